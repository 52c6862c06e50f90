//! Transfers by way of bounce memory.

use std::any::Any;
use std::error::Error;
use std::num::NonZeroUsize;
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::{Duration, Instant};

use terrane_core::{Alignment, Allocate, AllocateError, ByteCount, Durability, StorageKind};
use terrane_layout::{LayoutConfig, LayoutKind};
use terrane_storage::{DiskAllocator, DiskOptions, SystemAllocator, SystemOptions};
use terrane_testkit::conformance::copy_engine::{self, EngineFixture, check_copy_engine, end_of};
use terrane_testkit::device::SimulatedStream;
use terrane_testkit::engine::{Fault, InjectedFault, SimulatedEngine, SimulatedEngineOptions};
use terrane_testkit::fault::{Failing, FaultInjectingAllocator};
use terrane_testkit::memory::HeapAllocator;
use terrane_testkit::pattern::Pattern;
use terrane_transfer::engines::{
    DiskEngine, DiskEngineOptions, HostEngine, HostEngineOptions, RelayEngine, RelayOptions,
    RelaySlots, RelayStep, StepFailed,
};
use terrane_transfer::{
    CopyEngine, CopyJob, Declined, DeviceOrder, Endpoint, Quote, Terms, Transfer, TransferError,
    TransferManager, TransferPlan,
};

use crate::support::*;

/// An engine between devices and pinned memory, as a driver's is.
pub fn to_device() -> SimulatedEngineOptions {
    SimulatedEngineOptions::default().named("device").serving(|from, to| {
        (from.is_device() && to == StorageKind::Pinned)
            || (from == StorageKind::Pinned && to.is_device())
    })
}

/// A stand-in for whatever is on the other side of the bounce memory.
pub fn to_system() -> SimulatedEngineOptions {
    SimulatedEngineOptions::default().named("system").serving(|from, to| {
        (from == StorageKind::System && to == StorageKind::Pinned)
            || (from == StorageKind::Pinned && to == StorageKind::System)
    })
}

fn slots(slots: usize, slot_bytes: u64) -> RelayOptions {
    RelayOptions { slots, slot_bytes: ByteCount::new(slot_bytes) }
}

/// What the other hop is made by.
#[derive(Clone, Copy, PartialEq)]
enum Other {
    Disk,
    Host,
}

struct Relayed {
    other: Other,
    options: RelayOptions,
    device: SimulatedEngineOptions,
    directory: tempfile::TempDir,
    pinned: HeapAllocator,
}

impl Relayed {
    fn new(other: Other, options: RelayOptions) -> Self {
        let directory = tempfile::tempdir().unwrap();
        Self { other, options, device: to_device(), directory, pinned: HeapAllocator::pinned() }
    }
}

impl EngineFixture for Relayed {
    fn engine(&self) -> Arc<dyn CopyEngine> {
        let device = Arc::new(SimulatedEngine::new(self.device.clone()));
        let other: Arc<dyn CopyEngine> = match self.other {
            Other::Disk => Arc::new(DiskEngine::new(&DiskEngineOptions::default()).unwrap()),
            Other::Host => Arc::new(HostEngine::new(HostEngineOptions::default()).unwrap()),
        };
        let relay = RelayEngine::new(device, other, self.pinned.clone(), &self.options);
        Arc::new(relay.unwrap())
    }

    fn ends(&self) -> &[&'static str] {
        match self.other {
            Other::Disk => &["device", "file", "aligned file"],
            Other::Host => &["device", "heap"],
        }
    }

    fn endpoint(&self, end: &str, config: LayoutConfig, kind: LayoutKind) -> Endpoint {
        let files = || DiskAllocator::new(self.directory.path(), DiskOptions::default()).unwrap();
        match end {
            "device" => endpoint_in(&HeapAllocator::simulated_device(0), config, kind),
            "heap" => endpoint_in(&HeapAllocator::system(), config, kind),
            "file" => endpoint_in(&files(), config, kind),
            _ => {
                let aligned = config.with_block_alignment(Alignment::PAGE).unwrap();
                endpoint_in(&files(), aligned, kind)
            }
        }
    }

    fn serves(&self, source: &str, destination: &str) -> bool {
        (source == "device") != (destination == "device")
    }

