//! Jobs that wait for other transfers to end.

use std::sync::{Arc, Weak};

use crate::engines::threads;
use crate::job::{shielded, tell};
use crate::request::Predecessor;
use crate::sync::{Mutex, lock};
use crate::ticket::{Cancel, Dependent};
use crate::{CopyEngine, CopyJob, Ticket, TransferError, TransferId};

/// A job that is submitted to its engine once every predecessor has ended. It fails instead if a
/// predecessor failed that had to succeed.
struct Waiting {
    state: Mutex<State>,
    allow_incomplete: bool,
}

struct State {
    remaining: usize,
    failed: Option<TransferId>,
    parked: Parked,
}

#[expect(
    clippy::large_enum_variant,
    reason = "there is one for each transfer that waits, and nearly all of them hold the job"
)]
enum Parked {
    Job(CopyJob, Arc<dyn CopyEngine>),
    /// A thread is ending the cancelled job, and has not released its blocks yet.
    Cancelling,
    /// The job was cancelled and has ended. Its ticket ends with the last predecessor, as
    /// transfers that run after this one may use blocks of the predecessors.
    Cancelled(EndsTicket),
    /// The engine has the job.
    Gone,
}

/// Waits for the end of a predecessor that may fail.
struct ForTheEnd(Arc<Waiting>);

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
    let parked = Parked::Job(job, engine);
    let state = State { remaining: predecessors.len(), failed: None, parked };
    let waiting = Arc::new(Waiting { state: Mutex::new(state), allow_incomplete });
    let cancels: Weak<Waiting> = Arc::downgrade(&waiting);
    ticket.set_deferred(cancels);
    for predecessor in predecessors {
        predecessor.ticket.notify(match predecessor.has_to_succeed {
            true => waiting.clone(),
            false => Arc::new(ForTheEnd(Arc::clone(&waiting))),
        });
    }
}

impl Dependent for Waiting {
    fn predecessor_ended(&self, predecessor: TransferId, succeeded: bool) {
        let mut state = lock(&self.state);
        if !succeeded {
            state.failed.get_or_insert(predecessor);
        }
        state.remaining -= 1;
        if state.remaining > 0 || matches!(state.parked, Parked::Cancelling) {
            return;
        }
        let (parked, failed) = (std::mem::replace(&mut state.parked, Parked::Gone), state.failed);
        // The lock is released first, as the job may end right here.
        drop(state);
        let (job, engine) = match parked {
            Parked::Job(job, engine) => (job, engine),
            Parked::Cancelled(ended) => return drop(ended),
            Parked::Cancelling | Parked::Gone => return,
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

impl Dependent for ForTheEnd {
    fn predecessor_ended(&self, predecessor: TransferId, _: bool) {
        self.0.predecessor_ended(predecessor, true);
    }
}

impl Cancel for Waiting {
    fn cancel(&self) {
        let mut state = lock(&self.state);
        let (job, engine) = match std::mem::replace(&mut state.parked, Parked::Cancelling) {
            Parked::Job(job, engine) => (job, engine),
            other => {
                state.parked = other;
                return;
            }
        };
        drop(state);
        let ended = EndsTicket(job.ticket().clone());
        // This must not wait, so an engine that drops here does not join its threads.
        threads::finishing(|| {
            job.end_before_predecessors();
            shielded(|| drop(engine));
        });
        let mut state = lock(&self.state);
        if state.remaining > 0 {
            state.parked = Parked::Cancelled(ended);
        } else {
            state.parked = Parked::Gone;
            drop(state);
            drop(ended);
        }
    }
}

/// Ends the ticket of a cancelled job as it drops.
struct EndsTicket(Ticket);

impl Drop for EndsTicket {
    fn drop(&mut self) {
        tell(self.0.end(false), self.0.id(), false);
    }
}
