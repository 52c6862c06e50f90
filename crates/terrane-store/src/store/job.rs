//! Jobs and their outcomes.

use std::fmt;
use std::future::{Future, IntoFuture};
use std::pin::Pin;
use std::sync::{Arc, Condvar, Mutex};
use std::task::{Context, Poll, Waker};
use std::time::{Duration, Instant};

use terrane_core::sync::{lock, unpoisoned};
use terrane_core::{ByteCount, ForkedProcess, OwnerProcess};
use terrane_transfer::Layers;

use crate::error::StoreError;
use crate::slab::{JobId, Priority};
use crate::store::control::JobControl;
use crate::store::result::BlockResult;

/// A job in flight.
///
/// Wait for it, poll it, or `.await` it on any runtime. A job that is dropped or leaked goes on to its
/// end. Its memory stays in use until then: the guard that was given with it is dropped at the end.
///
/// The outcome of a job with a queue is delivered to the queue. Then this only cancels, raises and
/// waits for the end.
#[must_use = "a dropped job goes on, and its outcome is lost unless a queue gets it"]
pub struct Job {
    pub(crate) state: Arc<JobState>,
}

/// How a job ended.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct JobOutcome {
    /// The job.
    pub id: JobId,
    /// The number that the caller gave to the job with its queue; otherwise 0.
    pub tag: u64,
    /// A result for each key, in their order.
    pub results: Vec<BlockResult>,
    /// The bytes of all blocks that are [done](BlockResult::Done).
    pub bytes: ByteCount,
    /// The time from the submission to the end.
    pub took: Duration,
    /// Whether all blocks are. A job with a queue has its results there alone.
    pub(crate) is_ok: bool,
}

impl JobOutcome {
    /// Whether all blocks are where the job was to bring them. It is right without the results, too.
    #[must_use]
    pub fn is_ok(&self) -> bool {
        self.is_ok
    }
}

/// A job that was refused: the caller's guard, and the cause. Nothing has been read or written.
pub struct Refused<G> {
    /// The guard that was given with the job.
    pub guard: G,
    /// Why the job was refused.
    pub cause: StoreError,
}

impl<G> fmt::Debug for Refused<G> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Refused").field("cause", &self.cause).finish_non_exhaustive()
    }
}

impl<G> fmt::Display for Refused<G> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(&self.cause, f)
    }
}

impl<G> std::error::Error for Refused<G> {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        self.cause.source()
    }
}

/// The result of [`Store::drain`](crate::Store::drain) and [`Store::close`](crate::Store::close).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Drained {
    /// The jobs that had not ended at the deadline.
    pub left: usize,
    /// The blocks that a close could not write to the slowest tier. They are lost. A drain writes
    /// none and states 0.
    pub unwritten: usize,
}

impl Job {
    /// The number of the job.
    #[must_use]
    pub fn id(&self) -> JobId {
        self.state.control.id()
    }

    /// Whether the job has ended.
    #[must_use]
    pub fn has_ended(&self) -> bool {
        self.state.is_lost() || !matches!(*lock(&self.state.end), End::Running { .. })
    }

    /// Waits for the end. The outcome of a job with a queue is in the queue; the one that is returned
    /// here then has no results.
    pub fn wait(self) -> JobOutcome {
        if self.state.is_lost() {
            return self.state.lost();
        }
        let mut end = lock(&self.state.end);
        loop {
            if let Some(outcome) = end.take() {
                return outcome;
            }
            end = unpoisoned(self.state.changed.wait(end));
        }
    }

