//! Blocks of devices: every copy goes through the copy engines, and disk is reached by the host tier.

use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use terrane_core::{ByteCount, Location};
use terrane_layout::LayoutBuilder;
use terrane_store::{
    BlockGroup, BlockResult, Blocks, JobOptions, MemoryTier, NoRoom, Presence, Store, StoreError,
    TierId, Why, WritePolicy,
};
use terrane_testkit::device;
use terrane_testkit::engine::{Fault, SimulatedEngine, SimulatedEngineOptions};
use terrane_testkit::memory::HeapAllocator;
use terrane_testkit::random::Seeded;
use terrane_transfer::{CopyEngine, DeviceOrder, Endpoint, TransferManager};

use super::harness::{assert_at_rest, content, disk, get, key, keys, namespace, soon};
use super::memory_tiers::config;

fn on_device(blocks: u32, number: u32) -> Endpoint {
    let device = HeapAllocator::simulated_device(number);
    let layout = LayoutBuilder::new(config(blocks)).fully_contiguous().allocate(&device);
    Endpoint::new(layout.unregistered().build().unwrap()).unwrap()
}

/// The bytes of a block on a simulated device, changed by `each`.
fn each_byte(endpoint: &Endpoint, block: u32, mut each: impl FnMut(&mut u8)) {
    let layout = endpoint.layout();
    layout.geometry().canonical_spans(block, u32::MAX, &mut |at, bytes| {
        let Some(Location::Device { device, address }) = layout.location_at(at) else { panic!() };
        let start = device::resolve(device, address, ByteCount::new(bytes)).unwrap();
        let bytes = usize::try_from(bytes).unwrap();
        // SAFETY: the simulated device has so many bytes there, and no job uses them meanwhile.
        unsafe { std::slice::from_raw_parts_mut(start, bytes) }.iter_mut().for_each(&mut each);
    });
}

fn fill(endpoint: &Endpoint, block: u32, number: usize) {
    let bytes = usize::try_from(endpoint.layout().geometry().block_bytes().get()).unwrap();
    let mut content = content(&key(number), bytes).into_iter();
    each_byte(endpoint, block, |byte| *byte = content.next().unwrap());
}

fn has(endpoint: &Endpoint, block: u32, number: usize) -> bool {
    let bytes = usize::try_from(endpoint.layout().geometry().block_bytes().get()).unwrap();
    let mut found = Vec::new();
    each_byte(endpoint, block, |byte| found.push(*byte));
    found == content(&key(number), bytes)
}

pub(super) struct Machine {
    pub(super) engine: Arc<SimulatedEngine>,
    pub(super) manager: TransferManager,
    /// The cache of the serving engine.
    pub(super) cache: Endpoint,
}

impl Machine {
    pub(super) fn new() -> Self {
        let engine = Arc::new(SimulatedEngine::new(SimulatedEngineOptions::default()));
        let manager = TransferManager::new([Arc::clone(&engine) as Arc<dyn CopyEngine>]);
        Self { engine, manager, cache: on_device(24, 0) }
    }

    pub(super) fn block_bytes(&self) -> u64 {
        self.cache.layout().geometry().block_bytes().get()
    }

    fn open(&self, directory: &Path, policy: WritePolicy, tiers: Vec<MemoryTier>) -> Store {
        let slot = self.block_bytes().next_multiple_of(4096);
        let mut builder = Store::builder()
            .group(BlockGroup::of_layout("kv", self.cache.layout()))
            .disk(disk(directory, 40 * slot))
            .namespace(namespace())
            .manager(&self.manager)
            .write_policy(policy);
        for tier in tiers {
            builder = builder.memory_tier(tier);
        }
        builder.open().unwrap().0
    }

    fn host(&self, blocks: u64) -> MemoryTier {
        let stride = self.block_bytes().next_multiple_of(4096);
        MemoryTier::system("host", ByteCount::new(stride * blocks))
    }

    /// Puts blocks 0.. of the cache as the blocks of these keys.
    fn put(&self, store: &Store, numbers: std::ops::Range<usize>) -> Vec<BlockResult> {
        let ids: Vec<u32> = (0..u32::try_from(numbers.len()).unwrap()).collect();
        ids.iter().zip(numbers.clone()).for_each(|(id, number)| fill(&self.cache, *id, number));
        let source = Blocks::new(&self.cache, &ids);
        let options = ordered().deadline(soon());
        store.put(&keys(numbers), source, options, ()).unwrap().wait().results
    }