    fn unserved(&self, config: LayoutConfig) -> Option<Endpoint> {
        Some(endpoint_in(&HeapAllocator::pinned(), config, CONTIGUOUS))
    }

    fn unreached(&self) -> Option<(DeviceOrder, Box<dyn Any>)> {
        Some(unreached())
    }
}

#[test]
fn device_and_disk_conform() {
    let fixture = Relayed::new(Other::Disk, RelayOptions::default());
    check_copy_engine(&fixture);
    // The last engine dropped on a thread of its own, which ends by itself.
    until(|| fixture.pinned.live() == 0);
}

#[test]
fn device_and_system_conform() {
    check_copy_engine(&Relayed::new(Other::Host, RelayOptions::default()));
}

/// Slots that hold a layer of any of the suite's blocks, and not every block; a single one of
/// them; and a device that takes its jobs and their runs in any order.
#[test]
fn relays_conform_when_everything_is_scarce() {
    let three = NonZeroUsize::new(3).unwrap();
    for (other, count) in [(Other::Disk, 3), (Other::Host, 1)] {
        let mut fixture = Relayed::new(other, slots(count, 80 << 10));
        fixture.device = to_device().reordering(7).threads(three);
        check_copy_engine(&fixture);
    }
}

/// Slots of one layer, of two, of one block and of a little more, of the suite's odd blocks.
#[test]
fn blocks_larger_than_a_slot_and_of_its_very_size_are_copied() {
    for (other, slot_bytes) in
        [(Other::Host, 210), (Other::Disk, 420), (Other::Host, 630), (Other::Disk, 1300)]
    {
        let fixture = Relayed::new(other, slots(3, slot_bytes));
        copy_engine::bytes_are_exact_and_neighbours_untouched(&fixture);
        copy_engine::reports_say_what_was_done(&fixture);
        copy_engine::many_transfers_in_flight_all_end_well(&fixture);
    }
}

/// A relay between simulated engines that the test steers.
struct Steered {
    /// Drops first: a relay waits for its parts, and a test that fails must not.
    _release: [ReleaseAll; 2],
    device: Arc<SimulatedEngine>,
    system: Arc<SimulatedEngine>,
    relay: Arc<RelayEngine>,
    manager: TransferManager,
    source: Endpoint,
    destination: Endpoint,
}

/// Lets go of what an engine holds back.
struct ReleaseAll(Arc<SimulatedEngine>);

impl Drop for ReleaseAll {
    fn drop(&mut self) {
        self.0.release_all();
    }
}

/// Of `shape()`.
const BLOCK: u64 = 4 * 2 * PIECE;

impl Steered {
    fn new(options: &RelayOptions) -> Self {
        Self::over(HeapAllocator::pinned(), options)
    }

    fn over(bounce: impl Allocate + Send + Sync + 'static, options: &RelayOptions) -> Self {
        let device = Arc::new(SimulatedEngine::new(to_device()));
        let system = Arc::new(SimulatedEngine::new(to_system()));
        let relay = RelayEngine::new(device.clone(), system.clone(), bounce, options).unwrap();
        let relay = Arc::new(relay);
        let manager = TransferManager::new([relay.clone() as _]);
        let source = endpoint_in(&HeapAllocator::simulated_device(0), config(16), OUTER_FIRST);
        let destination = endpoint(config(16), CONTIGUOUS);
        Pattern::new(1).fill(&source).unwrap();
        let _release = [ReleaseAll(system.clone()), ReleaseAll(device.clone())];
        Self { _release, device, system, relay, manager, source, destination }
    }

    fn transfer(&self, from: &[u32], to: &[u32]) -> Transfer {
        Transfer::new(&self.source, &self.destination)
            .blocks(from, to)
            .device_order(DeviceOrder::AlreadySynchronised)
    }
}

/// Waits for what other threads bring about.
#[track_caller]
fn until(condition: impl Fn() -> bool) {
    let begun = Instant::now();
    while !condition() {
        assert!(begun.elapsed() < Duration::from_secs(60), "it did not come about");
        thread::yield_now();
    }
}

