//! Every kind of memory passes the conformance suites of memory and of allocators.

use terrane_core::Requirement;
use terrane_core::{Alignment, Allocate, AllocateError, ByteCount, Memory, RegionRequest};
use terrane_cuda::{
    Context, DeviceAllocator, DevicePool, PinnedAllocator, PinnedNuma, PinnedOptions,
};
use terrane_testkit::conformance::{AllocatorFixture, check_allocator};
use terrane_testkit::pattern::PieceAccess;

use crate::needs::{LITTLE, OnDevice, device};

/// An allocator from a function.
struct FromFunction<F> {
    make: F,
    access: OnDevice,
    strictest: Alignment,
}

impl<A: Allocate, F: Fn() -> A> AllocatorFixture for FromFunction<F> {
    type Allocator = A;

    fn allocator(&self) -> A {
        (self.make)()
    }

    fn access(&self) -> &dyn PieceAccess {
        &self.access
    }

    fn strictest_alignment(&self) -> Alignment {
        self.strictest
    }

    /// The driver counts the memory of all processes.
    fn live(&self, _: &A) -> Option<u64> {
        None
    }
}

fn check<A: Allocate>(context: &Context, strictest: Alignment, make: impl Fn() -> A) {
    check_allocator(&FromFunction { make, access: OnDevice::new(context), strictest });
    assert_eq!(context.lost(), None);
    assert_eq!(context.failed_drops(), 0);
}

#[test]
fn device_memory_conforms() {
    let Some(context) = device("device_memory_conforms", LITTLE) else { return };
    check(&context, Alignment::HUGE_PAGE, || DeviceAllocator::new(&context));
}

#[test]
fn pool_memory_conforms() {
    let Some(context) = device("pool_memory_conforms", LITTLE) else { return };
    let make = || DevicePool::new(&context, ByteCount::mib(256)).unwrap();
    check(&context, Alignment::HUGE_PAGE, make);
}

#[test]
fn pinned_memory_conforms() {
    let Some(context) = device("pinned_memory_conforms", LITTLE) else { return };
    let make = || PinnedAllocator::new(&context, PinnedOptions::default()).unwrap();
    check(&context, Alignment::HUGE_PAGE, make);
}

#[test]
fn pinned_memory_of_the_driver_conforms() {
    let Some(context) = device("pinned_memory_of_the_driver_conforms", LITTLE) else { return };
    let options = PinnedOptions {
        registration: Requirement::Off,
        numa: PinnedNuma::NearDevice(Requirement::Off),
        ..PinnedOptions::default()
    };
    let make = || PinnedAllocator::new(&context, options.clone()).unwrap();
    check(&context, Alignment::HUGE_PAGE, make);
}

#[test]
fn impossible_requests_are_refused_as_impossible() {
    let Some(context) = device("impossible_requests_are_refused_as_impossible", LITTLE) else {
        return;
    };
    let device = DeviceAllocator::new(&context);
    let (_, total) = context.memory().unwrap();
    let more = total.checked_add(ByteCount::gib(64)).unwrap();
    let error = device.allocate(&RegionRequest::new(more)).unwrap_err();
    assert!(matches!(error, AllocateError::TooLarge { .. }), "{error}");
    let strict = Alignment::new(1 << 30).unwrap();
    let request = RegionRequest::new(ByteCount::mib(1)).aligned_to(strict);
    let error = device.allocate(&request).unwrap_err();
    assert!(matches!(error, AllocateError::TooStrictlyAligned { .. }), "{error}");
}

#[test]
fn a_pool_keeps_memory_up_to_its_threshold_and_can_be_trimmed() {
    let name = "a_pool_keeps_memory_up_to_its_threshold_and_can_be_trimmed";
    let Some(context) = device(name, LITTLE) else { return };
    let request = RegionRequest::new(ByteCount::mib(48));
    let kept = |threshold: ByteCount| {
        let pool = DevicePool::new(&context, threshold).unwrap();
        drop(pool.allocate(&request).unwrap());
        // Synchronises the pool's stream, at which a pool without a threshold frees its memory.
        let second = pool.allocate(&RegionRequest::new(ByteCount::new(1))).unwrap();
        assert!(pool.in_use().unwrap() >= second.length());
        drop(second);
        let held = pool.held().unwrap();
        pool.trim(ByteCount::ZERO).unwrap();
        assert_eq!(pool.in_use().unwrap(), ByteCount::ZERO);
        assert_eq!(pool.held().unwrap(), ByteCount::ZERO, "trimmed to nothing");
        held
    };
    assert!(kept(ByteCount::gib(1)) >= request.bytes);
    let without = kept(ByteCount::ZERO);
    assert!(without < request.bytes, "{without} kept without a threshold");
}