    /// Gets blocks into blocks 12.. of the cache, and checks those that are done.
    fn get(&self, store: &Store, numbers: std::ops::Range<usize>) -> Vec<BlockResult> {
        let ids: Vec<u32> = (12..).take(numbers.len()).collect();
        ids.iter().for_each(|&id| fill(&self.cache, id, 999));
        let destination = Blocks::new(&self.cache, &ids);
        let options = ordered().deadline(soon());
        let job = store.get(&keys(numbers.clone()), destination, options, ()).unwrap();
        let results = job.wait().results;
        for ((id, number), result) in ids.iter().zip(numbers).zip(&results) {
            if result.is_ok() {
                assert!(has(&self.cache, *id, number), "wrong bytes of {number}");
            }
        }
        results
    }
}

/// The cache is filled by the processor, before each job.
pub(super) fn ordered() -> JobOptions {
    JobOptions::new().device_order(DeviceOrder::AlreadySynchronised)
}

fn all_done(results: &[BlockResult]) -> bool {
    results.iter().all(|result| matches!(result, BlockResult::Done { .. }))
}

#[test]
fn blocks_of_a_device_travel_by_the_host_tier() {
    for policy in [WritePolicy::Through, WritePolicy::Back] {
        let directory = tempfile::tempdir().unwrap();
        let machine = Machine::new();
        let store = machine.open(directory.path(), policy, vec![machine.host(6)]);
        for first in [0, 4, 8, 12] {
            let results = machine.put(&store, first..first + 4);
            assert!(all_done(&results), "{results:?}");
        }
        for first in [0, 6, 11] {
            let results = machine.get(&store, first..first + 5);
            assert!(all_done(&results), "{policy:?} {results:?}");
        }
        assert_at_rest(&store);
        drop(store);
        let store = machine.open(directory.path(), policy, vec![machine.host(6)]);
        // All at once: more blocks than the host tier has.
        let results = machine.get(&store, 0..12);
        assert!(all_done(&results), "{results:?}");
        let bytes = usize::try_from(machine.block_bytes()).unwrap();
        let (outcome, spans) = get(&store, &keys(3..4), bytes, JobOptions::new());
        assert!(outcome.is_ok() && spans[0] == content(&key(3), bytes), "{outcome:?}");
        assert_at_rest(&store);
    }
}

#[test]
fn a_tier_of_a_device_is_the_fastest_one() {
    for policy in [WritePolicy::Through, WritePolicy::Back] {
        let directory = tempfile::tempdir().unwrap();
        let machine = Machine::new();
        let tiers = || {
            let device = MemoryTier::new("device", [on_device(4, 1)]);
            vec![device, machine.host(6)]
        };
        let store = machine.open(directory.path(), policy, tiers());
        for first in [0, 3, 6, 9] {
            let results = machine.put(&store, first..first + 3);
            assert!(all_done(&results), "{results:?}");
        }
        let promoted = store.promote(&keys(0..2), TierId::new(0), JobOptions::new()).unwrap();
        let outcome = promoted.wait();
        assert!(outcome.is_ok(), "{outcome:?}");
        let mut presence = [Presence::Absent; 2];
        store.presence(0, &keys(0..2), &mut presence);
        for presence in presence {
            assert!(matches!(presence, Presence::Ready { tier, .. } if tier == TierId::new(0)));
        }
        let results = machine.get(&store, 0..12);
        assert!(all_done(&results), "{policy:?} {results:?}");
        assert!(store.snapshot().tiers[0].hits >= 2);
        // From a device to host memory, and back from host memory to the store.
        let bytes = usize::try_from(machine.block_bytes()).unwrap();
        let (outcome, spans) = get(&store, &keys(0..2), bytes, JobOptions::new());
        assert!(outcome.is_ok(), "{outcome:?}");
        assert!(spans[1] == content(&key(1), bytes));
        super::harness::put_ok(&store, &keys(20..22), bytes);
        assert!(all_done(&machine.get(&store, 20..22)));
        assert_at_rest(&store);
        drop(store);
        let store = machine.open(directory.path(), policy, tiers());
        assert!(all_done(&machine.get(&store, 0..12)));
        let outcome = store.promote(&keys(0..3), TierId::new(0), JobOptions::new()).unwrap().wait();
        assert!(outcome.is_ok(), "{outcome:?}");
        assert_at_rest(&store);
    }
}

