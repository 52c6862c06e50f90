//! The block in each slot, in one array.

use super::StoredBlock;
use crate::KeyHash;
use crate::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use crate::table_memory::{filled, prefetch};

/// The block of each slot: 32 bytes a slot.
///
/// A slot's block is written under the lock of its key's shard. It is read under that lock, or
/// between two reads of the shard's count of changes. The fields are atomic so that this needs no
/// unsafe code. Every access is relaxed, because the lock and the count order them.
pub(super) struct SlotBlocks {
    slots: Box<[SlotEntry]>,
}

/// Two of them fill a cache line, so that a query reads one.
#[derive(Default)]
#[repr(align(32))]
struct SlotEntry {
    high: AtomicU64,
    low: AtomicU64,
    length: AtomicU32,
    /// The number of pins, and [`REMOVED`].
    pins: AtomicU32,
    checksum: AtomicU64,
}

/// Set in a slot's pins when its block has left the index: the last pin frees the slot.
const REMOVED: u32 = 1 << 31;

impl SlotBlocks {
    pub(super) fn new(slots: u32) -> Self {
        Self { slots: filled(usize::try_from(slots).unwrap_or(usize::MAX), Default::default) }
    }

    pub(super) fn len(&self) -> usize {
        self.slots.len()
    }

    pub(super) const fn bytes_a_slot() -> usize {
        size_of::<SlotEntry>()
    }

    fn entry(&self, slot: u32) -> Option<&SlotEntry> {
        usize::try_from(slot).ok().and_then(|slot| self.slots.get(slot))
    }

    /// The key of a slot. Without the shard's lock the two halves may belong to different blocks.
    pub(super) fn key(&self, slot: u32) -> Option<KeyHash> {
        let entry = self.entry(slot)?;
        let (high, low) = (&entry.high, &entry.low);
        Some(KeyHash::from_halves(high.load(Ordering::Relaxed), low.load(Ordering::Relaxed)))
    }

    pub(super) fn has_key(&self, slot: u32, key: KeyHash) -> bool {
        self.key(slot) == Some(key)
    }

    /// Loads the entry of a slot into the cache.
    pub(super) fn prefetch(&self, slot: u32) {
        self.entry(slot).into_iter().for_each(prefetch);
    }

    pub(super) fn block(&self, slot: u32) -> Option<StoredBlock> {
        let entry = self.entry(slot)?;
        Some(StoredBlock {
            slot,
            length: entry.length.load(Ordering::Relaxed),
            checksum: entry.checksum.load(Ordering::Relaxed),
        })
    }

    /// Sets the block of a free slot, with so many pins. Returns `false` if there is no such slot.
    pub(super) fn set(&self, key: KeyHash, block: &StoredBlock, pins: u32) -> bool {
        let Some(entry) = self.entry(block.slot) else { return false };
        entry.high.store(key.high(), Ordering::Relaxed);
        entry.low.store(key.low(), Ordering::Relaxed);
        entry.checksum.store(block.checksum, Ordering::Relaxed);
        entry.length.store(block.length, Ordering::Relaxed);
        entry.pins.store(pins, Ordering::Relaxed);
        true
    }

    /// Forgets the key of a slot that no block and no job has.
    pub(super) fn forget(&self, slot: u32) {
        if let Some(entry) = self.entry(slot) {
            entry.high.store(0, Ordering::Relaxed);
            entry.low.store(0, Ordering::Relaxed);
        }
    }

    pub(super) fn is_pinned(&self, slot: u32) -> bool {
        self.entry(slot).is_some_and(|entry| entry.pins.load(Ordering::Acquire) != 0)
    }

    pub(super) fn pin(&self, slot: u32) {
        if let Some(entry) = self.entry(slot) {
            entry.pins.fetch_add(1, Ordering::Relaxed);
        }
    }

    /// Removes one pin. Returns whether the slot is free now: the block left the index earlier.
    pub(super) fn unpin(&self, slot: u32) -> bool {
        // Release: the reads of the block come before its next writer's.
        let had = self.entry(slot).map(|entry| entry.pins.fetch_sub(1, Ordering::AcqRel));
        had == Some(REMOVED | 1)
    }

    /// The block has left the index. Returns whether the slot is free now; otherwise the last pin
    /// frees it.
    pub(super) fn leave(&self, slot: u32) -> bool {
        let had = self.entry(slot).map(|entry| entry.pins.fetch_or(REMOVED, Ordering::AcqRel));
        had == Some(0)
    }
}