#[test]
fn first_hops_go_on_while_second_hops_run_in_as_many_slots_as_there_are() {
    let rig = Steered::new(&slots(3, BLOCK));
    rig.system.hold();
    let all: Vec<u32> = (0..8).collect();
    let completion = rig.manager.submit(rig.transfer(&all, &all), ()).unwrap();
    // Of eight chunks three have slots. The second hop of one is held, for which those of the
    // others wait.
    until(|| rig.device.ended() == 3);
    rig.device.wait_until_idle();
    until(|| rig.system.queued() == 1);
    assert_eq!((rig.device.ended(), rig.relay.slots().held), (3, 3));
    assert!(completion.copied().is_zero(), "nothing has arrived");
    rig.system.release(1);
    until(|| rig.device.ended() == 4 && rig.system.queued() == 1);
    assert_eq!(completion.copied(), ByteCount::new(BLOCK));
    rig.system.release_all();
    end_of(completion).result.unwrap();
    Pattern::new(1).verify_blocks(&rig.destination, &all, &all, 0..4).unwrap().assert_clean("all");
}

/// Engines that share themselves out among their jobs end all of them together. So they get few at
/// a time, and go on while the other hop of what they have done is under way.
#[test]
fn an_engine_has_a_part_of_the_chunks_at_a_time() {
    let rig = Steered::new(&slots(8, BLOCK));
    let all: Vec<u32> = (0..16).collect();
    rig.device.hold();
    rig.system.hold();
    let completion = rig.manager.submit(rig.transfer(&all, &all), ()).unwrap();
    until(|| rig.device.queued() == 4);
    // One more has a slot, so as to be next.
    until(|| rig.relay.slots().held == 5);
    rig.device.release(2);
    until(|| rig.system.queued() == 2 && rig.device.queued() == 4);
    rig.device.release(4);
    // The other hop has its share; further ones wait for it, in the slots that there are.
    until(|| rig.system.queued() == 4 && rig.relay.slots().held == 8);
    rig.device.release_all();
    until(|| rig.device.ended() == 8);
    assert_eq!(rig.system.queued(), 4);
    rig.system.release_all();
    end_of(completion).result.unwrap();
    Pattern::new(1).verify_blocks(&rig.destination, &all, &all, 0..4).unwrap().assert_clean("all");
}

#[test]
fn transfers_take_turns_at_the_slots() {
    let rig = Steered::new(&slots(1, BLOCK));
    rig.system.hold();
    let many: Vec<u32> = (0..8).collect();
    let long = rig.manager.submit(rig.transfer(&many, &many), ()).unwrap();
    until(|| rig.system.queued() == 1);
    let short = rig.manager.submit(rig.transfer(&[9], &[9]), ()).unwrap();
    // The long one has begun, and waits for its next turn: before the short one or behind it.
    rig.system.release(3);
    end_of(short).result.unwrap();
    assert!(!long.has_ended());
    rig.system.release_all();
    end_of(long).result.unwrap();
}

#[test]
fn idle_slots_are_freed_and_had_again() {
    let pinned = HeapAllocator::pinned();
    let rig = Steered::over(pinned.clone(), &slots(4, BLOCK));
    assert_eq!(pinned.live(), 1);
    let all: Vec<u32> = (0..8).collect();
    for _ in 0..2 {
        rig.system.hold();
        let completion = rig.manager.submit(rig.transfer(&all, &all), ()).unwrap();
        until(|| rig.device.ended() % 8 == 4 && rig.relay.slots().held == 4);
        assert_eq!((pinned.live(), rig.relay.trim()), (4, ByteCount::ZERO));
        rig.system.release_all();
        end_of(completion).result.unwrap();
        assert_eq!(rig.relay.trim(), ByteCount::new(3 * BLOCK));
        assert_eq!((pinned.live(), rig.relay.slots().held), (1, 1));
    }
    let Steered { device, system, relay, manager, .. } = rig;
    drop((device, system, manager, relay));
    pinned.assert_all_freed();
}

#[test]
fn without_memory_there_is_no_relay_and_with_little_it_goes_on() {
    let failing = |which| FaultInjectingAllocator::new(HeapAllocator::pinned(), which);
    let host = Arc::new(HostEngine::new(HostEngineOptions::default()).unwrap());
    let options = slots(3, BLOCK);
    let error =
        RelayEngine::new(host.clone(), host, failing(Failing::Call(0)), &options).unwrap_err();
    assert!(matches!(error, TransferError::EngineNotStarted { engine: "relay", .. }), "{error:?}");
    assert!(error.source().unwrap().is::<AllocateError>());

    let second_on = Failing::When(Box::new({
        let calls = Mutex::new(0);
        move |_| {
            *calls.lock().unwrap() += 1;
            *calls.lock().unwrap() > 1
        }
    }));
    let rig = Steered::over(failing(second_on), &options);
    let all: Vec<u32> = (0..8).collect();
    end_of(rig.manager.submit(rig.transfer(&all, &all), ()).unwrap()).result.unwrap();
    let RelaySlots { held, most, refused } = rig.relay.slots();
    assert_eq!((held, most), (1, 3));
    assert!(refused > 0);
}

