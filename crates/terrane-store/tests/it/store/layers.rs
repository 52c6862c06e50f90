//! Gets layer by layer: a layer is reported when its bytes of all blocks are at the destination.

use std::path::Path;
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::{Duration, Instant};

use terrane_core::{ByteCount, Location};
use terrane_layout::LayoutBuilder;
use terrane_store::{
    BlockGroup, BlockResult, Blocks, Job, JobLayerError, JobLayers, JobOptions, Spans, Store,
    TierId, WritePolicy,
};
use terrane_testkit::device;
use terrane_testkit::engine::{Fault, SimulatedEngine, SimulatedEngineOptions};
use terrane_testkit::memory::HeapAllocator;
use terrane_testkit::random::Seeded;
use terrane_transfer::{
    CopyEngine, CopyFailure, CopyJob, Declined, DeviceOrder, Endpoint, EventHandle, OnlyPath,
    Quote, Side, TransferManager, TransferOptions, TransferPlan,
};

use super::harness::{
    assert_at_rest, content, damage_byte, disk, key, keys, namespace, put_ok, soon, spans,
};
use super::memory_tiers::config;

const LAYERS: usize = 3;
/// The first block of the cache that gets write to.
const TO: u32 = 12;

/// Copies layer-by-layer transfers when the test says so, and declines the others.
#[derive(Debug, Default)]
struct Steered(Mutex<Vec<CopyJob>>);

// SAFETY: it accesses only the bytes of a plan's runs, and ends the job after its copies.
unsafe impl CopyEngine for Steered {
    fn name(&self) -> &'static str {
        "steered"
    }

    fn quote(&self, _: &TransferPlan, options: &TransferOptions) -> Result<Quote, Declined> {
        if !options.layer_by_layer {
            return Err(Declined::Kinds);
        }
        Ok(Quote::constant(Duration::ZERO, &OnlyPath { path: "none", reason: "of a test" }))
    }

    fn submit(&self, job: CopyJob) {
        job.start();
        self.0.lock().unwrap().push(job);
    }
}

fn address(at: Location, bytes: u64) -> *mut u8 {
    match at {
        Location::Host(address) => address.as_ptr(),
        Location::Device { device, address } => {
            device::resolve(device, address, ByteCount::new(bytes)).unwrap()
        }
        _ => panic!("{at:?}"),
    }
}

impl Steered {
    fn jobs(&self) -> usize {
        self.0.lock().unwrap().len()
    }

    /// Copies a layer of all jobs, and reports it.
    fn copy(&self, layer: u32) {
        for job in &*self.0.lock().unwrap() {
            let plan = job.plan();
            for (index, run) in plan.runs().iter().enumerate() {
                if plan.layer(index) == layer {
                    let bytes = run.bytes();
                    let [from, to] = [Side::Source, Side::Destination]
                        .map(|side| address(plan.location(run, side).unwrap(), bytes.get()));
                    // SAFETY: the plan is valid, and the job keeps both ends.
                    unsafe { from.copy_to_nonoverlapping(to, bytes.to_usize()) };
                }
            }
            job.layers().unwrap().done(layer..layer + 1);
        }
    }

    fn submitted(&self, layer: u32, event: &EventHandle) {
        for job in &*self.0.lock().unwrap() {
            job.layers().unwrap().submitted(layer..layer + 1, event.clone());
        }
    }

    /// Ends all jobs: as asked by the caller, or with success.
    fn finish(&self) {
        let jobs = std::mem::take(&mut *self.0.lock().unwrap());
        for job in jobs {
            let result = job.reason_to_stop().map_or(Ok(()), Err);
            job.finish(result);
        }
    }

    fn fail(&self) {
        let jobs = std::mem::take(&mut *self.0.lock().unwrap());
        for job in jobs {
            job.finish(Err(CopyFailure::Engine { source: "a fault of a test".into() }));
        }
    }
}

#[derive(Clone, Copy, Debug, PartialEq)]
enum Place {
    Host,
    Device,
}

const PLACES: [Place; 2] = [Place::Host, Place::Device];

struct Rig {
    steered: Arc<Steered>,
    /// Copies the other transfers, and also layer by layer without a steered engine.
    others: Arc<SimulatedEngine>,
    manager: TransferManager,
    cache: Endpoint,
    place: Place,
}

