//! Pinned memory that is used during its preparation in the background.

use std::pin::pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::task::{Poll, Wake, Waker};
use std::thread::Thread;
use std::time::{Duration, Instant};

use terrane_core::{
    Allocate, ByteCount, Capability, CapabilityStatus, Location, Memory, Reason, Region,
    RegionRequest, Requirement,
};
use terrane_cuda::{
    Context, CudaError, DeviceAllocator, DriverCode, PinnedAllocator, PinnedOptions, Stream,
};
use terrane_layout::{ElementFormat, LayoutConfig, LayoutKind, LayoutPlan};
use terrane_storage::StorageError;
use terrane_testkit::events::AtEvents;
use terrane_testkit::pattern::{InProcess, PieceAccess};
use terrane_testkit::process::in_child;

use crate::faults;
use crate::needs::{LITTLE, Needs, device};

const TIMEOUT: Duration = Duration::from_secs(120);
const STEP: ByteCount = ByteCount::mib(4);
const OUT_OF_MEMORY: DriverCode = DriverCode::OUT_OF_MEMORY;

fn in_steps(context: &Context, step: ByteCount) -> PinnedAllocator {
    let options = PinnedOptions { background_step: step, ..PinnedOptions::default() };
    PinnedAllocator::new(context, options).unwrap()
}

/// Asserts that nothing is registered, and that no drop has failed.
fn assert_all_gone(context: &Context) {
    assert_eq!(context.usage().registered, terrane_cuda::ResourceCount::default());
    assert_eq!((context.failed_drops(), context.lost()), (0, None));
}

#[test]
fn a_prefix_is_copied_while_the_rest_is_prepared() {
    let Some(context) = device("a_prefix_is_copied_while_the_rest_is_prepared", LITTLE) else {
        return;
    };
    let request = RegionRequest::new(ByteCount::mib(46));
    let (memory, bring_up) = in_steps(&context, STEP).allocate_in_background(&request).unwrap();
    assert_eq!((memory.length(), bring_up.length()), (request.bytes, request.bytes));
    assert_eq!(memory.registration_length(), Some(STEP));

    // The processor may use all of the memory from the start, and its writes persist.
    let last = memory.location().checked_add(ByteCount::mib(45)).unwrap();
    // SAFETY: no other code uses the memory.
    unsafe { InProcess.write(last, &[0xC3; 4096]) }.unwrap();

    let stream = Stream::new(&context).unwrap();
    let on_device = DeviceAllocator::new(&context).allocate(&RegionRequest::new(STEP)).unwrap();
    let (mut offset, mut before) = (ByteCount::ZERO, ByteCount::ZERO);
    while offset < request.bytes {
        let length = STEP.min(request.bytes.checked_sub(offset).unwrap());
        let end = offset.checked_add(length).unwrap();
        assert!(bring_up.wait_for(end, TIMEOUT).unwrap());
        let usable = memory.usable_prefix();
        assert!(usable >= end && usable >= before, "it only grows");
        before = usable;
        let at = memory.location().checked_add(offset).unwrap();
        // SAFETY: both are alive until the stream has been synchronised, and no other code uses
        // them.
        unsafe { stream.fill(on_device.location(), 0x5A, length) }.unwrap();
        // SAFETY: as above.
        unsafe { stream.copy(on_device.location(), at, length) }.unwrap();
        stream.synchronize().unwrap();
        let mut bytes = vec![0; length.to_usize()];
        // SAFETY: the copy has run.
        unsafe { InProcess.read(at, &mut bytes) }.unwrap();
        assert!(bytes.iter().all(|&byte| byte == 0x5A));
        offset = end;
    }
    assert_eq!(context.usage().registered.bytes, request.bytes);
    assert_eq!(context.usage().registered.count, 12, "one for each step");
    drop((memory, bring_up));
    assert_all_gone(&context);
}

