//! Failed jobs, whose submitted work may still run.

use terrane_transfer::CopyFailure;

use crate::engine::complete::job_resources::JobResources;
use crate::engine::complete::orphans::Orphans;
use crate::engine::resources::job_streams::{Backoff, MAX_UNANSWERED_QUERIES, StreamState};
use crate::error::CudaError;

/// A failed job that may still have work on the device.
pub(crate) struct FailedJob {
    resources: Box<JobResources>,
    failure: CopyFailure,
    /// The number of queries that the driver did not answer.
    unknown: u32,
}

impl FailedJob {
    pub(crate) fn new(resources: Box<JobResources>, failure: CopyFailure) -> Self {
        Self { resources, failure, unknown: 0 }
    }

    /// Finishes the job if none of its work is on the device, and returns it otherwise. After many
    /// unanswered queries, the job ends all the same, and the resources that the device may use are
    /// kept.
    pub(crate) fn check(mut self, orphans: &Orphans) -> Option<Self> {
        match self.resources.streams.state() {
            StreamState::Idle => {
                self.resources.finish(Err(self.failure));
                None
            }
            StreamState::Busy => Some(Self { unknown: 0, ..self }),
            StreamState::Unknown(_) if self.unknown < MAX_UNANSWERED_QUERIES => {
                Some(Self { unknown: self.unknown + 1, ..self })
            }
            StreamState::Unknown(error) => {
                tracing::error!(%error, "the driver does not say whether a transfer still runs");
                self.resources.orphan(self.failure, orphans);
                None
            }
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

pub(crate) fn engine_failure(error: CudaError) -> CopyFailure {
    CopyFailure::Engine { source: Box::new(error) }
}
