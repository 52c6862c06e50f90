//! Requests to the sync thread: syncs, clears, checkpoints, freed disk blocks, exports of metrics.

use std::collections::VecDeque;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex};
use std::time::{Duration, Instant};

use terrane_core::sync::{lock, wait_until};

use crate::error::StoreError;
use crate::store::job::one_shot::OneShot;

/// The length of the journal is checked after this many records.
const RECORDS_BETWEEN_CHECKS: u64 = 1024;

/// The work of the sync thread.
#[derive(Default)]
pub(crate) struct Maintenance {
    state: Mutex<Work>,
    changed: Condvar,
    records: AtomicU64,
    /// Whether the state has an end, to read without its lock.
    is_stopping: AtomicBool,
}

#[derive(Default)]
struct Work {
    requests: VecDeque<(Request, Arc<Reply>)>,
    wants_checkpoint: bool,
    wants_punch: bool,
    export: Option<Export>,
    /// When the store closes, the time until which it may write a checkpoint.
    ends: Option<Instant>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Request {
    /// Makes everything durable that was written before the request.
    Sync,
    /// Does the same, for records alone: a removal has no payload, whose sync may fail.
    SyncRecords,
    /// Removes everything.
    Clear,
}

struct Export {
    path: PathBuf,
    interval: Duration,
    next: Instant,
}

pub(crate) type Answer = Result<(), Arc<StoreError>>;

pub(crate) type Reply = OneShot<Answer>;

/// One thing to do.
pub(crate) enum Step {
    /// Each with [`Request::Sync`] or [`Request::SyncRecords`].
    Syncs(Vec<(Request, Arc<Reply>)>),
    Clear(Arc<Reply>),
    Checkpoint,
    /// Frees the disk blocks of slots that the tier no longer has.
    Punch,
    Export(PathBuf),
    Stop,
}

impl Maintenance {
    /// Sends a request to the sync thread, and waits for the answer.
    pub(crate) async fn request(&self, request: Request) -> Answer {
        let reply = Arc::new(Reply::new());
        {
            let mut state = lock(&self.state);
            if state.ends.is_some() {
                return Err(Arc::new(StoreError::Closed));
            }
            state.requests.push_back((request, Arc::clone(&reply)));
        }
        self.changed.notify_one();
        reply.receive().await
    }

    /// Counts a record that was added to the catalog. Returns whether the journal is to be checked.
    pub(crate) fn recorded(&self) -> bool {
        // Relaxed: a count that orders nothing.
        let records = self.records.fetch_add(1, Ordering::Relaxed) + 1;
        records.is_multiple_of(RECORDS_BETWEEN_CHECKS)
    }

    pub(crate) fn request_checkpoint(&self) {
        lock(&self.state).wants_checkpoint = true;
        self.changed.notify_one();
    }

    pub(crate) fn request_punch(&self) {
        lock(&self.state).wants_punch = true;
        self.changed.notify_one();
    }

    pub(crate) fn export(&self, path: &Path, interval: Duration) {
        let interval = interval.max(Duration::from_millis(10));
        let next = instant_after(interval);
        lock(&self.state).export = Some(Export { path: path.to_owned(), interval, next });
        self.changed.notify_one();
    }

    /// Ends the thread when it has answered all requests. A checkpoint that was asked for is written if
    /// there is time until the deadline.
    pub(crate) fn stop(&self, deadline: Instant) {
        lock(&self.state).ends = Some(deadline);
        self.is_stopping.store(true, Ordering::Release);
        self.changed.notify_one();
    }

    /// Whether the store closes and has no time left.
    pub(crate) fn is_overdue(&self) -> bool {
        self.is_stopping.load(Ordering::Acquire)
            && lock(&self.state).ends.is_some_and(|ends| ends <= Instant::now())
    }

    /// Waits for the next thing to do.
    pub(crate) fn next(&self) -> Step {
        let mut state = lock(&self.state);
        loop {
            if let Some((request, reply)) = state.requests.pop_front() {
                if request == Request::Clear {
                    return Step::Clear(reply);
                }
                let mut replies = vec![(request, reply)];
                while let Some(next) =
                    state.requests.pop_front_if(|(request, _)| *request != Request::Clear)
                {
                    replies.push(next);
                }
                return Step::Syncs(replies);
            }
            if std::mem::take(&mut state.wants_punch) {
                return Step::Punch;
            }
            let now = Instant::now();
            let has_time = state.ends.is_none_or(|ends| now < ends);
            if std::mem::take(&mut state.wants_checkpoint) && has_time {
                return Step::Checkpoint;
            }
            if state.ends.is_some() {
                return Step::Stop;
            }
            let next = match &mut state.export {
                Some(export) if export.next <= now => {
                    export.next = instant_after(export.interval);
                    return Step::Export(export.path.clone());
                }
                export => export.as_ref().map(|export| export.next),
            };
            state = wait_until(&self.changed, state, next).unwrap_or_else(|state| state);
        }
    }
}

/// The instant after a wait. A wait that the clock cannot express lasts for a hundred years.
pub(crate) fn instant_after(wait: Duration) -> Instant {
    const LONGEST: Duration = Duration::from_secs(100 * 365 * 24 * 3600);
    let now = Instant::now();
    now.checked_add(wait).unwrap_or_else(|| now + LONGEST)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_checkpoint_that_was_asked_for_is_written_before_the_end_if_there_is_time() {
        for has_time in [true, false] {
            let maintenance = Maintenance::default();
            maintenance.request_checkpoint();
            assert!(!maintenance.is_overdue());
            let left = Duration::from_secs(if has_time { 3600 } else { 0 });
            maintenance.stop(Instant::now() + left);
            assert_eq!(maintenance.is_overdue(), !has_time);
            assert_eq!(matches!(maintenance.next(), Step::Checkpoint), has_time);
            assert!(matches!(maintenance.next(), Step::Stop));
        }
    }
}
