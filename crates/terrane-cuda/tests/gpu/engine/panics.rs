//! Foreign code that panics on the engine's threads while parts of a transfer are on the device.

use std::sync::atomic::{AtomicU64, Ordering};
use std::thread;

use terrane_core::ByteCount;
use terrane_cuda::{CopyPath, DeviceEngineOptions};
use terrane_layout::LayoutKind;
use terrane_testkit::conformance::EngineFixture;
use terrane_testkit::conformance::copy_engine::{check_transfer, end_of, ordered};
use terrane_testkit::events::AtEvents;
use terrane_testkit::model::Image;
use terrane_testkit::process::in_child;
use terrane_testkit::simulated_cuda::{Live, SimulatedCuda};
use terrane_transfer::{Transfer, TransferError};
use tracing::Event;

use super::fixture::{DEVICE, Fixture, LAYERS_APART, PINNED, config};
use crate::needs::{LITTLE, device_with_kernels as device};

static PANICS: AtomicU64 = AtomicU64::new(0);

/// Panics on the submit threads, as foreign code.
fn panic_on_submit_threads(_: &Event<'_>) {
    if thread::current().name().is_some_and(|name| name.starts_with("terrane-cuda-submit-")) {
        PANICS.fetch_add(1, Ordering::SeqCst);
        panic!("a subscriber that panics");
    }
}

/// The submit thread panics in the middle of a job. The job ends like one that was dropped, but not
/// before the device has finished with its memory. The thread serves the next job.
#[test]
fn a_submit_thread_that_panics_waits_for_its_submitted_work() {
    let name = "engine::panics::a_submit_thread_that_panics_waits_for_its_submitted_work";
    in_child(name, || {
        let Some(context) = device(name, LITTLE) else { return };
        let Some(driver) = SimulatedCuda::find() else {
            return eprintln!("skipped: {name}: no simulated driver, whose calls can fail");
        };
        tracing::subscriber::set_global_default(AtEvents::any(panic_on_submit_threads)).unwrap();
        let options = DeviceEngineOptions {
            path: Some(CopyPath::Staged),
            scratch_bytes: ByteCount::kib(16),
            request_bytes: ByteCount::kib(16),
            ..DeviceEngineOptions::default()
        };
        let shape = config(32, 3, 2);
        let ids: Vec<u32> = (0..32).collect();
        for spared in 0..4 {
            let fixture = Fixture::new(&context, options.clone(), &[DEVICE, PINNED]);
            let manager = fixture.manager();
            let here = fixture.endpoint(DEVICE, shape, LAYERS_APART);
            let there = fixture.endpoint(PINNED, shape, LayoutKind::FullyContiguous);
            Image::scribble(&here, fixture.access(), 1);
            for (from, to) in [(&here, &there), (&there, &here)] {
                // All bytes are written, whatever the transfer before left there.
                Image::scribble(from, fixture.access(), 1);
                let before = PANICS.load(Ordering::SeqCst);
                // The submit thread finds no memory for the first or the second buffer, and emits a
                // trace.
                driver.fail("cuMemAlloc_v2", spared, 2);
                let transfer = ordered(Transfer::new(from, to), from, to).blocks(&ids, &ids);
                let outcome = end_of(manager.submit(transfer, ()).unwrap());
                match outcome.result {
                    Ok(_) => {}
                    Err(TransferError::EngineStopped) => {
                        assert_eq!(driver.count(Live::Operations), 0, "it ended too early");
                        assert!(PANICS.load(Ordering::SeqCst) > before);
                    }
                    Err(error) => panic!("{error}"),
                }
                driver.clear_faults();
            }
            for (end, seed) in [(&here, 2), (&there, 3)] {
                Image::scribble(end, fixture.access(), seed);
            }
            check_transfer(&manager, fixture.access(), (&here, &ids), (&there, &ids), 0..3);
        }
        assert!(PANICS.load(Ordering::SeqCst) > 0, "the subscriber never panicked");
        assert_eq!((context.lost(), context.failed_drops()), (None, 0));
    });
}
