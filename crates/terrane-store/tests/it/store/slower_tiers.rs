//! The blocks that a slower tier has, evicted or refuses.

use terrane_core::ByteCount;
use terrane_store::{
    BlockGroup, BlockResult, EvictionKind, JobOptions, MemoryTier, NoRoom, Store, TierId, Why,
    WritePolicy,
};

use super::harness::{
    assert_at_rest, builder, disk, found, key, keys, namespace, open, put, put_ok, soon, submit_put,
};

const BLOCK: usize = 4096;

fn host(slots: u64) -> ByteCount {
    ByteCount::new(4096 * slots)
}

/// Whether the tier with this number has each key.
fn are_in(store: &Store, tier: u8, keys: &[Vec<u8>]) -> Vec<bool> {
    let is_in = |key: &Vec<u8>| match store.why(0, key) {
        Why::Present { tiers, .. } => tiers.contains(&TierId::new(tier)),
        _ => false,
    };
    keys.iter().map(is_in).collect()
}

#[test]
fn blocks_that_memory_serves_stay_on_disk() {
    for policy in [WritePolicy::Through, WritePolicy::Back] {
        for eviction in [EvictionKind::S3Fifo, EvictionKind::Lru] {
            let directory = tempfile::tempdir().unwrap();
            let builder = builder(directory.path(), 4096, 256).host(host(64));
            let (store, _) = builder.write_policy(policy).eviction(eviction).open().unwrap();
            let hot = keys(0..32);
            put_ok(&store, &hot, BLOCK);
            for number in 0..1000 {
                if number % 4 == 0 {
                    assert_eq!(found(&store, &hot, BLOCK), [true; 32]);
                }
                put_ok(&store, &[key(1000 + number)], BLOCK);
            }
            assert!(store.sync().unwrap().wait().is_ok());
            assert_eq!(are_in(&store, 1, &hot), [true; 32], "{policy:?}, {eviction:?}");
            assert_at_rest(&store);
        }
    }
}

#[test]
fn a_sync_writes_blocks_that_the_disk_tier_evicted() {
    let directory = tempfile::tempdir().unwrap();
    let (store, _) = builder(directory.path(), 4096, 8).host(host(16)).open().unwrap();
    let all = keys(0..16);
    all.iter().for_each(|key| put_ok(&store, std::slice::from_ref(key), BLOCK));
    let is_on_disk = are_in(&store, 1, &all);
    let (on_disk, others): (Vec<_>, Vec<_>) =
        all.into_iter().zip(is_on_disk).partition(|(_, is_on_disk)| *is_on_disk);
    let names = |keys: Vec<(Vec<u8>, bool)>| keys.into_iter().map(|(key, _)| key).collect();
    let (on_disk, others): (Vec<Vec<u8>>, Vec<Vec<u8>>) = (names(on_disk), names(others));
    assert!(store.remove(0, &on_disk).unwrap().wait().is_ok());
    assert_eq!((others.len(), are_in(&store, 0, &others)), (8, vec![true; 8]));
    assert!(store.sync().unwrap().wait().is_ok());
    assert_eq!(are_in(&store, 1, &others), [true; 8]);
    assert_eq!(store.close(soon()).unwritten, 0);
    drop(store);
    let (store, recovery) = builder(directory.path(), 4096, 8).open().unwrap();
    assert_eq!(recovery.found, 8);
    assert_eq!(found(&store, &others, BLOCK), [true; 8]);
}

#[test]
fn a_sync_and_a_close_state_that_the_disk_tier_is_too_small() {
    let directory = tempfile::tempdir().unwrap();
    let (store, _) = builder(directory.path(), 4096, 8).host(host(16)).open().unwrap();
    for number in 0..16 {
        put_ok(&store, &[key(number)], BLOCK);
    }
    let outcome = store.sync().unwrap().wait();
    let too_small = NoRoom::TierTooSmall { requested: 16, slots: 8 };
    let is_right =
        matches!(&outcome.results[..], [BlockResult::NoRoom(found)] if *found == too_small);
    assert!(is_right, "{outcome:?}");
    assert_eq!(store.close(soon()).unwritten, 8);
}

#[test]
fn a_durable_put_of_more_blocks_than_the_disk_tier_has_is_not_done() {
    let directory = tempfile::tempdir().unwrap();
    let builder = builder(directory.path(), 4096, 4).host(host(64));
    let (store, _) = builder.write_policy(WritePolicy::Back).open().unwrap();
    let all = keys(0..16);
    let outcome = submit_put(&store, &all, BLOCK, JobOptions::new().durable(true)).wait();
    let too_small = NoRoom::TierTooSmall { requested: 16, slots: 4 };
    for result in &outcome.results {
        assert!(matches!(result, BlockResult::NoRoom(found) if *found == too_small), "{result}");
    }
    // Memory serves them.
    assert_eq!(found(&store, &all, BLOCK), [true; 16]);
    assert_at_rest(&store);
}

#[test]
fn a_durable_put_does_not_evict_its_own_blocks() {
    for eviction in [EvictionKind::S3Fifo, EvictionKind::Lru] {
        let directory = tempfile::tempdir().unwrap();
        let builder = builder(directory.path(), 4096, 20).host(host(64));
        let builder = builder.write_policy(WritePolicy::Back).eviction(eviction);
        let (store, _) = builder.open().unwrap();
        let durable = |keys: &[Vec<u8>]| {
            let outcome = submit_put(&store, keys, BLOCK, JobOptions::new().durable(true)).wait();
            assert!(outcome.is_ok(), "{eviction:?}: {outcome:?}");
            assert!(are_in(&store, 1, keys).iter().all(|&is_in| is_in), "{eviction:?}");
        };
        // Blocks that are used stay in the tier, and new ones leave first.
        durable(&keys(0..20));
        (0..3).for_each(|_| assert_eq!(found(&store, &keys(0..20), BLOCK), [true; 20]));
        durable(&keys(100..110));
        durable(&keys(200..220));
        assert_at_rest(&store);
    }
}

#[test]
fn a_put_is_done_in_memory_if_a_tier_further_below_refuses_blocks() {
    for hosts in 1..=3 {
        let directory = tempfile::tempdir().unwrap();
        drop(open(directory.path(), 4096, 4));
        let read_only = disk(directory.path(), 4 * 4096).read_only(true);
        let builder = Store::builder().group(BlockGroup::new("kv", 4096)).disk(read_only);
        let tier = |number| MemoryTier::system(format!("host {number}"), host(4));
        let builder = (0..hosts).fold(builder, |builder, number| builder.memory_tier(tier(number)));
        let (store, _) = builder.namespace(namespace()).open().unwrap();
        let outcome = put(&store, &keys(0..2), BLOCK);
        assert!(outcome.is_ok(), "{hosts} tiers of memory: {outcome:?}");
        assert_eq!(found(&store, &keys(0..2), BLOCK), [true; 2]);
        // No job waits without end for a slot of a block that cannot be written.
        for number in 10..30 {
            put_ok(&store, &[key(number)], BLOCK);
        }
        assert_at_rest(&store);
        assert!(!store.sync().unwrap().wait().is_ok());
    }
}
