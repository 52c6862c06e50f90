//! Changes of the number of slots.

use std::ops::Range;
use std::sync::atomic::{Ordering, fence};

use terrane_core::sync::lock;

use crate::error::StoreError;
use crate::slab::Slabs;
use crate::store::slot_table::{DeferredEffects, MUST_BE_WRITTEN, SlotTable};

/// Slots beyond the limit that no block or job has. They stay so until the tier grows.
pub(crate) struct Retired {
    pub(crate) slots: Vec<u32>,
    growths: u64,
}

impl SlotTable {
    /// Sets the number of slots that are used. Returns the slots beyond it, whose blocks the caller
    /// [evicts](Self::evict_all_beyond).
    pub(crate) fn set_limit(&self, slots: u32) -> Range<u32> {
        let mut state = lock(&self.state);
        let before = std::mem::replace(&mut state.limit, slots);
        self.limit.store(slots, Ordering::SeqCst);
        // Before the pins are read: a thread that unpins later sees the limit.
        fence(Ordering::SeqCst);
        if slots < before {
            let free = std::mem::take(&mut state.free);
            let quarantined = std::mem::take(&mut state.quarantined);
            let claimed = std::mem::take(&mut state.claimed);
            for slot in free.into_iter().chain(quarantined).chain(claimed) {
                self.put_back(&mut state, slot);
            }
        } else {
            state.growths += 1;
            let retired = std::mem::take(&mut state.retired);
            retired.into_iter().rev().for_each(|slot| self.put_back(&mut state, slot));
        }
        // Those beyond the limit are written first, so that their slots become free.
        state.dirty.make_contiguous().sort_by_key(|(slot, _)| *slot < slots);
        drop(state);
        self.policy.set_limit(slots);
        slots..before
    }

    /// Evicts the blocks of slots beyond the limit. A pinned block leaves with its last pin, and a
    /// dirty one after it was written to a slower tier. No lock may be held.
    pub(crate) fn evict_all_beyond(&self, slots: Range<u32>) {
        let mut dirty = 0;
        for slot in slots {
            if self.is_beyond(slot) && self.mark(slot) == MUST_BE_WRITTEN {
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
        if let Some(key) = self.index.evict(slot, || self.mark(slot) != MUST_BE_WRITTEN) {
            self.policy.remove(slot);
            self.put_back(&mut lock(&self.state), slot);
            self.apply(DeferredEffects { evicted: vec![key], ..DeferredEffects::default() });
        }
    }

    /// Starts the write of the block of a slot beyond the limit to a slower tier, if it is dirty.
    /// No lock may be held.
    pub(crate) fn write_beyond(&self, slot: u32) {
        if self.is_beyond(slot) && self.mark(slot) == MUST_BE_WRITTEN {
            self.apply(DeferredEffects { lacks: 1, ..DeferredEffects::default() });
        }
    }

    /// Whether dirty blocks beyond the limit are left to write.
    pub(crate) fn has_dirty_beyond(&self) -> bool {
        let state = lock(&self.state);
        state.dirty.front().is_some_and(|(slot, _)| *slot >= state.limit)
    }

    /// The slots beyond the limit that no block or job has.
    pub(crate) fn retired(&self) -> Retired {
        let state = lock(&self.state);
        Retired { slots: state.retired.iter().copied().collect(), growths: state.growths }
    }

    /// Those of the slots that are beyond the limit since they were listed. Others may have got a block
    /// meanwhile, and later removals need not be durable.
    pub(crate) fn still_retired(&self, listed: Retired) -> Vec<u32> {
        let is_same = lock(&self.state).growths == listed.growths;
        if is_same { listed.slots } else { Vec::new() }
    }

    /// Frees the disk blocks of slots beyond the limit. The removals of their last blocks are durable.
    pub(crate) fn punch(&self, slabs: &Slabs, removed: Retired) -> Result<(), StoreError> {
        let retired = self.still_retired(removed);
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
