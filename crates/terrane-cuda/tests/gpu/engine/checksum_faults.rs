//! Checksums of transfers that fail, are cancelled, wait, or restart.

use terrane_core::{ByteCount, Memory};
use terrane_cuda::{Context, CopyPath, DeviceAllocator, DeviceEngineOptions};
use terrane_layout::LayoutKind;
use terrane_testkit::conformance::EngineFixture;
use terrane_testkit::conformance::copy_engine::{end_of, ordered};
use terrane_testkit::process::in_child;
use terrane_testkit::regions::{Copied, RegionBytes};
use terrane_testkit::simulated_cuda::SimulatedCuda;
use terrane_transfer::{Checksums, Endpoint, Transfer, TransferError, TransferManager};

use super::checksums::{check, sums_of};
use super::faults::hoard;
use super::fixture::{APART, DEVICE, Fixture, HeldStream, LAYERS_APART, PINNED, config};
use super::resources::SLOW;
use crate::needs::{LITTLE, Needs, device_with_kernels as device};

fn fixture(context: &Context, path: Option<CopyPath>) -> Fixture {
    let options = DeviceEngineOptions { path, ..DeviceEngineOptions::default() };
    Fixture::new(context, options, &[DEVICE, APART, PINNED])
}

fn both_ends(fixture: &Fixture, blocks: u32) -> [Endpoint; 2] {
    let shape = config(blocks, 3, 4);
    let here = fixture.endpoint(APART, shape, LAYERS_APART);
    let there = fixture.endpoint(PINNED, shape, LayoutKind::FullyContiguous);
    RegionBytes::scribble(&here, fixture.access(), 1);
    RegionBytes::scribble(&there, fixture.access(), 2);
    [here, there]
}

fn whole(ids: &[u32]) -> Copied {
    Copied { from: ids.to_vec(), to: ids.to_vec(), layers: 0..3, heads: None, tokens: None }
}

/// The number of the device's allocations, and their bytes.
fn held_memory(context: &Context) -> (u64, ByteCount) {
    let held = context.usage().device;
    (held.count, held.bytes)
}

/// Each driver call of a transfer with checksums fails once: uploads of the tables, launches, the
/// copy of the sums to the host, and every event and wait between. The error is the driver's, no
/// memory is kept, and the next transfer has its checksums.
#[test]
fn a_transfer_whose_checksums_fail_fails_and_keeps_nothing() {
    let name = "a_transfer_whose_checksums_fail_fails_and_keeps_nothing";
    let Some(context) = device(name, LITTLE) else { return };
    let Some(driver) = SimulatedCuda::find_or_skip(name) else { return };
    for path in [CopyPath::Direct, CopyPath::Staged] {
        let fixture = fixture(&context, Some(path));
        let (manager, access) = (fixture.manager(), fixture.access());
        let [here, there] = both_ends(&fixture, 8);
        for ends in [[&here, &there], [&there, &here]] {
            let what = format!("{path}");
            check(&manager, access, ends, &whole(&[1, 5]), &what);
            let before = held_memory(&context);
            let mut failures = 0;
            for call in ["cuLaunchKernel", "cuMemcpyAsync", "cuStreamWaitEvent", "cuEventRecord"] {
                for spared in 0..6 {
                    let [from, to] = ends;
                    let transfer = Transfer::new(from, to).blocks(&[1, 5], &[1, 5]);
                    let transfer = ordered(transfer, from, to).checksums(Checksums::Compute);
                    // `CUDA_ERROR_OUT_OF_MEMORY`, which loses no context.
                    driver.fail(call, spared, 2);
                    let result = end_of(manager.submit(transfer, ()).unwrap()).result;
                    // The transfer made fewer calls.
                    driver.clear_faults();
                    match result {
                        Ok(report) => {
                            let right = sums_of(from, access, &[1, 5], 0..u32::MAX);
                            assert_eq!(report.checksums.as_deref(), Some(&right[..]), "{what}");
                        }
                        Err(TransferError::Engine { engine: "cuda", .. }) => failures += 1,
                        Err(error) => panic!("{what}, {call}, {spared}: {error}"),
                    }
                    check(&manager, access, ends, &whole(&[1, 5]), &what);
                }
            }
            assert!(failures > 5, "{what}: {failures}");
            assert_eq!(held_memory(&context), before, "{what}");
        }
    }
    assert_eq!((context.lost(), context.failed_drops()), (None, 0));
}

