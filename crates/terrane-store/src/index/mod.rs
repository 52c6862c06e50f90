//! The blocks of one tier, by the hash of their key.

mod slot_table;

use std::fmt;
use std::num::NonZeroUsize;
use std::thread;

use crossbeam_utils::CachePadded;
use hashbrown::HashTable;

use crate::KeyHash;
use crate::sync::{RwLock, read, write};
use slot_table::SlotTable;

/// A block that a tier has.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StoredBlock {
    /// Its slot in the tier.
    pub slot: u32,
    /// Its length in bytes.
    pub length: u32,
    /// The CRC-64/NVME of its bytes in canonical order.
    pub checksum: u64,
    /// The sequence number of the record that stored it.
    pub sequence: u64,
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
/// Each of 64 shards has a hash table of slots under a lock of its own, and the blocks are in one
/// array by slot. So a block takes 40 bytes, and 6 to 12 of the tables.
///
/// A pinned block is not evicted. If it is removed or replaced, its slot is freed with its last pin.
pub struct TierIndex {
    shards: Box<[CachePadded<RwLock<HashTable<u32>>>]>,
    slots: SlotTable,
}

/// Enough that threads rarely meet. The upper bits of a hash select the shard.
const SHARDS: usize = 64;
const SHARD_BITS: u32 = SHARDS.trailing_zeros();

impl TierIndex {
    /// An empty index for a tier of this many slots.
    #[must_use]
    pub fn new(slots: u32) -> Self {
        let slots = SlotTable::new(slots);
        let of_shard = slots.len().div_ceil(SHARDS);
        let shard = || CachePadded::new(RwLock::new(HashTable::with_capacity(of_shard)));
        Self { shards: (0..SHARDS).map(|_| shard()).collect(), slots }
    }

    /// The number of slots, with and without a block.
    #[must_use]
    pub fn capacity(&self) -> usize {
        self.slots.len()
    }

    /// The number of blocks.
    #[must_use]
    pub fn len(&self) -> usize {
        self.shards.iter().map(|shard| read(shard).len()).sum()
    }

    /// Whether there are no blocks.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The block of a key.
    #[must_use]
    pub fn get(&self, key: KeyHash) -> Option<StoredBlock> {
        let shard = read(self.shard(key)?);
        self.slots.block(self.find(&shard, key)?)
    }

    /// Pins the block of a key, and returns it. Each pin needs one [`unpin`](Self::unpin).
    pub fn pin(&self, key: KeyHash) -> Option<StoredBlock> {
        let shard = read(self.shard(key)?);
        let slot = self.find(&shard, key)?;
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
    /// The slot of `block` is free before, and belongs to the index from here on.
    pub fn insert(&self, key: KeyHash, block: &StoredBlock) -> Option<Freed> {
        let mut shard = write(self.shard(key)?);
        if !self.slots.set(key, block) {
            return None;
        }
        let Self { slots, .. } = self;
        let is_key = |&slot: &u32| slot != block.slot && slots.has_key(slot, key);
        match shard.find_mut(key.low(), is_key) {
            Some(slot) => {
                let replaced = std::mem::replace(slot, block.slot);
                Some(self.freed(replaced))
            }
            None => {
                shard.insert_unique(key.low(), block.slot, |&slot| slots.low(slot));
                None
            }
        }
    }

    /// Removes the block of a key, and returns it and the state of its slot.
    pub fn remove(&self, key: KeyHash) -> Option<(StoredBlock, Freed)> {
        let mut shard = write(self.shard(key)?);
        let found = shard.find_entry(key.low(), |&slot| self.slots.has_key(slot, key)).ok()?;
        let (slot, _) = found.remove();
        Some((self.slots.block(slot)?, self.freed(slot)))
    }

    /// Removes the block in `slot` if it is not pinned, and returns its key. The slot is free then.
    pub fn evict(&self, slot: u32) -> Option<KeyHash> {
        // Without the lock this may be a mixture of two keys; the search below then fails.
        let guess = self.slots.key(slot)?;
        let mut shard = write(self.shard(guess)?);
        let found = shard.find_entry(guess.low(), |&other| other == slot).ok()?;
        if !self.slots.has_key(slot, guess) || self.slots.is_pinned(slot) {
            return None;
        }
        found.remove();
        Some(guess)
    }

    /// Calls `each` with every block, a shard at a time. Blocks that come or go meanwhile may be
    /// missed.
    pub fn for_each(&self, mut each: impl FnMut(KeyHash, StoredBlock)) {
        for shard in &self.shards {
            let slots: Vec<u32> = read(shard).iter().copied().collect();
            for slot in slots {
                // `each` may write to disk, so it runs without the lock.
                let found = self.block_in(&read(shard), slot);
                if let Some((key, block)) = found {
                    each(key, block);
                }
            }
        }
    }

    /// The block in a slot, if it is of this shard. The slot may have one of another shard by now.
    fn block_in(&self, shard: &HashTable<u32>, slot: u32) -> Option<(KeyHash, StoredBlock)> {
        let key = self.slots.key(slot)?;
        shard.find(key.low(), |&other| other == slot)?;
        Some((key, self.slots.block(slot)?))
    }

    /// Fills an empty index with the blocks that were found on a disk, on `threads` threads. Each key
    /// and each slot comes once.
    pub fn load(&self, blocks: &[(KeyHash, StoredBlock)], threads: NonZeroUsize) {
        let threads = threads.get().min(SHARDS);
        let load_shards = |first: usize| {
            for (key, block) in blocks.iter().filter(|(key, _)| shard_of(*key) % threads == first) {
                // An empty index has no block to replace.
                let _ = self.insert(*key, block);
            }
        };
        thread::scope(|scope| {
            let mut left = Vec::from([0]);
            for first in 1..threads {
                let thread = thread::Builder::new().name(String::from("terrane-load"));
                if let Err(error) = thread.spawn_scoped(scope, move || load_shards(first)) {
                    tracing::debug!(%error, "the index is loaded on fewer threads");
                    left.push(first);
                }
            }
            // This thread does its own part, and those of the threads that did not start.
            left.into_iter().for_each(load_shards);
        });
    }

    /// The bytes of memory that the index owns, for all its slots.
    #[must_use]
    pub fn memory_bytes(&self) -> usize {
        let tables = self.shards.iter().map(|shard| read(shard).allocation_size());
        let fixed = self.shards.len() * size_of::<CachePadded<RwLock<HashTable<u32>>>>();
        tables.sum::<usize>() + fixed + self.slots.len() * SlotTable::bytes_a_slot()
    }

    fn freed(&self, slot: u32) -> Freed {
        if self.slots.leave(slot) { Freed::Now(slot) } else { Freed::WithLastPin }
    }

    fn find(&self, shard: &HashTable<u32>, key: KeyHash) -> Option<u32> {
        shard.find(key.low(), |&slot| self.slots.has_key(slot, key)).copied()
    }

    fn shard(&self, key: KeyHash) -> Option<&RwLock<HashTable<u32>>> {
        self.shards.get(shard_of(key)).map(|shard| &**shard)
    }
}

fn shard_of(key: KeyHash) -> usize {
    usize::try_from(key.high() >> (u64::BITS - SHARD_BITS)).unwrap_or(0)
}

impl fmt::Debug for TierIndex {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("TierIndex")
            .field("blocks", &self.len())
            .field("slots", &self.capacity())
            .finish_non_exhaustive()
    }
}
