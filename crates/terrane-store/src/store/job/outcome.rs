//! The outcome of a job, and the cell in which its caller waits for it.

use std::sync::{Arc, Condvar, Mutex};
use std::task::{Context, Poll, Waker};
use std::time::{Duration, Instant};

use terrane_core::sync::{lock, unpoisoned, wait_until};
use terrane_core::{ByteCount, ForkedProcess, OwnerProcess};

use crate::error::StoreError;
use crate::slab::JobId;
use crate::store::job::result::BlockResult;

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
    /// Kept beside the results, which a job with a queue has only there.
    pub(crate) is_ok: bool,
}

impl JobOutcome {
    /// Whether all blocks are where the job was to bring them. It is right without the results, too.
    #[must_use]
    pub fn is_ok(&self) -> bool {
        self.is_ok
    }
}

/// Passes the outcome of a job from its task to its caller.
pub(crate) struct OutcomeCell {
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

impl OutcomeCell {
    pub(crate) fn new(keys: usize) -> Self {
        Self {
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
    pub(crate) fn is_lost(&self) -> bool {
        !self.owner.is_current()
    }

    pub(crate) fn has_come(&self) -> bool {
        self.is_lost() || !matches!(*lock(&self.end), End::Running { .. })
    }

    pub(crate) fn wait(&self, job: JobId) -> JobOutcome {
        if self.is_lost() {
            return self.lost(job);
        }
        let mut end = lock(&self.end);
        loop {
            if let Some(outcome) = end.take() {
                return outcome;
            }
            end = unpoisoned(self.changed.wait(end));
        }
    }

    /// `None` if the job has not ended by the deadline.
    pub(crate) fn wait_until(&self, job: JobId, deadline: Instant) -> Option<JobOutcome> {
        if self.is_lost() {
            return Some(self.lost(job));
        }
        let mut end = lock(&self.end);
        loop {
            if let Some(outcome) = end.take() {
                return Some(outcome);
            }
            end = wait_until(&self.changed, end, Some(deadline)).ok()?;
        }
    }

    pub(crate) fn poll(&self, job: JobId, context: &Context<'_>) -> Poll<JobOutcome> {
        if self.is_lost() {
            return Poll::Ready(self.lost(job));
        }
        // Cloning and dropping wakers run foreign code, so neither happens under the lock.
        let latest = context.waker().clone();
        let mut end = lock(&self.end);
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

    fn lost(&self, id: JobId) -> JobOutcome {
        let error = Arc::new(StoreError::Forked(ForkedProcess));
        JobOutcome {
            id,
            tag: 0,
            results: vec![BlockResult::Failed(error); self.keys],
            bytes: ByteCount::ZERO,
            took: Duration::ZERO,
            is_ok: false,
        }
    }
}
