//! Processes that are forked from one that uses a device.

use std::sync::Arc;

use terrane_core::{Allocate, ByteCount, DeviceId, RegionRequest, Requirement};
use terrane_cuda::{
    Context, CudaError, CudaStreams, DeviceAllocator, DeviceEngine, DeviceEngineOptions,
    DevicePool, Event, PinnedAllocator, PinnedOptions, Stream, Timing, probe,
};
use terrane_layout::LayoutKind;
use terrane_pool::{FenceSource, StreamSource};
use terrane_testkit::conformance::EngineFixture;
use terrane_testkit::conformance::copy_engine::end_of;
use terrane_testkit::model::Image;
use terrane_testkit::process::{in_child, in_fork};
use terrane_testkit::simulated_cuda::SimulatedCuda;
use terrane_transfer::{CopyEngine, Transfer, TransferManager};

use crate::engine::fixture::{DEVICE, Fixture, LAYERS_APART, PINNED, config};
use crate::needs::{LITTLE, device_with_kernels as device};

/// Returns the device and its simulated driver. With a real driver, it prints the skip and returns
/// `None`.
fn simulated(test: &str) -> Option<(Context, SimulatedCuda)> {
    let context = device(test, LITTLE)?;
    let driver = SimulatedCuda::find();
    if driver.is_none() {
        eprintln!(
            "skipped: {test}: a simulated device needed; a fork damages the process of a real device"
        );
    }
    Some((context, driver?))
}

#[track_caller]
fn is_refused<T>(result: Result<T, CudaError>) {
    assert!(matches!(result.err(), Some(CudaError::Forked)));
}

#[test]
fn a_forked_process_is_refused_and_drops_what_it_inherited() {
    let name = "forks::a_forked_process_is_refused_and_drops_what_it_inherited";
    in_child(name, || {
        let Some((context, driver)) = simulated(name) else { return };
        let request = RegionRequest::new(ByteCount::mib(1));
        let pool = DevicePool::new(&context, ByteCount::mib(16)).unwrap();
        let stream = Stream::new(&context).unwrap();
        let streams = CudaStreams::new(&context);
        let number = StreamSource::create(&streams).unwrap();
        let fence = FenceSource::create(&streams).unwrap();
        fence.record(number).unwrap();
        let event = Event::new(&context, Timing::Off).unwrap();
        event.record(&stream).unwrap();
        let memory =
            (pool.allocate(&request).unwrap(), pool.allocate_on(&stream, &request).unwrap());
        let plain = DeviceAllocator::new(&context).allocate(&request).unwrap();
        let options =
            PinnedOptions { registration: Requirement::Required, ..PinnedOptions::default() };
        let pinned = PinnedAllocator::new(&context, options).unwrap();
        let (background, _) = pinned.allocate_in_background(&request).unwrap();
        let locked = pinned.allocate(&request).unwrap();

        // With a transfer that the device has not begun.
        let fixture = Fixture::new(&context, DeviceEngineOptions::default(), &[DEVICE, PINNED]);
        let here = fixture.endpoint(DEVICE, config(4, 4, 16), LAYERS_APART);
        let there = fixture.endpoint(PINNED, config(4, 4, 16), LayoutKind::FullyContiguous);
        Image::scribble(&here, fixture.access(), 1);
        let engine = DeviceEngine::new(&context, DeviceEngineOptions::default()).unwrap();
        let manager = TransferManager::new([Arc::new(engine) as Arc<dyn CopyEngine>]);
        let slow = Stream::new(&context).unwrap();
        let held = driver.hold(slow.handle());
        // SAFETY: the memory lives until the stream has been synchronised.
        unsafe { slow.fill(terrane_core::Memory::location(&plain), 1, request.bytes) }.unwrap();
        let order = || slow.order();
        let copy = |block| Transfer::new(&here, &there).blocks(&[block], &[block]);
        let in_flight = manager.submit(copy(0).device_order(order()), ()).unwrap();

        let mut inherited =
            Some((in_flight, manager, memory, plain, background, locked, event, fence));
        in_fork(|| {
            is_refused(probe());
            is_refused(Context::primary(DeviceId::new(0)));
            is_refused(context.memory());
            is_refused(Stream::new(&context));
            is_refused(Event::new(&context, Timing::Off));
            is_refused(DevicePool::new(&context, ByteCount::ZERO));
            is_refused(DeviceEngine::new(&context, DeviceEngineOptions::default()));
            is_refused(stream.is_idle());
            is_refused(stream.synchronize());
            is_refused(streams.get(number));
            is_refused(streams.add(stream.clone()));
            is_refused(pool.allocate_memory(&request));
            assert!(DeviceAllocator::new(&context).allocate(&request).is_err());
            let (in_flight, manager, memory, plain, background, locked, event, fence) =
                inherited.take().unwrap();
            is_refused(event.is_complete());
            assert!(fence.is_complete().is_err());
            assert!(manager.submit(copy(1).device_order(order()), ()).is_err());
            drop((in_flight, manager, memory, plain, background, locked, event, fence));
            assert_eq!((context.lost(), context.failed_drops()), (None, 0));
        });
        // The parent's transfer continues.
        drop(held);
        let (in_flight, ..) = inherited.take().unwrap();
        end_of(in_flight).result.unwrap();
        slow.synchronize().unwrap();
        assert_eq!((context.lost(), context.failed_drops()), (None, 0));
    });
}

/// Another thread of the parent may be using them at the moment of the fork.
#[test]
fn a_forked_process_counts_no_idle_events() {
    let name = "forks::a_forked_process_counts_no_idle_events";
    in_child(name, || {
        let Some((context, _)) = simulated(name) else { return };
        let event = Event::new(&context, Timing::Off).unwrap();
        event.record(&Stream::new(&context).unwrap()).unwrap();
        event.wait().unwrap();
        drop(event);
        assert_eq!(context.usage().events_idle, 1);
        in_fork(|| assert_eq!(context.usage().events_idle, 0));
        assert_eq!(context.usage().events_idle, 1);
    });
}

#[test]
fn a_process_that_is_forked_before_the_driver_is_loaded_may_use_it() {
    let name = "forks::a_process_that_is_forked_before_the_driver_is_loaded_may_use_it";
    in_child(name, || {
        in_fork(|| {
            let Some((context, _)) = simulated(name) else { return };
            Stream::new(&context).unwrap().synchronize().unwrap();
        });
    });
}
