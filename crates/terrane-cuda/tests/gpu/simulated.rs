//! Faults that only a simulated driver has on demand: failing calls, blocked streams, leaks.

use terrane_core::{Allocate, AllocateError, ByteCount, Memory, RegionRequest};
use terrane_cuda::{
    Context, CudaError, DeviceAllocator, DevicePool, DriverCode, Event, PinnedAllocator,
    PinnedOptions, Stream, Timing,
};
use terrane_testkit::process::in_child;
use terrane_testkit::simulated_cuda::{Live, SimulatedCuda};

use crate::needs::{LITTLE, device};

/// Returns the device and its simulated driver. With a real driver, it prints the skip and returns
/// `None`.
fn simulated(test: &str) -> Option<(Context, SimulatedCuda)> {
    let context = device(test, LITTLE)?;
    let driver = SimulatedCuda::find();
    if driver.is_none() {
        eprintln!("skipped: {test}: a simulated device needed, this one is real");
    }
    Some((context, driver?))
}

#[test]
fn every_refusal_of_the_driver_undoes_earlier_steps() {
    let name = "simulated::every_refusal_of_the_driver_undoes_earlier_steps";
    in_child(name, || {
        let Some((context, driver)) = simulated(name) else { return };
        let live = || {
            [Live::Streams, Live::Allocations, Live::Pinned, Live::Pools]
                .map(|sort| driver.count(sort))
        };
        let before = live();
        let request = RegionRequest::new(ByteCount::mib(6));
        let three = PinnedOptions {
            largest_registration: ByteCount::mib(2),
            registration: terrane_core::Requirement::Required,
            ..PinnedOptions::default()
        };
        let pinned = PinnedAllocator::new(&context, three).unwrap();
        for spared in 0..3 {
            driver.fail("cuMemHostRegister_v2", spared, 2);
            let error = pinned.allocate(&request).unwrap_err();
            assert!(matches!(error, AllocateError::Capability { .. }), "{error}");
            assert_eq!(live(), before, "chunks before the refused one are registered no more");
        }
        for function in ["cuMemPoolCreate", "cuMemPoolSetAttribute", "cuStreamCreateWithPriority"] {
            driver.fail(function, 0, 2);
            assert!(DevicePool::new(&context, ByteCount::ZERO).is_err(), "{function}");
            assert_eq!(live(), before, "{function}");
        }
        driver.fail("cuMemPoolSetAttribute", 1, 2);
        assert!(DevicePool::new(&context, ByteCount::ZERO).is_err(), "the second attribute");
        assert_eq!(live(), before, "the second attribute");
        driver.fail("cuMemAlloc_v2", 0, 2);
        let error = DeviceAllocator::new(&context).allocate(&request).unwrap_err();
        assert!(error.is_exhaustion(), "{error}");
        assert_eq!((driver.clear_faults(), context.lost(), context.failed_drops()), (0, None, 0));
        drop(pinned);
        drop(context);
        assert_eq!(driver.count(Live::Contexts), 0);
    });
}

/// In exclusive mode, for example, another process may use the device.
#[test]
fn a_device_that_is_unavailable_has_no_lost_context() {
    let name = "simulated::a_device_that_is_unavailable_has_no_lost_context";
    in_child(name, || {
        let Some((context, driver)) = simulated(name) else { return };
        driver.fail("cuDevicePrimaryCtxRetain", 0, 46);
        let error = Context::primary(context.device().id).unwrap_err();
        assert!(matches!(error, CudaError::Driver { .. }), "{error}");
        assert_eq!(error.code(), Some(DriverCode::new(46)));
        Context::primary(context.device().id).unwrap();
    });
}

#[test]
fn a_blocked_stream_delays_the_streams_that_wait_for_it() {
    let name = "simulated::a_blocked_stream_delays_the_streams_that_wait_for_it";
    in_child(name, || {
        let Some((context, driver)) = simulated(name) else { return };
        let memory = DeviceAllocator::new(&context)
            .allocate(&RegionRequest::new(ByteCount::mib(1)))
            .unwrap();
        let [slow, waiting, free] = [(); 3].map(|()| Stream::new(&context).unwrap());
        let event = Event::new(&context, Timing::Off).unwrap();
        let held = driver.hold(slow.handle());
        // SAFETY: the memory is alive until the streams have been synchronised.
        unsafe { slow.fill(memory.location(), 1, memory.length()) }.unwrap();
        event.record(&slow).unwrap();
        waiting.wait_for(&event).unwrap();
        // SAFETY: as above, and after the other fill.
        unsafe { waiting.fill(memory.location(), 2, memory.length()) }.unwrap();
        free.synchronize().unwrap();
        for _ in 0..100 {
            assert!(!event.is_complete().unwrap());
            assert!(!waiting.is_idle().unwrap());
        }
        drop(held);
        waiting.synchronize().unwrap();
        assert!(event.is_complete().unwrap() && slow.is_idle().unwrap());
    });
}

/// Memory that a blocked stream will free is not reused before. The pool would otherwise let its
/// stream wait for that stream, and the allocation waits for the pool's stream.
#[test]
fn an_allocation_of_a_pool_does_not_wait_for_other_streams() {
    let name = "simulated::an_allocation_of_a_pool_does_not_wait_for_other_streams";
    in_child(name, || {
        let Some((context, driver)) = simulated(name) else { return };
        let pool = DevicePool::new(&context, ByteCount::ZERO).unwrap();
        let (free, _) = context.memory().unwrap();
        // Two of them do not fit.
        let request = RegionRequest::new(ByteCount::new(free.get() / 4 * 3));
        let compute = Stream::new(&context).unwrap();
        let held = driver.hold(compute.handle());
        drop(pool.allocate_on(&compute, &request).unwrap());
        let (sender, receiver) = std::sync::mpsc::channel();
        std::thread::scope(|scope| {
            scope.spawn(|| sender.send(pool.allocate_memory(&request).map(drop)).unwrap());
            let answer = receiver.recv_timeout(std::time::Duration::from_secs(10));
            drop(held);
            let error = answer.expect("it waits for the blocked stream").unwrap_err();
            assert_eq!(error.code(), Some(DriverCode::OUT_OF_MEMORY), "{error}");
        });
        compute.synchronize().unwrap();
        drop(pool.allocate_memory(&request).unwrap());
        assert_eq!((context.lost(), context.failed_drops()), (None, 0));
    });
}