    /// Waits for the end until `deadline`.
    ///
    /// # Errors
    ///
    /// Returns the job if it has not ended by then. It goes on; see
    /// [`JobOptions::deadline`](crate::JobOptions::deadline).
    pub fn wait_until(self, deadline: Instant) -> Result<JobOutcome, Self> {
        if self.state.is_lost() {
            return Ok(self.state.lost());
        }
        let mut end = lock(&self.state.end);
        loop {
            if let Some(outcome) = end.take() {
                return Ok(outcome);
            }
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                drop(end);
                return Err(self);
            }
            end = unpoisoned(self.state.changed.wait_timeout(end, left)).0;
        }
    }

    /// The layers of the job's copies between endpoints that have begun, one value for each copy. It is
    /// empty unless the job is [`layer_by_layer`](crate::JobOptions::layer_by_layer).
    ///
    /// The copies of blocks that were in memory have begun when the submission returns: one for each
    /// tier and number of tokens. So compute on a layer can begin when all of these values have it. A
    /// block that comes from disk by way of the host tier adds a value when it is there. Blocks that the
    /// disk writes to host memory arrive whole, and add none.
    #[must_use]
    pub fn layers(&self) -> Vec<Layers> {
        if self.state.is_lost() { Vec::new() } else { self.state.control.layers() }
    }

    /// Ends the job early. Blocks that are done stay done; the others are
    /// [`Cancelled`](BlockResult::Cancelled). The job ends when no request uses its memory any more.
    pub fn cancel(&self) {
        if !self.state.is_lost() {
            self.state.control.cancel();
        }
    }

    /// Raises the priority. It is never lowered.
    pub fn raise(&self, priority: Priority) {
        if !self.state.is_lost() {
            self.state.control.raise(priority);
        }
    }
}

impl fmt::Debug for Job {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Job").field(&self.id()).finish()
    }
}

impl IntoFuture for Job {
    type Output = JobOutcome;
    type IntoFuture = JobFuture;

    fn into_future(self) -> JobFuture {
        JobFuture { state: self.state }
    }
}

/// A [`Job`] as a future, for any runtime. Dropping it does not cancel the job.
#[must_use = "a future does nothing unless it is polled; the job goes on without it"]
pub struct JobFuture {
    state: Arc<JobState>,
}

impl Future for JobFuture {
    type Output = JobOutcome;

    /// Ready once. A poll after that returns pending.
    fn poll(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<JobOutcome> {
        if self.state.is_lost() {
            return Poll::Ready(self.state.lost());
        }
        // Cloning and dropping wakers run foreign code, so neither happens under the lock.
        let latest = context.waker().clone();
        let mut end = lock(&self.state.end);
        if let Some(outcome) = end.take() {
            drop(end);
            return Poll::Ready(outcome);
        }
        let replaced = match &mut *end {
            End::Running { waker } => waker.replace(latest),
            End::Ended(_) | End::Taken => Some(latest),
        };
        drop(end);
        drop(replaced);
        Poll::Pending
    }
}

impl fmt::Debug for JobFuture {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("JobFuture").finish_non_exhaustive()
    }
}

/// The state that the caller's end and the task of a job share.
pub(crate) struct JobState {
    pub(crate) control: Arc<JobControl>,
    owner: OwnerProcess,
    /// The number of keys.
    keys: usize,
    end: Mutex<End>,
    changed: Condvar,
}

enum End {
    Running { waker: Option<Waker> },
    Ended(JobOutcome),
    Taken,
}

impl End {
    fn take(&mut self) -> Option<JobOutcome> {
        match std::mem::replace(self, Self::Taken) {
            Self::Ended(outcome) => Some(outcome),
            other => {
                *self = other;
                None
            }
        }
    }
}

impl JobState {
    pub(crate) fn new(control: Arc<JobControl>, keys: usize) -> Self {
        Self {
            control,
            owner: OwnerProcess::current(),
            keys,
            end: Mutex::new(End::Running { waker: None }),
            changed: Condvar::new(),
        }
    }

    /// Publishes the outcome, once. Returns the waker of the caller, which is foreign code.
    pub(crate) fn publish(&self, outcome: JobOutcome) -> Option<Waker> {
        let before = std::mem::replace(&mut *lock(&self.end), End::Ended(outcome));
        self.changed.notify_all();
        match before {
            End::Running { waker } => waker,
            End::Ended(_) | End::Taken => None,
        }
    }

    /// Whether this process was forked from the job's.
    fn is_lost(&self) -> bool {
        !self.owner.is_current()
    }

    fn lost(&self) -> JobOutcome {
        let error = Arc::new(StoreError::Forked(ForkedProcess));
        JobOutcome {
            id: self.control.id(),
            tag: 0,
            results: vec![BlockResult::Failed(error); self.keys],
            bytes: ByteCount::ZERO,
            took: Duration::ZERO,
            is_ok: false,
        }
    }
}
