//! The end of a transfer without a completion.

use std::sync::Arc;

use crate::completion::waiter_progress::WaiterProgress;
use crate::engine::finalizer::OutcomeSink;
use crate::error::TransferError;
use crate::explain::Report;

/// Receives the end of a transfer that has no [completion](crate::Completion):
/// [`TransferManager::submit_to`](crate::TransferManager::submit_to).
///
/// The transfer keeps the sink until the end. So the sink can own what must live until the copy has
/// ended.
pub trait EndSink: Send + Sync + 'static {
    /// Called at most once, on the thread that ends the transfer. That may be the thread that
    /// submits it. In a forked process the sink drops without a call.
    ///
    /// Like all code that runs there, it [must not wait](crate::TransferManager::submit) for
    /// another transfer.
    fn ended(&self, result: Result<Report, TransferError>);
}

impl<S: EndSink> OutcomeSink for S {
    /// No thread waits.
    fn invite_waiters(&self, _: &Arc<dyn WaiterProgress>) {}

    fn publish(&self, result: Result<Report, TransferError>) {
        self.ended(result);
    }
}