#[test]
fn a_failure_of_either_hop_names_the_blocks_and_the_cause() {
    for (fails, step) in [("device", RelayStep::IntoBounce), ("system", RelayStep::OutOfBounce)] {
        let rig = Steered::new(&slots(3, 2 * BLOCK));
        let engine = if fails == "device" { &rig.device } else { &rig.system };
        engine.fail_next(Fault::ShortCopy { after_runs: 0 });
        // In ascending order of the destination: 7 to 2 and 6 to 4 are the first chunk.
        let transfer = rig.transfer(&[6, 9, 7, 3], &[4, 10, 2, 12]);
        let error = end_of(rig.manager.submit(transfer, ()).unwrap()).result.unwrap_err();
        let TransferError::Copy { source_block: 7, destination_block: 2, .. } = error else {
            panic!("{error:?}");
        };
        let failed = error.source().unwrap().downcast_ref::<StepFailed>().unwrap();
        assert_eq!((failed.step, failed.engine), (step, fails));
        assert!(failed.source().unwrap().is::<InjectedFault>(), "{failed:?}");
        assert_unclaimed(&rig.source);
        assert_unclaimed(&rig.destination);

        for fault in [Fault::Engine, Fault::DropJob] {
            engine.fail_next(fault);
            let completion = rig.manager.submit(rig.transfer(&[1], &[1]), ()).unwrap();
            let error = end_of(completion).result.unwrap_err();
            assert!(matches!(error, TransferError::Engine { engine: "relay", .. }), "{error:?}");
            let failed = error.source().unwrap().downcast_ref::<StepFailed>().unwrap();
            assert_eq!((failed.step, failed.engine), (step, fails));
        }
        // Every slot has come back.
        let all: Vec<u32> = (0..16).collect();
        end_of(rig.manager.submit(rig.transfer(&all, &all), ()).unwrap()).result.unwrap();
    }
}

#[test]
fn a_failed_transfer_waits_for_what_is_in_flight_of_it() {
    let rig = Steered::new(&slots(4, BLOCK));
    rig.system.hold();
    rig.system.fail_next(Fault::Engine);
    let all: Vec<u32> = (0..8).collect();
    let completion = rig.manager.submit(rig.transfer(&all, &all), ()).unwrap();
    // Two are on their second hop, and two wait for theirs.
    until(|| rig.system.queued() == 2 && rig.device.ended() == 4);
    rig.system.release(1);
    until(|| rig.system.ended() == 1);
    // A transfer through the same thread and the slot that came back: what comes before it has
    // been dealt with.
    let other = rig.manager.submit(rig.transfer(&[9], &[9]), ()).unwrap();
    until(|| rig.system.queued() == 2);
    assert!(!completion.has_ended(), "a chunk is still on its way to the destination");
    rig.system.release_all();
    assert!(end_of(completion).result.is_err());
    end_of(other).result.unwrap();
    assert_eq!(rig.device.ended(), 5, "a chunk was begun after the failure");
    assert_eq!(rig.system.ended(), 3, "so was a second hop");
    // Every slot has come back.
    end_of(rig.manager.submit(rig.transfer(&all, &all), ()).unwrap()).result.unwrap();
    assert_eq!(rig.relay.trim(), ByteCount::new(3 * BLOCK));
}

