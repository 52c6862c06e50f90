//! A driver that does not report whether work has ended: the resources of the work are kept.

use std::thread;
use std::time::{Duration, Instant};

use terrane_core::ByteCount;
use terrane_cuda::{Context, CopyPath, DeviceEngineOptions, Stream};
use terrane_layout::LayoutKind;
use terrane_testkit::conformance::EngineFixture;
use terrane_testkit::conformance::copy_engine::{check_transfer, end_of, ordered};
use terrane_testkit::model::Image;
use terrane_testkit::process::in_child;
use terrane_testkit::simulated_cuda::{Live, SimulatedCuda};
use terrane_transfer::{Endpoint, Transfer, TransferError, TransferManager};

use super::fixture::{DEVICE, Fixture, LAYERS_APART, PINNED, config, keep_busy, large_memory};
use crate::needs::{LITTLE, device_with_kernels as device};

/// `CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED`, which does not tell whether the work has ended.
const UNSUPPORTED: u32 = 900;
const WAITS: [&str; 2] = ["cuEventSynchronize", "cuStreamSynchronize"];
const QUERIES: [&str; 2] = ["cuEventQuery", "cuStreamQuery"];
const TIMEOUT: Duration = Duration::from_secs(120);

fn simulated(test: &str) -> Option<(Context, SimulatedCuda)> {
    let context = device(test, LITTLE)?;
    let driver = SimulatedCuda::find();
    if driver.is_none() {
        eprintln!("skipped: {test}: only a simulated device can leave queries unanswered");
    }
    Some((context, driver?))
}

/// A fixture, a manager whose waiting threads do not poll, and two ends.
fn setting(context: &Context, path: CopyPath) -> (Fixture, TransferManager, Endpoint, Endpoint) {
    let options = DeviceEngineOptions {
        path: Some(path),
        scratch_bytes: ByteCount::kib(32),
        ..DeviceEngineOptions::default()
    };
    let fixture = Fixture::new(context, options, &[DEVICE, PINNED]);
    let manager = TransferManager::new([fixture.engine()]).with_spin(Duration::ZERO);
    let shape = config(8, 4, 16);
    let here = fixture.endpoint(DEVICE, shape, LAYERS_APART);
    let there = fixture.endpoint(PINNED, shape, LayoutKind::FullyContiguous);
    (fixture, manager, here, there)
}

/// The driver leaves queries unanswered for a while. The job, on a blocked stream, does not end in
/// that time. It ends when the driver answers and the stream continues.
#[test]
fn a_job_ends_no_sooner_than_its_work() {
    let name = "engine::unknown::a_job_ends_no_sooner_than_its_work";
    in_child(name, || {
        let Some((context, driver)) = simulated(name) else { return };
        let (fixture, manager, here, there) = setting(&context, CopyPath::Direct);
        Image::scribble(&here, fixture.access(), 4);
        check_transfer(&manager, fixture.access(), (&here, &[1]), (&there, &[1]), 0..4);
        let (compute, room) = (Stream::new(&context).unwrap(), large_memory(&context));
        let held = driver.hold(compute.handle());
        keep_busy(&compute, &room);
        WAITS.iter().for_each(|call| driver.refuse(call, UNSUPPORTED));
        let order = compute.order();
        let transfer = Transfer::new(&here, &there).blocks(&[0], &[0]).device_order(order);
        let completion = manager.submit(transfer, ()).unwrap();
        for call in QUERIES.iter().chain(&QUERIES) {
            driver.refuse(call, UNSUPPORTED);
            thread::sleep(Duration::from_millis(20));
            assert!(!completion.has_ended(), "its copy has not even begun");
            assert!(there.hold_for_write(&[0]).is_err());
        }
        driver.clear_faults();
        for _ in 0..20 {
            driver.step(8);
            assert!(!completion.has_ended(), "its copy has not even begun");
        }
        drop(held);
        // The job failed with the driver's error. Its resources are free again.
        assert!(matches!(end_of(completion).result, Err(TransferError::Engine { .. })));
        Image::scribble(&there, fixture.access(), 5);
        check_transfer(&manager, fixture.access(), (&here, &[0]), (&there, &[0]), 0..4);
        assert_eq!((context.lost(), context.failed_drops()), (None, 0));
    });
}