#[test]
fn a_get_of_more_blocks_of_a_device_tier_than_the_host_tier_has_does_not_wait_for_itself() {
    let directory = tempfile::tempdir().unwrap();
    let machine = Machine::new();
    let tiers = vec![MemoryTier::new("device", [on_device(16, 1)]), machine.host(4)];
    let store = machine.open(directory.path(), WritePolicy::Back, tiers);
    assert!(all_done(&machine.put(&store, 0..8)));
    let bytes = usize::try_from(machine.block_bytes()).unwrap();
    let options = JobOptions::new().deadline(soon());
    let (outcome, spans) = get(&store, &keys(0..8), bytes, options);
    assert!(all_done(&outcome.results), "{outcome:?}");
    for (number, span) in spans.iter().enumerate() {
        assert!(*span == content(&key(number), bytes), "{number}");
    }
    // The loads of several such jobs, and the write-backs of both tiers, wait for the same slots.
    for first in [8, 16, 24, 32] {
        assert!(all_done(&machine.put(&store, first..first + 8)));
        let options = JobOptions::new().deadline(soon());
        let promoted = store.promote(&keys(0..8), TierId::new(0), options).unwrap();
        assert!(all_done(&machine.get(&store, first..first + 8)));
        let results = promoted.wait().results;
        let is_timed_out = |result: &BlockResult| matches!(result, BlockResult::TimedOut);
        assert!(!results.iter().any(is_timed_out), "{results:?}");
    }
    assert_at_rest(&store);
}

#[test]
fn a_promotion_through_a_small_host_tier_says_which_blocks_left_it_on_their_way() {
    let directory = tempfile::tempdir().unwrap();
    let machine = Machine::new();
    let tiers = vec![MemoryTier::new("device", [on_device(2, 1)]), machine.host(3)];
    let store = machine.open(directory.path(), WritePolicy::Through, tiers);
    for first in (0..21).step_by(3) {
        assert!(all_done(&machine.put(&store, first..first + 3)));
    }
    // Each round carries as many blocks as the host tier has slots.
    let promoted = store.promote(&keys(0..20), TierId::new(0), JobOptions::new()).unwrap();
    let results = promoted.wait().results;
    let has_left = |result: &&BlockResult| {
        matches!(result, BlockResult::NoRoom(NoRoom::LeftHostTier { slots: 3, .. }))
    };
    let left = results.iter().filter(has_left).count();
    let done = results.iter().filter(|result| result.is_ok()).count();
    assert!(left > 0 && left + done == 20, "{results:?}");
    assert_at_rest(&store);
}

#[test]
fn blocks_that_several_gets_load_through_a_small_host_tier_all_arrive() {
    let directory = tempfile::tempdir().unwrap();
    let machine = Machine::new();
    let store = machine.open(directory.path(), WritePolicy::Through, vec![machine.host(4)]);
    for part in 0..3 {
        assert!(all_done(&machine.put(&store, part * 4..part * 4 + 4)));
    }
    for round in 0..20 {
        // They take each other's slots as soon as these can be taken.
        let jobs: Vec<_> = (0..6_u32)
            .map(|part| {
                let ids: Vec<u32> = (12 + part * 2..14 + part * 2).collect();
                ids.iter().for_each(|&id| fill(&machine.cache, id, 999));
                let first = usize::try_from(part * 2).unwrap();
                let destination = Blocks::new(&machine.cache, &ids);
                let options = ordered().deadline(soon());
                store.get(&keys(first..first + 2), destination, options, ()).unwrap()
            })
            .collect();
        for (part, job) in jobs.into_iter().enumerate() {
            let results = job.wait().results;
            assert!(all_done(&results), "round {round}, job {part}: {results:?}");
        }
        for (number, id) in (12..24).enumerate() {
            assert!(has(&machine.cache, id, number), "round {round}: wrong bytes of {number}");
        }
    }
    assert_at_rest(&store);
}

#[test]
fn a_device_without_a_host_tier_is_refused() {
    let directory = tempfile::tempdir().unwrap();
    let machine = Machine::new();
    let store = machine.open(directory.path(), WritePolicy::Through, vec![]);
    let source = Blocks::new(&machine.cache, &[0]);
    let refused = store.put(&keys(0..1), source, JobOptions::new(), ()).unwrap_err();
    assert!(matches!(refused.cause, StoreError::NeedsHostTier { .. }), "{refused}");
    drop(store);
    let error = Store::builder()
        .group(BlockGroup::of_layout("kv", machine.cache.layout()))
        .memory_tier(MemoryTier::new("device", [on_device(4, 1)]))
        .disk(disk(directory.path(), 1 << 20))
        .namespace(namespace())
        .open()
        .unwrap_err();
    assert!(matches!(error, StoreError::NeedsHostTier { .. }), "{error}");
}

