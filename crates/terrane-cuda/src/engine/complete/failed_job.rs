//! Failed jobs, whose submitted work may still run.

use terrane_transfer::CopyFailure;

use crate::engine::complete::job_resources::Cargo;
use crate::engine::complete::orphans::Lost;
use crate::engine::resources::job_streams::{MOST_QUESTIONS, Naps, Rest};
use crate::error::CudaError;

/// A failed job that may still have work on the device.
pub(crate) struct Failed {
    cargo: Box<Cargo>,
    failure: CopyFailure,
    /// The number of times that the driver has not said whether it has.
    unknown: u32,
}

impl Failed {
    pub(crate) fn new(cargo: Box<Cargo>, failure: CopyFailure) -> Self {
        Self { cargo, failure, unknown: 0 }
    }

    /// Finishes the job if none of its work is on the device, and returns it otherwise. If the
    /// driver has given no answer for long, the job ends all the same, and the resources that the
    /// device may use are kept.
    pub(crate) fn look(mut self, lost: &Lost) -> Option<Self> {
        match self.cargo.lanes.rest() {
            Rest::Come => {
                self.cargo.finish(Err(self.failure));
                None
            }
            Rest::NotYet => Some(Self { unknown: 0, ..self }),
            Rest::Unknown(_) if self.unknown < MOST_QUESTIONS => {
                Some(Self { unknown: self.unknown + 1, ..self })
            }
            Rest::Unknown(error) => {
                tracing::error!(%error, "the driver does not say whether a transfer still runs");
                self.cargo.abandon(self.failure, lost);
                None
            }
        }
    }

    /// Retries until the job has ended.
    pub(crate) fn see_through(self, lost: &Lost) {
        let mut naps = Naps::default();
        let mut left = self.look(lost);
        while let Some(failed) = left {
            naps.take();
            left = failed.look(lost);
        }
    }
}

pub(crate) fn engine_failure(error: CudaError) -> CopyFailure {
    CopyFailure::Engine { source: Box::new(error) }
}