#[test]
fn memory_prepared_in_the_background_equals_memory_prepared_at_once() {
    let name = "memory_prepared_in_the_background_equals_memory_prepared_at_once";
    let Some(context) = device(name, LITTLE) else { return };
    let request = RegionRequest::new(ByteCount::mib(10));
    let (memory, bring_up) = in_steps(&context, STEP).allocate_in_background(&request).unwrap();
    assert!(complete(&bring_up));
    assert!(bring_up.is_complete() && bring_up.ended().is_none());
    assert_eq!(bring_up.touched(), request.bytes);
    let report = memory.capabilities();
    assert_eq!(
        report.status(&Capability::HostRegistration),
        Some(&CapabilityStatus::Granted),
        "{report}"
    );
    let alias = memory.device_alias().expect("the device reaches all of it");
    if context.device().uses_host_addresses {
        assert_eq!(alias.get(), memory.address().get());
    }
    let at = Location::Device { device: context.device().id, address: alias };
    let stream = Stream::new(&context).unwrap();
    let mut offset = ByteCount::ZERO;
    while offset < memory.length() {
        let length = STEP.min(memory.length().checked_sub(offset).unwrap());
        // SAFETY: the memory is alive until the stream has been synchronised.
        unsafe { stream.fill(at.checked_add(offset).unwrap(), 0xA5, length) }.unwrap();
        offset = offset.checked_add(length).unwrap();
    }
    stream.synchronize().unwrap();
    let mut bytes = vec![0; memory.length().to_usize()];
    // SAFETY: no other code uses the memory any more.
    unsafe { InProcess.read(memory.location(), &mut bytes) }.unwrap();
    assert!(bytes.iter().all(|&byte| byte == 0xA5));
}

/// Polls the bring-up to its end, as an async task does.
fn complete(bring_up: &terrane_cuda::PinnedBringUp) -> bool {
    struct Unpark(Thread);
    impl Wake for Unpark {
        fn wake(self: Arc<Self>) {
            self.0.unpark();
        }
    }
    let waker = Waker::from(Arc::new(Unpark(std::thread::current())));
    let mut context = std::task::Context::from_waker(&waker);
    let mut all = pin!(bring_up.usable(bring_up.length()));
    let started = Instant::now();
    loop {
        match all.as_mut().poll(&mut context) {
            Poll::Ready(answer) => {
                answer.unwrap();
                return bring_up.is_complete();
            }
            Poll::Pending => std::thread::park_timeout(Duration::from_secs(1)),
        }
        assert!(started.elapsed() < TIMEOUT);
    }
}

#[test]
fn memory_that_drops_during_its_preparation_leaves_nothing() {
    let Some(context) = device("memory_that_drops_during_its_preparation_leaves_nothing", LITTLE)
    else {
        return;
    };
    let pinned = in_steps(&context, ByteCount::mib(2));
    let request = RegionRequest::new(ByteCount::mib(40));
    for round in 0..20 {
        let (memory, bring_up) = pinned.allocate_in_background(&request).unwrap();
        if round % 2 == 0 {
            bring_up.wait_for(ByteCount::mib(2), TIMEOUT).unwrap();
        }
        drop(memory);
        // The thread is joined: nothing is registered any more, and the end has been reported.
        assert_all_gone(&context);
        assert!(bring_up.is_complete() || bring_up.ended().is_some());
    }
    let (memory, bring_up) = pinned.allocate_in_background(&request).unwrap();
    bring_up.cancel();
    let usable = match bring_up.wait_for(request.bytes, TIMEOUT) {
        Ok(is_usable) => {
            assert!(is_usable);
            request.bytes
        }
        Err(ended) => {
            assert!(ended.cause.is_none(), "{ended:?}");
            ended.usable
        }
    };
    assert_eq!(context.usage().registered.bytes, usable, "usable bytes stay usable");
    drop(memory);
    assert_all_gone(&context);
}

#[test]
fn a_refused_step_ends_the_preparation_and_keeps_the_usable_prefix() {
    let name = "a_refused_step_ends_the_preparation_and_keeps_the_usable_prefix";
    let Some(context) = device(name, LITTLE) else { return };
    for refused in [0, 2, 5] {
        if !faults::fail(name, "cuMemHostRegister_v2", refused, OUT_OF_MEMORY) {
            return;
        }
        let request = RegionRequest::new(ByteCount::mib(24));
        let (memory, bring_up) = in_steps(&context, STEP).allocate_in_background(&request).unwrap();
        let ended = bring_up.wait_for(request.bytes, TIMEOUT).unwrap_err();
        let usable = STEP.checked_mul("steps", refused).unwrap();
        assert_eq!((ended.usable, ended.of), (usable, request.bytes));
        let cause = ended.cause.as_deref().expect("a refusal has a cause");
        assert_eq!(cause.code(), Some(OUT_OF_MEMORY), "{cause}");
        assert_eq!(context.usage().registered.bytes, usable);
        assert_eq!(memory.device_alias(), None, "no kernel may access bytes beyond the prefix");
        let report = memory.capabilities();
        match report.status(&Capability::HostRegistration) {
            Some(CapabilityStatus::Partial { granted, of }) => {
                assert_eq!((*granted, *of), (usable, request.bytes));
            }
            Some(CapabilityStatus::Refused(Reason::Driver { operation, code })) if refused == 0 => {
                assert_eq!((*operation, *code), ("cuMemHostRegister_v2", OUT_OF_MEMORY.get()));
            }
            other => panic!("{other:?}"),
        }
        drop(memory);
        assert_all_gone(&context);
    }
}

