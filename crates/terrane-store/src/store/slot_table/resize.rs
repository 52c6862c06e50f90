//! Changes of the number of slots.

use std::ops::Range;
use std::sync::atomic::{Ordering, fence};

use terrane_core::sync::lock;

use crate::error::StoreError;
use crate::slab::Slabs;
use crate::store::slot_table::{
    CLEAN, DeferredEffects, KEPT, MOST_DAMAGES, SlotTable, SlotTableState,
};

impl SlotTable {
    /// Sets the number of slots that are used. Returns the slots beyond it, whose blocks the caller
    /// [evicts](Self::evict_all_beyond).
    pub(crate) fn set_limit(&self, slots: u32) -> Range<u32> {
        let mut state = lock(&self.state);
        let before = std::mem::replace(&mut state.limit, slots);
        self.limit.store(slots, Ordering::SeqCst);
        // Before the look at the pins: who unpins later sees the limit.
        fence(Ordering::SeqCst);
        if slots < before {
            let free = std::mem::take(&mut state.free);
            let quarantined = std::mem::take(&mut state.quarantined);
            let claimed = std::mem::take(&mut state.claimed);
            for slot in free.into_iter().chain(quarantined).chain(claimed) {
                self.put_back(&mut state, slot);
            }
        } else {
            let retired = std::mem::take(&mut state.retired);
            retired.into_iter().rev().for_each(|slot| self.put_back(&mut state, slot));
        }
        // Those beyond the limit are written first: their slots are to become free.
        state.dirty.make_contiguous().sort_by_key(|(slot, _)| *slot < slots);
        drop(state);
        self.policy.set_limit(slots);
        slots..before
    }

    /// Evicts the blocks of slots beyond the limit. Pinned blocks leave with their last pin, and dirty
    /// ones when they were written to a slower tier. No lock may be held.
    pub(crate) fn evict_all_beyond(&self, slots: Range<u32>) {
        let mut dirty = 0;
        for slot in slots {
            if self.is_beyond(slot) && self.mark(slot) == KEPT {
                dirty += 1;
            } else {
                self.evict_beyond(slot);
            }
        }
        self.apply(DeferredEffects { lacks: dirty, ..DeferredEffects::default() });
        self.retry();
    }

    /// Evicts the block of a slot beyond the limit, unless it is in use or dirty. No lock may be held.
    pub(crate) fn evict_beyond(&self, slot: u32) {
        fence(Ordering::SeqCst);
        if slot < self.limit.load(Ordering::SeqCst) {
            return;
        }
        if let Some(key) = self.index.evict(slot, || self.mark(slot) != KEPT) {
            self.policy.remove(slot);
            self.put_back(&mut lock(&self.state), slot);
            self.apply(DeferredEffects { evicted: vec![key], ..DeferredEffects::default() });
        }
    }

    /// Has the block of a slot beyond the limit written to a slower tier, if it is dirty. No lock may be
    /// held.
    pub(crate) fn write_beyond(&self, slot: u32) {
        if self.is_beyond(slot) && self.mark(slot) == KEPT {
            self.apply(DeferredEffects { lacks: 1, ..DeferredEffects::default() });
        }
    }

    /// A slot has no block and no user any more.
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

    /// Frees the slots whose orphaned copies have ended.
    pub(super) fn free_unclaimed(&self, state: &mut SlotTableState) {
        let claimed = std::mem::take(&mut state.claimed);
        claimed.into_iter().for_each(|slot| self.put_back(state, slot));
    }

    /// Tells the store that slots beyond the limit became free, if so. No lock may be held.
    pub(super) fn report_retired(&self) {
        if self.has_retired.load(Ordering::Relaxed)
            && self.has_retired.swap(false, Ordering::Relaxed)
            && let Some(store) = self.store.upgrade()
        {
            store.after_retiring(self.tier);
        }
    }

    /// Whether dirty blocks beyond the limit are left to write.
    pub(crate) fn has_dirty_beyond(&self) -> bool {
        let state = lock(&self.state);
        state.dirty.front().is_some_and(|(slot, _)| *slot >= state.limit)
    }

    /// The slots beyond the limit that no block or job has. They stay so until the tier grows.
    pub(crate) fn retired(&self) -> Vec<u32> {
        lock(&self.state).retired.iter().copied().collect()
    }

    /// Frees the disk blocks of the slots beyond the limit that no block, job or record has.
    pub(crate) fn punch(&self, slabs: &Slabs) -> Result<(), StoreError> {
        let mut retired = self.retired();
        retired.retain(|&slot| self.index.last_key(slot).is_none());
        for run in retired.chunk_by(|before, after| before + 1 == *after) {
            if let (Some(&first), Some(&last)) = (run.first(), run.last()) {
                slabs.punch(self.group, first..last + 1)?;
            }
        }
        Ok(())
    }

    pub(crate) fn limit(&self) -> u32 {
        lock(&self.state).limit
    }

    /// Whether a slot is beyond the limit now. It takes no lock.
    pub(crate) fn is_beyond(&self, slot: u32) -> bool {
        slot >= self.limit.load(Ordering::SeqCst)
    }
}