/// A transfer that waits for a stream is cancelled and ends without checksums. A transfer that is
/// not cancelled has the checksums of the bytes at its order, not at its submission.
#[test]
fn checksums_are_computed_after_the_device_order() {
    let name = "checksums_are_computed_after_the_device_order";
    let Some(context) = device(name, LITTLE) else { return };
    for (path, blocks) in [(CopyPath::Direct, 2), (CopyPath::Staged, 2), (CopyPath::Staged, 64)] {
        let fixture = fixture(&context, Some(path));
        let manager = fixture.manager();
        let [here, there] = both_ends(&fixture, blocks);
        let ids: Vec<u32> = (0..blocks).collect();
        let held = HeldStream::new(&context);
        for region in here.layout().regions() {
            // SAFETY: the endpoint keeps the memory alive, and the transfer runs after this.
            unsafe { held.stream().fill(region.location(), 7, region.length()) }.unwrap();
        }
        let transfer = || Transfer::new(&here, &there).blocks(&ids, &ids);
        let wanted = transfer().device_order(held.order()).checksums(Checksums::Compute);
        let completion = manager.submit(wanted, ()).unwrap();
        drop(held);
        let report = end_of(completion).result.unwrap();
        let right = sums_of(&here, fixture.access(), &ids, 0..u32::MAX);
        assert!(right.windows(2).all(|pair| pair[0] == pair[1]), "equal bytes everywhere");
        assert_eq!(report.checksums.as_deref(), Some(&right[..]), "{path}, {blocks}");

        let held = HeldStream::new(&context);
        let wanted = transfer().device_order(held.order()).checksums(Checksums::Compute);
        let completion = manager.submit(wanted, ()).unwrap();
        completion.cancel();
        drop(held);
        match end_of(completion).result {
            // Its work was on the device before the cancellation.
            Ok(report) => assert_eq!(report.checksums.as_deref(), Some(&right[..])),
            Err(TransferError::Cancelled { .. }) => {}
            Err(error) => panic!("{error}"),
        }
    }
    assert_eq!((context.lost(), context.failed_drops()), (None, 0));
}

/// Staged transfers continue without buffers, from their first chunk on.
#[test]
fn without_memory_for_buffers_there_are_checksums() {
    let path = "engine::checksum_faults::without_memory_for_buffers_there_are_checksums";
    in_child(path, || {
        let room = Needs { device: ByteCount::gib(1), host: ByteCount::gib(1) };
        let Some(context) = device(path, room) else { return };
        let fixture = fixture(&context, Some(CopyPath::Staged));
        let manager = fixture.manager();
        let [here, there] = both_ends(&fixture, 64);
        let ids: Vec<u32> = (0..64).collect();
        let hoarded = hoard(&DeviceAllocator::new(&context));
        let before = held_memory(&context);
        for ends in [[&here, &there], [&there, &here]] {
            check(&manager, fixture.access(), ends, &whole(&ids), "without buffers");
        }
        assert_eq!(held_memory(&context), before, "there was memory for a buffer");
        drop(hoarded);
        for ends in [[&here, &there], [&there, &here]] {
            check(&manager, fixture.access(), ends, &whole(&ids), "with buffers");
        }
        assert_eq!(context.lost(), None);
    });
}

/// From the very first transfer on. With more concurrent transfers than streams, a caller may
/// create a stream for a copy. It allocates nothing for the tables.
#[test]
fn callers_neither_allocate_nor_create_streams_for_checksums() {
    let name = "callers_neither_allocate_nor_create_streams_for_checksums";
    let Some(context) = device(name, LITTLE) else { return };
    let Some(driver) = SimulatedCuda::find_or_skip(name) else { return };
    let calls = |names: &[&str]| names.iter().map(|name| driver.calls(Some(name))).sum::<u64>();
    let allocating = || calls(&SLOW[..4]);
    for path in [CopyPath::Direct, CopyPath::Staged, CopyPath::CopyEach] {
        let fixture = fixture(&context, Some(path));
        let [here, there] = both_ends(&fixture, 48);
        let right = sums_of(&here, fixture.access(), &(0..48).collect::<Vec<_>>(), 0..u32::MAX);
        let manager = fixture.manager();
        for (from, to) in [(&here, &there), (&there, &here)] {
            let submit = |id: u32| {
                let transfer = Transfer::new(from, to).blocks(&[id], &[id]);
                let transfer = ordered(transfer, from, to).checksums(Checksums::Compute);
                manager.submit(transfer, ()).unwrap()
            };
            let before = calls(&SLOW);
            for id in 0..4 {
                drop(end_of(submit(id)).result.unwrap());
            }
            assert_eq!(calls(&SLOW), before, "{path}, one at a time");
            let before = allocating();
            let all: Vec<_> = (0..48).map(submit).collect();
            assert_eq!(allocating(), before, "{path}");
            let sums: Vec<u64> = all
                .into_iter()
                .flat_map(|completion| end_of(completion).result.unwrap().checksums.unwrap())
                .collect();
            assert_eq!(sums, right, "{path}");
        }
    }
    assert_eq!((context.lost(), context.failed_drops()), (None, 0));
}

/// The engine drops while its kernels may still run.
#[test]
fn an_engine_that_drops_ends_its_checksums() {
    let name = "an_engine_that_drops_ends_its_checksums";
    let Some(context) = device(name, LITTLE) else { return };
    for path in [None, Some(CopyPath::Staged), Some(CopyPath::Batched)] {
        let fixture = fixture(&context, path);
        let manager: TransferManager = fixture.manager();
        let [here, there] = both_ends(&fixture, 32);
        let right = sums_of(&here, fixture.access(), &(0..32).collect::<Vec<_>>(), 0..u32::MAX);
        let all: Vec<_> = (0..4_u32)
            .map(|part| {
                let ids: Vec<u32> = (part * 8..part * 8 + 8).collect();
                let transfer = Transfer::new(&here, &there).blocks(&ids, &ids);
                let transfer = transfer.checksums(Checksums::Compute);
                manager.submit(ordered(transfer, &here, &there), ()).unwrap()
            })
            .collect();
        drop(manager);
        let sums: Vec<u64> = all
            .into_iter()
            .flat_map(|completion| end_of(completion).result.unwrap().checksums.unwrap())
            .collect();
        assert_eq!(sums, right, "{path:?}");
    }
    assert_eq!((context.lost(), context.failed_drops()), (None, 0));
}