impl Rig {
    fn new(place: Place) -> Self {
        Self::with(place, SimulatedEngineOptions::default(), true)
    }

    fn with(place: Place, options: SimulatedEngineOptions, is_steered: bool) -> Self {
        let steered = Arc::new(Steered::default());
        let others = Arc::new(SimulatedEngine::new(options));
        let mut engines = vec![Arc::clone(&others) as Arc<dyn CopyEngine>];
        if is_steered {
            engines.insert(0, Arc::clone(&steered) as _);
        }
        let allocator = match place {
            Place::Host => HeapAllocator::system(),
            Place::Device => HeapAllocator::simulated_device(0),
        };
        let layout = LayoutBuilder::new(config(24)).fully_contiguous().allocate(&allocator);
        let cache = Endpoint::new(layout.unregistered().build().unwrap()).unwrap();
        Self { steered, others, manager: TransferManager::new(engines), cache, place }
    }

    fn bytes(&self) -> usize {
        self.cache.layout().geometry().block_bytes().to_usize()
    }

    /// A store with this many slots in host memory.
    fn open(&self, directory: &Path, slots: u64) -> Store {
        let slot = u64::try_from(self.bytes()).unwrap().next_multiple_of(4096);
        let builder = Store::builder()
            .group(BlockGroup::of_layout("kv", self.cache.layout()))
            .disk(disk(directory, 40 * slot))
            .namespace(namespace())
            .manager(&self.manager)
            .write_policy(WritePolicy::Through)
            .host(ByteCount::new(slot * slots));
        builder.open().unwrap().0
    }

    fn options(&self) -> JobOptions {
        let options = JobOptions::new().layer_by_layer();
        match self.place {
            Place::Host => options,
            Place::Device => options.device_order(DeviceOrder::AlreadySynchronised),
        }
    }

    /// Gets blocks into those of the cache from `TO` on.
    fn get(&self, store: &Store, numbers: &[usize], options: JobOptions) -> (Job, JobLayers) {
        let ids: Vec<u32> = (TO..).take(numbers.len()).collect();
        let keys: Vec<_> = numbers.iter().map(|&number| key(number)).collect();
        let job = store.get(&keys, Blocks::new(&self.cache, &ids), options, ()).unwrap();
        let layers = job.layers().unwrap();
        (job, layers)
    }

    /// Whether the bytes of these layers of a block of the cache are those of a key.
    fn has(&self, block: u32, layers: std::ops::Range<usize>, number: usize) -> bool {
        let layout = self.cache.layout();
        let mut found = Vec::new();
        layout.geometry().canonical_spans(block, u32::MAX, &mut |at, bytes| {
            let start = address(layout.location_at(at).unwrap(), bytes);
            let bytes = usize::try_from(bytes).unwrap();
            // SAFETY: the block has so many bytes there, and no engine writes these layers now.
            found.extend_from_slice(unsafe { std::slice::from_raw_parts(start, bytes) });
        });
        let layer = self.bytes() / LAYERS;
        let bytes = layers.start * layer..layers.end * layer;
        found[bytes.clone()] == content(&key(number), self.bytes())[bytes]
    }

    #[track_caller]
    fn assert_has(&self, layers: std::ops::Range<usize>, numbers: &[usize]) {
        for (block, &number) in (TO..).zip(numbers) {
            assert!(self.has(block, layers.clone(), number), "block {block}, layers {layers:?}");
        }
    }
}

fn in_a_while() -> Instant {
    Instant::now() + Duration::from_millis(30)
}

const FAILED: fn(u32) -> Result<bool, JobLayerError> = |layer| Err(JobLayerError::Failed { layer });

#[test]
fn a_layer_of_all_blocks_is_there_before_the_job_has_ended() {
    for place in PLACES {
        let (rig, directory) = (Rig::new(place), tempfile::tempdir().unwrap());
        let store = rig.open(directory.path(), 8);
        put_ok(&store, &keys(0..5), rig.bytes());
        let numbers = [3, 0, 4];
        let (job, layers) = rig.get(&store, &numbers, rig.options());
        assert_eq!((layers.range(), rig.steered.jobs()), (0..3, 1));
        assert_eq!(layers.wait_until(0, in_a_while()), Ok(false));
        for layer in 0..3 {
            rig.steered.copy(layer);
            layers.wait(0..=layer).unwrap();
            rig.assert_has(0..usize::try_from(layer).unwrap() + 1, &numbers);
            assert_eq!(layers.wait_until(layer + 1.., Instant::now()), Ok(layer == 2));
            assert!(!job.has_ended());
        }
        let outside = JobLayerError::NoSuchLayer { layer: 3, last: 2 };
        assert_eq!((layers.wait(3), layers.wait(1..9)), (Err(outside), Err(outside)));
        rig.steered.finish();
        assert!(job.wait().is_ok() && layers.wait(..) == Ok(()));
        assert_at_rest(&store);
    }
}