/// The driver never answers. The caller gets its outcome, and the engine keeps the memory and the
/// claims. If the driver answers later, they are released.
#[test]
fn an_orphaned_job_keeps_the_resources_of_its_work() {
    let name = "engine::unknown::an_orphaned_job_keeps_the_resources_of_its_work";
    in_child(name, || {
        let Some((context, driver)) = simulated(name) else { return };
        let (fixture, manager, here, there) = setting(&context, CopyPath::Direct);
        let other = fixture.endpoint(DEVICE, config(8, 4, 16), LAYERS_APART);
        Image::scribble(&here, fixture.access(), 4);
        let (compute, room) = (Stream::new(&context).unwrap(), large_memory(&context));
        let live = || [Live::Allocations, Live::Pinned].map(|sort| driver.count(sort));
        let held = driver.hold(compute.handle());
        keep_busy(&compute, &room);
        WAITS.iter().for_each(|call| driver.refuse(call, UNSUPPORTED));
        let order = compute.order();
        let transfer = Transfer::new(&here, &there).blocks(&[0], &[0]).device_order(order);
        let completion = manager.submit(transfer, "guard").unwrap();
        QUERIES.iter().for_each(|call| driver.refuse(call, UNSUPPORTED));
        let outcome = end_of(completion);
        assert_eq!(outcome.guard, "guard");
        assert!(matches!(outcome.result, Err(TransferError::Engine { .. })));
        assert!(driver.count(Live::Operations) > 0, "no work is in flight");
        assert!(here.hold_for_write(&[0]).is_err() && there.hold_for_write(&[0]).is_err());
        let before = live();
        drop(here);
        assert_eq!(live(), before, "the source is still to be read");
        driver.clear_faults();
        drop(held);
        // With each later transfer, the engine queries the driver again.
        let begun = Instant::now();
        while there.hold_for_write(&[0]).is_err() {
            assert!(begun.elapsed() < TIMEOUT, "the claims are never released");
            let transfer = ordered(Transfer::new(&other, &there), &other, &there);
            end_of(manager.submit(transfer.blocks(&[5], &[5]), ()).unwrap()).result.unwrap();
        }
        assert_ne!(live(), before, "the source is freed with the claims");
        assert_eq!((context.lost(), context.failed_drops()), (None, 0));
    });
}

/// A job in parts fails half-way, and the driver leaves queries unanswered for a while. Until the
/// device has finished the parts, no buffer is reused, and the job does not end.
#[test]
fn buffers_are_not_reused_while_their_work_may_run() {
    let name = "engine::unknown::buffers_are_not_reused_while_their_work_may_run";
    in_child(name, || {
        let Some((context, driver)) = simulated(name) else { return };
        let (fixture, manager, here, there) = setting(&context, CopyPath::Staged);
        let ids: Vec<u32> = (0..8).collect();
        Image::scribble(&here, fixture.access(), 4);
        check_transfer(&manager, fixture.access(), (&here, &ids), (&there, &ids), 0..4);
        for spared in 0..6 {
            driver.fail("cuLaunchKernel", spared, 701);
            for call in ["cuStreamSynchronize", "cuStreamQuery"] {
                (0..20).for_each(|_| driver.fail(call, 0, UNSUPPORTED));
            }
            let transfer = ordered(Transfer::new(&here, &there), &here, &there);
            let completion = manager.submit(transfer.blocks(&ids, &ids), ()).unwrap();
            let failed = end_of(completion).result.is_err();
            assert!(!failed || driver.count(Live::Operations) == 0, "it ended too early");
            driver.clear_faults();
            for end in [&here, &there] {
                Image::scribble(end, fixture.access(), spared);
            }
            check_transfer(&manager, fixture.access(), (&here, &ids), (&there, &ids), 0..4);
        }
        assert_eq!((context.lost(), context.failed_drops()), (None, 0));
    });
}
