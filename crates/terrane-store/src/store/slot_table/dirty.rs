//! Blocks that no slower tier has.

use std::collections::HashSet;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use terrane_core::convert::to_usize;
use terrane_core::sync::lock;

use crate::KeyHash;
use crate::index::StoredBlock;
use crate::store::slot_table::{
    CLEAN, MAY_BE_LOST, MUST_BE_WRITTEN, PinnedSlot, SlotTable, SlotTableState,
};

impl SlotTable {
    pub(super) fn mark(&self, slot: u32) -> u8 {
        let mark = self.dirty.get(to_usize(slot.into()));
        mark.map_or(CLEAN, |mark| mark.load(Ordering::Acquire))
    }

    pub(super) fn set_mark(&self, slot: u32, value: u8) {
        let Some(mark) = self.dirty.get(to_usize(slot.into())) else { return };
        match (mark.swap(value, Ordering::AcqRel), value) {
            (MUST_BE_WRITTEN, MUST_BE_WRITTEN) => {}
            (MUST_BE_WRITTEN, _) => {
                self.must_be_written.fetch_sub(1, Ordering::SeqCst);
            }
            (_, MUST_BE_WRITTEN) => {
                self.must_be_written.fetch_add(1, Ordering::SeqCst);
            }
            _ => {}
        }
    }

    /// Adds a block to the list of dirty ones. The list has at most two entries for each slot of
    /// the tier.
    pub(super) fn push_dirty(&self, state: &mut SlotTableState, entry: (u32, KeyHash)) {
        let is_clean = |&mut (slot, _): &mut (u32, KeyHash)| self.mark(slot) != MUST_BE_WRITTEN;
        while state.dirty.pop_front_if(is_clean).is_some() {}
        if entry.0 < state.limit {
            state.dirty.push_back(entry);
        } else {
            state.dirty.push_front(entry);
        }
        if state.dirty.len() > 2 * self.dirty.len() {
            let mut seen = HashSet::new();
            state.dirty.retain(|&(slot, key)| {
                let is_same = |block: StoredBlock| block.slot == slot;
                let is_dirty = self.mark(slot) == MUST_BE_WRITTEN;
                is_dirty && self.index.get(key).is_some_and(is_same) && seen.insert(slot)
            });
        }
    }

    /// Marks a block that the caller has pinned as clean, because a slower tier has it. It can be
    /// evicted once the pin has dropped. The drop also retries for the jobs that wait.
    pub(crate) fn set_clean(&self, slot: u32) {
        self.set_mark(slot, CLEAN);
    }

    /// Makes the caller the only job that writes back. Returns `false` if another one is.
    pub(crate) fn begin_write_back(&self) -> bool {
        !self.is_writing_back.swap(true, Ordering::AcqRel)
    }

    pub(crate) fn end_write_back(&self) {
        self.is_writing_back.store(false, Ordering::Release);
    }

    /// Takes up to `most` dirty blocks from the list and pins them, the oldest first.
    pub(crate) fn take_dirty(self: &Arc<Self>, most: usize) -> Vec<(KeyHash, PinnedSlot)> {
        let mut found = Vec::new();
        while found.len() < most {
            let Some((slot, key)) = lock(&self.state).dirty.pop_front() else { break };
            let pinned =
                self.pin(key).filter(|pin| pin.block.slot == slot && self.mark(slot) != CLEAN);
            found.extend(pinned.map(|pin| (key, pin)));
        }
        found
    }

    /// Whether a block that is pinned has to be written to a slower tier.
    pub(crate) fn is_pin_dirty(&self, pin: &PinnedSlot) -> bool {
        self.mark(pin.block.slot) != CLEAN
    }

    /// Whether the list of dirty blocks has entries. Some may be clean by now.
    pub(crate) fn has_dirty(&self) -> bool {
        !lock(&self.state).dirty.is_empty()
    }

    /// The keys of all dirty blocks, and those of all others. Both lists are empty if there is no
    /// slower tier.
    pub(crate) fn keys_by_mark(&self) -> (Vec<KeyHash>, Vec<KeyHash>) {
        let (mut dirty, mut clean) = (Vec::new(), Vec::new());
        if !self.dirty.is_empty() {
            self.index.for_each(|key, block| match self.mark(block.slot) {
                CLEAN => clean.push(key),
                _ => dirty.push(key),
            });
        }
        (dirty, clean)
    }

    /// Whether the list of dirty blocks is longer than half of the slots.
    pub(crate) fn is_mostly_dirty(&self) -> bool {
        let state = lock(&self.state);
        state.dirty.len() > to_usize(state.limit.into()) / 2
    }

    /// Whether a job that found no room for one block here may find some by itself: copies claim slots, or
    /// there is room by now.
    pub(crate) fn may_have_room_later(&self) -> bool {
        let mut state = lock(&self.state);
        self.free_unclaimed(&mut state);
        !state.claimed.is_empty() || state.never(1).is_none()
    }

    /// Adds a dirty block to the list again, because it could not be written.
    pub(crate) fn requeue_dirty(&self, key: KeyHash, slot: u32) {
        if self.mark(slot) == MUST_BE_WRITTEN {
            self.push_dirty(&mut lock(&self.state), (slot, key));
        }
    }

    /// Allows the eviction of a block that could not be written, once the caller's pin has dropped.
    /// So no job waits for its slot without end. The block is not clean: a sync tries again.
    pub(crate) fn allow_loss(&self, slot: u32) {
        self.set_mark(slot, MAY_BE_LOST);
    }
}