#[test]
fn a_device_order_is_that_of_the_submission_and_holds_no_slot() {
    for back in [false, true] {
        let rig = Steered::new(&slots(1, BLOCK));
        let stream = SimulatedStream::new(Default::default());
        stream.launch();
        let (from, to) = if back {
            Pattern::new(1).fill(&rig.destination).unwrap();
            (&rig.destination, &rig.source)
        } else {
            (&rig.source, &rig.destination)
        };
        let blocks = [0, 1, 2];
        let transfer = Transfer::new(from, to).blocks(&blocks, &blocks);
        let ordered = rig.manager.submit(transfer.device_order(stream.order()), ()).unwrap();
        // What the device is given later is none of the transfer's business.
        stream.launch();
        let other = rig.manager.submit(rig.transfer(&[9], &[9]), ()).unwrap();
        end_of(other).result.unwrap();
        assert!(!ordered.has_ended() && ordered.copied().is_zero());
        stream.finish_one();
        end_of(ordered).result.unwrap();
        let found = Pattern::new(1).verify_blocks(to, &blocks, &blocks, 0..4).unwrap();
        found.assert_clean("after the stream");
    }
}

#[test]
fn a_stream_that_is_unknown_is_declined() {
    let rig = Steered::new(&slots(1, BLOCK));
    let gone = SimulatedStream::new(Default::default()).order();
    let cause = refused(&rig.manager, rig.transfer(&[0], &[0]).device_order(gone));
    let TransferError::NoEngine { declined, .. } = cause else { panic!("{cause:?}") };
    assert_eq!(declined, [("relay", Declined::DeviceOrder)]);
}

#[test]
fn a_layer_that_fits_no_slot_is_declined() {
    let rig = Steered::new(&slots(4, 2 * PIECE - 1));
    let cause = refused(&rig.manager, rig.transfer(&[0], &[0]));
    let TransferError::NoEngine { declined, .. } = cause else { panic!("{cause:?}") };
    assert_eq!(declined, [("relay", Declined::SlotTooSmall)]);
}

#[test]
fn both_hops_are_explained_and_the_slower_one_is_predicted() {
    let millis = Duration::from_millis;
    let device = Arc::new(SimulatedEngine::new(to_device().predicting(millis(2))));
    let system = Arc::new(SimulatedEngine::new(to_system().predicting(millis(5))));
    let relay = RelayEngine::new(device, system, HeapAllocator::pinned(), &slots(3, BLOCK));
    let manager = TransferManager::new([Arc::new(relay.unwrap()) as _]);
    let source = endpoint_in(&HeapAllocator::simulated_device(0), config(8), OUTER_FIRST);
    let destination = endpoint(config(8), CONTIGUOUS);
    let transfer = |blocks: &[u32]| {
        Transfer::new(&source, &destination)
            .blocks(blocks, blocks)
            .device_order(DeviceOrder::AlreadySynchronised)
    };
    let explained = manager.explain(&transfer(&[0, 1, 2, 3])).unwrap();
    assert_eq!(explained.path, "simulated copy by device, then simulated copy by system");
    assert!(explained.reason.contains("pinned memory, in 4 chunks of up to 480 B"), "{explained}");
    assert_eq!(explained.predicted, millis(2 + 5 + 3 * 5));
    assert_eq!(manager.explain(&transfer(&[0])).unwrap().predicted, millis(7));
}

/// Notes the terms and the bytes of the jobs that pass.
#[derive(Debug)]
struct Noting {
    inner: Arc<dyn CopyEngine>,
    jobs: Mutex<Vec<(Terms, ByteCount)>>,
}

// SAFETY: it is the other engine that executes jobs.
unsafe impl CopyEngine for Noting {
    fn name(&self) -> &'static str {
        self.inner.name()
    }
    fn quote(&self, plan: &TransferPlan, terms: &Terms) -> Result<Quote, Declined> {
        self.inner.quote(plan, terms)
    }
    fn submit(&self, job: CopyJob) {
        self.jobs.lock().unwrap().push((job.terms().clone(), job.plan().bytes()));
        self.inner.submit(job);
    }
}

