//! Driver calls that fail in the middle of a transfer, on a simulated driver.

use terrane_core::ByteCount;
use terrane_cuda::{Context, CopyPath, DeviceEngineOptions};
use terrane_layout::LayoutKind;
use terrane_testkit::conformance::EngineFixture;
use terrane_testkit::conformance::copy_engine::{check_transfer, end_of, ordered};
use terrane_testkit::model::Image;
use terrane_testkit::simulated_cuda::SimulatedCuda;
use terrane_transfer::{Transfer, TransferError};

use super::fixture::{APART, DEVICE, Fixture, LAYERS_APART, PINNED, config};
use crate::needs::{LITTLE, device_with_kernels as device};

fn check(name: &str, path: CopyPath, calls: &[&str]) {
    let Some(context) = device(name, LITTLE) else { return };
    let Some(driver) = SimulatedCuda::find() else {
        return eprintln!("skipped: {name}: no simulated driver, whose calls can be made to fail");
    };
    for &call in calls {
        for spared in 0..4 {
            one_failure(&context, &driver, path, (call, spared));
        }
    }
    assert_eq!((context.lost(), context.failed_drops()), (None, 0));
}

/// One call of a transfer in many parts fails. The transfer ends with the driver's error, or
/// without one if the call was not part of it. The next transfer copies the right bytes.
fn one_failure(
    context: &Context,
    driver: &SimulatedCuda,
    path: CopyPath,
    (call, spared): (&str, u64),
) {
    /// `CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES`, which loses no context.
    const CODE: u32 = 701;
    let options = DeviceEngineOptions {
        path: Some(path),
        scratch_bytes: ByteCount::kib(16),
        request_bytes: ByteCount::kib(16),
        ..DeviceEngineOptions::default()
    };
    let fixture = Fixture::new(context, options, &[DEVICE, APART, PINNED]);
    let manager = fixture.manager();
    let shape = config(32, 3, 2);
    let ids: Vec<u32> = (0..32).collect();
    let here = fixture.endpoint(APART, shape, LAYERS_APART);
    let there = fixture.endpoint(PINNED, shape, LayoutKind::FullyContiguous);
    Image::scribble(&here, fixture.access(), 1);
    // The resources of the first transfer exist.
    check_transfer(&manager, fixture.access(), (&here, &ids), (&there, &ids), 0..3);
    for (from, to) in [(&here, &there), (&there, &here)] {
        // All bytes are written, whatever the transfer before left there.
        Image::scribble(from, fixture.access(), 1);
        let transfer = ordered(Transfer::new(from, to), from, to).blocks(&ids, &ids);
        driver.fail(call, spared, CODE);
        match end_of(manager.submit(transfer, ()).unwrap()).result {
            Ok(_) => {}
            Err(error @ (TransferError::Copy { .. } | TransferError::Engine { .. })) => {
                let mut causes = String::new();
                let mut next: Option<&dyn std::error::Error> = Some(&error);
                while let Some(cause) = next {
                    causes.push_str(&cause.to_string());
                    next = cause.source();
                }
                assert!(causes.contains("701"), "{causes}");
                assert!(causes.contains(call), "{causes}");
            }
            Err(error) => panic!("{error}"),
        }
        // The number of queries and waits depends on the threads, so some faults may remain.
        driver.clear_faults();
    }
    for (end, seed) in [(&here, 2), (&there, 3)] {
        Image::scribble(end, fixture.access(), seed);
    }
    check_transfer(&manager, fixture.access(), (&here, &ids), (&there, &ids), 0..3);
}

#[test]
fn failing_copies_end_a_transfer() {
    let name = "failing_copies_end_a_transfer";
    check(name, CopyPath::CopyEach, &["cuMemcpyAsync", "cuEventRecord"]);
}

#[test]
fn a_failing_batch_ends_a_transfer() {
    check("a_failing_batch_ends_a_transfer", CopyPath::Batched, &["cuMemcpyBatchAsync_v2"]);
}

#[test]
fn failing_launches_end_a_transfer() {
    let name = "failing_launches_end_a_transfer";
    check(name, CopyPath::Direct, &["cuLaunchKernel", "cuEventRecord"]);
}

#[test]
fn a_failing_call_of_any_kind_ends_a_staged_transfer() {
    let calls = [
        "cuLaunchKernel",
        "cuMemcpyAsync",
        "cuEventRecord",
        "cuStreamWaitEvent",
        "cuEventSynchronize",
        "cuEventQuery",
    ];
    check("a_failing_call_of_any_kind_ends_a_staged_transfer", CopyPath::Staged, &calls);
}

/// No request is longer than the options allow, also if the staged path finds a longer stretch.
#[test]
fn the_staged_path_keeps_its_requests_short() {
    let name = "the_staged_path_keeps_its_requests_short";
    let Some(context) = device(name, LITTLE) else { return };
    let Some(driver) = SimulatedCuda::find() else {
        return eprintln!("skipped: {name}: no simulated driver, whose calls can be made to fail");
    };
    let options = DeviceEngineOptions {
        path: Some(CopyPath::Staged),
        request_bytes: ByteCount::kib(16),
        ..DeviceEngineOptions::default()
    };
    let fixture = Fixture::new(&context, options, &[DEVICE, PINNED]);
    let manager = fixture.manager();
    let shape = config(8, 8, 16);
    let here = fixture.endpoint(DEVICE, shape, LAYERS_APART);
    let there = fixture.endpoint(PINNED, shape, LayoutKind::FullyContiguous);
    let ids: Vec<u32> = (0..8).collect();
    for (from, to) in [(&here, &there), (&there, &here)] {
        // All bytes are written, whatever the transfer before left there.
        Image::scribble(from, fixture.access(), 1);
        // Half a MiB in one stretch needs several requests, and so a batch.
        driver.fail("cuMemcpyBatchAsync_v2", 0, 701);
        let transfer = ordered(Transfer::new(from, to), from, to).blocks(&ids, &ids);
        let result = end_of(manager.submit(transfer, ()).unwrap()).result;
        assert!(result.is_err(), "in one request");
        assert_eq!(driver.clear_faults(), 0);
    }
}