#[test]
fn a_job_states_a_device_order_if_its_blocks_are_on_a_device() {
    let directory = tempfile::tempdir().unwrap();
    let machine = Machine::new();
    let store = machine.open(directory.path(), WritePolicy::Through, vec![machine.host(4)]);
    let blocks = || Blocks::new(&machine.cache, &[0]);
    let refused = store.put(&keys(0..1), blocks(), JobOptions::new(), ()).unwrap_err();
    assert!(matches!(refused.cause, StoreError::DeviceOrderNotStated { .. }), "{refused}");
    let refused = store.get(&keys(0..1), blocks(), JobOptions::new(), ()).unwrap_err();
    assert!(matches!(refused.cause, StoreError::DeviceOrderNotStated { .. }), "{refused}");
    let heap = HeapAllocator::system();
    let on_host = LayoutBuilder::new(config(1)).fully_contiguous().allocate(&heap);
    let on_host = Endpoint::new(on_host.unregistered().build().unwrap()).unwrap();
    let refused = store.put(&keys(0..1), Blocks::new(&on_host, &[0]), ordered(), ()).unwrap_err();
    assert!(matches!(refused.cause, StoreError::DeviceOrderWithoutDevice), "{refused}");
    assert_at_rest(&store);
}

#[test]
fn faults_of_copies_cost_their_blocks_and_leave_nothing_behind() {
    let directory = tempfile::tempdir().unwrap();
    let machine = Machine::new();
    for (round, policy) in [WritePolicy::Back, WritePolicy::Through].into_iter().enumerate() {
        let tiers = vec![MemoryTier::new("device", [on_device(3, 1)]), machine.host(4)];
        let store = machine.open(directory.path(), policy, tiers);
        let mut random = Seeded::new(u64::try_from(round).unwrap());
        let (mut good, mut bad) = (0, 0);
        for _ in 0..150 {
            match random.below(8) {
                0 => machine.engine.fail_next(Fault::Engine),
                1 => machine.engine.fail_next(Fault::DropJob),
                2 => machine.engine.fail_next(Fault::ShortCopy { after_runs: random.below(4) }),
                _ => {}
            }
            let first = random.below(20);
            let numbers = first..first + 1 + random.below(3);
            let results = match random.below(5) {
                0 | 1 => machine.put(&store, numbers),
                2 => {
                    let tier = TierId::new(u8::try_from(random.below(2)).unwrap());
                    let options = JobOptions::new().deadline(soon());
                    store.promote(&keys(numbers), tier, options).unwrap().wait().results
                }
                3 => {
                    let options = ordered().deadline(
                        Instant::now()
                            + Duration::from_micros(u64::try_from(random.below(400)).unwrap()),
                    );
                    let source = Blocks::new(&machine.cache, &[0, 1]);
                    fill(&machine.cache, 0, 30);
                    fill(&machine.cache, 1, 31);
                    let job = store.put(&keys(30..32), source, options, ()).unwrap();
                    job.cancel();
                    job.wait().results
                }
                _ => machine.get(&store, numbers),
            };
            for result in results {
                match result {
                    BlockResult::Done { .. } | BlockResult::AlreadyStored => good += 1,
                    _ => bad += 1,
                }
            }
        }
        assert!(good > 50 && bad > 10, "{good} {bad}");
        assert_at_rest(&store);
        // The faults that are left.
        for number in 200..400 {
            let put = machine.put(&store, number..number + 1);
            if all_done(&put) && all_done(&machine.get(&store, number..number + 1)) && number > 250
            {
                break;
            }
        }
        // Nothing is left half-way: all tiers still take blocks.
        assert!(all_done(&machine.put(&store, 100..103)));
        assert!(all_done(&machine.get(&store, 100..103)));
        assert_at_rest(&store);
    }
}

