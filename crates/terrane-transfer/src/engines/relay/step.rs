//! The jobs of a relayed transfer.

use std::fmt;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use crossbeam_channel::Sender;
use terrane_core::{AllocateError, BoxedCause};

use super::worker::Message;
use crate::completion::Settle;
use crate::job::{Claims, Ending};
use crate::{
    Attend, CopyEngine, CopyFailure, CopyJob, Declined, Explanation, Progress, Report, Terms,
    Ticket, TransferError, TransferPlan,
};

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

impl fmt::Display for RelayStep {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Self::Order => "waiting for the device's order",
            Self::IntoBounce => "copying into a bounce slot",
            Self::OutOfBounce => "copying out of a bounce slot",
            Self::Durability => "making the files durable",
            Self::Notification => "telling the peer",
        })
    }
}

/// The cause of a relayed transfer's failure: the engine, the step, and the engine's own error.
#[derive(Debug, thiserror::Error)]
#[error("{step}, by engine {engine}, failed")]
pub struct StepFailed {
    /// The step that failed.
    pub step: RelayStep,
    /// The engine.
    pub engine: &'static str,
    /// The engine's error.
    #[source]
    pub source: BoxedCause,
}

/// The identity of a job: its transfer, its step and its chunk.
#[derive(Clone, Copy, Debug)]
pub(super) struct Part {
    pub(super) transfer: u64,
    pub(super) step: RelayStep,
    /// The chunk, for steps that copy one.
    pub(super) chunk: usize,
}

/// How a part has ended.
pub(super) struct PartEnd {
    pub(super) part: Part,
    pub(super) result: Result<(), TransferError>,
    /// Whether the copy may continue: its engine gave it up.
    pub(super) has_remains: bool,
}

/// Notifies the relay's thread of the end of a part.
struct Notice {
    part: Part,
    has_remains: AtomicBool,
    to: Sender<Message>,
}

impl Settle for Notice {
    /// No thread waits for a part: the relay's thread is notified of its end and does not poll.
    fn attend(&self, _: &Arc<dyn Attend>) {}

    fn leaves_remains(&self) {
        // Relaxed: the same thread settles.
        self.has_remains.store(true, Ordering::Relaxed);
    }

    fn settle(&self, result: Result<Report, TransferError>) {
        let (part, has_remains) = (self.part, self.has_remains.load(Ordering::Relaxed));
        let end = PartEnd { part, result: result.map(drop), has_remains };
        // The thread runs until every part has ended.
        let _ = self.to.send(Message::Ended(end));
    }
}

/// A job for `engine`, which notifies the relay's thread at its end. An engine's panic must not end
/// this thread and all its transfers.
///
/// # Errors
///
/// If the engine declines it, or panics.
pub(super) fn job(
    engine: &Arc<dyn CopyEngine>,
    claims: &Arc<Claims>,
    plan: TransferPlan,
    terms: Terms,
    progress: Arc<Progress>,
    part: Part,
    to: &Sender<Message>,
) -> Result<CopyJob, Failure> {
    let explain = || {
        let quote = engine.quote(&plan, &terms);
        let explained = quote.map(|quote| Explanation::new(&plan, &**engine, quote, Vec::new()));
        explained.map_err(|declined| Failure::declined(declined, part.step, engine.name()))
    };
    let explanation = guarded(explain)??;
    let settle = Arc::new(Notice { part, has_remains: AtomicBool::new(false), to: to.clone() });
    let ending = Ending::new(Ticket::new([]), settle, None, explanation);
    Ok(CopyJob::part(claims, plan, terms, progress, ending))
}

/// Submits a part to its engine.
pub(super) fn submit(engine: &Arc<dyn CopyEngine>, job: CopyJob) {
    // A job that is lost in a panic reports its end as it drops.
    let _ = guarded(|| engine.submit(job));
}

/// Calls code of another engine.
///
/// # Errors
///
/// If it panicked.
pub(super) fn guarded<T>(call: impl FnOnce() -> T) -> Result<T, Failure> {
    catch_unwind(AssertUnwindSafe(call)).map_err(|_| TransferError::EngineStopped.into())
}

/// The failure of a relayed transfer.
#[derive(Debug)]
pub(super) enum Failure {
    /// It was stopped: cancelled, or at its deadline.
    Stopped(CopyFailure),
    Other(TransferError),
}

impl Failure {
    /// The failure of a step, in terms of the transfer: `pair` maps a block of the slot to the
    /// transfer's blocks.
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
                TransferError::Engine { engine: super::NAME, source: failed(source) }
            }
            other => TransferError::Engine { engine: super::NAME, source: failed(Box::new(other)) },
        })
    }

    /// A step that its engine declines.
    pub(super) fn declined(declined: Declined, step: RelayStep, engine: &'static str) -> Self {
        let source = Box::new(StepFailed { step, engine, source: Box::new(declined) });
        Self::Other(TransferError::Engine { engine: super::NAME, source })
    }

    pub(super) fn end(self, job: CopyJob) {
        match self {
            Self::Stopped(failure) => job.finish(Err(failure)),
            Self::Other(error) => job.abandon(error),
        }
    }
}

/// No slot exists, and none can be allocated.
impl From<AllocateError> for Failure {
    fn from(error: AllocateError) -> Self {
        Self::Other(TransferError::Engine { engine: super::NAME, source: Box::new(error) })
    }
}

/// The relay's plan of a part was refused.
impl From<TransferError> for Failure {
    fn from(error: TransferError) -> Self {
        Self::Other(TransferError::Engine { engine: super::NAME, source: Box::new(error) })
    }
}