/// A subscriber of `tracing` panics on the thread that registers the memory. The preparation ends,
/// and the usable prefix stays registered.
#[test]
fn a_panic_in_the_background_keeps_the_usable_prefix() {
    static EVENTS: AtomicU64 = AtomicU64::new(0);
    let name = "background::a_panic_in_the_background_keeps_the_usable_prefix";
    in_child(name, || {
        let Some(context) = device(name, LITTLE) else { return };
        let panic_at_third = |_: &tracing::Event<'_>| {
            let is_here = std::thread::current().name() == Some("terrane-pin");
            if is_here && EVENTS.fetch_add(1, Ordering::SeqCst) == 2 {
                panic!("a subscriber that panics");
            }
        };
        tracing::subscriber::set_global_default(AtEvents::any(panic_at_third)).unwrap();
        let request = RegionRequest::new(ByteCount::mib(24));
        let (memory, bring_up) = in_steps(&context, STEP).allocate_in_background(&request).unwrap();
        let ended = bring_up.wait_for(request.bytes, TIMEOUT).unwrap_err();
        assert!(ended.cause.is_none(), "{ended:?}");
        let usable = memory.usable_prefix();
        assert_eq!(usable, STEP.checked_mul("steps", 2).unwrap());
        assert!(context.usage().registered.bytes >= usable, "usable bytes stay usable");
        drop(memory);
        assert_all_gone(&context);
    });
}

#[test]
fn a_registration_that_fails_midway_is_rolled_back_and_replaced_or_refused() {
    let name = "a_registration_that_fails_midway_is_rolled_back_and_replaced_or_refused";
    let Some(context) = device(name, LITTLE) else { return };
    let pinned = |registration| {
        let options =
            PinnedOptions { registration, largest_registration: STEP, ..PinnedOptions::default() };
        PinnedAllocator::new(&context, options).unwrap()
    };
    let request = RegionRequest::new(ByteCount::mib(16));
    if !faults::fail(name, "cuMemHostRegister_v2", 2, OUT_OF_MEMORY) {
        return;
    }
    let memory = pinned(Requirement::Preferred).allocate_memory(&request).unwrap();
    let usage = context.usage();
    assert_eq!(
        usage.registered,
        terrane_cuda::ResourceCount::default(),
        "the first two were rolled back"
    );
    assert_eq!((usage.host.count, usage.host.bytes), (1, request.bytes));
    let report = memory.capabilities();
    let Some(CapabilityStatus::Refused(Reason::Driver { code, .. })) =
        report.status(&Capability::HostRegistration)
    else {
        panic!("{report}");
    };
    assert_eq!(*code, OUT_OF_MEMORY.get());
    assert_eq!(memory.registration_length(), None);
    assert!(memory.device_alias().is_some());
    drop(memory);

    assert!(faults::fail(name, "cuMemHostRegister_v2", 3, OUT_OF_MEMORY));
    let error = pinned(Requirement::Required).allocate_memory(&request).unwrap_err();
    assert!(matches!(error, CudaError::Capability(_)), "{error}");
    assert_all_gone(&context);
    assert_eq!(context.usage().host, terrane_cuda::ResourceCount::default());

    // Neither way works: the driver's own refusal is the error.
    assert!(faults::fail(name, "cuMemHostRegister_v2", 0, OUT_OF_MEMORY));
    assert!(faults::fail(name, "cuMemHostAlloc", 0, OUT_OF_MEMORY));
    let error = pinned(Requirement::Preferred).allocate(&request).unwrap_err();
    assert!(error.is_exhaustion(), "{error}");
    assert_all_gone(&context);
}