#[test]
fn only_a_get_that_asks_for_layers_has_them() {
    let (rig, directory) = (Rig::new(Place::Host), tempfile::tempdir().unwrap());
    let store = rig.open(directory.path(), 8);
    let put = || {
        let source = Blocks::new(&rig.cache, &[0]);
        store.put(&keys(0..1), source, rig.options(), ()).unwrap()
    };
    let promoted = store.promote(&keys(0..1), TierId::new(0), rig.options()).unwrap();
    for job in [put(), put(), promoted] {
        assert!(job.layers().is_none());
        job.wait();
    }
    let whole = JobOptions::new();
    let job = store.get(&keys(0..1), Blocks::new(&rig.cache, &[TO]), whole, ()).unwrap();
    assert!(job.layers().is_none() && job.wait().is_ok());
    assert_eq!(rig.steered.jobs(), 0);
    assert_at_rest(&store);
}

#[test]
fn blocks_that_come_from_disk_hold_all_layers_back() {
    for place in PLACES {
        let (rig, directory) = (Rig::new(place), tempfile::tempdir().unwrap());
        drop({
            let store = rig.open(directory.path(), 8);
            put_ok(&store, &keys(0..6), rig.bytes());
            store
        });
        let store = rig.open(directory.path(), 8);
        let promoted = store.promote(&keys(2..4), TierId::new(0), JobOptions::new()).unwrap();
        assert!(promoted.wait().is_ok());
        // To the device, the blocks from disk take a second copy.
        rig.others.hold();
        let numbers = [2, 0, 3, 5];
        let (job, layers) = rig.get(&store, &numbers, rig.options());
        assert_eq!(rig.steered.jobs(), 1);
        rig.steered.copy(0);
        if place == Place::Device {
            assert_eq!(layers.wait_until(0, in_a_while()), Ok(false));
            assert_eq!(layers.events_until(0, in_a_while()), Ok(None));
        }
        rig.others.release_all();
        assert_eq!(layers.wait_until(0, soon()), Ok(true));
        rig.assert_has(0..1, &numbers);
        // The blocks from disk are there whole.
        assert!(rig.has(TO + 1, 0..LAYERS, 0) && rig.has(TO + 3, 0..LAYERS, 5));
        assert_eq!((layers.wait_until(1, Instant::now()), job.has_ended()), (Ok(false), false));
        (1..3).for_each(|layer| rig.steered.copy(layer));
        assert_eq!(layers.wait_until(.., soon()), Ok(true));
        rig.assert_has(0..LAYERS, &numbers);
        rig.steered.finish();
        assert!(job.wait().is_ok());
        assert_at_rest(&store);
    }
}

#[test]
fn a_block_that_another_job_writes_holds_all_layers_back() {
    for place in PLACES {
        let (rig, directory) = (Rig::new(place), tempfile::tempdir().unwrap());
        let store = rig.open(directory.path(), 8);
        put_ok(&store, &keys(0..2), rig.bytes());
        // The block of key 7 has the bytes of key 0.
        let source = Blocks::new(&rig.cache, &[0]);
        let mut whole = JobOptions::new();
        if place == Place::Device {
            whole = whole.device_order(DeviceOrder::AlreadySynchronised);
        }
        assert!(store.get(&keys(0..1), source.clone(), whole.clone(), ()).unwrap().wait().is_ok());
        rig.others.hold();
        let put = store.put(&keys(7..8), source, whole, ()).unwrap();
        let (job, layers) = rig.get(&store, &[1, 7], rig.options());
        assert_eq!(rig.steered.jobs(), 1);
        (0..3).for_each(|layer| rig.steered.copy(layer));
        rig.steered.finish();
        assert_eq!(layers.wait_until(0, in_a_while()), Ok(false));
        rig.others.release_all();
        assert!(put.wait().is_ok());
        while rig.steered.jobs() == 0 {
            thread::yield_now();
        }
        assert_eq!(layers.wait_until(0, in_a_while()), Ok(false));
        rig.steered.copy(0);
        assert_eq!(layers.wait_until(0, soon()), Ok(true));
        assert!(rig.has(TO, 0..LAYERS, 1) && rig.has(TO + 1, 0..1, 0) && !job.has_ended());
        (1..3).for_each(|layer| rig.steered.copy(layer));
        rig.steered.finish();
        assert!(job.wait().is_ok() && rig.has(TO + 1, 0..LAYERS, 0));
        assert_at_rest(&store);
    }
}

