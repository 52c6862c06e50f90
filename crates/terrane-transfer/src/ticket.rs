//! Tickets of transfers in flight, and the order between them.

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use rustc_hash::FxHashSet;
use smallvec::SmallVec;
use terrane_core::OwnerProcess;

use crate::sync::{Mutex, lock};

/// The number of a transfer, unique within the process.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct TransferId(u64);

impl TransferId {
    fn next() -> Self {
        static NEXT: AtomicU64 = AtomicU64::new(1);
        // Relaxed: only uniqueness is needed.
        Self(NEXT.fetch_add(1, Ordering::Relaxed))
    }

    /// The number.
    #[must_use]
    pub const fn get(self) -> u64 {
        self.0
    }
}

impl fmt::Display for TransferId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "#{}", self.0)
    }
}

/// A cheap, cloneable handle of a transfer (or of a hold on blocks), to run others after it.
#[derive(Clone)]
pub struct Ticket(Arc<Inner>);

struct Inner {
    id: TransferId,
    /// A forked process does not lock the state: a thread that does not exist there may hold the
    /// lock.
    owner: OwnerProcess,
    state: Mutex<State>,
}

enum State {
    InFlight { predecessors: SmallVec<[Ticket; 2]>, dependents: Vec<Arc<dyn Dependent>> },
    Ended { succeeded: bool },
}

/// Something that waits for tickets to end.
pub(crate) trait Dependent: Send + Sync {
    /// Called once for each ticket that it waits for. `succeeded` says whether that one succeeded.
    fn predecessor_ended(&self, predecessor: TransferId, succeeded: bool);
}

impl Ticket {
    pub(crate) fn new(predecessors: impl IntoIterator<Item = Ticket>) -> Self {
        let predecessors = predecessors.into_iter().filter(|p| !p.has_ended()).collect();
        Self(Arc::new(Inner {
            id: TransferId::next(),
            owner: OwnerProcess::current(),
            state: Mutex::new(State::InFlight { predecessors, dependents: Vec::new() }),
        }))
    }

    /// The transfer's number.
    #[must_use]
    pub fn id(&self) -> TransferId {
        self.0.id
    }

    /// Whether the transfer has ended, successfully or not. In a forked process, it is `true` for
    /// transfers of the parent.
    #[must_use]
    pub fn has_ended(&self) -> bool {
        !self.is_of_this_process() || matches!(*lock(&self.0.state), State::Ended { .. })
    }

    /// Whether it belongs to a transfer of this process, not of the parent that this was forked
    /// from.
    pub(crate) fn is_of_this_process(&self) -> bool {
        self.0.owner.is_current()
    }

    /// The numbers of these tickets and of all their predecessors in flight.
    pub(crate) fn closure<'a>(
        tickets: impl IntoIterator<Item = &'a Self>,
    ) -> FxHashSet<TransferId> {
        let mut pending: Vec<Self> = tickets.into_iter().cloned().collect();
        let mut seen = FxHashSet::default();
        while let Some(ticket) = pending.pop() {
            if !seen.insert(ticket.id()) || !ticket.is_of_this_process() {
                continue;
            }
            if let State::InFlight { predecessors, .. } = &*lock(&ticket.0.state) {
                pending.extend(predecessors.iter().cloned());
            }
        }
        seen
    }

    /// Calls `dependent` when the transfer ends, or at once if it has ended.
    pub(crate) fn notify(&self, dependent: Arc<dyn Dependent>) {
        if !self.is_of_this_process() {
            return dependent.predecessor_ended(self.id(), false);
        }
        let mut state = lock(&self.0.state);
        match &mut *state {
            State::InFlight { dependents, .. } => dependents.push(dependent),
            State::Ended { succeeded } => {
                let succeeded = *succeeded;
                drop(state);
                dependent.predecessor_ended(self.id(), succeeded);
            }
        }
    }

    /// Marks the end, and returns the dependents to notify. A second call changes nothing.
    pub(crate) fn end(&self, succeeded: bool) -> Vec<Arc<dyn Dependent>> {
        if !self.is_of_this_process() {
            return Vec::new();
        }
        let mut state = lock(&self.0.state);
        if matches!(*state, State::Ended { .. }) {
            return Vec::new();
        }
        let ended = std::mem::replace(&mut *state, State::Ended { succeeded });
        // A predecessor that drops here may hold the last reference to a transfer that others wait
        // for, and their guards drop with it. So it drops after the lock is released.
        drop(state);
        match ended {
            // The predecessors drop with the state, so that chains of transfers do not grow.
            State::InFlight { dependents, .. } => dependents,
            State::Ended { .. } => Vec::new(),
        }
    }
}

impl fmt::Debug for Ticket {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Ticket({}, ended: {})", self.id(), self.has_ended())
    }
}
