//! Copies that go on after their job has ended: their slots are used again only when they have ended.

use std::ops::Range;

use terrane_core::ByteCount;
use terrane_store::{
    BlockGroup, BlockResult, Blocks, Job, JobOptions, JobOutcome, MemoryTier, NoRoom, Store,
    TierId, WritePolicy,
};
use terrane_testkit::engine::Fault;

use super::devices::{Machine, ordered};
use super::harness::{assert_at_rest, key, keys, soon};

const HOST: TierId = TierId::new(0);

/// A store with a tier of host memory alone, and an engine that can hang.
struct Rig {
    machine: Machine,
    store: Store,
}

impl Rig {
    fn new(slots: u64) -> Self {
        let machine = Machine::new();
        let group = BlockGroup::of_layout("kv", machine.cache.layout());
        let builder = Store::builder().group(group).host(bytes(&machine, slots));
        let (store, _) = builder.manager(&machine.manager).open().unwrap();
        Self { machine, store }
    }

    fn put(&self, numbers: Range<u32>) -> Job {
        let (ids, keys) = ids_and_keys(numbers);
        let source = Blocks::new(&self.machine.cache, &ids);
        self.store.put(&keys, source, ordered(), ()).unwrap()
    }

    /// Gets block 0 into a block of the cache.
    fn get(&self, to: u32) -> Job {
        let destination = Blocks::new(&self.machine.cache, &[to]);
        self.store.get(&keys(0..1), destination, ordered(), ()).unwrap()
    }

    #[track_caller]
    fn put_ok(&self, numbers: Range<u32>) {
        let outcome = self.put(numbers).wait();
        assert!(outcome.is_ok(), "{outcome:?}");
    }

    /// Runs a job whose copy hangs.
    fn hang(&self, job: impl FnOnce() -> Job) -> Job {
        self.machine.engine.fail_next(Fault::Hang);
        let job = job();
        while self.machine.engine.hung() == 0 {
            std::thread::yield_now();
        }
        job
    }

    /// Ends the job of a copy that hangs. The copy goes on.
    #[track_caller]
    fn orphan(&self, job: Job) {
        self.machine.engine.orphan_hung();
        let outcome = job.wait();
        assert!(matches!(outcome.results[..], [BlockResult::Failed(_)]), "{outcome:?}");
    }

    /// The free slots and those in use.
    fn slots(&self) -> (usize, usize) {
        let group = self.store.snapshot().tiers[0].groups[0];
        (group.free, group.in_use)
    }
}

fn bytes(machine: &Machine, slots: u64) -> ByteCount {
    ByteCount::new(machine.block_bytes().next_multiple_of(4096) * slots)
}

fn ids_and_keys(numbers: Range<u32>) -> (Vec<u32>, Vec<Vec<u8>>) {
    let keys = numbers.clone().map(|number| key(usize::try_from(number).unwrap()));
    (numbers.collect(), keys.collect())
}

#[track_caller]
fn assert_too_small(outcome: &JobOutcome, requested: usize, slots: usize) {
    let expected = NoRoom::TierTooSmall { requested, slots };
    let is_expected =
        |result: &BlockResult| matches!(result, BlockResult::NoRoom(why) if *why == expected);
    assert!(outcome.results.iter().all(is_expected), "{outcome:?}");
}

#[test]
fn a_slot_that_an_orphaned_copy_may_write_is_not_used_until_the_copy_ends() {
    let rig = Rig::new(6);
    let job = rig.hang(|| rig.put(0..1));
    rig.orphan(job);
    assert_eq!(rig.slots(), (5, 1));
    for number in 1..8 {
        rig.put_ok(number..number + 1);
    }
    rig.put_ok(8..13);
    assert_too_small(&rig.put(13..19).wait(), 6, 5);
    rig.machine.engine.end_orphaned();
    rig.put_ok(13..19);
    assert_at_rest(&rig.store);
}

#[test]
fn a_block_that_an_orphaned_copy_reads_is_served_and_its_slot_is_used_after_the_copy() {
    let rig = Rig::new(3);
    rig.put_ok(0..1);
    let job = rig.hang(|| rig.get(12));
    rig.orphan(job);
    assert!(rig.get(13).wait().is_ok());
    assert_eq!(rig.slots(), (2, 0));
    // It evicts the block, and finds its slot in use.
    assert_too_small(&rig.put(1..4).wait(), 3, 2);
    assert_eq!((rig.store.prefix(0, &keys(0..1)), rig.slots()), (0, (2, 1)));
    rig.put_ok(1..3);
    rig.machine.engine.end_orphaned();
    assert_eq!(rig.slots(), (1, 0));
    rig.put_ok(3..6);
    assert_at_rest(&rig.store);
}

