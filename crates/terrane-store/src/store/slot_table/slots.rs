//! Slots in use: by a job that fills them, a reader, or a lease.

use std::cmp::Reverse;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::thread;

use terrane_core::sync::lock;

use crate::KeyHash;
use crate::index::StoredBlock;
use crate::store::slot_table::SlotTable;

/// Slots that a job fills. Slots that it does not [keep](Self::keep) are freed on drop.
///
/// After a panic in the job's task they are freed with the last request that uses them.
///
/// On drop the blocks in kept slots become evictable, the last one first. The keys are those of a
/// prefix, its head first, and a block is useless without the blocks before it.
pub(crate) struct TakenSlots {
    shared: Arc<SharedSlots>,
    kept: Vec<KeptSlot>,
}

/// A slot whose block is in the index. Its first field is its place among the slots of the job.
type KeptSlot = (usize, KeyHash, u32);

/// The slots of a job, which its requests share.
pub(crate) struct SharedSlots {
    table: Arc<SlotTable>,
    slots: Mutex<Vec<Option<u32>>>,
    /// Whether requests share the slots and may have written them. Relaxed: the job sets it before
    /// its requests begin.
    is_shared: AtomicBool,
}

impl TakenSlots {
    pub(super) fn new(table: &Arc<SlotTable>, slots: Vec<u32>) -> Self {
        let slots = Mutex::new(slots.into_iter().map(Some).collect());
        let (table, is_shared) = (Arc::clone(table), AtomicBool::new(false));
        let shared = Arc::new(SharedSlots { table, slots, is_shared });
        Self { shared, kept: Vec::new() }
    }

    pub(crate) fn slot(&self, index: usize) -> Option<u32> {
        lock(&self.shared.slots).get(index).copied().flatten()
    }

    /// The number of slots that were taken.
    pub(crate) fn len(&self) -> usize {
        lock(&self.shared.slots).len()
    }

    /// Frees a slot before the others.
    pub(crate) fn free(&mut self, index: usize) {
        if let Some(slot) = self.shared.take(index) {
            self.shared.free(&[slot]);
        }
    }

    /// For a request that writes the slots: they stay taken until it ends, also after a panic in
    /// the task.
    pub(crate) fn share(&self) -> Arc<SharedSlots> {
        self.shared.is_shared.store(true, Ordering::Relaxed);
        Arc::clone(&self.shared)
    }

    /// The slot belongs to the index from here on.
    pub(crate) fn keep(&mut self, index: usize, key: KeyHash) -> Option<u32> {
        let slot = self.shared.take(index)?;
        self.kept.push((index, key, slot));
        Some(slot)
    }
}

impl Drop for TakenSlots {
    fn drop(&mut self) {
        if !self.kept.is_empty() {
            self.kept.sort_unstable_by_key(|(index, ..)| Reverse(*index));
            let kept = self.kept.iter().map(|(_, key, slot)| (*key, *slot));
            self.shared.table.make_evictable(kept);
        }
        // Without a panic, the requests of the job have ended.
        if !thread::panicking() {
            self.shared.free_all();
        }
    }
}

impl SharedSlots {
    fn take(&self, index: usize) -> Option<u32> {
        lock(&self.slots).get_mut(index).and_then(Option::take)
    }

    fn free_all(&self) {
        let slots: Vec<u32> = lock(&self.slots).iter_mut().filter_map(Option::take).collect();
        if !slots.is_empty() {
            self.free(&slots);
        }
    }

    fn free(&self, slots: &[u32]) {
        if self.is_shared.load(Ordering::Relaxed) {
            self.table.free_written(slots);
        } else {
            self.table.free(slots.iter().copied());
        }
    }
}

impl Drop for SharedSlots {
    fn drop(&mut self) {
        self.free_all();
    }
}

/// A pinned block. Its slot is neither evicted nor reused until this drops.
pub(crate) struct PinnedSlot {
    pub(crate) table: Arc<SlotTable>,
    pub(crate) block: StoredBlock,
}

impl Drop for PinnedSlot {
    fn drop(&mut self) {
        if !self.table.owner.is_current() {
            return;
        }
        match self.table.index.unpin(self.block.slot) {
            Some(slot) => self.table.free([slot]),
            None => {
                self.table.evict_beyond(self.block.slot);
                self.table.retry_for_waiters();
            }
        }
    }
}

/// A block that a lease pins.
pub(crate) struct LeasedSlot {
    pub(crate) pin: PinnedSlot,
}

impl Drop for LeasedSlot {
    fn drop(&mut self) {
        if !self.pin.table.owner.is_current() {
            return;
        }
        let slot = self.pin.block.slot;
        let mut state = lock(&self.pin.table.state);
        if let Some(count) = state.leases.get_mut(&slot) {
            *count -= 1;
            if *count == 0 {
                state.leases.remove(&slot);
            }
        }
    }
}
