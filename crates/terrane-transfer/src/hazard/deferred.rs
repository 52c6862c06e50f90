//! Jobs that wait for other transfers to end.

use std::sync::{Arc, Weak};

use crate::engine::job::CopyJob;
use crate::engine::{CopyEngine, threads};
use crate::error::TransferError;
use crate::hazard::notify::{catch_foreign_panic, notify};
use crate::hazard::ticket::{Cancel, Dependent, Ticket, TransferId};
use crate::sync::{Mutex, lock};
use crate::transfer::Predecessor;

/// A job that is submitted to its engine once every predecessor has ended. It fails if a
/// predecessor that must succeed has failed.
struct DeferredJob {
    state: Mutex<DeferredState>,
    allow_incomplete: bool,
}

struct DeferredState {
    remaining: usize,
    failed: Option<TransferId>,
    stage: DeferredStage,
}

enum DeferredStage {
    Waiting(CopyJob, Arc<dyn CopyEngine>),
    /// A thread is ending the cancelled job, and has not released its blocks yet.
    Cancelling,
    /// The job was cancelled and has ended. Its ticket ends with the last predecessor, as
    /// transfers that run after this one may use blocks of the predecessors.
    Cancelled(EndTicketOnDrop),
    /// The engine has the job, or the ticket of the cancelled job has ended.
    Finished,
}

/// Waits for the end of a predecessor that may fail.
struct AfterEnd(Arc<DeferredJob>);

/// Submits `job` to `engine` after `predecessors`, or at once if they have ended.
pub(crate) fn submit_after(
    predecessors: &[Predecessor],
    allow_incomplete: bool,
    job: CopyJob,
    engine: Arc<dyn CopyEngine>,
) {
    if predecessors.is_empty() {
        engine.submit(job);
        return;
    }
    let ticket = job.ticket().clone();
    let stage = DeferredStage::Waiting(job, engine);
    let state = DeferredState { remaining: predecessors.len(), failed: None, stage };
    let deferred = Arc::new(DeferredJob { state: Mutex::new(state), allow_incomplete });
    let cancels: Weak<DeferredJob> = Arc::downgrade(&deferred);
    ticket.add_canceller(cancels);
    for predecessor in predecessors {
        predecessor.ticket.add_dependent(match predecessor.has_to_succeed {
            true => deferred.clone(),
            false => Arc::new(AfterEnd(Arc::clone(&deferred))),
        });
    }
}

impl Dependent for DeferredJob {
    fn predecessor_ended(&self, predecessor: TransferId, succeeded: bool) {
        let mut state = lock(&self.state);
        if !succeeded {
            state.failed.get_or_insert(predecessor);
        }
        state.remaining -= 1;
        if state.remaining > 0 || matches!(state.stage, DeferredStage::Cancelling) {
            return;
        }
        let (stage, failed) =
            (std::mem::replace(&mut state.stage, DeferredStage::Finished), state.failed);
        // The lock is released first, because the job may end in this call.
        drop(state);
        let (job, engine) = match stage {
            DeferredStage::Waiting(job, engine) => (job, engine),
            DeferredStage::Cancelled(ended) => return drop(ended),
            DeferredStage::Cancelling | DeferredStage::Finished => return,
        };
        let may_start = match failed {
            Some(predecessor) => Err(TransferError::PredecessorFailed { predecessor }),
            None if job.is_cancelled() => Err(job.cancelled()),
            None => job.check_start(self.allow_incomplete),
        };
        match may_start {
            Ok(()) => engine.submit(job),
            Err(cause) => job.abandon(cause),
        }
    }
}

impl Dependent for AfterEnd {
    fn predecessor_ended(&self, predecessor: TransferId, _: bool) {
        self.0.predecessor_ended(predecessor, true);
    }
}

impl Cancel for DeferredJob {
    fn cancel(&self) {
        let mut state = lock(&self.state);
        let (job, engine) = match std::mem::replace(&mut state.stage, DeferredStage::Cancelling) {
            DeferredStage::Waiting(job, engine) => (job, engine),
            other => {
                state.stage = other;
                return;
            }
        };
        drop(state);
        let ended = EndTicketOnDrop(job.ticket().clone());
        // This must not wait, so an engine that drops here does not join its threads. The end of
        // the ticket may drop an engine too, because it starts other transfers.
        threads::finishing(|| {
            job.end_before_predecessors();
            catch_foreign_panic(|| drop(engine));
            let mut state = lock(&self.state);
            if state.remaining > 0 {
                state.stage = DeferredStage::Cancelled(ended);
            } else {
                state.stage = DeferredStage::Finished;
                drop(state);
                drop(ended);
            }
        });
    }
}

/// Ends the ticket of a cancelled job when it drops.
struct EndTicketOnDrop(Ticket);

impl Drop for EndTicketOnDrop {
    fn drop(&mut self) {
        notify(self.0.end(false), self.0.id(), false);
    }
}