#[test]
fn a_get_of_more_blocks_than_host_memory_has_reports_its_layers() {
    for place in PLACES {
        let (rig, directory) = (Rig::new(place), tempfile::tempdir().unwrap());
        let store = rig.open(directory.path(), 3);
        put_ok(&store, &keys(0..3), rig.bytes());
        put_ok(&store, &keys(3..6), rig.bytes());
        put_ok(&store, &keys(6..9), rig.bytes());
        let numbers: Vec<usize> = (0..9).collect();
        let (job, layers) = rig.get(&store, &numbers, rig.options());
        // The pins of these copies keep slots that the blocks from disk need.
        thread::scope(|scope| {
            scope.spawn(|| {
                while !job.has_ended() {
                    (0..3).for_each(|layer| rig.steered.copy(layer));
                    rig.steered.finish();
                    thread::yield_now();
                }
            });
            assert_eq!(layers.wait_until(.., soon()), Ok(true));
            rig.assert_has(0..LAYERS, &numbers);
        });
        assert!(job.wait().is_ok());
        assert_at_rest(&store);
    }
}

#[test]
fn blocks_in_spans_have_one_layer_which_arrives_with_all_blocks() {
    let (rig, directory) = (Rig::new(Place::Host), tempfile::tempdir().unwrap());
    let store = rig.open(directory.path(), 4);
    for first in [0, 4] {
        put_ok(&store, &keys(first..first + 4), rig.bytes());
    }
    let mut blocks = vec![vec![0; rig.bytes()]; 8];
    let list: Spans = spans(&mut blocks);
    // SAFETY: `blocks` outlives the wait below.
    let to = unsafe { Blocks::spans(list) };
    let job = store.get(&keys(0..8), to, JobOptions::new().layer_by_layer(), ()).unwrap();
    let layers = job.layers().unwrap();
    assert_eq!((layers.range(), layers.wait(0)), (0..1, Ok(())));
    for (number, block) in blocks.iter().enumerate() {
        assert!(*block == content(&key(number), rig.bytes()));
    }
    assert!(layers.wait(1).is_err() && job.wait().is_ok());
    assert_at_rest(&store);
}

#[test]
fn a_stream_waits_for_the_events_of_a_layer_which_need_no_arrival() {
    let (rig, directory) = (Rig::new(Place::Device), tempfile::tempdir().unwrap());
    let store = rig.open(directory.path(), 8);
    put_ok(&store, &keys(0..2), rig.bytes());
    let (job, layers) = rig.get(&store, &[0, 1], rig.options());
    assert_eq!(layers.events_until(0, in_a_while()), Ok(None));
    // SAFETY: no driver gets the handle.
    let event = unsafe { EventHandle::from_raw(Default::default(), 7, Arc::new(()) as _) };
    rig.steered.submitted(0, &event);
    assert_eq!(layers.events(0), Ok(vec![event.clone()]));
    assert_eq!(layers.wait_until(0, Instant::now()), Ok(false));
    rig.steered.copy(0);
    assert_eq!((layers.events(0), layers.events(3..3)), (Ok(vec![]), Ok(vec![])));
    rig.steered.submitted(1, &event);
    rig.steered.submitted(2, &event);
    assert_eq!(layers.events(..), Ok(vec![event]));
    rig.steered.fail();
    assert_eq!(layers.events(0), Ok(vec![]));
    assert_eq!(layers.events(1), Err(JobLayerError::Failed { layer: 1 }));
    assert!(!job.wait().is_ok());
    assert_at_rest(&store);
}