#[test]
fn blocks_of_a_layout_become_usable_in_order() {
    let name = "blocks_of_a_layout_become_usable_in_order";
    let Some(context) = device(name, LITTLE) else { return };
    let config = LayoutConfig::builder()
        .num_blocks(24)
        .num_layers(8)
        .outer_dim(2)
        .page_size(16)
        .inner_dim(4096)
        .element(ElementFormat::Width(1))
        .build()
        .unwrap();
    let block = ByteCount::mib(1);
    let pinned = in_steps(&context, STEP);
    let plan = LayoutPlan::new(&config, LayoutKind::FullyContiguous, pinned.limits()).unwrap();
    assert_eq!(plan.geometry().block_unit(), Some(block));
    let (memory, bring_up) = pinned.allocate_in_background(&plan.base_request()).unwrap();
    let regions = plan.cut(&Region::new(memory)).unwrap();
    let stream = Stream::new(&context).unwrap();
    let device = DeviceAllocator::new(&context);
    let on_device = device.allocate(&RegionRequest::new(block)).unwrap();
    for id in 0..24 {
        // The check that an allocator of block ids makes.
        let started = Instant::now();
        while plan.blocks_within(bring_up.usable_prefix()) <= id {
            let end = block.checked_mul("blocks", u64::from(id) + 1).unwrap();
            assert!(bring_up.wait_for(end, TIMEOUT).unwrap());
            assert!(started.elapsed() < TIMEOUT);
        }
        let offset = ByteCount::new(plan.geometry().offset(id, 0, 0).offset);
        let at = regions[0].location().checked_add(offset).unwrap();
        // SAFETY: both are alive until the stream has been synchronised.
        unsafe { stream.copy(at, on_device.location(), block) }.unwrap();
        stream.synchronize().unwrap();
    }
    assert_eq!(plan.blocks_within(bring_up.usable_prefix()), 24);
}

#[test]
fn memory_without_registration_is_ready_when_it_is_returned() {
    let name = "memory_without_registration_is_ready_when_it_is_returned";
    let Some(context) = device(name, LITTLE) else { return };
    let request = RegionRequest::new(ByteCount::mib(3));
    let options = PinnedOptions { registration: Requirement::Off, ..PinnedOptions::default() };
    let allocator = PinnedAllocator::new(&context, options).unwrap();
    let (memory, bring_up) = allocator.allocate_in_background(&request).unwrap();
    assert!(bring_up.is_complete());
    assert_eq!(memory.usable_prefix(), memory.length());
    assert!(memory.device_alias().is_some());
    let nothing = RegionRequest::new(ByteCount::ZERO);
    let (memory, bring_up) = in_steps(&context, STEP).allocate_in_background(&nothing).unwrap();
    assert!(memory.length().is_zero() && bring_up.is_complete());

    let cancelled = terrane_storage::Progress::default();
    cancelled.cancel();
    let allocator = in_steps(&context, STEP).reporting_to(cancelled);
    let (memory, bring_up) = allocator.allocate_in_background(&request).unwrap();
    let ended = bring_up.wait_for(request.bytes, TIMEOUT).unwrap_err();
    assert!(ended.cause.is_none() && memory.usable_prefix().is_zero(), "{ended}");
    let beyond = RegionRequest::new(ByteCount::new(1 << 60));
    let error = in_steps(&context, STEP).allocate_in_background(&beyond).unwrap_err();
    let CudaError::HostMemory { source } = &error else { panic!("{error}") };
    assert!(matches!(**source, StorageError::OutOfMemory { .. }), "{source}");
}

#[test]
fn the_first_part_of_8_gib_is_usable_early() {
    let needs = Needs { device: ByteCount::mib(64), host: ByteCount::gib(10) };
    let name = "the_first_part_of_8_gib_is_usable_early";
    let Some(context) = device(name, needs) else { return };
    if faults::is_simulated() {
        eprintln!("skipped: {name}: a simulated driver has no meaningful times");
        return;
    }
    let pinned = PinnedAllocator::new(&context, PinnedOptions::default()).unwrap();
    let request = RegionRequest::new(ByteCount::gib(8));
    for _ in 0..3 {
        let started = Instant::now();
        let (memory, bring_up) = pinned.allocate_in_background(&request).unwrap();
        let mapped = started.elapsed();
        let mut after = Vec::new();
        for part in [ByteCount::mib(512), ByteCount::gib(1), ByteCount::gib(4), request.bytes] {
            assert!(bring_up.wait_for(part, TIMEOUT).unwrap());
            after.push((part, started.elapsed()));
        }
        eprintln!(
            "measured: pinned memory in the background: mapped after {mapped:.2?}; {after:.2?}"
        );
        drop(memory);
    }
    assert_all_gone(&context);
}
