//! Failed jobs, whose submitted work may still run.

use terrane_transfer::CopyFailure;

use crate::engine::complete::orphans::Orphans;
use crate::engine::resources::job_streams::{Backoff, StreamState, UnansweredQueries};
use crate::engine::submit::submission::Submission;
use crate::error::CudaError;

/// A failed job that may still have work on the device.
pub(crate) struct FailedJob {
    submission: Box<Submission>,
    failure: CopyFailure,
    unanswered: UnansweredQueries,
}

impl FailedJob {
    pub(crate) fn new(submission: Box<Submission>, failure: CopyFailure) -> Self {
        Self { submission, failure, unanswered: UnansweredQueries::default() }
    }

    /// Finishes the job if none of its work is on the device, and returns it otherwise. After some
    /// seconds without an answer, the job ends all the same, and the resources that the device may
    /// use are kept.
    pub(crate) fn check(mut self, orphans: &Orphans) -> Option<Self> {
        match self.submission.state() {
            StreamState::Idle => {
                self.submission.finish(Err(self.failure));
                None
            }
            StreamState::Busy => Some(Self { unanswered: UnansweredQueries::default(), ..self }),
            StreamState::Unknown(error) if self.unanswered.last_too_long() => {
                self.submission.orphan(self.failure, orphans);
                // A subscriber may panic, so the resources are kept before.
                tracing::error!(%error, "the driver does not say whether a transfer still runs");
                None
            }
            StreamState::Unknown(_) => Some(self),
        }
    }

    /// Retries until the job has ended.
    pub(crate) fn run_to_end(self, orphans: &Orphans) {
        let mut backoff = Backoff::default();
        let mut pending = self.check(orphans);
        while let Some(failed) = pending {
            backoff.take();
            pending = failed.check(orphans);
        }
    }
}

#[cold]
pub(crate) fn engine_failure(error: CudaError) -> CopyFailure {
    CopyFailure::Engine { source: Box::new(error) }
}
