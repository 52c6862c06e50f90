//! Slots that become free: to be used again, or not while a claim, damage or the limit prevents it.

use std::sync::atomic::Ordering;

use terrane_core::sync::lock;
use terrane_transfer::OrphanedClaims;

use crate::store::slot_table::{CLEAN, MOST_DAMAGES, SlotTable, SlotTableState};

impl SlotTable {
    /// Frees slots that have no block, and that a job may have written. No lock may be held.
    pub(super) fn free_written(&self, slots: &[u32]) {
        // Before another job gets the slots: on disk, the records of their last blocks must go.
        if self.owner.is_current()
            && let Some(store) = self.store.upgrade()
        {
            store.before_return(self, slots);
        }
        self.free(slots.iter().copied());
    }

    /// Frees slots that have no block. [`free_written`](Self::free_written) is for those that a job
    /// may have written. No lock may be held.
    pub(super) fn free(&self, slots: impl IntoIterator<Item = u32>) {
        let mut state = lock(&self.state);
        slots.into_iter().for_each(|slot| self.put_back(&mut state, slot));
        drop(state);
        self.retry_for_waiters();
    }

    /// Frees a slot while the order of a key is locked. The caller calls
    /// [`retry_for_waiters`](Self::retry_for_waiters) later, without the lock.
    pub(super) fn free_quietly(&self, slot: u32) {
        self.put_back(&mut lock(&self.state), slot);
    }

    /// Adds a slot that no block and no job has to the set that it belongs to.
    pub(super) fn put_back(&self, state: &mut SlotTableState, slot: u32) {
        // A dirty block that another one replaced leaves with its last pin.
        self.set_mark(slot, CLEAN);
        if slot >= state.limit {
            state.retired.insert(slot);
            self.has_retired.store(true, Ordering::Relaxed);
        } else if state.damages.get(&slot).is_some_and(|&damages| damages >= MOST_DAMAGES) {
            state.quarantined.insert(slot);
        } else if self.orphaned.as_ref().is_some_and(|orphaned| orphaned.has(slot)) {
            state.claimed.push(slot);
        } else {
            state.free.push(slot);
        }
    }

    /// Frees the claimed slots whose orphaned copies have ended. It checks none if no copy has ended since
    /// the last check, and wakes no job.
    pub(super) fn free_unclaimed(&self, state: &mut SlotTableState) {
        if state.claimed.is_empty() {
            return;
        }
        let ended = self.orphaned.as_ref().map(OrphanedClaims::ended);
        if std::mem::replace(&mut state.orphaned_ended, ended) == ended {
            return;
        }
        let claimed = std::mem::take(&mut state.claimed);
        claimed.into_iter().for_each(|slot| self.put_back(state, slot));
    }

    /// Reports to the store that slots beyond the limit became free, if so. No lock may be held.
    pub(super) fn report_retired(&self) {
        if self.has_retired.load(Ordering::Relaxed)
            && self.has_retired.swap(false, Ordering::Relaxed)
            && let Some(store) = self.store.upgrade()
        {
            store.after_retiring(self.tier);
        }
    }
}