#[test]
fn files_are_made_durable_once_when_all_is_written() {
    let directory = tempfile::tempdir().unwrap();
    for (stated, asked) in [
        (Durability::None, Durability::Full),
        (Durability::Data, Durability::None),
        (Durability::None, Durability::None),
    ] {
        let disk = Arc::new(DiskEngine::new(&DiskEngineOptions::default()).unwrap());
        let disk = Arc::new(Noting { inner: disk, jobs: Mutex::default() });
        let device = Arc::new(SimulatedEngine::new(to_device()));
        let relay =
            RelayEngine::new(device, disk.clone(), HeapAllocator::pinned(), &slots(3, BLOCK));
        let manager = TransferManager::new([Arc::new(relay.unwrap()) as _]);
        let options = DiskOptions { durability: stated, ..DiskOptions::default() };
        let files = DiskAllocator::new(directory.path(), options).unwrap();
        let file = endpoint_in(&files, config(4), CONTIGUOUS);
        let source = endpoint_in(&HeapAllocator::simulated_device(0), config(4), BLOCK_FIRST);
        let transfer = Transfer::new(&source, &file)
            .blocks(&[0, 1, 2, 3], &[3, 1, 0, 2])
            .device_order(DeviceOrder::AlreadySynchronised)
            .durability(asked);
        run(&manager, transfer);
        let mut jobs = std::mem::take(&mut *disk.jobs.lock().unwrap());
        if stated.max(asked) > Durability::None {
            let (last, bytes) = jobs.pop().unwrap();
            assert_eq!((last.durability, bytes), (asked, ByteCount::ZERO));
            assert!(!last.more_follows);
        }
        assert_eq!(jobs.len(), 4);
        assert!(jobs.iter().all(|(terms, _)| terms.more_follows));
    }
}

/// Pages in memory and in the file: the disk's hop goes around the page cache, as it does without
/// a relay.
#[test]
fn files_are_reached_directly() {
    let directory = tempfile::tempdir().unwrap();
    let config = shape().num_blocks(8).page_size(16).inner_dim(1024).build().unwrap();
    let files = DiskAllocator::new(directory.path(), DiskOptions::default()).unwrap();
    let file = endpoint_in(&files, config, CONTIGUOUS);
    let device = endpoint_in(&HeapAllocator::simulated_device(0), config, OUTER_FIRST);
    let system = endpoint_in(&SystemAllocator::new(SystemOptions::default()), config, CONTIGUOUS);
    let disk = Arc::new(DiskEngine::new(&DiskEngineOptions::default()).unwrap());
    let by_itself = TransferManager::new([disk.clone() as _]);
    let explained =
        by_itself.explain(&Transfer::new(&system, &file).blocks(&[0, 1], &[0, 1])).unwrap();
    if explained.path != "direct vectored" {
        eprintln!("skipped: files_are_reached_directly: {}", explained.reason);
        return;
    }
    let engine = Arc::new(SimulatedEngine::new(to_device()));
    let relay =
        RelayEngine::new(engine, disk, HeapAllocator::pinned(), &RelayOptions::default()).unwrap();
    let manager = TransferManager::new([Arc::new(relay) as _]);
    let order = DeviceOrder::AlreadySynchronised;
    for (from, to) in [(&device, &file), (&file, &device)] {
        let transfer = Transfer::new(from, to).blocks(&[0, 1], &[0, 1]).device_order(order);
        let explained = manager.explain(&transfer).unwrap();
        assert!(explained.path.contains("direct vectored by disk"), "{explained}");
    }
}

/// Blocks go to and fro through one slot, two and three, by two relays that share their engines,
/// from several threads; should slots ever wait for one another, this does not end.
#[test]
fn to_and_fro_at_once_nothing_waits_for_ever() {
    const THREADS: u32 = 4;
    for count in 1..=3 {
        let device = Arc::new(SimulatedEngine::new(to_device().reordering(count)));
        let host = Arc::new(HostEngine::new(HostEngineOptions::default()).unwrap());
        let options = slots(usize::try_from(count).unwrap(), BLOCK / 2);
        let relay = || {
            let pinned = HeapAllocator::pinned();
            Arc::new(RelayEngine::new(device.clone(), host.clone(), pinned, &options).unwrap())
        };
        let managers = [relay(), relay()].map(|relay| TransferManager::new([relay as _]));
        let here = endpoint_in(&HeapAllocator::simulated_device(0), config(16), OUTER_FIRST);
        let there = endpoint(config(16), CONTIGUOUS);
        Pattern::new(3).fill(&here).unwrap();
        thread::scope(|scope| {
            for number in 0..THREADS {
                let (managers, here, there) = (&managers, &here, &there);
                scope.spawn(move || {
                    let blocks: Vec<u32> = (number * 4..number * 4 + 4).collect();
                    let manager = &managers[usize::try_from(number % 2).unwrap()];
                    let mut last = None;
                    let mut all = Vec::new();
                    for round in 0..16 {
                        let ends = if round % 2 == 0 { (here, there) } else { (there, here) };
                        let mut transfer = Transfer::new(ends.0, ends.1)
                            .blocks(&blocks, &blocks)
                            .device_order(DeviceOrder::AlreadySynchronised);
                        if let Some(last) = &last {
                            transfer = transfer.after(last);
                        }
                        let completion = manager.submit(transfer, ()).unwrap();
                        last = Some(completion.ticket());
                        all.push(completion);
                    }
                    for completion in all {
                        end_of(completion).result.unwrap();
                    }
                });
            }
        });
        drop(managers);
        Pattern::new(3).verify(&here).unwrap().assert_clean("after all rounds");
        Pattern::new(3).verify(&there).unwrap().assert_clean("after all rounds");
    }
}

