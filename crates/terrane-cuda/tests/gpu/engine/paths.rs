//! Every path moves the right bytes.

use std::sync::Arc;
use std::time::Instant;

use terrane_core::{Allocate, ByteCount, Region, Requirement};
use terrane_cuda::{
    Calibration, CalibrationOptions, CopyPath, DeviceAllocator, DeviceEngine, DeviceEngineOptions,
    Direction, PinnedAllocator, PinnedOptions,
};
use terrane_layout::{LayoutBuilder, LayoutConfig, LayoutKind, LayoutPlan};
use terrane_testkit::conformance::copy_engine::{check_transfer, end_of, ordered};
use terrane_testkit::conformance::{EngineFixture, check_copy_engine};
use terrane_testkit::model::Image;
use terrane_testkit::random::Seeded;
use terrane_testkit::simulated_cuda::SimulatedCuda;
use terrane_transfer::{CopyEngine, Endpoint, Transfer, TransferManager};

use super::fixture::{
    APART, DEVICE, Fixture, LAYERS_APART, PEER, PINNED, config, endpoint, pinned,
};
use crate::needs::{LITTLE, Needs, device_with_kernels as device, two_devices};

const ALL: [&str; 3] = [DEVICE, APART, PINNED];

fn check_path(name: &str, path: CopyPath, ends: &[&'static str]) {
    let Some(context) = device(name, LITTLE) else { return };
    check_copy_engine(&Fixture::in_small_parts(&context, path, ends));
    assert_eq!((context.lost(), context.failed_drops()), (None, 0));
}

#[test]
fn the_calibrated_engine_conforms() {
    let Some(context) = device("the_calibrated_engine_conforms", LITTLE) else { return };
    check_copy_engine(&Fixture::new(&context, DeviceEngineOptions::default(), &ALL));
    assert_eq!((context.lost(), context.failed_drops()), (None, 0));
}

#[test]
fn contiguous_copies_conform() {
    check_path("contiguous_copies_conform", CopyPath::Contiguous, &ALL);
}

#[test]
fn a_copy_for_each_run_conforms() {
    check_path("a_copy_for_each_run_conforms", CopyPath::CopyEach, &ALL);
}

#[test]
fn batched_copies_conform() {
    check_path("batched_copies_conform", CopyPath::Batched, &ALL);
}

#[test]
fn the_direct_kernel_conforms() {
    check_path("the_direct_kernel_conforms", CopyPath::Direct, &ALL);
}

#[test]
fn the_staged_path_conforms() {
    check_path("the_staged_path_conforms", CopyPath::Staged, &ALL);
}

#[test]
fn the_relayout_kernel_conforms() {
    check_path("the_relayout_kernel_conforms", CopyPath::Relayout, &[DEVICE, APART]);
}

#[test]
fn paths_between_devices_conform() {
    let name = "paths_between_devices_conform";
    let Some([context, peer]) = two_devices(name, LITTLE) else { return };
    let ends = [DEVICE, PEER];
    let default = Fixture::new(&context, DeviceEngineOptions::default(), &ends);
    check_copy_engine(&default.beside(peer.clone()));
    for path in [CopyPath::Contiguous, CopyPath::CopyEach, CopyPath::Batched, CopyPath::Peer] {
        let fixture = Fixture::in_small_parts(&context, path, &ends).beside(peer.clone());
        let probe = |end| fixture.endpoint(end, config(1, 1, 1), LayoutKind::FullyContiguous);
        let (here, there) = (probe(DEVICE), probe(PEER));
        let transfer = ordered(Transfer::new(&here, &there), &here, &there).blocks(&[0], &[0]);
        match fixture.manager().explain(&transfer) {
            Ok(_) => check_copy_engine(&fixture),
            // Without peer access there is no such path.
            Err(error) => eprintln!("{path} is not there: {error}"),
        }
    }
    assert_eq!((context.lost(), peer.lost()), (None, None));
}

/// Some blocks of many, in random order.
fn some(random: &mut Seeded, of: u32, count: usize) -> Vec<u32> {
    let mut all: Vec<u32> = (0..of).collect();
    random.shuffle(&mut all);
    all.truncate(count);
    all
}

/// Larger than what the engine submits at once, with more blocks than a launch's parameters. The
/// buffers have room for many blocks, for one, and for less than one.
#[test]
fn large_transfers_in_many_parts_are_exact() {
    let needs = Needs { device: ByteCount::mib(256), host: ByteCount::mib(512) };
    let Some(context) = device("large_transfers_in_many_parts_are_exact", needs) else { return };
    let mut random = Seeded::new(7);
    let shape = config(400, 3, 2);
    let parts = [ByteCount::kib(2), ByteCount::kib(50), ByteCount::mib(1)];
    for path in [CopyPath::Staged, CopyPath::Direct, CopyPath::Batched] {
        for scratch in parts.into_iter().skip(usize::from(path != CopyPath::Staged)) {
            let options = DeviceEngineOptions {
                path: Some(path),
                scratch_bytes: scratch,
                request_bytes: scratch,
                ..DeviceEngineOptions::default()
            };
            let fixture = Fixture::new(&context, options, &ALL);
            let manager = fixture.manager();
            for host_kind in LayoutKind::ALL {
                let here = fixture.endpoint(APART, shape, LAYERS_APART);
                let there = fixture.endpoint(PINNED, shape, host_kind);
                Image::scribble(&here, fixture.access(), 1);
                Image::scribble(&there, fixture.access(), 2);
                for (from, to) in [(&here, &there), (&there, &here)] {
                    let (read, written) =
                        (some(&mut random, 400, 300), some(&mut random, 400, 300));
                    let access = fixture.access();
                    check_transfer(&manager, access, (from, &read), (to, &written), 0..3);
                }
            }
        }
    }
}

/// Blocks in registrations of 2 MiB, whatever the size of the blocks.
fn split(pinned: &PinnedAllocator, shape: LayoutConfig) -> Endpoint {
    let kind = LayoutKind::FullyContiguous;
    let plan = LayoutPlan::new(&shape, kind, pinned.limits()).unwrap();
    let request = plan.base_request().in_units_of(ByteCount::ZERO);
    let memory = pinned.allocate_memory(&request).unwrap();
    assert_eq!(memory.registration_length(), Some(ByteCount::mib(2)));
    let regions = plan.cut(&Region::new(memory)).unwrap();
    let layout = LayoutBuilder::new(shape).kind(kind).adopt(regions);
    Endpoint::new(layout.unregistered().build().unwrap()).unwrap()
}

/// No copy crosses from one registration into the next.
#[test]
fn registrations_are_not_crossed() {
    let needs = Needs { device: ByteCount::mib(256), host: ByteCount::mib(512) };
    let Some(context) = device("registrations_are_not_crossed", needs) else { return };
    let options = PinnedOptions {
        registration: Requirement::Required,
        largest_registration: ByteCount::mib(2),
        unit: ByteCount::ZERO,
        ..PinnedOptions::default()
    };
    let chunked = PinnedAllocator::new(&context, options).unwrap();
    // Blocks of 1.5 MiB. Every other block begins in one registration and ends in the next.
    let shape = config(4, 12, 256);
    for path in [None, Some(CopyPath::Contiguous), Some(CopyPath::Batched), Some(CopyPath::Staged)]
    {
        let options = DeviceEngineOptions { path, ..DeviceEngineOptions::default() };
        let fixture = Fixture::new(&context, options, &ALL);
        let manager = fixture.manager();
        for kind in [LayoutKind::FullyContiguous, LAYERS_APART] {
            let here = fixture.endpoint(DEVICE, shape, kind);
            let there = split(&chunked, shape);
            Image::scribble(&here, fixture.access(), 3);
            for (from, to) in [(&here, &there), (&there, &here)] {
                let blocks = [0, 1, 2, 3];
                check_transfer(&manager, fixture.access(), (from, &blocks), (to, &blocks), 0..12);
            }
        }
    }
    assert_eq!(context.lost(), None);
}

/// Memory that another library has pinned in pieces that only the driver knows.
#[test]
fn pinned_memory_of_other_libraries_is_served() {
    let Some(context) = device("pinned_memory_of_other_libraries_is_served", LITTLE) else {
        return;
    };
    let options = PinnedOptions { registration: Requirement::Off, ..PinnedOptions::default() };
    let of_driver = PinnedAllocator::new(&context, options).unwrap();
    let shape = config(8, 3, 4);
    let theirs = endpoint(&of_driver, shape, LayoutKind::FullyContiguous);
    // Adopted like other libraries' memory: a span and an owner, and no other facts.
    let adopted = |owner: &Endpoint| {
        let regions = owner.layout().regions().iter().map(|region| {
            // SAFETY: the owner keeps the bytes alive, and the test accesses them through one
            // endpoint at a time.
            let memory = unsafe { terrane_core::ForeignMemory::new(region.span(), region.clone()) };
            Region::new(memory)
        });
        let builder = LayoutBuilder::new(shape).fully_contiguous();
        let layout = builder.adopt(regions.collect::<Vec<_>>()).unregistered().build().unwrap();
        // SAFETY: as above.
        unsafe { Endpoint::sharing(layout) }
    };
    let there = adopted(&theirs);
    for path in [None, Some(CopyPath::Direct), Some(CopyPath::Staged)] {
        let options = DeviceEngineOptions { path, ..DeviceEngineOptions::default() };
        let fixture = Fixture::new(&context, options, &ALL);
        let here = fixture.endpoint(DEVICE, shape, LAYERS_APART);
        Image::scribble(&here, fixture.access(), 4);
        let manager = fixture.manager();
        for (from, to) in [(&here, &there), (&there, &here)] {
            check_transfer(&manager, fixture.access(), (from, &[1, 2, 7]), (to, &[0, 5, 3]), 0..3);
        }
    }
}

/// Between devices, measured costs replace the built-in ones, unless `peers` is off.
#[test]
fn peers_are_measured() {
    let needs = Needs { device: ByteCount::mib(512), host: ByteCount::mib(512) };
    let Some([context, peer]) = two_devices("peers_are_measured", needs) else { return };
    let mut options = CalibrationOptions::default();
    (options.bytes, options.repetitions) = (ByteCount::mib(1), 1);
    let built_in = Calibration::built_in();
    let measured = options.measure(&context).unwrap();
    options.peers = false;
    let without = options.measure(&context).unwrap();
    for direction in [Direction::ToPeer, Direction::FromPeer] {
        let cost = |calibration: &Calibration, path| *calibration.cost(direction, path).unwrap();
        assert_ne!(cost(&measured, CopyPath::CopyEach), cost(&built_in, CopyPath::CopyEach));
        for path in [CopyPath::CopyEach, CopyPath::Batched, CopyPath::Peer] {
            assert_eq!(cost(&without, path), cost(&built_in, path), "{direction:?} {path}");
        }
    }
    assert_eq!((context.lost(), peer.lost()), (None, None));
}

/// A second device without enough memory is not measured.
#[test]
fn a_peer_without_room_is_not_measured() {
    let name = "a_peer_without_room_is_not_measured";
    let needs = Needs { device: ByteCount::mib(512), host: ByteCount::mib(512) };
    let Some([context, peer]) = two_devices(name, needs) else { return };
    let Some(driver) = SimulatedCuda::find() else {
        return eprintln!("skipped: {name}: no simulated driver, which refuses what it is told to");
    };
    let mut options = CalibrationOptions::default();
    (options.bytes, options.repetitions) = (ByteCount::mib(1), 1);
    // First the engine's own memory is allocated, then two regions of this device, and one of the
    // other device.
    let before = allocations(&driver, || drop(DeviceEngine::new(&context, options.engine.clone())));
    driver.fail("cuMemAlloc_v2", before + 2, 2);
    let measured = options.measure(&context).unwrap();
    assert_eq!(driver.clear_faults(), 0);
    for direction in [Direction::ToPeer, Direction::FromPeer] {
        let cost =
            |calibration: &Calibration| *calibration.cost(direction, CopyPath::CopyEach).unwrap();
        assert_eq!(cost(&measured), cost(&Calibration::built_in()), "{direction:?}");
    }
    assert_eq!((context.lost(), peer.lost()), (None, None));
}

/// The number of device allocations of a call on this thread.
fn allocations(driver: &SimulatedCuda, call: impl FnOnce()) -> u64 {
    let before = driver.calls(Some("cuMemAlloc_v2"));
    call();
    driver.calls(Some("cuMemAlloc_v2")) - before
}

#[test]
fn a_calibration_is_measured_saved_and_used() {
    let needs = Needs { device: ByteCount::mib(512), host: ByteCount::mib(512) };
    let name = "a_calibration_is_measured_saved_and_used";
    let Some(context) = device(name, needs) else { return };
    let mut options = CalibrationOptions::default();
    (options.bytes, options.repetitions) = (ByteCount::mib(1), 1);
    let begun = Instant::now();
    let measured = options.measure(&context).unwrap();
    eprintln!("measured: a calibration in {:.2?}", begun.elapsed());
    assert_eq!(measured.device(), context.device().name);
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("calibration.json");
    measured.save(&file).unwrap();
    let loaded = Calibration::load(&file, &context.device().name).unwrap();
    assert_eq!(loaded, measured);
    let options = DeviceEngineOptions { calibration: Some(loaded), ..Default::default() };
    let engine = DeviceEngine::new(&context, options).unwrap();
    assert_eq!(engine.calibration(), &measured);
    let manager = TransferManager::new([Arc::new(engine) as Arc<dyn CopyEngine>]);
    let shape = config(64, 8, 16);
    let here = endpoint(&DeviceAllocator::new(&context), shape, LAYERS_APART);
    let there = pinned(&context, shape, LayoutKind::FullyContiguous);
    let all: Vec<u32> = (0..64).collect();
    let transfer = ordered(Transfer::new(&here, &there), &here, &there).blocks(&all, &all);
    eprintln!("{}", manager.explain(&transfer).unwrap());
    end_of(manager.submit(transfer, ()).unwrap()).result.unwrap();
}
