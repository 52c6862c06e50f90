//! Jobs that are cancelled.

use std::time::Instant;

use super::{CopyFailure, CopyJob};
use crate::error::TransferError;
use crate::hazard::notify::catch_foreign_panic;
use crate::hazard::table::Written;
use crate::hazard::ticket::Ticket;

impl CopyJob {
    /// Whether the caller has [cancelled](Ticket::cancel) the transfer. If so, an engine that can
    /// stop the copy finishes the job with [`CopyFailure::Cancelled`]. It stops between pieces of
    /// work, as at a deadline. It may also continue, and finish the job as usual.
    ///
    /// It costs one load.
    #[must_use]
    pub fn is_cancelled(&self) -> bool {
        self.parts.claims.ticket.is_cancelled()
    }

    /// The reason why the copy must stop now: the job was [cancelled](Self::is_cancelled), or its
    /// deadline has passed. An engine checks this before it [starts](Self::start), and between
    /// pieces of work.
    #[must_use]
    pub fn reason_to_stop(&self) -> Option<CopyFailure> {
        if self.is_cancelled() {
            return Some(CopyFailure::Cancelled);
        }
        let is_late =
            self.parts.options.deadline.is_some_and(|deadline| deadline <= Instant::now());
        is_late.then_some(CopyFailure::DeadlineExceeded)
    }

    /// The ticket of the transfer.
    pub(crate) fn ticket(&self) -> &Ticket {
        &self.parts.claims.ticket
    }

    /// Ends a job that no engine has, before its predecessors have ended. The caller ends its
    /// ticket after them.
    pub(crate) fn end_before_predecessors(mut self) {
        self.parts.claims.writing.has_written(Written::Nothing);
        self.parts.finalizer.result = Some(Err(self.cancelled()));
        self.parts.finalizer.leaves_ticket = true;
        catch_foreign_panic(|| drop(self));
    }

    /// Ends a job that was never started: its blocks are unchanged.
    pub(crate) fn withdraw(mut self) {
        self.parts.claims.writing.has_written(Written::Nothing);
        self.parts.finalizer.uncount();
        catch_foreign_panic(|| drop(self));
    }

    /// The error of a job that was cancelled.
    pub(crate) fn cancelled(&self) -> TransferError {
        TransferError::Cancelled {
            started: self.parts.finalizer.started.get().is_some(),
            done: self.parts.progress.copied(),
            total: self.parts.plan.bytes(),
        }
    }
}
