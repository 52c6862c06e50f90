//! Callers' threads do not allocate or free memory, or create streams. These driver calls are slow,
//! and some wait for the device.

use std::time::Duration;

use terrane_cuda::{CopyPath, DeviceEngineOptions, Stream};
use terrane_layout::LayoutKind;
use terrane_testkit::conformance::EngineFixture;
use terrane_testkit::conformance::copy_engine::end_of;
use terrane_testkit::model::Image;
use terrane_testkit::simulated_cuda::SimulatedCuda;
use terrane_transfer::{DeviceOrder, Transfer, TransferManager};

use super::fixture::{
    APART, DEVICE, Fixture, LAYERS_APART, PINNED, config, keep_busy, large_memory,
};
use crate::needs::{LITTLE, device_with_kernels as device};

pub const SLOW: [&str; 6] = [
    "cuMemAlloc_v2",
    "cuMemFree_v2",
    "cuMemHostAlloc",
    "cuMemFreeHost",
    "cuStreamCreateWithPriority",
    "cuStreamDestroy_v2",
];

/// From the very first transfer on. There are more block ids than a launch carries, layers at
/// irregular distances, and more concurrent transfers than lists. The engine's threads allocate and
/// free what is needed.
#[test]
fn callers_neither_allocate_nor_free() {
    let name = "callers_neither_allocate_nor_free";
    let Some(context) = device(name, LITTLE) else { return };
    let Some(driver) = SimulatedCuda::find() else {
        return eprintln!("skipped: {name}: the calls of a real driver are not counted");
    };
    let slow = || SLOW.iter().map(|call| driver.calls(Some(call))).sum::<u64>();
    let created = || driver.calls(Some("cuStreamCreateWithPriority"));
    let shape = config(12 * 160, 2, 1);
    let ids = |number: u32| (number * 160..(number + 1) * 160).rev().collect::<Vec<_>>();
    for path in [CopyPath::Direct, CopyPath::Staged, CopyPath::CopyEach, CopyPath::Batched] {
        let options = DeviceEngineOptions { path: Some(path), ..DeviceEngineOptions::default() };
        let fixture = Fixture::new(&context, options, &[DEVICE, APART, PINNED]);
        let (compute, room) = (Stream::new(&context).unwrap(), large_memory(&context));
        let here = fixture.endpoint(APART, shape, LAYERS_APART);
        let there = fixture.endpoint(PINNED, shape, LayoutKind::FullyContiguous);
        let image = Image::scribble(&here, fixture.access(), 3);
        let mut expected = Image::of(&there, fixture.access());
        for spin in [Duration::ZERO, Duration::from_secs(60)] {
            let manager = TransferManager::new([fixture.engine()]).with_spin(spin);
            let after_compute = compute.order();
            for order in [DeviceOrder::AlreadySynchronised, after_compute] {
                let held = driver.hold(compute.handle());
                keep_busy(&compute, &room);
                let (before, streams) = (slow(), created());
                let all: Vec<_> = (0..12)
                    .map(|number| {
                        let transfer = Transfer::new(&here, &there).device_order(order.clone());
                        let ids = ids(number);
                        manager.submit(transfer.blocks(&ids, &ids), ()).unwrap()
                    })
                    .collect();
                drop(held);
                all.into_iter().for_each(|completion| drop(end_of(completion).result.unwrap()));
                // The engine has four streams ready. If more transfers are in flight, a caller creates one.
                let created = created() - streams;
                assert!(created <= 12 - 4, "{path}, {order:?}: {created} streams");
                assert_eq!(slow() - created, before, "{path}, {order:?}");
                compute.synchronize().unwrap();
            }
        }
        (0..12).for_each(|number| expected.transfer(&image, &ids(number), &ids(number), 0..2));
        Image::of(&there, fixture.access()).assert_equals(&expected, path.name());
    }
    assert_eq!((context.lost(), context.failed_drops()), (None, 0));
}
