//! The steps of a relayed transfer, and its failure at one of them.

use terrane_core::{AllocateError, BoxedCause};

use super::options::NAME;
use crate::engine::declined::Declined;
use crate::engine::job::{CopyFailure, CopyJob};
use crate::error::TransferError;

/// A step that another engine executes for a relay.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum RelayStep {
    /// Wait for the device order that the transfer states.
    Order,
    /// Copy a chunk into a bounce slot.
    IntoBounce,
    /// Copy a chunk out of a bounce slot.
    OutOfBounce,
    /// Make the written files durable.
    Durability,
    /// Notify the peer that all bytes have arrived.
    Notification,
}

terrane_core::display_names!(RelayStep {
    Self::Order => "waiting for the device order",
    Self::IntoBounce => "copying into a bounce slot",
    Self::OutOfBounce => "copying out of a bounce slot",
    Self::Durability => "making the files durable",
    Self::Notification => "notifying the peer",
});

/// The cause of a relayed transfer's failure: the engine, the step, and the engine's own error.
#[derive(Debug, thiserror::Error)]
#[error("{step} failed in engine {engine}; see the cause")]
pub struct StepFailed {
    /// The step that failed.
    pub step: RelayStep,
    /// The engine.
    pub engine: &'static str,
    /// The engine's error.
    #[source]
    pub source: BoxedCause,
}

/// The identity of a part: its transfer, its step and its chunk.
#[derive(Clone, Copy, Debug)]
pub(super) struct PartId {
    pub(super) transfer: u64,
    pub(super) step: RelayStep,
    /// The chunk, for steps that copy one.
    pub(super) chunk: usize,
}

/// The failure of a relayed transfer.
#[derive(Debug)]
pub(super) enum RelayFailure {
    /// The transfer was cancelled, or its deadline passed.
    Stopped(CopyFailure),
    Other(TransferError),
}

impl RelayFailure {
    /// Converts the failure of a step to one of the transfer. `pair` maps a block of the slot to
    /// the transfer's blocks.
    pub(super) fn of(
        error: TransferError,
        step: RelayStep,
        engine: &'static str,
        pair: impl Fn(u32) -> Option<(u32, u32)>,
    ) -> Self {
        let failed = |source| Box::new(StepFailed { step, engine, source });
        Self::Other(match error {
            TransferError::DeadlineExceeded { .. } => {
                return Self::Stopped(CopyFailure::DeadlineExceeded);
            }
            TransferError::Cancelled { .. } => return Self::Stopped(CopyFailure::Cancelled),
            TransferError::Copy { source_block, destination_block, bytes, source } => {
                let in_slot = match step {
                    RelayStep::OutOfBounce => source_block,
                    _ => destination_block,
                };
                let (source_block, destination_block) =
                    pair(in_slot).unwrap_or((source_block, destination_block));
                TransferError::Copy {
                    source_block,
                    destination_block,
                    bytes,
                    source: failed(source),
                }
            }
            TransferError::Engine { source, .. } => {
                TransferError::Engine { engine: NAME, source: failed(source) }
            }
            other => TransferError::Engine { engine: NAME, source: failed(Box::new(other)) },
        })
    }

    /// The failure of a step that its engine declines.
    pub(super) fn declined(declined: Declined, step: RelayStep, engine: &'static str) -> Self {
        let source = Box::new(StepFailed { step, engine, source: Box::new(declined) });
        Self::Other(TransferError::Engine { engine: NAME, source })
    }

    pub(super) fn end(self, job: CopyJob) {
        match self {
            Self::Stopped(failure) => job.finish(Err(failure)),
            Self::Other(error) => job.abandon(error),
        }
    }
}

/// No slot exists, and none can be allocated.
impl From<AllocateError> for RelayFailure {
    fn from(error: AllocateError) -> Self {
        Self::Other(TransferError::Engine { engine: NAME, source: Box::new(error) })
    }
}

/// The relay's plan of a part was refused.
impl From<TransferError> for RelayFailure {
    fn from(error: TransferError) -> Self {
        Self::Other(TransferError::Engine { engine: NAME, source: Box::new(error) })
    }
}