/// What a relay would be given is what it gives: each hop may itself be relayed.
#[test]
fn a_relay_may_be_a_hop_of_another() {
    for slot_bytes in [4 * BLOCK, BLOCK / 2, BLOCK / 4] {
        relay_over_a_relay(&slots(2, slot_bytes), &slots(2, BLOCK / 2));
    }
}

fn relay_over_a_relay(options: &RelayOptions, inner_options: &RelayOptions) {
    let device = Arc::new(SimulatedEngine::new(to_device()));
    let host = Arc::new(HostEngine::new(HostEngineOptions::default()).unwrap());
    let disk = Arc::new(DiskEngine::new(&DiskEngineOptions::default()).unwrap());
    let inner = RelayEngine::new(device, host, HeapAllocator::pinned(), inner_options).unwrap();
    let outer = RelayEngine::new(Arc::new(inner), disk, HeapAllocator::system(), options).unwrap();
    let manager = TransferManager::new([Arc::new(outer) as _]);
    let directory = tempfile::tempdir().unwrap();
    let files = DiskAllocator::new(directory.path(), DiskOptions::default()).unwrap();
    let file = endpoint_in(&files, config(8), CONTIGUOUS);
    let here = endpoint_in(&HeapAllocator::simulated_device(0), config(8), OUTER_FIRST);
    Pattern::new(5).fill(&here).unwrap();
    let blocks: Vec<u32> = (0..8).collect();
    let transfer = Transfer::new(&here, &file).blocks(&blocks, &blocks);
    run(&manager, transfer.device_order(DeviceOrder::AlreadySynchronised));
    Pattern::new(5).verify(&file).unwrap().assert_clean("through two slots");
}

#[test]
fn layers_are_told_of_as_they_arrive() {
    let rig = Steered::new(&slots(1, 4 * 2 * PIECE));
    rig.system.hold();
    // A slot holds one layer of four blocks.
    let blocks = [0, 1, 2, 3];
    let transfer = rig.transfer(&blocks, &blocks).layer_wise();
    let completion = rig.manager.submit(transfer, ()).unwrap();
    let layers = completion.layers().unwrap();
    for layer in 0..3 {
        rig.system.release(1);
        layers.wait(layer).unwrap();
        assert!(!layers.is_done(layer + 1));
    }
    rig.system.release_all();
    end_of(completion).result.unwrap();
    assert!(layers.is_done(3));
    let found = Pattern::new(1).verify_blocks(&rig.destination, &blocks, &blocks, 0..4);
    found.unwrap().assert_clean("all layers");
}

/// The last reference to the relay goes with a transfer that waited for one of another engine, on
/// that engine's thread, which the relay needs to end what it has begun.
#[test]
fn a_relay_may_drop_on_the_thread_of_an_engine_that_it_needs() {
    let rig = Steered::new(&slots(1, BLOCK));
    let both = TransferManager::new([rig.relay.clone() as _, rig.system.clone() as _]);
    let pinned = endpoint_in(&HeapAllocator::pinned(), config(16), CONTIGUOUS);
    rig.system.hold();
    let first = Transfer::new(&rig.destination, &pinned).blocks(&[5], &[5]);
    let first = both.submit(first, ()).unwrap();
    let all: Vec<u32> = (0..4).collect();
    let second = both.submit(rig.transfer(&all, &all).after(&first.ticket()), ()).unwrap();
    let Steered { system, relay, manager, .. } = rig;
    drop((both, manager, relay));
    system.release_all();
    end_of(first).result.unwrap();
    end_of(second).result.unwrap();
}
