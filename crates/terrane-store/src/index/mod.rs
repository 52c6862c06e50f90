//! The index of one group in one tier: its blocks, by the hash of their key. `buckets` is the hash
//! table, `slot_blocks` has the block of each slot, and `shard` the locks.

mod buckets;
mod shard;
mod slot_blocks;

use std::iter;
use std::sync::atomic::{AtomicBool, Ordering};

use crossbeam_utils::CachePadded;
use terrane_core::convert::to_usize;

use crate::KeyHash;
use crate::parallel::fold;
use crate::sync::read;
use buckets::{Buckets, Found, Home, SHARDS};
use shard::{Change, Shard};
use slot_blocks::SlotBlocks;

/// A block that a tier has.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StoredBlock {
    /// Its slot in the tier.
    pub slot: u32,
    /// Its length in bytes.
    pub length: u32,
    /// The CRC-64/NVME of its bytes in canonical order.
    pub checksum: u64,
}

/// The state of the slot of a block that left the index.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[must_use = "a free slot that is dropped is lost to the tier"]
pub enum Freed {
    /// The slot is free.
    Now(u32),
    /// The block is pinned. The last [`TierIndex::unpin`] frees the slot.
    WithLastPin,
}

/// The blocks of one tier: from the hash of a key to a slot, length and checksum.
///
/// Slots are in a hash table of 64 shards, each with a lock of its own, and the blocks are in one
/// array by slot. So a block takes 32 bytes there, and 12 of the table.
///
/// A pinned block is not evicted. If it is removed or replaced, its slot is freed with its last pin.
pub struct TierIndex {
    shards: Box<[CachePadded<Shard>]>,
    buckets: Buckets,
    slots: SlotBlocks,
}

/// Blocks that are added together.
const BATCH: usize = 64;

impl TierIndex {
    /// An empty index for a tier of this many slots.
    #[must_use]
    pub fn new(slots: u32) -> Self {
        let slots = SlotBlocks::new(slots);
        let buckets = Buckets::new(slots.len());
        let shards = (0..SHARDS).map(|_| CachePadded::new(Shard::new())).collect();
        Self { shards, buckets, slots }
    }

    /// The number of slots, with and without a block.
    #[must_use]
    pub fn capacity(&self) -> usize {
        self.slots.len()
    }

    /// The number of blocks.
    #[must_use]
    pub fn len(&self) -> usize {
        self.shards.iter().map(|shard| *read(&shard.blocks)).sum()
    }

    /// Whether there are no blocks.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Loads the memory that [`get`](Self::get) reads for these keys into the processor's cache, so
    /// that the misses of many keys overlap.
    #[inline]
    pub fn prefetch(&self, keys: impl Iterator<Item = KeyHash> + Clone) {
        keys.clone().for_each(|key| self.buckets.prefetch(self.home(key)));
        let slots = keys.filter_map(|key| self.buckets.guess(self.home(key)));
        slots.for_each(|slot| self.slots.prefetch(slot));
    }

    /// The block of a key.
    #[must_use]
    pub fn get(&self, key: KeyHash) -> Option<StoredBlock> {
        let home = self.home(key);
        let shard = self.shards.get(home.shard)?;
        let look = || self.slots.block(self.find(home, key)?.slot);
        shard.read_unlocked(look).unwrap_or_else(|| {
            let _blocks = read(&shard.blocks);
            look()
        })
    }

    /// Pins the block of a key, and returns it. Each pin needs one [`unpin`](Self::unpin).
    pub fn pin(&self, key: KeyHash) -> Option<StoredBlock> {
        let home = self.home(key);
        let _blocks = read(&self.shards.get(home.shard)?.blocks);
        let slot = self.find(home, key)?.slot;
        // Under the shard's lock, which eviction takes for writing.
        self.slots.pin(slot);
        self.slots.block(slot)
    }

    /// Removes one pin of the block in `slot`. Returns the slot if it is free now, as the block left
    /// the index while it was pinned.
    #[must_use = "a free slot that is dropped is lost to the tier"]
    pub fn unpin(&self, slot: u32) -> Option<u32> {
        self.slots.unpin(slot).then_some(slot)
    }

    /// Adds a block, and returns the state of the slot of the block that it replaces.
    ///
    /// The slot of `block` is free before, and belongs to the index from here on. If the shard of the
    /// key is full, the block is not added and its slot is returned as free. Keyed hashes do not fill
    /// a shard.
    pub fn insert(&self, key: KeyHash, block: &StoredBlock) -> Option<Freed> {
        self.add(key, block, 0)
    }

    /// Adds a block as [`insert`](Self::insert) does, with a pin from its first moment in the index on.
    /// There is no pin if the slot of `block` is returned.
    pub fn insert_pinned(&self, key: KeyHash, block: &StoredBlock) -> Option<Freed> {
        self.add(key, block, 1)
    }

    fn add(&self, key: KeyHash, block: &StoredBlock, pins: u32) -> Option<Freed> {
        let home = self.home(key);
        let mut shard = self.shards.get(home.shard)?.write();
        let found = self.find(home, key).filter(|found| found.slot != block.slot);
        if !self.slots.set(key, block, pins) {
            return None;
        }
        match found {
            Some(found) => {
                self.buckets.replace(home, &found, block.slot);
                Some(self.freed(found.slot))
            }
            None if self.buckets.add(home, block.slot) => {
                *shard.count += 1;
                None
            }
            None => Some(Freed::Now(block.slot)),
        }
    }

