//! The index against a map, pins against evictions, and its memory.

use std::cell::Cell;
use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::thread;

use proptest::prelude::*;
use terrane_store::{Freed, KeyHash, KeyHasher, StoredBlock, TierIndex};

fn hash(key: u32) -> KeyHash {
    KeyHasher::new(&[3; 16]).hash(&key.to_le_bytes()).unwrap()
}

fn block(slot: u32, sequence: u64) -> StoredBlock {
    StoredBlock { slot, length: 7 + slot, checksum: u64::from(slot) << 40 | sequence }
}

#[derive(Clone, Debug)]
enum Step {
    Insert(u32),
    Remove(u32),
    Pin(u32),
    Unpin(usize),
    Evict(u32),
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let step = prop_oneof![
        3 => (0..12_u32).prop_map(Step::Insert),
        1 => (0..12_u32).prop_map(Step::Remove),
        2 => (0..12_u32).prop_map(Step::Pin),
        2 => (0..16_usize).prop_map(Step::Unpin),
        2 => (0..8_u32).prop_map(Step::Evict),
    ];
    prop::collection::vec(step, 0..200)
}

const SLOTS: u32 = 8;

proptest! {
    #[test]
    fn the_index_is_a_map_whose_pinned_slots_stay(steps in steps()) {
        let index = TierIndex::new(SLOTS);
        let mut model: HashMap<u32, StoredBlock> = HashMap::new();
        let mut free: Vec<u32> = (0..SLOTS).collect();
        // The slots of all pins, and the slots that left the index while they were pinned.
        let (mut pins, mut leaving): (Vec<u32>, Vec<u32>) = (Vec::new(), Vec::new());
        for (sequence, step) in (1_u64..).zip(steps) {
            let release = |slot: u32, freed, free: &mut Vec<u32>, leaving: &mut Vec<u32>| {
                if pins.contains(&slot) {
                    leaving.push(slot);
                    assert_eq!(freed, Freed::WithLastPin);
                } else {
                    free.push(slot);
                    assert_eq!(freed, Freed::Now(slot));
                }
            };
            match step {
                Step::Insert(key) => {
                    let Some(slot) = free.pop() else { continue };
                    let block = block(slot, sequence);
                    let replaced = index.insert(hash(key), &block);
                    let expected = model.insert(key, block);
                    prop_assert_eq!(replaced.is_some(), expected.is_some());
                    if let Some((freed, old)) = replaced.zip(expected) {
                        release(old.slot, freed, &mut free, &mut leaving);
                    }
                }
                Step::Remove(key) => {
                    let removed = index.remove(hash(key));
                    let expected = model.remove(&key);
                    prop_assert_eq!(removed.map(|(block, _)| block), expected);
                    if let Some((block, freed)) = removed {
                        release(block.slot, freed, &mut free, &mut leaving);
                    }
                }
                Step::Pin(key) => {
                    let pinned = index.pin(hash(key));
                    prop_assert_eq!(pinned, model.get(&key).copied());
                    pins.extend(pinned.map(|block| block.slot));
                }
                Step::Unpin(at) => {
                    if at >= pins.len() {
                        continue;
                    }
                    let slot = pins.swap_remove(at);
                    let is_last = leaving.contains(&slot) && !pins.contains(&slot);
                    prop_assert_eq!(index.unpin(slot), is_last.then_some(slot));
                    if is_last {
                        leaving.retain(|&other| other != slot);
                        free.push(slot);
                    }
                }
                Step::Evict(slot) => {
                    let holder = model.iter().find(|(_, block)| block.slot == slot);
                    let holder = holder.map(|(&key, _)| key).filter(|_| !pins.contains(&slot));
                    prop_assert_eq!(index.evict(slot, || true), holder.map(hash));
                    if let Some(key) = holder {
                        model.remove(&key);
                        free.push(slot);
                    }
                }
            }
            prop_assert_eq!(index.len(), model.len());
            for key in 0..12 {
                prop_assert_eq!(index.get(hash(key)), model.get(&key).copied());
            }
        }
        let mut found = Vec::new();
        index.for_each(|key, block| found.push((key, block.slot)));
        let mut expected: Vec<_> = model.iter().map(|(&key, b)| (hash(key), b.slot)).collect();
        found.sort_unstable();
        expected.sort_unstable();
        prop_assert_eq!(found, expected);
    }
}

