//! Pins of blocks with a time limit.

use std::sync::{Arc, Mutex};
use std::task::Wake;

use terrane_core::OwnerProcess;
use terrane_core::sync::lock;

use crate::store::job::executor::Timer;
use crate::store::query::presence::Presence;
use crate::store::slot_table::LeasedSlot;

/// Keeps blocks from being evicted, until it drops or its time is over.
///
/// [`presence`](Self::presence) is the state of each key at the time of the call. Keys that are
/// ready are pinned. A lease that is leaked ends at its time limit.
#[must_use = "dropping the lease releases the blocks"]
pub struct Lease {
    pub(crate) presence: Vec<Presence>,
    pub(crate) pins: Arc<LeasePins>,
    pub(crate) _timer: Option<Timer>,
}

/// The pins of a lease, which the timer and the lease share.
pub(crate) struct LeasePins {
    owner: OwnerProcess,
    slots: Mutex<Vec<LeasedSlot>>,
}

impl LeasePins {
    pub(crate) fn new(slots: Vec<LeasedSlot>) -> Self {
        Self { owner: OwnerProcess::current(), slots: Mutex::new(slots) }
    }

    pub(crate) fn release(&self) {
        // A forked process has no copy of the thread that may have had the lock.
        if !self.owner.is_current() {
            return;
        }
        let slots = std::mem::take(&mut *lock(&self.slots));
        drop(slots);
    }
}

/// The time limit has come.
impl Wake for LeasePins {
    fn wake(self: Arc<Self>) {
        self.release();
    }
}

impl Lease {
    /// The state of each key at the time of the call.
    #[must_use]
    pub fn presence(&self) -> &[Presence] {
        &self.presence
    }

    /// The number of leading keys that were ready, and are pinned.
    #[must_use]
    pub fn prefix(&self) -> usize {
        self.presence.iter().take_while(|presence| presence.is_ready()).count()
    }

    /// The number of blocks that are pinned now: zero after the time limit, and in a forked process.
    #[must_use]
    pub fn pinned(&self) -> usize {
        if self.pins.owner.is_current() { lock(&self.pins.slots).len() } else { 0 }
    }
}

impl Drop for Lease {
    fn drop(&mut self) {
        self.pins.release();
    }
}

terrane_core::debug_fields!(Lease, |it| { presence: it.presence });
