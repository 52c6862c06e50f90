//! Jobs that wait for other transfers to end.

use std::sync::Arc;

use crate::request::Predecessor;
use crate::sync::{Mutex, lock};
use crate::ticket::Dependent;
use crate::{CopyEngine, CopyJob, TransferError, TransferId};

/// A job that is submitted to its engine once every predecessor has ended. It fails instead if a
/// predecessor failed that had to succeed.
struct Waiting {
    state: Mutex<State>,
    allow_incomplete: bool,
}

struct State {
    remaining: usize,
    failed: Option<TransferId>,
    parked: Option<(CopyJob, Arc<dyn CopyEngine>)>,
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
    let state = State { remaining: predecessors.len(), failed: None, parked: Some((job, engine)) };
    let waiting = Arc::new(Waiting { state: Mutex::new(state), allow_incomplete });
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
        if state.remaining > 0 {
            return;
        }
        let (parked, failed) = (state.parked.take(), state.failed);
        // The lock is released first, as the job may end right here.
        drop(state);
        let Some((job, engine)) = parked else { return };
        let may_start = match failed {
            Some(predecessor) => Err(TransferError::PredecessorFailed { predecessor }),
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