#[test]
fn a_pinned_block_is_never_evicted_while_threads_race() {
    let index = TierIndex::new(4);
    let owners: [AtomicU32; 4] = Default::default();
    let stop = AtomicBool::new(false);
    for slot in 0..4 {
        assert_eq!(index.insert(hash(slot), &block(slot, 1)), None);
    }
    thread::scope(|scope| {
        for _ in 0..3 {
            scope.spawn(|| {
                for round in 0..20_000_u32 {
                    let key = round % 4;
                    let Some(found) = index.pin(hash(key)) else { continue };
                    let owner = &owners[usize::try_from(found.slot).unwrap()];
                    owner.fetch_add(1, Ordering::SeqCst);
                    assert_eq!(found.length, 7 + found.slot);
                    owner.fetch_sub(1, Ordering::SeqCst);
                    assert_eq!(index.unpin(found.slot), None);
                }
                stop.store(true, Ordering::SeqCst);
            });
        }
        scope.spawn(|| {
            while !stop.load(Ordering::SeqCst) {
                for slot in 0..4 {
                    if let Some(key) = index.evict(slot, || true) {
                        assert_eq!(
                            owners[usize::try_from(slot).unwrap()].load(Ordering::SeqCst),
                            0
                        );
                        assert_eq!(index.insert(key, &block(slot, 2)), None);
                    }
                }
            }
        });
    });
    assert_eq!(index.len(), 4);
}

#[test]
fn an_index_of_a_million_blocks_takes_at_most_64_bytes_a_block() {
    let count = 1_000_000;
    let blocks: Vec<_> = (0..count).map(|key| (hash(key), block(key, key.into()))).collect();
    let index = TierIndex::new(count);
    index.insert_all(&blocks);
    assert_eq!(index.len(), blocks.len());
    assert!(blocks.iter().all(|(key, block)| index.get(*key) == Some(*block)));
    let of_each = index.memory_bytes() / blocks.len();
    assert!(of_each <= 64, "{of_each} bytes a block");
}

#[test]
fn a_block_that_may_not_leave_stays_and_only_blocks_are_asked_about() {
    let index = TierIndex::new(2);
    assert_eq!(index.insert(hash(1), &block(0, 1)), None);
    assert_eq!(index.evict(0, || false), None);
    assert_eq!(index.get(hash(1)), Some(block(0, 1)));
    let asked = Cell::new(0);
    let may_leave = || {
        asked.set(asked.get() + 1);
        true
    };
    assert_eq!(index.evict(1, may_leave), None);
    assert_eq!(asked.get(), 0, "the slot is free");
    assert_eq!(index.evict(0, may_leave), Some(hash(1)));
    assert_eq!(asked.get(), 1);
}

#[test]
fn a_block_that_is_inserted_pinned_is_not_evicted_before_its_unpin() {
    let index = TierIndex::new(2);
    assert_eq!(index.insert_pinned(hash(1), &block(0, 1)), None);
    assert_eq!(index.evict(0, || true), None);
    assert_eq!(index.insert_pinned(hash(1), &block(1, 2)), Some(Freed::WithLastPin));
    assert_eq!(index.unpin(0), Some(0));
    assert_eq!((index.evict(1, || true), index.unpin(1)), (None, None));
    assert_eq!(index.evict(1, || true), Some(hash(1)));
}

#[test]
fn a_slot_beyond_the_tier_is_not_inserted() {
    let index = TierIndex::new(2);
    assert_eq!(index.insert(hash(1), &block(2, 1)), None);
    assert_eq!(index.get(hash(1)), None);
    assert_eq!(index.evict(9, || true), None);
    assert_eq!(TierIndex::new(0).len(), 0);
}

#[test]
fn a_block_whose_shard_is_full_is_not_inserted_and_its_slot_is_free() {
    let index = TierIndex::new(10_000);
    // All of one place, which keyed hashes never are.
    let key = |slot: u32| KeyHash::new(u128::from(slot) << 64 | u128::from(slot));
    let insert = |slot: u32| index.insert(key(slot), &block(slot, 1));
    let stored = (0..10_000).find(|&slot| insert(slot).is_some()).unwrap();
    assert!(stored > 10_000 / 64, "{stored} blocks");
    for slot in stored..stored + 10 {
        assert_eq!(insert(slot), Some(Freed::Now(slot)));
        assert_eq!((index.get(key(slot)), index.evict(slot, || true)), (None, None));
    }
    assert_eq!(index.len(), usize::try_from(stored).unwrap());
    assert!((0..stored).all(|slot| index.get(key(slot)) == Some(block(slot, 1))));
    // It has room again.
    assert_eq!(index.evict(3, || true), Some(key(3)));
    assert_eq!(insert(stored), None);
    assert_eq!(index.get(key(stored)), Some(block(stored, 1)));
}
