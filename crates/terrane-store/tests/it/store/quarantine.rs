//! Slots that damage their blocks, and removals that a read-only tier refuses.

use std::path::Path;
use std::thread;

use terrane_core::ByteCount;
use terrane_store::{
    BlockResult, GroupSnapshot, JobOptions, NoRoom, Store, StoreError, StoreEventKind, TierId, Why,
    tools,
};

use super::harness::{
    assert_at_rest, builder, damage_byte, disk, found, get, key, keys, open, put, put_ok, slab,
    submit_put,
};

const BLOCK: usize = 4096;

fn slot_of(directory: &Path, number: usize) -> u32 {
    tools::why(directory, "model", 0, &key(number)).unwrap().1.unwrap().slot
}

fn damage(directory: &Path, number: usize) {
    damage_byte(directory, number, 4096, 100);
}

fn group(store: &Store) -> GroupSnapshot {
    store.snapshot().tiers[0].groups[0]
}

#[test]
fn a_slot_that_damages_two_blocks_is_not_used_until_the_store_is_opened_again() {
    let directory = tempfile::tempdir().unwrap();
    let store = open(directory.path(), 4096, 4);
    let events = store.events(100).unwrap();
    put_ok(&store, &keys(0..1), BLOCK);
    let slot = slot_of(directory.path(), 0);
    for round in 1..=2 {
        damage(directory.path(), 0);
        let (outcome, _) = get(&store, &keys(0..1), BLOCK, JobOptions::new());
        assert!(matches!(outcome.results[..], [BlockResult::Corrupt]), "{outcome:?}");
        assert_at_rest(&store);
        assert_eq!(group(&store).quarantined, usize::from(round == 2));
        put_ok(&store, &keys(0..1), BLOCK);
        // The first damage may have been a crash: the slot is used once more.
        assert_eq!(slot_of(directory.path(), 0) == slot, round == 1);
    }
    let mut taken = Vec::new();
    events.take_all(&mut taken);
    let reported = taken.iter().filter(|event| event.kind == StoreEventKind::SlotQuarantined);
    assert_eq!(reported.count(), 1);
    // Three slots are left.
    put_ok(&store, &keys(1..3), BLOCK);
    assert_eq!((group(&store).blocks, group(&store).free), (3, 0));
    let outcome = put(&store, &keys(10..14), BLOCK);
    let is_small = |result: &BlockResult| {
        matches!(result, BlockResult::NoRoom(NoRoom::TierTooSmall { requested: 4, slots: 3, .. }))
    };
    assert!(outcome.results.iter().all(is_small), "{outcome:?}");
    assert_eq!(found(&store, &keys(0..3), BLOCK), [true; 3]);
    // It stays so when the tier shrinks and grows.
    for kib in [0, 16] {
        store.resize(TierId::new(0), ByteCount::kib(kib)).unwrap();
        assert_at_rest(&store);
    }
    assert_eq!((group(&store).quarantined, group(&store).free), (1, 3));
    let mut text = String::new();
    store.snapshot().write_openmetrics(&mut text).unwrap();
    assert!(
        text.contains("terrane_store_tier_quarantined{tier=\"disk\",group=\"0\"} 1\n"),
        "{text}"
    );
    drop(store);
    let store = open(directory.path(), 4096, 4);
    assert_eq!(group(&store).quarantined, 0);
    put_ok(&store, &keys(20..24), BLOCK);
    assert_eq!(found(&store, &keys(20..24), BLOCK), [true; 4]);
}