#[test]
fn a_second_writer_waits_for_the_first_and_writes_if_that_fails() {
    let directory = tempfile::tempdir().unwrap();
    let machine = Machine::new();
    for fails in [false, true] {
        let tiers = vec![machine.host(6)];
        let store = machine.open(directory.path(), WritePolicy::Through, tiers);
        assert!(store.clear().unwrap().wait().is_ok());
        fill(&machine.cache, 0, 7);
        fill(&machine.cache, 1, 7);
        machine.engine.hold();
        let put = |block| {
            let source = Blocks::new(&machine.cache, &[block]);
            store.put(&keys(7..8), source, ordered(), ()).unwrap()
        };
        let (first, second) = (put(0), put(1));
        let mut presence = [Presence::Absent];
        store.presence(0, &keys(7..8), &mut presence);
        assert_eq!(presence, [Presence::Writing]);
        assert_eq!(store.why(0, &key(7)), Why::Writing);
        // A get waits for the put, until its deadline.
        let deadline = ordered().deadline(Instant::now() + Duration::from_millis(20));
        let to = Blocks::new(&machine.cache, &[12]);
        let outcome = store.get(&keys(7..8), to.clone(), deadline, ()).unwrap().wait();
        assert!(matches!(outcome.results[..], [BlockResult::TimedOut]), "{outcome:?}");
        assert_eq!(store.snapshot().misses.writing, 1);
        let waits = store.get(&keys(7..8), to, ordered(), ()).unwrap();
        assert!(!waits.has_ended() && !second.has_ended());
        if fails {
            machine.engine.fail_next(Fault::Engine);
        }
        machine.engine.release_all();
        let (first, second) = (first.wait(), second.wait());
        let second = &second.results[0];
        if fails {
            assert!(matches!(first.results[..], [BlockResult::Failed(_)]), "{first:?}");
            assert!(matches!(second, BlockResult::Done { .. }), "{second}");
        } else {
            assert!(matches!(first.results[..], [BlockResult::Done { .. }]), "{first:?}");
            assert!(matches!(second, BlockResult::AlreadyStored), "{second}");
        }
        assert!(waits.wait().is_ok());
        assert!(has(&machine.cache, 12, 7));
        assert_at_rest(&store);
    }
}

/// Releases the copies that the engine holds.
struct ReleaseOnDrop<'a>(&'a Machine);

impl Drop for ReleaseOnDrop<'_> {
    fn drop(&mut self) {
        self.0.engine.release_all();
    }
}

#[test]
fn a_cancelled_job_ends_with_its_copy_and_a_close_cancels_the_rest() {
    let directory = tempfile::tempdir().unwrap();
    let machine = Machine::new();
    let store = machine.open(directory.path(), WritePolicy::Back, vec![machine.host(16)]);
    assert!(all_done(&machine.put(&store, 0..4)));
    // The put leaves the table of jobs just after its outcome.
    assert_eq!(store.drain(Instant::now() + Duration::from_secs(60)).left, 0);
    machine.engine.hold();
    // A failed assertion must not leave the store waiting for copies that are held.
    let _released = ReleaseOnDrop(&machine);
    let get = |block, number| {
        let to = Blocks::new(&machine.cache, &[block]);
        store.get(&keys(number..number + 1), to, ordered(), ()).unwrap()
    };
    let (cancelled, closed) = (get(12, 0), get(13, 1));
    cancelled.cancel();
    assert_eq!(store.drain(Instant::now()).left, 2);
    let dirty =
        || -> usize { store.snapshot().tiers.iter().map(|tier| tier.groups[0].dirty).sum() };
    assert_eq!(dirty(), 4);
    let close = std::thread::scope(|scope| {
        // Half of the time is for the write-back, which syncs files.
        let close = scope.spawn(|| store.close(Instant::now() + Duration::from_secs(20)));
        // The write-back begins when the close has cancelled the jobs.
        while dirty() > 0 && !close.is_finished() {
            std::thread::sleep(Duration::from_millis(5));
        }
        // The copies are the engine's: the jobs end when it has ended them.
        std::thread::sleep(Duration::from_millis(200));
        assert!(!close.is_finished());
        machine.engine.release_all();
        close.join().unwrap()
    });
    // The jobs had only a part of the time.
    assert_eq!((close.left, close.unwritten), (2, 0));
    for job in [cancelled, closed] {
        let outcome = job.wait();
        assert!(matches!(outcome.results[..], [BlockResult::Cancelled]), "{outcome:?}");
    }
    drop(store);
    let store = machine.open(directory.path(), WritePolicy::Back, vec![machine.host(16)]);
    assert!(all_done(&machine.get(&store, 0..4)));
}
