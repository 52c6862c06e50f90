//! Every interleaving of threads that find, pin, evict, remove and replace blocks of an index, with a
//! bounded number of preemptions.
//!
//! Run with `RUSTFLAGS="--cfg loom" cargo test --release -p terrane-store --test loom`.
//! The bytes of a slot are a cell that loom watches. So a slot that is filled while a pin keeps it is
//! found as the data race that it would be.
#![cfg(loom)]
#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    missing_docs,
    reason = "tests say what they expect by unwrapping it"
)]

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use loom::cell::UnsafeCell;
use loom::sync::atomic::AtomicBool;
use loom::thread;
use terrane_store::{Freed, KeyHash, StoredBlock, TierIndex};

/// Almost all bugs of this sort show with two preemptions (Musuvathi and Qadeer, PLDI 2007).
const PREEMPTIONS: usize = 2;

fn model(run: impl Fn() + Sync + Send + 'static) {
    let mut builder = loom::model::Builder::new();
    builder.preemption_bound.get_or_insert(PREEMPTIONS);
    builder.check(run);
}

/// Two keys of different shards, whose halves differ.
const FIRST: KeyHash = KeyHash::new(0x0100_0000_0000_0000_0000_0000_0000_0001);
const SECOND: KeyHash = KeyHash::new(0x8200_0000_0000_0000_0000_0000_0000_0002);

/// The block of a key in a slot. Its numbers follow from the key.
fn block(key: KeyHash, slot: u32) -> StoredBlock {
    let number = u32::try_from(key.get() & 0xff).unwrap();
    StoredBlock { slot, length: number, checksum: number.into() }
}

/// The bytes of the slots, and how often each became free.
struct Slots {
    bytes: Vec<UnsafeCell<u128>>,
    freed: Vec<AtomicUsize>,
}

// SAFETY: unsynchronised access is what loom looks for.
unsafe impl Send for Slots {}
// SAFETY: as above.
unsafe impl Sync for Slots {}

impl Slots {
    fn new(count: usize) -> Self {
        let bytes = (0..count).map(|_| UnsafeCell::new(0)).collect();
        Self { bytes, freed: (0..count).map(|_| AtomicUsize::new(0)).collect() }
    }

    /// The owner of a free slot fills it.
    fn fill(&self, slot: u32, key: KeyHash) {
        // SAFETY: loom fails the model if another thread could access the cell at this point.
        self.bytes[slot as usize].with_mut(|bytes| unsafe { *bytes = key.get() });
    }

    fn read(&self, slot: u32) -> u128 {
        // SAFETY: loom fails the model if another thread could write the cell at this point.
        self.bytes[slot as usize].with(|bytes| unsafe { *bytes })
    }

    /// A slot became free: it is filled with other bytes at once.
    fn free(&self, slot: u32) {
        self.freed[slot as usize].fetch_add(1, Ordering::Relaxed);
        self.fill(slot, KeyHash::new(0));
    }

    fn freed(&self) -> Vec<usize> {
        self.freed.iter().map(|count| count.load(Ordering::Relaxed)).collect()
    }
}

struct Tier {
    index: TierIndex,
    slots: Slots,
}

impl Tier {
    /// A tier with `FIRST` in slot 0, and a second slot that is free.
    fn with_first() -> Arc<Self> {
        let tier = Self { index: TierIndex::new(2), slots: Slots::new(2) };
        tier.slots.fill(0, FIRST);
        assert_eq!(tier.index.insert(FIRST, &block(FIRST, 0)), None);
        Arc::new(tier)
    }

    /// Reads the block of a key under a pin, if it is there.
    fn read(&self, key: KeyHash) -> bool {
        let Some(found) = self.index.pin(key) else { return false };
        assert_eq!(found, block(key, found.slot));
        assert_eq!(self.slots.read(found.slot), key.get());
        if let Some(free) = self.index.unpin(found.slot) {
            self.slots.free(free);
        }
        true
    }

    fn freed(&self, freed: Freed) {
        if let Freed::Now(slot) = freed {
            self.slots.free(slot);
        }
    }

    /// Puts a block in a slot that is free.
    fn put(&self, key: KeyHash, slot: u32) {
        self.slots.fill(slot, key);
        if let Some(replaced) = self.index.insert(key, &block(key, slot)) {
            self.freed(replaced);
        }
    }
}

fn spawn(tier: &Arc<Tier>, run: impl FnOnce(&Tier) + 'static) -> thread::JoinHandle<()> {
    let tier = Arc::clone(tier);
    thread::spawn(move || run(&tier))
}

#[test]
fn a_pinned_block_is_not_evicted() {
    model(|| {
        let tier = Tier::with_first();
        let reader = spawn(&tier, |tier| {
            tier.read(FIRST);
        });
        // The slot belongs to this thread if the eviction succeeds.
        let evicted = tier.index.evict(0, || true);
        if evicted.is_some() {
            assert_eq!(evicted, Some(FIRST));
            tier.put(SECOND, 0);
            assert!(tier.read(SECOND));
        }
        reader.join().unwrap();
        assert_eq!(tier.index.len(), 1);
        assert_eq!(tier.read(FIRST), evicted.is_none());
        assert_eq!(tier.slots.freed(), [0, 0]);
    });
}

