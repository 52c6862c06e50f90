//! A transfer that loses its buffers half-way.

use std::num::NonZeroU32;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread;
use std::time::Duration;

use terrane_core::{ByteCount, Memory};
use terrane_cuda::{Context, CopyPath, DeviceEngineOptions};
use terrane_layout::LayoutKind;
use terrane_testkit::conformance::EngineFixture;
use terrane_testkit::conformance::copy_engine::{check_transfer, end_of, ordered};
use terrane_testkit::events::AtEvents;
use terrane_testkit::model::Image;
use terrane_testkit::process::in_child;
use terrane_testkit::simulated_cuda::{Live, SimulatedCuda};
use terrane_transfer::{Checksums, Transfer, TransferManager};
use tracing::Subscriber;
use tracing::field::{Field, Visit};

use super::checksums::sums_of;
use super::fixture::{DEVICE, Fixture, LAYERS_APART, PINNED, config};
use crate::needs::{LITTLE, device_with_kernels as device};

/// `CUDA_ERROR_OUT_OF_MEMORY`, and `CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED`.
const OUT_OF_MEMORY: u32 = 2;
const UNSUPPORTED: u32 = 900;

static SWITCHES: AtomicU64 = AtomicU64::new(0);

/// Whether a trace reports that a transfer continues without a buffer.
struct ReportsNoBuffer(bool);

impl Visit for ReportsNoBuffer {
    fn record_debug(&mut self, _: &Field, value: &dyn std::fmt::Debug) {
        self.0 |= format!("{value:?}").contains("no memory for a buffer");
    }
}

/// Removes the fault once a transfer continues without buffers.
fn forgiving(driver: SimulatedCuda) -> impl Subscriber + Send + Sync {
    AtEvents::any(move |event| {
        let mut says = ReportsNoBuffer(false);
        event.record(&mut says);
        if says.0 {
            driver.clear_faults();
            SWITCHES.fetch_add(1, Ordering::SeqCst);
        }
    })
}

/// An engine that stages its transfers through two small buffers.
fn two_buffers(context: &Context) -> Fixture {
    let options = DeviceEngineOptions {
        path: Some(CopyPath::Staged),
        scratch_bytes: ByteCount::kib(32),
        scratch_buffers: NonZeroU32::new(2).unwrap(),
        ..DeviceEngineOptions::default()
    };
    Fixture::new(context, options, &[DEVICE, PINNED])
}

/// After some chunks of a staged transfer, it is unknown when its buffers become free, and no
/// memory is left for others. The transfer continues without buffers, ends after all of its work,
/// and counts every byte once.
#[test]
fn a_transfer_that_loses_its_buffers_continues_without_them() {
    let name = "engine::switching::a_transfer_that_loses_its_buffers_continues_without_them";
    in_child(name, || {
        let Some(context) = device(name, LITTLE) else { return };
        let Some(driver) = SimulatedCuda::find() else {
            return eprintln!("skipped: {name}: no simulated driver, whose calls can fail");
        };
        tracing::subscriber::set_global_default(forgiving(SimulatedCuda::find().unwrap())).unwrap();
        let shape = config(8, 4, 16);
        let ids: Vec<u32> = (0..8).collect();
        for layer_by_layer in [false, true] {
            let fixture = two_buffers(&context);
            let manager = TransferManager::new([fixture.engine()]).with_spin(Duration::ZERO);
            let here = fixture.endpoint(DEVICE, shape, LAYERS_APART);
            let there = fixture.endpoint(PINNED, shape, LayoutKind::FullyContiguous);
            Image::scribble(&here, fixture.access(), 1);
            check_transfer(&manager, fixture.access(), (&here, &ids), (&there, &ids), 0..4);
            check_transfer(&manager, fixture.access(), (&there, &ids), (&here, &ids), 0..4);
            for (from, to) in [(&here, &there), (&there, &here)] {
                let image = Image::scribble(from, fixture.access(), 7);
                let mut expected = Image::of(to, fixture.access());
                expected.transfer(&image, &ids, &ids, 0..4);
                let before = SWITCHES.load(Ordering::SeqCst);
                driver.refuse("cuMemAlloc_v2", OUT_OF_MEMORY);
                driver.refuse("cuEventQuery", UNSUPPORTED);
                driver.refuse("cuEventSynchronize", UNSUPPORTED);
                let transfer = ordered(Transfer::new(from, to), from, to).blocks(&ids, &ids);
                let transfer = if layer_by_layer { transfer.layer_by_layer() } else { transfer };
                let completion = manager.submit(transfer, ()).unwrap();
                while !completion.has_ended() {
                    thread::yield_now();
                }
                let copied = completion.copied();
                end_of(completion).result.unwrap();
                assert_eq!(SWITCHES.load(Ordering::SeqCst), before + 1);
                assert_eq!(driver.count(Live::Operations), 0, "it ended too early");
                let bytes: u64 = here.layout().regions().iter().map(|r| r.length().get()).sum();
                assert_eq!(copied.get(), bytes);
                Image::of(to, fixture.access()).assert_equals(&expected, name);
            }
        }
        assert_eq!((context.lost(), context.failed_drops()), (None, 0));
    });
}

