//! Tickets of transfers in flight, and the order between them.

use std::any::Any;
use std::fmt;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Weak};

use rustc_hash::FxHashSet;
use smallvec::SmallVec;
use terrane_core::OwnerProcess;

use crate::hazard::notify::catch_foreign_panic;
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
pub struct Ticket(Arc<TicketInner>);

struct TicketInner {
    id: TransferId,
    /// A forked process does not lock the state: a thread of the parent may hold the lock.
    owner: OwnerProcess,
    is_cancelled: AtomicBool,
    /// Whether the predecessors are the members of a set, and are cancelled with it.
    is_of_set: bool,
    state: Mutex<TicketState>,
}

enum TicketState {
    InFlight(TicketInFlight),
    Ended { succeeded: bool },
}

struct TicketInFlight {
    predecessors: SmallVec<[Ticket; 2]>,
    /// Boxed, because most transfers have none of them.
    linked: Option<Box<Linked>>,
}

/// The values that a transfer notifies or drops at its end, or uses when it is cancelled.
#[derive(Default)]
struct Linked {
    dependents: Vec<Arc<dyn Dependent>>,
    /// The waits for the end. A wait that ends early drops its value, and the list removes it
    /// later.
    waits: Vec<Weak<dyn Dependent>>,
    /// Values that drop as the transfer ends.
    kept_alive: Vec<KeptAlive>,
    /// They end parts of the transfer when it is cancelled.
    cancellers: Vec<Weak<dyn Cancel>>,
}

/// A value that is only kept alive.
pub(crate) type KeptAlive = Arc<dyn Any + Send + Sync>;

/// Something that waits for tickets to end.
pub(crate) trait Dependent: Send + Sync {
    /// Called once for each ticket that it waits for. `succeeded`: that transfer succeeded.
    fn predecessor_ended(&self, predecessor: TransferId, succeeded: bool);
}

/// The holder of a transfer that waits: for other transfers, or for its turn in a relay.
pub(crate) trait Cancel: Send + Sync {
    /// Ends the transfer, unless it no longer waits.
    fn cancel(&self);
}

impl Ticket {
    pub(crate) fn new(predecessors: impl IntoIterator<Item = Ticket>) -> Self {
        Self::build(predecessors, false)
    }

    /// The ticket of a set, from those of its members.
    pub(crate) fn of_set(members: impl IntoIterator<Item = Ticket>) -> Self {
        Self::build(members, true)
    }

    fn build(predecessors: impl IntoIterator<Item = Ticket>, is_of_set: bool) -> Self {
        let predecessors = predecessors.into_iter().filter(|p| !p.has_ended()).collect();
        let in_flight = TicketInFlight { predecessors, linked: None };
        Self(Arc::new(TicketInner {
            id: TransferId::next(),
            owner: OwnerProcess::current(),
            is_cancelled: AtomicBool::new(false),
            is_of_set,
            state: Mutex::new(TicketState::InFlight(in_flight)),
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
        !self.is_of_this_process() || matches!(*lock(&self.0.state), TicketState::Ended { .. })
    }

    /// Whether the transfer has ended successfully.
    pub(crate) fn has_succeeded(&self) -> bool {
        self.is_of_this_process()
            && matches!(*lock(&self.0.state), TicketState::Ended { succeeded: true })
    }

    /// Requests that the transfer stops, and returns at once. Later calls change nothing.
    ///
    /// | the transfer | what happens |
    /// |---|---|
    /// | waits for others ([`Transfer::after`](crate::Transfer::after)) | ends now, with [`TransferError::Cancelled`]; nothing is copied |
    /// | is queued in its engine | ends, with that error, when its turn comes; in a relay at once, unless it waits for a device's stream; nothing is copied |
    /// | is being copied by the host, disk, device or NIXL engine or a relay | ends, with that error, before the next chunk or request; those in progress complete |
    /// | is being copied by an engine that cannot stop it | continues, and ends as without the request |
    /// | has ended, or has copied all bytes | nothing |
    ///
    /// So the outcome reports whether the transfer was stopped. Its guard returns with the outcome,
    /// as always. If it was stopped half-way, its destination is
    /// [incomplete](crate::TransferError::Incomplete). If it had not started, the destination is
    /// unchanged. For transfers that run after it, it is a failed predecessor.
    ///
    /// The ticket of a transfer that waited for others ends only when those have ended, although
    /// the outcome is available earlier. Transfers that run after this one rely on that order.
    ///
    /// The ticket of a [set](crate::CompletionSet) cancels all its transfers. The ticket of a
    /// [hold](crate::Hold) ignores the request, and so does a process that was forked from the
    /// transfer's process.
    ///
    /// A transfer that waits ends on this thread, which then runs what
    /// [`TransferManager::submit`](crate::TransferManager::submit) lists. No call waits for a copy.
    ///
    /// [`TransferError::Cancelled`]: crate::TransferError::Cancelled
    /// [`TransferError::Incomplete`]: crate::TransferError::Incomplete
    pub fn cancel(&self) {
        if !self.is_of_this_process() {
            return;
        }
        // Relaxed: nothing is published with it. An engine that loads it late stops late.
        self.0.is_cancelled.store(true, Ordering::Relaxed);
        let state = lock(&self.0.state);
        let TicketState::InFlight(in_flight) = &*state else { return };
        if self.0.is_of_set {
            let members = in_flight.predecessors.clone();
            drop(state);
            return members.iter().for_each(Self::cancel);
        }
        let cancellers = in_flight.linked.as_ref().map(|linked| linked.cancellers.clone());
        drop(state);
        let cancellers = cancellers.iter().flatten().filter_map(Weak::upgrade);
        cancellers.for_each(|canceller| canceller.cancel());
    }

    /// Whether a cancellation of the transfer was requested.
    pub(crate) fn is_cancelled(&self) -> bool {
        self.0.is_cancelled.load(Ordering::Relaxed)
    }

    /// Lets a cancellation end the transfer through `canceller` as well, which may have dropped by
    /// then. Parts of a transfer share its ticket, and each may have one.
    pub(crate) fn add_canceller(&self, canceller: Weak<dyn Cancel>) {
        if let TicketState::InFlight(in_flight) = &mut *lock(&self.0.state) {
            push_live(&mut in_flight.linked().cancellers, canceller);
        }
    }

    /// Drops `value` as the transfer ends, before any thread can observe the end; at once if it has
    /// ended.
    pub(crate) fn keep(&self, value: KeptAlive) {
        if !self.is_of_this_process() {
            return;
        }
        let mut state = lock(&self.0.state);
        if let TicketState::InFlight(in_flight) = &mut *state {
            if !self.0.is_of_set {
                return in_flight.linked().kept_alive.push(value);
            }
            // Two threads may end the ticket of a set. Each member has one thread that ends it, and
            // members end before their set.
            let members = in_flight.predecessors.clone();
            drop(state);
            return members.iter().for_each(|member| member.keep(Arc::clone(&value)));
        }
        // The value drops after the lock is released.
        drop(state);
    }

    /// Whether it belongs to a transfer of this process, not to one of the parent process.
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
            if let TicketState::InFlight(in_flight) = &*lock(&ticket.0.state) {
                pending.extend(in_flight.predecessors.iter().cloned());
            }
        }
        seen
    }

    /// Calls `dependent` when the transfer ends, or at once if it has ended.
    pub(crate) fn add_dependent(&self, dependent: Arc<dyn Dependent>) {
        if !self.is_of_this_process() {
            return dependent.predecessor_ended(self.id(), false);
        }
        let mut state = lock(&self.0.state);
        match &mut *state {
            TicketState::InFlight(in_flight) => in_flight.linked().dependents.push(dependent),
            TicketState::Ended { succeeded } => {
                let succeeded = *succeeded;
                drop(state);
                dependent.predecessor_ended(self.id(), succeeded);
            }
        }
    }

    /// Like [`add_dependent`](Self::add_dependent), unless the caller has dropped `wait` by then.
    pub(crate) fn add_wait<W: Dependent + 'static>(&self, wait: &Arc<W>) {
        if self.is_of_this_process()
            && let TicketState::InFlight(in_flight) = &mut *lock(&self.0.state)
        {
            let weak: Weak<W> = Arc::downgrade(wait);
            return push_live(&mut in_flight.linked().waits, weak);
        }
        wait.predecessor_ended(self.id(), self.has_succeeded());
    }

