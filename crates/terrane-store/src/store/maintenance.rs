//! Requests to the sync thread: syncs, clears, checkpoints, freed disk blocks, exports of metrics.

use std::collections::VecDeque;
use std::future::poll_fn;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex};
use std::task::{Poll, Waker};
use std::time::{Duration, Instant};

use terrane_core::sync::{lock, unpoisoned};

use crate::error::StoreError;

/// How often the length of the journal is looked at: after so many records.
const RECORDS_BETWEEN_LOOKS: u64 = 1024;

/// The work of the sync thread.
#[derive(Default)]
pub(crate) struct Maintenance {
    state: Mutex<Work>,
    changed: Condvar,
    records: AtomicU64,
}

#[derive(Default)]
struct Work {
    requests: VecDeque<(Request, Arc<Reply>)>,
    wants_checkpoint: bool,
    wants_punch: bool,
    export: Option<Export>,
    is_stopping: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Request {
    Sync,
    Clear,
}

struct Export {
    path: PathBuf,
    interval: Duration,
    next: Instant,
}

pub(crate) type Answer = Result<(), Arc<StoreError>>;

#[derive(Default)]
pub(crate) struct Reply {
    state: Mutex<(Option<Answer>, Option<Waker>)>,
}

impl Reply {
    pub(crate) fn send(&self, answer: Answer) {
        let task = {
            let mut state = lock(&self.state);
            state.0 = Some(answer);
            state.1.take()
        };
        if let Some(task) = task {
            task.wake();
        }
    }

    async fn answer(&self) -> Answer {
        poll_fn(|context| {
            let latest = context.waker().clone();
            let mut state = lock(&self.state);
            if let Some(answer) = state.0.take() {
                drop(state);
                return Poll::Ready(answer);
            }
            let before = state.1.replace(latest);
            drop(state);
            drop(before);
            Poll::Pending
        })
        .await
    }
}

/// One thing to do.
pub(crate) enum Step {
    Syncs(Vec<Arc<Reply>>),
    Clear(Arc<Reply>),
    Checkpoint,
    /// Frees the disk blocks of slots that a smaller tier has not.
    Punch,
    Export(PathBuf),
    Stop,
}

impl Maintenance {
    /// Makes everything durable that was written before the call.
    pub(crate) async fn sync(&self) -> Answer {
        self.request(Request::Sync).await
    }

    /// Removes everything.
    pub(crate) async fn clear(&self) -> Answer {
        self.request(Request::Clear).await
    }

    async fn request(&self, request: Request) -> Answer {
        let reply = Arc::<Reply>::default();
        {
            let mut state = lock(&self.state);
            if state.is_stopping {
                return Err(Arc::new(StoreError::Closed));
            }
            state.requests.push_back((request, Arc::clone(&reply)));
        }
        self.changed.notify_one();
        reply.answer().await
    }

    /// A record was added to the catalog. Returns whether it is time to look at the journal.
    pub(crate) fn recorded(&self) -> bool {
        // Relaxed: a count that orders nothing.
        let records = self.records.fetch_add(1, Ordering::Relaxed) + 1;
        records.is_multiple_of(RECORDS_BETWEEN_LOOKS)
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
        let next = Instant::now() + interval;
        lock(&self.state).export = Some(Export { path: path.to_owned(), interval, next });
        self.changed.notify_one();
    }

    /// Ends the thread when it has answered all requests.
    pub(crate) fn stop(&self) {
        lock(&self.state).is_stopping = true;
        self.changed.notify_one();
    }

    /// Waits for the next thing to do.
    pub(crate) fn next(&self) -> Step {
        let mut state = lock(&self.state);
        loop {
            if let Some((request, reply)) = state.requests.pop_front() {
                if request == Request::Clear {
                    return Step::Clear(reply);
                }
                let mut replies = vec![reply];
                while let Some((_, reply)) =
                    state.requests.pop_front_if(|(request, _)| *request == Request::Sync)
                {
                    replies.push(reply);
                }
                return Step::Syncs(replies);
            }
            if std::mem::take(&mut state.wants_punch) {
                return Step::Punch;
            }
            if state.is_stopping {
                return Step::Stop;
            }
            if std::mem::take(&mut state.wants_checkpoint) {
                return Step::Checkpoint;
            }
            let now = Instant::now();
            let left = match &mut state.export {
                Some(export) if export.next <= now => {
                    export.next = now + export.interval;
                    return Step::Export(export.path.clone());
                }
                Some(export) => Some(export.next - now),
                None => None,
            };
            state = match left {
                None => unpoisoned(self.changed.wait(state)),
                Some(left) => unpoisoned(self.changed.wait_timeout(state, left)).0,
            };
        }
    }
}
