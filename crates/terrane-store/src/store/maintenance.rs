//! The thread that makes blocks durable: syncs, clears, checkpoints, exports of metrics.

use std::collections::VecDeque;
use std::fs;
use std::future::poll_fn;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex};
use std::task::{Poll, Waker};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use terrane_core::convert::to_u64;
use terrane_core::sync::{lock, unpoisoned};

use crate::disk::CatalogError;
use crate::error::StoreError;
use crate::store::shared::StoreCore;

/// A journal of fewer bytes is not replaced by a checkpoint.
const SMALL_JOURNAL: u64 = 8 << 20;

/// The bytes of a record of a block in a checkpoint, without the rest of a long key.
const RECORD_BYTES: u64 = 128;

/// How often the length of the journal is looked at: after so many records.
const RECORDS_BETWEEN_LOOKS: u64 = 1024;

/// The work of the thread.
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

type Answer = Result<(), Arc<StoreError>>;

#[derive(Default)]
struct Reply {
    state: Mutex<(Option<Answer>, Option<Waker>)>,
}

impl Reply {
    fn send(&self, answer: Answer) {
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
enum Step {
    Syncs(Vec<Arc<Reply>>),
    Clear(Arc<Reply>),
    Checkpoint,
    Export(PathBuf),
    Stop,
}

impl Maintenance {
    pub(crate) fn start(core: &Arc<StoreCore>) -> Result<JoinHandle<()>, StoreError> {
        let core = Arc::clone(core);
        let name = "terrane-store-sync";
        let thread = thread::Builder::new().name(name.to_owned());
        let started = thread.spawn(move || core.maintenance.run(&core));
        started.map_err(|source| StoreError::Thread { name, source })
    }

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

    /// A record was added to the catalog.
    pub(crate) fn recorded(&self, core: &StoreCore) {
        // Relaxed: a count that orders nothing.
        let records = self.records.fetch_add(1, Ordering::Relaxed) + 1;
        if !records.is_multiple_of(RECORDS_BETWEEN_LOOKS) {
            return;
        }
        let Some(disk) = &core.disk else { return };
        let Ok(snapshot) = disk.catalog.snapshot() else { return };
        let rooms = core.tiers.last().map(|tier| tier.rooms.as_slice()).unwrap_or_default();
        let blocks: usize = rooms.iter().map(|room| room.index.len()).sum();
        if snapshot.journal_bytes > SMALL_JOURNAL.max(2 * RECORD_BYTES * to_u64(blocks)) {
            lock(&self.state).wants_checkpoint = true;
            self.changed.notify_one();
        }
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

    fn run(&self, core: &StoreCore) {
        loop {
            match self.next() {
                Step::Syncs(replies) => {
                    let answer = core.sync_now().map_err(Arc::new);
                    replies.iter().for_each(|reply| reply.send(answer.clone()));
                }
                Step::Clear(reply) => reply.send(core.clear_now().map_err(Arc::new)),
                Step::Checkpoint => core.checkpoint_now(),
                Step::Export(path) => {
                    if let Err(error) = core.write_metrics(&path) {
                        tracing::warn!(%error, "metrics were not exported");
                    }
                }
                Step::Stop => return,
            }
        }
    }

    fn next(&self) -> Step {
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

impl StoreCore {
    /// Syncs the payloads, then the records.
    fn sync_now(&self) -> Result<(), StoreError> {
        let Some(disk) = &self.disk else { return Ok(()) };
        disk.slabs.sync()?;
        Ok(disk.catalog.sync()?)
    }

    fn checkpoint_now(&self) {
        let Some(disk) = &self.disk else { return };
        match disk.catalog.checkpoint(|writer| self.add_live(writer)) {
            Ok(report) => tracing::debug!(?report, "checkpoint written"),
            Err(CatalogError::CheckpointAbandoned) => {}
            Err(error) => tracing::warn!(%error, "no checkpoint was written"),
        }
    }

    pub(crate) fn export_metrics(&self, path: &Path, interval: Duration) -> Result<(), StoreError> {
        self.check()?;
        self.write_metrics(path)?;
        self.maintenance.export(path, interval);
        Ok(())
    }

    /// Writes the file aside and renames it, so that a reader sees a whole one.
    fn write_metrics(&self, path: &Path) -> Result<(), StoreError> {
        let mut text = String::new();
        // Writing to a string does not fail.
        let _ = self.snapshot().write_openmetrics(&mut text);
        let mut aside = path.as_os_str().to_owned();
        aside.push(".new");
        let written = fs::write(&aside, text).and_then(|()| fs::rename(&aside, path));
        written.map_err(|source| StoreError::Export { path: path.to_owned(), source })
    }
}