#[test]
fn a_job_that_waits_for_the_slot_of_a_copy_ends_when_the_copy_is_orphaned() {
    let rig = Rig::new(2);
    let hangs = rig.hang(|| rig.put(0..1));
    let waits = rig.put(1..3);
    assert!(!waits.has_ended());
    rig.orphan(hangs);
    assert_too_small(&waits.wait(), 2, 1);
    rig.machine.engine.end_orphaned();
    rig.put_ok(1..3);
    assert_at_rest(&rig.store);
}

#[test]
fn a_job_that_waits_for_another_slot_gets_that_of_an_orphaned_copy_when_the_copy_ends() {
    let rig = Rig::new(3);
    let orphaned = rig.hang(|| rig.put(0..1));
    rig.orphan(orphaned);
    let hangs = rig.hang(|| rig.put(1..3));
    let (ids, keys) = ids_and_keys(3..4);
    let source = Blocks::new(&rig.machine.cache, &ids);
    let waits = rig.store.put(&keys, source, ordered().deadline(soon()), ()).unwrap();
    assert!(!waits.has_ended());
    rig.machine.engine.end_orphaned();
    let outcome = waits.wait();
    let slots = rig.slots();
    rig.machine.engine.orphan_hung();
    assert!(!hangs.wait().is_ok());
    rig.machine.engine.end_orphaned();
    assert!(outcome.is_ok(), "{outcome:?}");
    assert_eq!(slots, (0, 2));
    assert_at_rest(&rig.store);
}

#[test]
fn a_resize_keeps_slots_of_orphaned_copies_aside() {
    let rig = Rig::new(4);
    let job = rig.hang(|| rig.put(0..1));
    rig.orphan(job);
    for slots in [2, 0, 4] {
        rig.store.resize(HOST, bytes(&rig.machine, slots)).unwrap();
    }
    assert_eq!(rig.slots(), (3, 1));
    rig.put_ok(1..4);
    rig.store.resize(HOST, bytes(&rig.machine, 0)).unwrap();
    rig.machine.engine.end_orphaned();
    rig.store.resize(HOST, bytes(&rig.machine, 4)).unwrap();
    assert_eq!(rig.slots(), (4, 0));
    rig.put_ok(4..8);
    assert_at_rest(&rig.store);
}

#[test]
fn a_put_that_no_longer_fits_beside_an_orphaned_copy_evicts_no_further_blocks() {
    let rig = Rig::new(6);
    for number in 0..6 {
        rig.put_ok(number..number + 1);
    }
    let job = rig.hang(|| rig.get(12));
    rig.orphan(job);
    assert_too_small(&rig.put(6..12).wait(), 6, 5);
    // The oldest block left, whose slot the copy reads.
    assert_eq!((rig.store.prefix(0, &keys(0..1)), rig.store.prefix(0, &keys(1..6))), (0, 5));
    rig.machine.engine.end_orphaned();
    assert_at_rest(&rig.store);
}

#[test]
fn a_block_stays_until_an_orphaned_copy_leaves_room_for_it_in_a_slower_tier() {
    let machine = Machine::new();
    let group = BlockGroup::of_layout("kv", machine.cache.layout());
    let slower = MemoryTier::system("slower", bytes(&machine, 1));
    let builder = Store::builder().group(group).host(bytes(&machine, 2)).memory_tier(slower);
    let builder = builder.manager(&machine.manager).write_policy(WritePolicy::Back);
    let (store, _) = builder.open().unwrap();
    let rig = Rig { machine, store };
    rig.put_ok(0..1);
    assert!(rig.store.sync().unwrap().wait().is_ok());
    for slots in [0, 2] {
        rig.store.resize(HOST, bytes(&rig.machine, slots)).unwrap();
    }
    let job = rig.hang(|| rig.get(12));
    rig.orphan(job);
    rig.put_ok(1..2);
    rig.put_ok(2..3);
    // Both blocks are in the faster tier alone.
    let (ids, keys_of_3) = ids_and_keys(3..4);
    let put = |options: JobOptions| {
        let source = Blocks::new(&rig.machine.cache, &ids);
        rig.store.put(&keys_of_3, source, options, ()).unwrap().wait()
    };
    assert_too_small(&put(ordered().deadline(soon())), 1, 0);
    assert_eq!(rig.store.prefix(0, &keys(1..3)), 2);
    rig.machine.engine.end_orphaned();
    assert!(put(ordered()).is_ok());
    assert_at_rest(&rig.store);
}
