//! The limits of checksums: what they delay, how many bytes a launch sums, and their memory.

use std::error::Error;
use std::num::NonZeroU32;

use terrane_core::ByteCount;
use terrane_cuda::{CopyPath, CudaError, DeviceEngineOptions, Stream};
use terrane_layout::LayoutKind;
use terrane_testkit::conformance::EngineFixture;
use terrane_testkit::conformance::copy_engine::{end_of, ordered};
use terrane_testkit::regions::RegionBytes;
use terrane_testkit::simulated_cuda::SimulatedCuda;
use terrane_transfer::{Checksums, Transfer};

use super::checksums::sums_of;
use super::fixture::{APART, DEVICE, Fixture, LAYERS_APART, PINNED, config};
use crate::needs::{LITTLE, device_with_kernels as device};

/// Compute on each layer is submitted before the checksums are complete.
#[test]
fn layers_arrive_one_by_one_and_the_blocks_have_their_checksums() {
    let name = "layers_arrive_one_by_one_and_the_blocks_have_their_checksums";
    let Some(context) = device(name, LITTLE) else { return };
    let compute = Stream::new(&context).unwrap();
    let ids: Vec<u32> = (0..16).collect();
    for path in [CopyPath::Staged, CopyPath::Direct, CopyPath::Batched] {
        for scratch_bytes in [ByteCount::kib(16), ByteCount::mib(32)] {
            let options = DeviceEngineOptions {
                path: Some(path),
                scratch_bytes,
                request_bytes: scratch_bytes,
                ..DeviceEngineOptions::default()
            };
            let fixture = Fixture::new(&context, options, &[APART, PINNED]);
            let (manager, access) = (fixture.manager(), fixture.access());
            let here = fixture.endpoint(APART, config(16, 4, 4), LAYERS_APART);
            let there = fixture.endpoint(PINNED, config(16, 4, 4), LayoutKind::FullyContiguous);
            for (seed, [from, to]) in [(1, [&here, &there]), (2, [&there, &here])] {
                RegionBytes::scribble(from, access, seed);
                let right = sums_of(from, access, &ids, 0..u32::MAX);
                let transfer = ordered(Transfer::new(from, to), from, to).blocks(&ids, &ids);
                let transfer = transfer.layer_by_layer().checksums(Checksums::Compute);
                let completion = manager.submit(transfer, ()).unwrap();
                let layers = completion.layers().unwrap();
                for layer in layers.range() {
                    compute.wait_for_layers(&layers, layer).unwrap();
                }
                compute.synchronize().unwrap();
                let report = end_of(completion).result.unwrap();
                assert_eq!(report.checksums.as_deref(), Some(&right[..]), "{path}");
                assert_eq!(sums_of(to, access, &ids, 0..u32::MAX), right, "{path}");
            }
        }
    }
    assert_eq!((context.lost(), context.failed_drops()), (None, 0));
}

/// A launch sums at most as many bytes as a kernel within the device's memory copies, or one block.
#[test]
fn a_launch_sums_no_more_than_a_kernel_copies() {
    let name = "a_launch_sums_no_more_than_a_kernel_copies";
    let Some(context) = device(name, LITTLE) else { return };
    let Some(driver) = SimulatedCuda::find_or_skip(name) else { return };
    let ids: Vec<u32> = (0..8).collect();
    // Blocks of 24 KiB. A kernel copies one, three, or all of them.
    for (kib, launches) in [(24, 8), (72, 3), (1024, 1)] {
        for relayout_ctas in [None, NonZeroU32::new(1)] {
            let relayout_bytes = ByteCount::kib(kib);
            let options =
                DeviceEngineOptions { relayout_bytes, relayout_ctas, ..Default::default() };
            let fixture = Fixture::new(&context, options, &[DEVICE, APART]);
            let manager = fixture.manager();
            let [from, to] =
                [DEVICE, APART].map(|end| fixture.endpoint(end, config(8, 3, 16), LAYERS_APART));
            RegionBytes::scribble(&from, fixture.access(), kib.into());
            let right = sums_of(&from, fixture.access(), &ids, 0..u32::MAX);
            let run = |checksums| {
                let transfer = ordered(Transfer::new(&from, &to), &from, &to).blocks(&ids, &ids);
                let transfer = match checksums {
                    true => transfer.checksums(Checksums::Compute),
                    false => transfer,
                };
                // The caller's thread submits these blocks.
                let before = driver.calls(Some("cuLaunchKernel"));
                let completion = manager.submit(transfer, ()).unwrap();
                let launched = driver.calls(Some("cuLaunchKernel")) - before;
                (launched, end_of(completion).result.unwrap().checksums)
            };
            let ((copies, _), (all, sums)) = (run(false), run(true));
            assert_eq!(sums.as_deref(), Some(&right[..]), "{kib}");
            assert_eq!(all - copies, launches, "{kib}");
        }
    }
    assert_eq!((context.lost(), context.failed_drops()), (None, 0));
}

/// Without memory for its tables, a transfer fails with an error that names a remedy. The memory of
/// such large tables is not kept.
#[test]
fn without_memory_for_tables_the_error_names_a_remedy() {
    let name = "without_memory_for_tables_the_error_names_a_remedy";
    let Some(context) = device(name, LITTLE) else { return };
    let Some(driver) = SimulatedCuda::find_or_skip(name) else { return };
    let options =
        DeviceEngineOptions { path: Some(CopyPath::Direct), ..DeviceEngineOptions::default() };
    let fixture = Fixture::new(&context, options, &[DEVICE, PINNED]);
    let (manager, shape) = (fixture.manager(), config(6000, 1, 1));
    let [from, to] =
        [DEVICE, PINNED].map(|end| fixture.endpoint(end, shape, LayoutKind::FullyContiguous));
    RegionBytes::scribble(&from, fixture.access(), 3);
    let ids: Vec<u32> = (0..6000).collect();
    let transfer = || {
        let transfer = ordered(Transfer::new(&from, &to), &from, &to).blocks(&ids, &ids);
        transfer.checksums(Checksums::Compute)
    };
    driver.refuse("cuMemAlloc_v2", 2);
    let error = end_of(manager.submit(transfer(), ()).unwrap()).result.unwrap_err();
    driver.clear_faults();
    let mut causes = std::iter::successors(error.source(), |cause| (*cause).source());
    let found = causes.find_map(|cause| cause.downcast_ref::<CudaError>());
    let Some(CudaError::NoMemoryForChecksums { blocks: 6000, .. }) = found else {
        panic!("{error:?}")
    };
    assert!(found.unwrap().to_string().contains("copy fewer blocks"), "{error}");
    let report = end_of(manager.submit(transfer(), ()).unwrap()).result.unwrap();
    let right = sums_of(&from, fixture.access(), &ids, 0..u32::MAX);
    assert_eq!(report.checksums.as_deref(), Some(&right[..]));
    assert_eq!((context.lost(), context.failed_drops()), (None, 0));
}