    /// Marks the end, and returns the dependents to notify. A second call changes nothing.
    pub(crate) fn end(&self, succeeded: bool) -> Vec<Arc<dyn Dependent>> {
        if !self.is_of_this_process() {
            return Vec::new();
        }
        let mut state = lock(&self.0.state);
        loop {
            let TicketState::InFlight(in_flight) = &mut *state else { return Vec::new() };
            let kept_alive = in_flight.linked.as_mut().map(|it| std::mem::take(&mut it.kept_alive));
            let Some(kept_alive) = kept_alive.filter(|kept| !kept.is_empty()) else { break };
            // Their drop takes locks. Other dependents may be added meanwhile.
            drop(state);
            // It may own memory that another library frees.
            catch_foreign_panic(|| drop(kept_alive));
            state = lock(&self.0.state);
        }
        let ended = std::mem::replace(&mut *state, TicketState::Ended { succeeded });
        // A predecessor that drops here may have the last reference to a transfer that others wait
        // for, and their guards drop with it. So it drops after the lock is released.
        drop(state);
        match ended {
            // The predecessors drop with the state, so that chains of transfers do not grow.
            // Waits are notified first, because dependents may take long to start.
            TicketState::InFlight(TicketInFlight { linked: Some(linked), .. }) => {
                let Linked { dependents, waits, .. } = *linked;
                waits.iter().filter_map(Weak::upgrade).chain(dependents).collect()
            }
            TicketState::InFlight(_) | TicketState::Ended { .. } => Vec::new(),
        }
    }
}

impl TicketInFlight {
    fn linked(&mut self) -> &mut Linked {
        self.linked.get_or_insert_default()
    }
}

/// Adds a value to a list. Before the list grows, the values that have dropped are removed. So it
/// has at most a few times as many entries as values lived at once, and a call takes constant time
/// in the mean.
fn push_live<T: ?Sized>(list: &mut Vec<Weak<T>>, value: Weak<T>) {
    if list.len() == list.capacity() {
        list.retain(|value| value.strong_count() > 0);
        if list.len() > list.capacity() / 2 {
            list.reserve(list.len());
        }
    }
    list.push(value);
}

impl fmt::Debug for Ticket {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Ticket({}, ended: {})", self.id(), self.has_ended())
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    impl Ticket {
        /// The number of dependents and waits in the lists.
        pub(in crate::hazard) fn dependents(&self) -> usize {
            match &*lock(&self.0.state) {
                TicketState::InFlight(TicketInFlight { linked: Some(linked), .. }) => {
                    linked.dependents.len() + linked.waits.len()
                }
                TicketState::InFlight(_) => 0,
                TicketState::Ended { .. } => 0,
            }
        }
    }
}