#[test]
fn a_wait_fails_as_soon_as_a_block_is_known_not_to_arrive() {
    for place in PLACES {
        let (rig, directory) = (Rig::new(place), tempfile::tempdir().unwrap());
        drop({
            let store = rig.open(directory.path(), 8);
            put_ok(&store, &keys(0..2), rig.bytes());
            store
        });
        let slot = u64::try_from(rig.bytes()).unwrap().next_multiple_of(4096);
        damage_byte(directory.path(), 1, slot, 9);
        let store = rig.open(directory.path(), 8);
        let promoted = store.promote(&keys(0..1), TierId::new(0), JobOptions::new()).unwrap();
        assert!(promoted.wait().is_ok());
        // An absent block, and one that is damaged on disk. The copy of the other block goes on.
        for other in [99, 1] {
            let (job, layers) = rig.get(&store, &[0, other], rig.options());
            assert_eq!(rig.steered.jobs(), 1);
            rig.steered.copy(0);
            assert_eq!(layers.wait_until(0, soon()), FAILED(0));
            assert!(layers.events(1) == Err(JobLayerError::Failed { layer: 1 }));
            assert!(!job.has_ended());
            rig.steered.finish();
            let outcome = job.wait();
            let wrong = matches!(outcome.results[1], BlockResult::Absent | BlockResult::Corrupt);
            assert!(outcome.results[0].is_ok() && wrong, "{outcome:?}");
            assert_eq!(layers.wait_until(.., soon()), FAILED(0));
        }
        assert_at_rest(&store);
    }
}

#[test]
fn a_copy_that_is_refused_or_fails_fails_the_layers_that_have_not_arrived() {
    for place in PLACES {
        let (rig, directory) = (Rig::new(place), tempfile::tempdir().unwrap());
        let store = rig.open(directory.path(), 8);
        put_ok(&store, &keys(0..2), rig.bytes());
        let hold = rig.cache.hold_for_write(&[TO]).unwrap();
        let (job, layers) = rig.get(&store, &[0], rig.options());
        assert_eq!((layers.wait_until(0, soon()), rig.steered.jobs()), (FAILED(0), 0));
        assert!(matches!(job.wait().results[..], [BlockResult::Failed(_)]));
        drop(hold);
        let (job, layers) = rig.get(&store, &[0, 1], rig.options());
        rig.steered.copy(0);
        assert_eq!(layers.wait_until(0, soon()), Ok(true));
        thread::scope(|scope| {
            let waits = scope.spawn(|| layers.wait_until(.., soon()));
            thread::sleep(Duration::from_millis(10));
            rig.steered.fail();
            assert_eq!(waits.join().unwrap(), FAILED(1));
        });
        assert!(matches!(job.wait().results[..], [BlockResult::Failed(_), BlockResult::Failed(_)]));
        // A layer that has arrived stays so.
        assert_eq!(layers.wait(0), Ok(()));
        assert_at_rest(&store);
    }
}

/// Ends of a job that is stopped while a thread waits for a layer.
#[derive(Clone, Copy, Debug)]
enum Stop {
    Cancel,
    Deadline,
    Close,
}

#[test]
fn a_thread_that_waits_for_a_layer_of_a_stopped_job_gets_a_failure() {
    for (place, stop) in PLACES
        .into_iter()
        .flat_map(|place| [Stop::Cancel, Stop::Deadline, Stop::Close].map(|stop| (place, stop)))
    {
        let (rig, directory) = (Rig::new(place), tempfile::tempdir().unwrap());
        let store = rig.open(directory.path(), 8);
        put_ok(&store, &keys(0..2), rig.bytes());
        assert_at_rest(&store);
        let mut options = rig.options();
        if matches!(stop, Stop::Deadline) {
            options = options.deadline(in_a_while());
        }
        let (job, layers) = rig.get(&store, &[0, 1], options);
        rig.steered.copy(0);
        thread::scope(|scope| {
            let waits = scope.spawn(|| layers.wait(1));
            let closes = match stop {
                Stop::Cancel => {
                    job.cancel();
                    None
                }
                Stop::Deadline => {
                    thread::sleep(Duration::from_millis(40));
                    None
                }
                Stop::Close => Some(scope.spawn(|| store.close(Instant::now()))),
            };
            // The copy is the engine's, which finds the stop.
            while rig.steered.0.lock().unwrap().iter().any(|job| job.reason_to_stop().is_none()) {
                thread::yield_now();
            }
            rig.steered.finish();
            assert_eq!(waits.join().unwrap(), Err(JobLayerError::Failed { layer: 1 }), "{stop:?}");
            if let Some(closes) = closes {
                assert_eq!(closes.join().unwrap().left, 1);
            }
        });
        let results = job.wait().results;
        let stopped =
            |it: &BlockResult| matches!(it, BlockResult::Cancelled | BlockResult::TimedOut);
        assert!(results.iter().all(stopped), "{results:?}");
        assert_eq!(layers.wait(0), Ok(()));
    }
}

