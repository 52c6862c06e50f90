//! The end of a job.

use std::sync::{Arc, OnceLock, Weak};
use std::time::{Duration, Instant};

use crate::completion::layers::LayerSignals;
use crate::completion::waiter_progress::WaiterProgress;
use crate::error::TransferError;
use crate::explain::{EngineTimes, Explanation, Report};
use crate::hazard::notify::{catch_foreign_panic, notify};
use crate::hazard::ticket::Ticket;
use crate::metrics::{Ended, PathMetrics};

/// The engine's handle to a transfer's outcome, independent of the guard's type.
pub(crate) trait OutcomeSink: Send + Sync {
    /// Lets waiting threads poll the engine.
    fn invite_waiters(&self, progress: &Arc<dyn WaiterProgress>);

    /// Reports, before the end, that orphaned work may access the memory after the end.
    fn report_orphaned(&self) {}

    /// Publishes the result and wakes waiting threads. A second call changes nothing.
    fn publish(&self, result: Result<Report, TransferError>);
}

/// The threads that wait for a transfer, or for a layer of it.
pub(crate) struct Waiters {
    /// Weak, so that this value keeps neither the outcome nor the caller's guard.
    pub(crate) sink: Option<Weak<dyn OutcomeSink>>,
    pub(crate) layers: Option<LayerSignals>,
}

impl Waiters {
    /// Lets the threads poll `progress`.
    pub(crate) fn invite(&self, progress: &Arc<dyn WaiterProgress>) {
        if let Some(layers) = &self.layers {
            layers.invite_waiters(progress);
        }
        if let Some(sink) = self.sink.as_ref().and_then(Weak::upgrade) {
            sink.invite_waiters(progress);
        }
    }
}

/// The last part of a job, after the memory is released. Its drop publishes the outcome and starts
/// the transfers that run after this one.
pub(crate) struct Finalizer {
    pub(super) ticket: Ticket,
    /// `None` before the job is connected to its caller, and while it drops.
    pub(super) sink: Option<Arc<dyn OutcomeSink>>,
    pub(super) layers: Option<LayerSignals>,
    pub(super) explanation: Explanation,
    pub(super) submitted: Instant,
    pub(super) started: OnceLock<Instant>,
    pub(super) engine_times: Option<EngineTimes>,
    /// The number of parts that were copied again.
    pub(super) retries: u32,
    /// The counters of the path; `None` for a part of a transfer.
    pub(super) counted: Option<Arc<PathMetrics>>,
    pub(super) checksums: Option<Box<[u64]>>,
    pub(super) result: Option<Result<(), TransferError>>,
    /// Whether another caller ends the ticket later.
    pub(super) leaves_ticket: bool,
}

impl Finalizer {
    /// The threads that wait for the transfer.
    pub(super) fn waiters(&self) -> Waiters {
        Waiters { sink: self.sink.as_ref().map(Arc::downgrade), layers: self.layers.clone() }
    }

    /// Removes the transfer from the counters, because it was never started.
    pub(super) fn uncount(&mut self) {
        self.counted = None;
    }

    /// Counts the end before the caller can observe it.
    fn count(&mut self, result: &Result<Report, TransferError>) {
        let Some(counted) = self.counted.take() else { return };
        let ended = match result {
            Ok(report) => Ended::Succeeded { queued: report.queued, copied: report.copied },
            Err(TransferError::Cancelled { .. }) => Ended::Cancelled,
            Err(_) => Ended::Failed,
        };
        counted.ended(&self.explanation, &ended, self.retries);
    }
}

impl Drop for Finalizer {
    fn drop(&mut self) {
        // A forked process drops its parent's job. Waits in that process already return an error,
        // and transfers that wait for this one are not started.
        if !self.ticket.is_of_this_process() {
            return;
        }
        let result = self.result.take().unwrap_or(Err(TransferError::EngineStopped)).map(|()| {
            let started = self.started.get().copied().unwrap_or(self.submitted);
            Report {
                explanation: self.explanation.clone(),
                queued: started.saturating_duration_since(self.submitted),
                copied: started.elapsed().max(Duration::from_nanos(1)),
                engine_times: self.engine_times,
                checksums: self.checksums.take(),
            }
        });
        self.count(&result);
        let succeeded = result.is_ok();
        // The ticket ends first, so that a thread with the outcome finds the ticket ended.
        let dependents = if self.leaves_ticket { Vec::new() } else { self.ticket.end(succeeded) };
        // The layers end next, for the same reason.
        if let Some(layers) = self.layers.take() {
            catch_foreign_panic(|| layers.end(succeeded));
            catch_foreign_panic(|| drop(layers));
        }
        let sink = self.sink.take();
        if let Some(sink) = &sink {
            catch_foreign_panic(|| sink.publish(result));
        }
        // If the completion was dropped, this drops the outcome and the caller's guard. It happens
        // before any transfer that runs after this one starts.
        catch_foreign_panic(|| drop(sink));
        notify(dependents, self.ticket.id(), succeeded);
    }
}