/// The first buffer is allocated, and the second is not: the transfer begins again. Its checksums
/// are those of the bytes, whatever was summed before.
#[test]
fn checksums_of_a_transfer_that_begins_again_are_right() {
    let name = "engine::switching::checksums_of_a_transfer_that_begins_again_are_right";
    in_child(name, || {
        let Some(context) = device(name, LITTLE) else { return };
        let Some(driver) = SimulatedCuda::find() else {
            return eprintln!("skipped: {name}: no simulated driver, whose calls can fail");
        };
        tracing::subscriber::set_global_default(forgiving(SimulatedCuda::find().unwrap())).unwrap();
        let fixture = two_buffers(&context);
        let (shape, ids) = (config(8, 4, 16), (0..8).collect::<Vec<u32>>());
        let here = fixture.endpoint(DEVICE, shape, LAYERS_APART);
        let there = fixture.endpoint(PINNED, shape, LayoutKind::FullyContiguous);
        for layer_by_layer in [false, true] {
            for (from, to) in [(&here, &there), (&there, &here)] {
                // The engine has no buffers yet.
                let manager = TransferManager::new([fixture.engine()]).with_spin(Duration::ZERO);
                let image = Image::scribble(from, fixture.access(), 7);
                let mut expected = Image::of(to, fixture.access());
                expected.transfer(&image, &ids, &ids, 0..4);
                let right = sums_of(from, fixture.access(), &ids, 0..u32::MAX);
                let transfer = ordered(Transfer::new(from, to), from, to).blocks(&ids, &ids);
                let transfer = transfer.checksums(Checksums::Compute);
                let transfer = if layer_by_layer { transfer.layer_by_layer() } else { transfer };
                manager.explain(&transfer).unwrap();
                driver.fail("cuMemAlloc_v2", 1, OUT_OF_MEMORY);
                // Also not once the first buffer has been freed.
                driver.refuse("cuMemAlloc_v2", OUT_OF_MEMORY);
                driver.refuse("cuEventQuery", UNSUPPORTED);
                driver.refuse("cuEventSynchronize", UNSUPPORTED);
                let report = end_of(manager.submit(transfer, ()).unwrap()).result.unwrap();
                assert_eq!(driver.clear_faults(), 0);
                let paths = manager.snapshot().paths;
                assert_eq!(paths.iter().map(|path| path.retries).sum::<u64>(), 1, "{paths:?}");
                assert_eq!(report.checksums.as_deref(), Some(&right[..]));
                Image::of(to, fixture.access()).assert_equals(&expected, name);
            }
        }
        assert_eq!((context.lost(), context.failed_drops()), (None, 0));
    });
}