#[test]
fn a_slot_of_a_removed_block_is_freed_once_and_after_its_last_pin() {
    model(|| {
        let tier = Tier::with_first();
        let readers = [(); 2].map(|()| {
            spawn(&tier, |tier| {
                tier.read(FIRST);
            })
        });
        let (removed, freed) = tier.index.remove(FIRST).unwrap();
        assert_eq!(removed, block(FIRST, 0));
        tier.freed(freed);
        readers.into_iter().for_each(|reader| reader.join().unwrap());
        assert_eq!(tier.slots.freed(), [1, 0]);
        assert!(tier.index.is_empty() && tier.index.pin(FIRST).is_none());
    });
}

#[test]
fn one_of_an_eviction_and_a_removal_gets_the_slot() {
    model(|| {
        let tier = Tier::with_first();
        let evictor = spawn(&tier, |tier| {
            if let Some(key) = tier.index.evict(0, || true) {
                assert_eq!(key, FIRST);
                tier.slots.free(0);
            }
        });
        let reader = spawn(&tier, |tier| {
            tier.read(FIRST);
        });
        if let Some((_, freed)) = tier.index.remove(FIRST) {
            tier.freed(freed);
        }
        evictor.join().unwrap();
        reader.join().unwrap();
        assert_eq!(tier.slots.freed(), [1, 0]);
    });
}

#[test]
fn a_replaced_block_stays_readable_until_its_last_pin() {
    model(|| {
        let tier = Tier::with_first();
        let reader = spawn(&tier, |tier| assert!(tier.read(FIRST)));
        tier.put(FIRST, 1);
        reader.join().unwrap();
        assert_eq!(tier.slots.freed(), [1, 0]);
        assert_eq!(tier.index.get(FIRST), Some(block(FIRST, 1)));
    });
}

#[test]
fn presence_beside_a_removal_is_the_block_or_nothing() {
    model(|| {
        let tier = Tier::with_first();
        let query = spawn(&tier, |tier| {
            let found = [FIRST, SECOND].map(|key| tier.index.get(key));
            assert!(found[0].is_none_or(|found| found == block(FIRST, 0)), "{found:?}");
            assert!(found[1].is_none_or(|found| found == block(SECOND, 0)), "{found:?}");
        });
        // The slot gets the block of another key, in another shard.
        let (_, freed) = tier.index.remove(FIRST).unwrap();
        assert_eq!(freed, Freed::Now(0));
        tier.put(SECOND, 0);
        assert_eq!(tier.index.get(FIRST), None);
        query.join().unwrap();
        assert_eq!(tier.index.get(SECOND), Some(block(SECOND, 0)));
    });
}

#[test]
fn an_eviction_beside_a_change_of_the_slot_names_the_block_that_it_removed() {
    model(|| {
        let tier = Tier::with_first();
        let evictor = spawn(&tier, |tier| {
            // It reads the key without a lock, and may see half of each.
            let evicted = tier.index.evict(0, || true);
            assert!(matches!(evicted, None | Some(FIRST | SECOND)), "{evicted:?}");
            if let Some(key) = evicted {
                assert_eq!(tier.index.get(key), None);
            }
        });
        if let Some((_, freed)) = tier.index.remove(FIRST) {
            assert_eq!(freed, Freed::Now(0));
            tier.put(SECOND, 0);
        }
        evictor.join().unwrap();
    });
}

#[test]
fn a_block_that_is_marked_before_its_insertion_is_not_evicted() {
    model(|| {
        let tier = Tier::with_first();
        let is_marked = Arc::new(AtomicBool::new(false));
        let evictor = {
            let is_marked = Arc::clone(&is_marked);
            spawn(&tier, move |tier| {
                // A policy knows the slot, and not which block is in it by now.
                let evicted = tier.index.evict(0, || !is_marked.load(Ordering::Acquire));
                assert!(matches!(evicted, None | Some(FIRST)), "{evicted:?}");
            })
        };
        if tier.index.remove(FIRST).is_some() {
            is_marked.store(true, Ordering::Release);
            tier.put(SECOND, 0);
        }
        evictor.join().unwrap();
    });
}

#[test]
fn a_block_that_is_inserted_pinned_stays_beside_an_eviction() {
    model(|| {
        let tier = Tier::with_first();
        let evictor = spawn(&tier, |tier| {
            let evicted = tier.index.evict(1, || true);
            assert_eq!(evicted, None);
        });
        tier.slots.fill(1, SECOND);
        assert_eq!(tier.index.insert_pinned(SECOND, &block(SECOND, 1)), None);
        assert!(tier.read(SECOND));
        evictor.join().unwrap();
        assert_eq!(tier.index.unpin(1), None);
    });
}
