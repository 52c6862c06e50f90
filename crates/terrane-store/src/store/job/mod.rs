//! Jobs: the handle of a caller here, and the submodules for the rest of their life.
//!
//! A `submit` checks the `request`, with `blocks` and `options`. The `task` runs on the `executor`,
//! and the caller controls it by `control`. Results of disk requests reach it as `arrivals`. An
//! `outcome` has a `result` for each block. `layers` of a get arrive before its end.

pub(crate) mod arrivals;
pub(crate) mod blocks;
pub(crate) mod control;
pub(crate) mod executor;
pub(crate) mod layers;
pub(crate) mod one_shot;
pub(crate) mod options;
pub(crate) mod outcome;
pub(crate) mod request;
pub(crate) mod result;
pub(crate) mod submit;
pub(crate) mod task;

use std::fmt;
use std::future::{Future, IntoFuture};
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Instant;

use crate::error::StoreError;
use crate::slab::{JobId, Priority};
use crate::store::job::control::JobControl;
use crate::store::job::layers::JobLayers;
use crate::store::job::outcome::JobOutcome;

/// A job in flight.
///
/// Wait for it, poll it, or `.await` it on any runtime. A job that is dropped or leaked goes on to its
/// end. Its memory stays in use until then: the guard that was given with it is dropped at the end.
///
/// The outcome of a job with a queue is delivered to the queue. Then this only cancels, raises and
/// waits for the end.
#[must_use = "a dropped job goes on, and its outcome is lost unless a queue gets it"]
pub struct Job {
    pub(crate) control: Arc<JobControl>,
}

/// A job that was refused: the caller's guard, and the cause. Nothing has been read or written.
pub struct Refused<G> {
    /// The guard that was given with the job.
    pub guard: G,
    /// Why the job was refused.
    pub cause: StoreError,
}

terrane_core::debug_fields!(Refused<G>, |it| { cause: it.cause });

terrane_core::delegate_error!(Refused<G>);

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
        self.control.id
    }

    /// Whether the job has ended.
    #[must_use]
    pub fn has_ended(&self) -> bool {
        self.control.outcome.has_come()
    }

    /// Blocks until the job has ended. The outcome of a job with a queue is in the queue. The one
    /// that is returned here then has no results.
    pub fn wait(self) -> JobOutcome {
        self.control.outcome.wait(self.id())
    }

    /// Blocks until the job has ended, or until `deadline`.
    ///
    /// # Errors
    ///
    /// Returns the job if it has not ended by then. It goes on; see
    /// [`JobOptions::deadline`](crate::JobOptions::deadline).
    pub fn wait_until(self, deadline: Instant) -> Result<JobOutcome, Self> {
        self.control.outcome.wait_until(self.id(), deadline).ok_or(self)
    }

    /// The layers of a [`layer_by_layer`](crate::JobOptions::layer_by_layer) get, which may arrive before
    /// its end; `None` for other jobs.
    #[must_use]
    pub fn layers(&self) -> Option<JobLayers> {
        self.control.layers().map(|_| JobLayers::new(Arc::clone(&self.control)))
    }

    /// Ends the job early. Blocks that are done stay done; the others are
    /// [`Cancelled`](crate::BlockResult::Cancelled). The job ends when no request uses its memory any more.
    pub fn cancel(&self) {
        if !self.control.outcome.is_lost() {
            self.control.cancel();
        }
    }

    /// Raises the priority. It is never lowered.
    pub fn raise(&self, priority: Priority) {
        if !self.control.outcome.is_lost() {
            self.control.raise(priority);
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
        JobFuture { control: self.control }
    }
}

/// A [`Job`] as a future, for any runtime. Dropping it does not cancel the job.
#[must_use = "a future does nothing unless it is polled; the job goes on without it"]
pub struct JobFuture {
    control: Arc<JobControl>,
}

impl Future for JobFuture {
    type Output = JobOutcome;

    /// Ready once. A poll after that returns pending.
    fn poll(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<JobOutcome> {
        self.control.outcome.poll(self.control.id, context)
    }
}

terrane_core::debug_fields!(JobFuture {});