    /// Removes the block of a key, and returns it and the state of its slot.
    pub fn remove(&self, key: KeyHash) -> Option<(StoredBlock, Freed)> {
        let home = self.home(key);
        let mut shard = self.shards.get(home.shard)?.write();
        let found = self.find(home, key)?;
        self.buckets.remove(home, &found);
        *shard.count -= 1;
        Some((self.slots.block(found.slot)?, self.freed(found.slot)))
    }

    /// Removes the block in `slot` if it may leave and is not pinned, and returns its key. The slot is
    /// free then.
    ///
    /// `may_leave` is called under the lock that an [`insert`](Self::insert) takes. So it sees what a thread
    /// wrote before it inserted the block.
    pub fn evict(&self, slot: u32, may_leave: impl FnOnce() -> bool) -> Option<KeyHash> {
        // Without the lock this may be halves of two keys. The search below then fails.
        let guess = self.slots.key(slot)?;
        let home = self.home(guess);
        let mut shard = self.shards.get(home.shard)?.write();
        let found = self.buckets.find(home, |other| other == slot)?;
        if !self.slots.has_key(slot, guess) || !may_leave() || self.slots.is_pinned(slot) {
            return None;
        }
        self.buckets.remove(home, &found);
        *shard.count -= 1;
        Some(guess)
    }

    /// The key of the block in a slot that has one.
    pub(crate) fn key_in(&self, slot: u32) -> Option<KeyHash> {
        self.slots.key(slot)
    }

    /// The key of the last block in a slot that has none now, until it is forgotten.
    pub(crate) fn last_key(&self, slot: u32) -> Option<KeyHash> {
        self.slots.key(slot).filter(|key| *key != KeyHash::new(0))
    }

    /// Forgets the key of the last block in a slot that has none now, and that the caller owns.
    pub(crate) fn forget_last_key(&self, slot: u32) {
        self.slots.forget(slot);
    }

    /// Calls `each` with every block, a shard at a time. Blocks that come or go meanwhile may be
    /// missed.
    pub fn for_each(&self, mut each: impl FnMut(KeyHash, StoredBlock)) {
        for (number, shard) in self.shards.iter().enumerate() {
            let slots: Vec<u32> = {
                let _blocks = read(&shard.blocks);
                self.buckets.slots(number).collect()
            };
            for slot in slots {
                // `each` may write to disk, so it runs without the lock.
                if let Some((key, block)) = self.block_in(number, slot) {
                    each(key, block);
                }
            }
        }
    }

    /// The block in a slot, if it is of this shard. The slot may have one of another shard by now.
    fn block_in(&self, shard: usize, slot: u32) -> Option<(KeyHash, StoredBlock)> {
        let _blocks = read(&self.shards.get(shard)?.blocks);
        let key = self.slots.key(slot)?;
        let home = self.home(key);
        self.buckets.find(home, |other| other == slot).filter(|_| home.shard == shard)?;
        Some((key, self.slots.block(slot)?))
    }

    /// Adds blocks as [`insert`](Self::insert) does, with overlapping cache misses. The index has none of
    /// the keys, and each slot comes once.
    pub fn insert_all(&self, blocks: &[(KeyHash, StoredBlock)]) {
        for blocks in blocks.chunks(BATCH) {
            for (key, block) in blocks {
                self.buckets.prefetch(self.home(*key));
                self.slots.prefetch(block.slot);
            }
            let mut change: Option<(usize, Change<'_>)> = None;
            for (key, block) in blocks {
                let home = self.home(*key);
                // The keys of a recovery come by shard.
                if change.as_ref().is_none_or(|(shard, _)| *shard != home.shard) {
                    // The guard of one shard drops before the next one is locked.
                    drop(change.take());
                    change = self.shards.get(home.shard).map(|shard| (home.shard, shard.write()));
                }
                if let Some((_, shard)) = &mut change
                    && self.slots.set(*key, block, 0)
                    && self.buckets.add(home, block.slot)
                {
                    *shard.count += 1;
                }
            }
        }
    }

    /// Whether each slot has a block. The shards are read on so many threads, this one included.
    pub(crate) fn used_slots(&self, threads: usize) -> Box<[AtomicBool]> {
        let is_used: Box<[AtomicBool]> =
            iter::repeat_with(AtomicBool::default).take(self.capacity()).collect();
        let (threads, shards) = (threads.min(SHARDS), self.shards.iter().enumerate());
        fold(
            (threads, "terrane-load"),
            shards,
            || (),
            |(), (number, shard)| {
                let _blocks = read(&shard.blocks);
                for slot in self.buckets.slots(number) {
                    if let Some(is_used) = is_used.get(to_usize(slot.into())) {
                        // Relaxed: the threads are joined before the values are read.
                        is_used.store(true, Ordering::Relaxed);
                    }
                }
            },
        );
        is_used
    }

    /// The bytes of memory that the index owns, for all its slots.
    #[must_use]
    pub fn memory_bytes(&self) -> usize {
        let fixed = size_of_val(&*self.shards);
        self.buckets.bytes() + fixed + self.slots.len() * SlotBlocks::bytes_a_slot()
    }

    fn freed(&self, slot: u32) -> Freed {
        if self.slots.leave(slot) { Freed::Now(slot) } else { Freed::WithLastPin }
    }

    fn home(&self, key: KeyHash) -> Home {
        self.buckets.home(key)
    }

    fn find(&self, home: Home, key: KeyHash) -> Option<Found> {
        self.buckets.find(home, |slot| self.slots.has_key(slot, key))
    }
}

terrane_core::debug_fields!(TierIndex, |it| { blocks: it.len(), slots: it.capacity() });
