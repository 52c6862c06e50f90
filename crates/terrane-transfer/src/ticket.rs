//! Names of transfers in flight, and the order between them.

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
        // Relaxed: only uniqueness is asked for.
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

/// A cheap, cloneable name of a transfer (or of a hold on blocks), to run others after it.
#[derive(Clone)]
pub struct Ticket(Arc<Inner>);

struct Inner {
    id: TransferId,
    /// In a forked process the state is not locked: a thread that is not there may have done so.
    owner: OwnerProcess,
    state: Mutex<State>,
}

enum State {
    InFlight { predecessors: SmallVec<[Ticket; 2]>, dependents: Vec<Arc<dyn Dependent>> },
    Ended { succeeded: bool },
}

/// Something that waits for tickets to end.
pub(crate) trait Dependent: Send + Sync {
    /// Called once for each ticket that it waits for, with whether that ended well.
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

    /// Whether the transfer has ended, well or not. In a forked process, the transfers of the parent
    /// have.
    #[must_use]
    pub fn has_ended(&self) -> bool {
        !self.is_of_this_process() || matches!(*lock(&self.0.state), State::Ended { .. })
    }

    /// Whether it names a transfer of this process, and not of the one that this was forked from.
    pub(crate) fn is_of_this_process(&self) -> bool {
        self.0.owner.is_current()
    }

    /// The numbers of these tickets and of everything in flight that they run after.
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

    /// Has `dependent` called when the transfer ends; at once, if it has.
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

    /// Marks the end, and gives out those to be told of it. A second call changes nothing.
    pub(crate) fn end(&self, succeeded: bool) -> Vec<Arc<dyn Dependent>> {
        if !self.is_of_this_process() {
            return Vec::new();
        }
        let mut state = lock(&self.0.state);
        if matches!(*state, State::Ended { .. }) {
            return Vec::new();
        }
        let ended = std::mem::replace(&mut *state, State::Ended { succeeded });
        // A predecessor that drops here may be the last name of a transfer that others wait for, and
        // their guards drop with it. So it drops after the lock.
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
