//! The jobs of a relayed transfer.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use crossbeam_channel::Sender;

use super::message::{Message, PartEnded, PartSums};
use super::part_invitations::PartInvitations;
use super::step::{PartId, RelayFailure};
use crate::completion::progress::CopyProgress;
use crate::completion::waiter_progress::WaiterProgress;
use crate::engine::finalizer::OutcomeSink;
use crate::engine::job::{CopyJob, TransferClaims};
use crate::engine::{CopyEngine, quote};
use crate::error::TransferError;
use crate::explain::{Explanation, Report};
use crate::plan::TransferPlan;
use crate::transfer::TransferOptions;

/// The receivers of a part's progress.
pub(super) struct PartProgress {
    /// The copied bytes.
    pub(super) copied: Arc<CopyProgress>,
    /// The invitations to threads that wait for the transfer.
    pub(super) invitations: Arc<PartInvitations>,
}

/// Notifies the relay's thread of the end of a part.
struct PartSink {
    part: PartId,
    invitations: Arc<PartInvitations>,
    is_orphaned: AtomicBool,
    to: Sender<Message>,
}

impl OutcomeSink for PartSink {
    /// The relay's thread is notified of the end, and does not poll.
    fn invite_waiters(&self, progress: &Arc<dyn WaiterProgress>) {
        self.invitations.invite(progress);
    }

    fn report_orphaned(&self) {
        // Relaxed: the same thread publishes the result.
        self.is_orphaned.store(true, Ordering::Relaxed);
    }

    fn publish(&self, result: Result<Report, TransferError>) {
        let (part, is_orphaned) = (self.part, self.is_orphaned.load(Ordering::Relaxed));
        let sums = |report: Report| {
            let bytes = report.explanation.bytes.get();
            report.checksums.map(|sums| PartSums { sums, bytes })
        };
        let end = PartEnded { part, result: result.map(sums), is_orphaned };
        // The relay's thread runs until every part has ended.
        let _ = self.to.send(Message::Ended(end));
    }
}

/// Creates a job for `engine` that notifies the relay's thread at its end. A panic of the engine
/// must not end this thread and all of its transfers.
///
/// # Errors
///
/// If the engine declines the job, or panics.
pub(super) fn job(
    engine: &Arc<dyn CopyEngine>,
    claims: &Arc<TransferClaims>,
    plan: TransferPlan,
    options: TransferOptions,
    progress: PartProgress,
    part: PartId,
    to: &Sender<Message>,
) -> Result<CopyJob, RelayFailure> {
    let explain = || {
        let quote = quote(&**engine, &plan, &options);
        let explained =
            quote.map(|quote| Explanation::new(&plan, engine.name(), quote, Vec::new()));
        explained.map_err(|declined| RelayFailure::declined(declined, part.step, engine.name()))
    };
    let explanation = guarded(explain)??;
    let PartProgress { copied, invitations } = progress;
    let (is_orphaned, to) = (AtomicBool::new(false), to.clone());
    let sink = Arc::new(PartSink { part, invitations, is_orphaned, to });
    let mut job = CopyJob::part(claims, plan, options, copied, explanation);
    job.connect(sink, None);
    Ok(job)
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
/// If the code panicked.
pub(super) fn guarded<T>(call: impl FnOnce() -> T) -> Result<T, RelayFailure> {
    catch_unwind(AssertUnwindSafe(call)).map_err(|_| TransferError::EngineStopped.into())
}
