//! Jobs that wait for other transfers to end.

use std::sync::Arc;

use crate::sync::{Mutex, lock};
use crate::ticket::Dependent;
use crate::{CopyEngine, CopyJob, Ticket, TransferError, TransferId};

/// A job that goes to its engine once every predecessor has ended well, and that ends with an
/// error once all have ended and one of them has not.
struct Waiting {
    state: Mutex<State>,
}

struct State {
    remaining: usize,
    failed: Option<TransferId>,
    parked: Option<(CopyJob, Arc<dyn CopyEngine>)>,
}

/// Hands `job` to `engine` after `predecessors`, at once if they have ended.
pub(crate) fn submit_after(predecessors: &[Ticket], job: CopyJob, engine: Arc<dyn CopyEngine>) {
    if predecessors.is_empty() {
        engine.submit(job);
        return;
    }
    let state = State { remaining: predecessors.len(), failed: None, parked: Some((job, engine)) };
    let waiting = Arc::new(Waiting { state: Mutex::new(state) });
    for predecessor in predecessors {
        predecessor.notify(waiting.clone());
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
        // The job leaves the lock before it goes anywhere: its end may come right here.
        drop(state);
        match (parked, failed) {
            (Some((job, _)), Some(predecessor)) => {
                job.abandon(TransferError::PredecessorFailed { predecessor });
            }
            (Some((job, engine)), None) => engine.submit(job),
            (None, _) => {}
        }
    }
}
