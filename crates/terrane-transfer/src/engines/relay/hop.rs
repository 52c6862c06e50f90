//! The jobs of a relayed transfer.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use crossbeam_channel::Sender;

use super::message::{Message, PartEnd};
use super::step::{Failure, Part};
use crate::completion::progress::Progress;
use crate::completion::waiter_progress::Attend;
use crate::engine::CopyEngine;
use crate::engine::finalizer::{Ending, Settle};
use crate::engine::job::{Claims, CopyJob};
use crate::error::TransferError;
use crate::explain::{Explanation, Report};
use crate::hazard::ticket::Ticket;
use crate::plan::TransferPlan;
use crate::transfer::Terms;

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
        let explained =
            quote.map(|quote| Explanation::new(&plan, engine.name(), quote, Vec::new()));
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