#[test]
fn a_block_that_the_device_cannot_read_costs_its_slot_and_no_other_block() {
    let directory = tempfile::tempdir().unwrap();
    let store = open(directory.path(), 4096, 4);
    let events = store.events(100).unwrap();
    put_ok(&store, &keys(0..4), BLOCK);
    let first = (0..4).find(|&number| slot_of(directory.path(), number) == 0).unwrap();
    // The other slots are behind the end of the file.
    slab(directory.path()).set_len(4096).unwrap();
    let (outcome, blocks) = get(&store, &keys(0..4), BLOCK, JobOptions::new());
    for (number, result) in outcome.results.iter().enumerate() {
        match result {
            BlockResult::Done { .. } => assert_eq!(number, first),
            BlockResult::Failed(error) => {
                assert!(matches!(**error, StoreError::ReadFailed(_)), "{error}");
                assert_eq!(store.why(0, &key(number)), Why::Unreadable);
            }
            other => panic!("{other}"),
        }
    }
    assert_eq!(blocks[first], super::harness::content(&key(first), BLOCK));
    assert_at_rest(&store);
    let snapshot = store.snapshot();
    assert_eq!((group(&store).quarantined, group(&store).blocks), (3, 1));
    assert_eq!(snapshot.tiers[0].read_failures, 3);
    let mut taken = Vec::new();
    events.take_all(&mut taken);
    let count = |kind| taken.iter().filter(|event| event.kind == kind).count();
    assert_eq!(count(StoreEventKind::Unreadable), 3);
    assert_eq!(count(StoreEventKind::SlotQuarantined), 3);
    // From now on they are plain misses.
    assert_eq!(found(&store, &keys(0..4), BLOCK).iter().filter(|&&found| found).count(), 1);
    assert_at_rest(&store);
}

#[test]
fn a_read_only_tier_keeps_a_block_whose_removal_it_refuses() {
    let directory = tempfile::tempdir().unwrap();
    drop({
        let store = open(directory.path(), 4096, 4);
        put_ok(&store, &keys(0..2), BLOCK);
        store
    });
    let tier = disk(directory.path(), 4 * 4096).read_only(true);
    let builder = builder(directory.path(), 4096, 4).disk(tier).host(ByteCount::kib(16));
    let (store, _) = builder.open().unwrap();
    put_ok(&store, &keys(5..6), BLOCK);
    assert!(store.promote(&keys(0..1), TierId::new(0), JobOptions::new()).unwrap().wait().is_ok());
    let outcome = store.remove(0, &keys(0..2)).unwrap().wait();
    for result in &outcome.results {
        let BlockResult::Failed(error) = result else { panic!("{result}") };
        assert!(matches!(**error, StoreError::ReadOnly), "{error}");
    }
    assert_eq!(found(&store, &keys(0..2), BLOCK), [true; 2]);
    // A block in memory alone can go.
    assert!(store.remove(0, &keys(5..6)).unwrap().wait().is_ok());
    assert_eq!(found(&store, &keys(5..6), BLOCK), [false]);
    assert_at_rest(&store);
}

#[test]
fn large_copies_do_not_run_on_the_callers_thread() {
    const LARGE: usize = 1 << 20;
    let directory = tempfile::tempdir().unwrap();
    let large = u32::try_from(LARGE).unwrap();
    let builder = builder(directory.path(), large, 4).host(ByteCount::mib(4));
    let (store, _) = builder.open().unwrap();
    put_ok(&store, &keys(0..2), LARGE);
    /// Sends the thread that drops it: the one that ends the job.
    struct Says(std::sync::mpsc::Sender<thread::ThreadId>);
    impl Drop for Says {
        fn drop(&mut self) {
            self.0.send(thread::current().id()).unwrap();
        }
    }
    for (bytes, is_here) in [(4096, true), (LARGE, false)] {
        let small = key(100 + bytes);
        let keys = if is_here { vec![small.clone()] } else { keys(0..1) };
        if is_here {
            put_ok(&store, &keys, bytes);
        }
        let mut block = vec![0_u8; bytes];
        let mut spans = terrane_store::Spans::new();
        spans.add(std::ptr::NonNull::from(&mut block[..]).cast(), bytes);
        let (sender, ended) = std::sync::mpsc::channel();
        // SAFETY: the block outlives the wait.
        let destination = unsafe { terrane_store::Blocks::spans(spans) };
        let job = store.get(&keys, destination, JobOptions::new(), Says(sender)).unwrap();
        assert!(job.wait().is_ok());
        assert_eq!(ended.recv().unwrap() == thread::current().id(), is_here);
        assert!(block == super::harness::content(&keys[0], bytes));
    }
    drop(submit_put(&store, &keys(2..3), LARGE, JobOptions::new()).wait());
    assert_at_rest(&store);
}
