//! Blocks of a slot table: added to the index and removed from it, pinned, leased and counted as
//! used.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use terrane_core::convert::to_usize;
use terrane_core::sync::lock;

use crate::KeyHash;
use crate::index::{Freed, StoredBlock};
use crate::store::metrics::snapshot::GroupSnapshot;
use crate::store::slot_table::{CLEAN, LeasedSlot, MUST_BE_WRITTEN, PinnedSlot, SlotTable};

/// The count after 255. It and 256 are multiples of 16, so callers still recognise every 16th use.
const LAST_USES: u8 = 240;

impl SlotTable {
    /// Adds a block to the index, which owns its slot from here on. The block is not evicted before
    /// its [`TakenSlots`](super::TakenSlots) drop. With `pins`, it returns a pin, unless the index
    /// is full.
    pub(crate) fn insert(
        self: &Arc<Self>,
        key: KeyHash,
        block: &StoredBlock,
        is_dirty: bool,
        pins: bool,
    ) -> Option<PinnedSlot> {
        if let Some(uses) = self.uses.get(to_usize(block.slot.into())) {
            uses.store(0, Ordering::Relaxed);
        }
        // Before the block is in the index: an eviction reads the mark of a block that it found there.
        self.set_mark(block.slot, if is_dirty { self.dirty_mark } else { CLEAN });
        let replaced = match pins {
            true => self.index.insert_pinned(key, block),
            false => self.index.insert(key, block),
        };
        let is_stored = replaced != Some(Freed::Now(block.slot));
        let pin =
            (pins && is_stored).then(|| PinnedSlot { table: Arc::clone(self), block: *block });
        if is_dirty && self.dirty_mark == MUST_BE_WRITTEN {
            self.push_dirty(&mut lock(&self.state), (block.slot, key));
        }
        if let Some(Freed::Now(slot)) = replaced {
            self.policy.remove(slot);
            self.set_mark(slot, CLEAN);
            self.free_quietly(slot);
        }
        pin
    }

    /// Adds new blocks to the eviction policy, in this order. No lock may be held.
    pub(super) fn make_evictable(&self, blocks: impl Iterator<Item = (KeyHash, u32)>) {
        for (key, slot) in blocks {
            // The block may have left already. If it leaves after this check, its slot cannot be
            // evicted, and the next block there enters the policy again.
            if self.index.get(key).is_some_and(|block| block.slot == slot) {
                self.policy.insert(slot, key);
            }
        }
        self.retry_for_waiters();
    }

    /// Removes the block of a key. Its slot becomes free now, or with its last pin. The caller
    /// calls [`retry_for_waiters`](Self::retry_for_waiters) later, without a lock.
    pub(crate) fn remove(&self, key: KeyHash) -> Option<StoredBlock> {
        // Without the pin, the last reader may free the slot and another job may fill it before the
        // calls below.
        let pinned = self.index.pin(key)?.slot;
        let removed = self.index.remove(key);
        if let Some((block, freed)) = &removed {
            self.policy.remove(block.slot);
            self.set_mark(block.slot, CLEAN);
            if let Freed::Now(slot) = freed {
                self.free_quietly(*slot);
            }
        }
        if let Some(slot) = self.index.unpin(pinned) {
            self.free_quietly(slot);
        }
        removed.map(|(block, _)| block)
    }

    /// Removes the block of a key if it is still this one.
    pub(crate) fn remove_block(&self, key: KeyHash, block: &StoredBlock) -> bool {
        let is_same =
            |found: StoredBlock| found.slot == block.slot && found.checksum == block.checksum;
        self.index.get(key).is_some_and(is_same) && self.remove(key).is_some()
    }

    pub(crate) fn pin(self: &Arc<Self>, key: KeyHash) -> Option<PinnedSlot> {
        let block = self.index.pin(key)?;
        Some(PinnedSlot { table: Arc::clone(self), block })
    }

    pub(crate) fn lease(self: &Arc<Self>, key: KeyHash) -> Option<LeasedSlot> {
        let pin = self.pin(key)?;
        *lock(&self.state).leases.entry(pin.block.slot).or_insert(0) += 1;
        // A job that waits may not fit beside the lease: it ends then.
        self.retry_for_waiters();
        Some(LeasedSlot { pin })
    }

    /// Counts a use of the block in a slot, and returns the number of its uses: 0 in the slowest
    /// tier, and [`LAST_USES`] after 255.
    pub(crate) fn hit(&self, slot: u32) -> u8 {
        self.policy.hit(slot);
        let Some(uses) = self.uses.get(to_usize(slot.into())) else { return 0 };
        let counted = uses.load(Ordering::Relaxed).checked_add(1).unwrap_or(LAST_USES);
        uses.store(counted, Ordering::Relaxed);
        counted
    }

    /// Counts a use for eviction alone.
    pub(crate) fn touch(&self, slot: u32) {
        self.policy.hit(slot);
    }

    pub(crate) fn was_evicted(&self, key: KeyHash) -> bool {
        self.policy.was_evicted(key)
    }

    pub(crate) fn is_leased(&self, slot: u32) -> bool {
        lock(&self.state).leases.contains_key(&slot)
    }

    pub(crate) fn snapshot(&self) -> GroupSnapshot {
        let blocks = self.index.len();
        let mut state = lock(&self.state);
        self.free_unclaimed(&mut state);
        let slots = to_usize(state.limit.into());
        let dirty = self.dirty.iter().filter(|mark| mark.load(Ordering::Relaxed) != CLEAN).count();
        let (free, quarantined) = (state.free.len(), state.quarantined.len());
        let in_use = slots.saturating_sub(free + quarantined).saturating_sub(blocks);
        let pinned = state.leases.len();
        GroupSnapshot { slots, blocks, free, in_use, quarantined, pinned, dirty }
    }
}
