//! Leases, resizes, directories and times, in combinations.

use std::fs;
use std::path::Path;
use std::time::Duration;

use terrane_core::ByteCount;
use terrane_store::disk::CatalogError;
use terrane_store::{BlockGroup, BlockResult, NoRoom, Store, StoreBuilder, StoreError, TierId};

use super::harness::{
    assert_at_rest, builder, disk, found, keys, namespace, open, put, put_ok, soon,
};

const BLOCK: usize = 8192;
const BLOCK_BYTES: u32 = 8192;

fn slots(count: u64) -> ByteCount {
    ByteCount::new(count * u64::from(BLOCK_BYTES))
}

/// Puts blocks one by one, so that their slots follow each other.
fn put_each(store: &Store, numbers: std::ops::Range<usize>) {
    keys(numbers).chunks(1).for_each(|key| put_ok(store, key, BLOCK));
}

#[test]
fn a_job_gets_slots_that_no_lease_pins_in_a_smaller_tier() {
    // One half of the blocks is in the slots that are used afterwards, the other half beyond them.
    let outcomes = [0..4, 4..8].map(|leased| {
        let directory = tempfile::tempdir().unwrap();
        let store = open(directory.path(), BLOCK_BYTES, 8);
        put_each(&store, 0..8);
        let lease = store.acquire(0, &keys(leased), Duration::from_secs(600));
        assert_eq!(lease.pinned(), 4);
        store.resize(TierId::new(0), slots(4)).unwrap();
        let outcome = put(&store, &keys(10..11), BLOCK);
        drop(lease);
        assert_at_rest(&store);
        outcome.results.into_iter().next().unwrap()
    });
    let is_pinned = |result: &BlockResult| {
        let pinned = NoRoom::Pinned { requested: 1, slots: 4, pinned: 4 };
        matches!(result, BlockResult::NoRoom(why) if *why == pinned)
    };
    assert!(outcomes.iter().any(BlockResult::is_ok), "{outcomes:?}");
    assert!(outcomes.iter().any(is_pinned), "{outcomes:?}");
}

fn striped(first: &Path, second: &Path) -> StoreBuilder {
    Store::builder()
        .group(BlockGroup::new("kv", BLOCK_BYTES))
        .disk(disk(first, 8 * 8192).also_in(second))
        .namespace(namespace())
}

#[test]
fn each_directory_of_a_striped_tier_has_one_owner() {
    let [first, second, shared] = [(); 3].map(|()| tempfile::tempdir().unwrap());
    let (store, _) = striped(first.path(), shared.path()).open().unwrap();
    put_ok(&store, &keys(0..8), BLOCK);
    let error = striped(second.path(), shared.path()).open().unwrap_err();
    let StoreError::Catalog(CatalogError::Owned { directory, owner: Some(owner) }) = &error else {
        panic!("{error}")
    };
    assert!(directory.starts_with(shared.path()));
    assert_eq!(owner.process, std::process::id());
    let error = builder(shared.path(), BLOCK_BYTES, 8).open().unwrap_err();
    assert!(matches!(error, StoreError::Catalog(CatalogError::Owned { .. })), "{error}");
    assert_eq!(found(&store, &keys(0..8), BLOCK), [true; 8]);
    drop(store);
    striped(first.path(), shared.path()).open().unwrap();
    // A directory that is listed twice has one lock.
    let (store, _) = striped(second.path(), second.path()).open().unwrap();
    put_ok(&store, &keys(0..8), BLOCK);
}

#[test]
fn a_shrink_frees_blocks_of_its_own_file_only() {
    let parent = tempfile::tempdir().unwrap();
    let [here, moved] = ["here", "moved"].map(|name| parent.path().join(name));
    fs::create_dir(&here).unwrap();
    let first = open(&here, BLOCK_BYTES, 16);
    put_each(&first, 0..16);
    fs::rename(&here, &moved).unwrap();
    fs::create_dir(&here).unwrap();
    let second = open(&here, BLOCK_BYTES, 16);
    put_each(&second, 20..36);
    first.resize(TierId::new(0), slots(2)).unwrap();
    assert_eq!(first.drain(soon()).left, 0);
    // The sync thread frees disk blocks before it answers.
    assert!(first.sync().unwrap().wait().is_ok());
    assert_eq!(first.close(soon()).left, 0);
    assert_eq!(found(&second, &keys(20..36), BLOCK), [true; 16]);
}

#[test]
fn a_time_without_end_is_accepted() {
    let directory = tempfile::tempdir().unwrap();
    let metrics = directory.path().join("metrics");
    let builder = builder(directory.path(), BLOCK_BYTES, 8).close_within(Duration::MAX);
    let (store, _) = builder.open().unwrap();
    put_ok(&store, &keys(0..4), BLOCK);
    store.export_metrics(&metrics, Duration::MAX).unwrap();
    drop(store);
    let store = open(directory.path(), BLOCK_BYTES, 8);
    assert_eq!(found(&store, &keys(0..4), BLOCK), [true; 4]);
}

#[test]
fn a_store_that_is_not_persistent_has_no_block_of_an_earlier_session() {
    let directory = tempfile::tempdir().unwrap();
    let store = open(directory.path(), BLOCK_BYTES, 20);
    put_each(&store, 0..20);
    // Blocks in the slots of a smaller tier would be found, and cleared for that.
    let taken: Vec<_> = keys(0..16);
    assert!(store.remove(0, &taken).unwrap().wait().is_ok());
    assert_eq!(store.close(soon()).left, 0);
    drop(store);
    let smaller = builder(directory.path(), BLOCK_BYTES, 16).persistent(false);
    let (store, recovery) = smaller.open().unwrap();
    assert_eq!(recovery.found, 0);
    drop(store);
    let (store, recovery) = builder(directory.path(), BLOCK_BYTES, 32).open().unwrap();
    assert_eq!(recovery.found, 0);
    assert!(found(&store, &keys(0..20), BLOCK).iter().all(|&found| !found));
}