#[test]
fn a_thread_that_waits_for_a_layer_before_its_copies_begin_gets_the_failure_of_the_job() {
    for cancels in [true, false] {
        let (rig, directory) = (Rig::new(Place::Device), tempfile::tempdir().unwrap());
        let store = rig.open(directory.path(), 4);
        put_ok(&store, &keys(0..4), rig.bytes());
        put_ok(&store, &keys(4..8), rig.bytes());
        // All slots are pinned, so the blocks from disk wait for one.
        let lease = store.acquire(0, &keys(4..8), Duration::from_secs(600));
        let mut options = rig.options();
        if !cancels {
            options = options.deadline(in_a_while());
        }
        rig.others.hold();
        let (job, layers) = rig.get(&store, &[0, 1], options);
        thread::scope(|scope| {
            let waits = scope.spawn(|| layers.wait(0));
            if cancels {
                thread::sleep(Duration::from_millis(10));
                job.cancel();
            }
            assert_eq!(waits.join().unwrap(), Err(JobLayerError::Failed { layer: 0 }));
        });
        rig.others.release_all();
        assert!(job.wait().results.iter().all(|result| !result.is_ok()));
        drop(lease);
        assert_at_rest(&store);
    }
}

#[test]
fn layers_of_random_gets_have_the_bytes_that_their_job_has() {
    for place in PLACES {
        let options = SimulatedEngineOptions::default()
            .reordering(7)
            .delaying(Duration::from_micros(20))
            .threads(2.try_into().unwrap());
        let (rig, directory) = (Rig::with(place, options, false), tempfile::tempdir().unwrap());
        let store = rig.open(directory.path(), 6);
        let mut random = Seeded::new(11);
        let (mut whole, mut partial, mut early) = (0, 0, 0);
        for first in (0..12).step_by(3) {
            put_ok(&store, &keys(first..first + 3), rig.bytes());
        }
        for _ in 0..300 {
            let mut numbers: Vec<usize> = (0..16).collect();
            random.shuffle(&mut numbers);
            numbers.truncate(1 + random.below(9));
            if random.below(4) > 0 {
                numbers.retain(|&number| number < 12);
            }
            let mut options = rig.options();
            let mut cancels = false;
            match random.below(10) {
                0 => rig.others.fail_next(Fault::ShortCopy { after_runs: random.below(4) }),
                1 => rig.others.fail_next(Fault::DropJob),
                2 => {
                    let time = u64::try_from(random.below(900)).unwrap();
                    options = options.deadline(Instant::now() + Duration::from_micros(time));
                }
                3 => cancels = true,
                _ => {}
            }
            let (job, layers) = rig.get(&store, &numbers, options);
            let arrived = thread::scope(|scope| {
                let waits: Vec<_> = (0..3_u32)
                    .map(|layer| {
                        let (rig, layers, numbers, job) = (&rig, &layers, &numbers, &job);
                        scope.spawn(move || {
                            layers.wait(layer).is_ok().then(|| {
                                let is_early = !job.has_ended();
                                let at = usize::try_from(layer).unwrap();
                                rig.assert_has(at..at + 1, numbers);
                                is_early
                            })
                        })
                    })
                    .collect();
                if cancels {
                    job.cancel();
                }
                waits.into_iter().map(|wait| wait.join().unwrap()).collect::<Vec<_>>()
            });
            early += arrived.iter().flatten().filter(|&&is_early| is_early).count();
            let outcome = job.wait();
            let all = arrived.iter().all(Option::is_some);
            if outcome.is_ok() {
                assert!(all, "{outcome:?} {arrived:?}");
                rig.assert_has(0..LAYERS, &numbers);
                whole += 1;
            } else {
                partial += 1;
            }
        }
        assert!(whole > 100 && partial > 30 && early > 50, "{whole} {partial} {early}");
        assert_at_rest(&store);
    }
}
