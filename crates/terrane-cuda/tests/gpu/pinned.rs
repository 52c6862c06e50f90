//! Pinned memory: registered in chunks, accessed by the device, and allocated faster than by the
//! driver.

use std::time::{Duration, Instant};

use terrane_core::{
    Allocate, ByteCount, Capability, CapabilityStatus, Location, Memory, RegionRequest, Requirement,
};
use terrane_cuda::{
    Context, CudaError, DeviceAllocator, Event, PinnedAllocator, PinnedOptions, Stream, Timing,
};
use terrane_layout::{BlockDimension, ElementFormat, LayoutConfig, LayoutKind, LayoutPlan};
use terrane_storage::Progress;
use terrane_testkit::pattern::{InProcess, PieceAccess};

use crate::needs::{LITTLE, Needs, device, real_device};

fn registered(context: &Context) -> PinnedAllocator {
    let options = PinnedOptions { registration: Requirement::Required, ..PinnedOptions::default() };
    PinnedAllocator::new(context, options).unwrap()
}

#[test]
fn the_device_reads_and_writes_it_at_its_alias() {
    let name = "the_device_reads_and_writes_it_at_its_alias";
    let Some(context) = device(name, LITTLE) else { return };
    let memory = registered(&context).allocate(&RegionRequest::new(ByteCount::mib(8))).unwrap();
    eprintln!("{}", memory.capabilities());
    assert_eq!(
        memory.capabilities().status(&Capability::HostRegistration),
        Some(&CapabilityStatus::Granted)
    );
    let alias = memory.device_alias().expect("registered memory is mapped");
    if context.device().uses_host_addresses {
        assert_eq!(alias.get(), memory.address().get());
    }
    let mut bytes = vec![1; memory.length().to_usize()];
    // SAFETY: no other code uses the memory.
    unsafe { InProcess.read(memory.location(), &mut bytes) }.unwrap();
    assert!(bytes.iter().all(|&byte| byte == 0), "fresh memory is zeroed");

    let stream = Stream::new(&context).unwrap();
    let at = Location::Device { device: context.device().id, address: alias };
    // SAFETY: the memory is alive until the stream has been synchronised.
    unsafe { stream.fill(at, 0xA5, memory.length()) }.unwrap();
    stream.synchronize().unwrap();
    // SAFETY: no other code uses the memory any more.
    unsafe { InProcess.read(memory.location(), &mut bytes) }.unwrap();
    assert!(bytes.iter().all(|&byte| byte == 0xA5));
}

#[test]
fn chunks_are_registered_separately_and_accessed_as_one_span() {
    let name = "chunks_are_registered_separately_and_accessed_as_one_span";
    let Some(context) = device(name, LITTLE) else { return };
    let chunk = ByteCount::mib(4);
    let options = PinnedOptions {
        registration: Requirement::Required,
        largest_registration: chunk,
        unit: ByteCount::mib(2),
        ..PinnedOptions::default()
    };
    let pinned = PinnedAllocator::new(&context, options).unwrap();
    let memory = pinned.allocate(&RegionRequest::new(ByteCount::mib(11))).unwrap();
    assert_eq!(memory.registration_length(), Some(chunk));
    assert!(memory.device_alias().is_some());
    let on_device =
        DeviceAllocator::new(&context).allocate(&RegionRequest::new(memory.length())).unwrap();
    let bytes: Vec<u8> = (0..=250).cycle().take(memory.length().to_usize()).collect();
    // SAFETY: no other code uses the memory.
    unsafe { InProcess.write(memory.location(), &bytes) }.unwrap();
    let stream = Stream::new(&context).unwrap();
    let mut offset = ByteCount::ZERO;
    while offset < memory.length() {
        let length = chunk.min(memory.length().checked_sub(offset).unwrap());
        let from = memory.location().checked_add(offset).unwrap();
        let to = on_device.location().checked_add(offset).unwrap();
        // SAFETY: both are alive until the stream has been synchronised.
        unsafe { stream.copy(from, to, length) }.unwrap();
        offset = offset.checked_add(length).unwrap();
    }
    let mut back = vec![0; bytes.len()];
    let to = terrane_core::HostAddress::new(std::ptr::NonNull::from(&mut back[0]));
    // SAFETY: both are alive until the stream has been synchronised.
    unsafe { stream.copy(on_device.location(), Location::Host(to), memory.length()) }.unwrap();
    stream.synchronize().unwrap();
    assert!(back == bytes, "the bytes of some chunk differ from the written ones");

    // The reason why a unit is not split: the driver's result for a copy from one chunk into the
    // next.
    let across = memory.location().checked_add(ByteCount::mib(3)).unwrap();
    // SAFETY: both are alive until the stream has been synchronised.
    let crossed = unsafe { stream.copy(across, on_device.location(), ByteCount::mib(2)) };
    eprintln!("a copy across two registrations: {crossed:?}");
    stream.synchronize().unwrap();
    assert!(!crossed.is_err_and(|error| error.is_context_lost()));
}

/// Blocks of 1.5 MiB, two of which fit into 4 MiB, and blocks that are larger than a registration.
#[test]
fn registrations_do_not_split_the_blocks_of_a_layout() {
    let name = "registrations_do_not_split_the_blocks_of_a_layout";
    let Some(context) = device(name, LITTLE) else { return };
    let options = PinnedOptions {
        registration: Requirement::Required,
        largest_registration: ByteCount::mib(4),
        background_step: ByteCount::mib(2),
        ..PinnedOptions::default()
    };
    let pinned = PinnedAllocator::new(&context, options).unwrap();
    let request = |pages, kind| {
        let config = LayoutConfig::builder().num_blocks(4).num_layers(2).outer_dim(2);
        let config = config.page_size(pages).inner_dim(1024).element(ElementFormat::Width(2));
        let plan = LayoutPlan::new(&config.build().unwrap(), kind, pinned.limits()).unwrap();
        plan.base_request()
    };
    let separate = LayoutKind::LayerSeparate { block_dimension: BlockDimension::First };
    for (pages, kind, at_once, in_background) in [
        (192, LayoutKind::FullyContiguous, ByteCount::mib(3), ByteCount::kib(1536)),
        (384, separate, ByteCount::mib(3), ByteCount::kib(1536)),
        (1024, LayoutKind::FullyContiguous, ByteCount::mib(4), ByteCount::mib(2)),
    ] {
        let request = request(pages, kind);
        let memory = pinned.allocate_memory(&request).unwrap();
        assert_eq!(memory.registration_length(), Some(at_once), "{kind}, {request:?}");
        let (memory, bring_up) = pinned.allocate_in_background(&request).unwrap();
        assert_eq!(memory.registration_length(), Some(in_background), "{kind}, {request:?}");
        assert!(bring_up.wait_for(request.bytes, Duration::from_secs(120)).unwrap());
    }
}

#[test]
fn allocating_and_freeing_pinned_memory_leaves_nothing() {
    let Some(context) = device("allocating_and_freeing_pinned_memory_leaves_nothing", LITTLE)
    else {
        return;
    };
    let pinned = registered(&context);
    for _ in 0..100 {
        drop(pinned.allocate(&RegionRequest::new(ByteCount::mib(4))).unwrap());
    }
    assert_eq!((context.failed_drops(), context.lost()), (0, None));
}

#[test]
fn units_above_a_registration_and_cancelled_allocations_are_errors() {
    let name = "units_above_a_registration_and_cancelled_allocations_are_errors";
    let Some(context) = device(name, LITTLE) else { return };
    let options = PinnedOptions { unit: ByteCount::gib(65), ..PinnedOptions::default() };
    let error = PinnedAllocator::new(&context, options).unwrap_err();
    assert!(matches!(error, CudaError::UnitTooLarge { .. }), "{error}");

    let progress = Progress::default();
    progress.cancel();
    let pinned = registered(&context).reporting_to(progress);
    let request = RegionRequest::new(ByteCount::mib(4));
    assert!(pinned.allocate(&request).is_err(), "it was cancelled");
}

fn median(mut times: Vec<Duration>) -> Duration {
    times.sort();
    times[times.len() / 2]
}

#[test]
fn bring_up_of_8_gib_beside_the_drivers_own() {
    let needs = Needs { device: ByteCount::mib(64), host: ByteCount::gib(10) };
    let name = "bring_up_of_8_gib_beside_the_drivers_own";
    let Some(context) = real_device(name, needs) else { return };
    let request = RegionRequest::new(ByteCount::gib(8));
    let options = PinnedOptions { registration: Requirement::Off, ..PinnedOptions::default() };
    let of_driver = PinnedAllocator::new(&context, options).unwrap();
    let registered = registered(&context);
    let (mut ours, mut theirs, mut raw) = (Vec::new(), Vec::new(), Vec::new());
    // The first round is a warm-up: a virtual machine gets its memory on the first touch.
    for round in 0..4 {
        let started = Instant::now();
        let memory = registered.allocate(&request).unwrap();
        let our = started.elapsed();
        if round == 0 {
            eprintln!("{}", memory.capabilities());
        }
        drop(memory);
        let raw_time = raw_host_alloc(request.bytes);
        let started = Instant::now();
        drop(of_driver.allocate(&request).unwrap());
        if round > 0 {
            ours.push(our);
            raw.push(raw_time);
            theirs.push(started.elapsed());
        }
    }
    let (ours, theirs, raw) = (median(ours), median(theirs), median(raw));
    let ratio = raw.as_secs_f64() / ours.as_secs_f64();
    eprintln!(
        "measured: 8 GiB of pinned memory, medians of 3: registered {ours:.2?}, the driver's own \
         through this crate (allocated, zeroed, freed) {theirs:.2?}, cuMemHostAlloc alone \
         {raw:.2?}: {ratio:.1} times"
    );
}

/// The time of the driver's own allocation.
fn raw_host_alloc(bytes: ByteCount) -> Duration {
    use cudarc::driver::sys;
    let context = cudarc::driver::CudaContext::new(0).unwrap();
    context.bind_to_thread().unwrap();
    let mut address = std::ptr::null_mut();
    let started = Instant::now();
    // SAFETY: one address is written.
    let code = unsafe { sys::cuMemHostAlloc(&raw mut address, bytes.to_usize(), 3) };
    let time = started.elapsed();
    assert_eq!(code, sys::CUresult::CUDA_SUCCESS);
    // SAFETY: it was allocated above.
    let code = unsafe { sys::cuMemFreeHost(address) };
    assert_eq!(code, sys::CUresult::CUDA_SUCCESS);
    time
}

#[test]
fn one_contiguous_copy_each_way() {
    let needs = Needs { device: ByteCount::gib(2), host: ByteCount::gib(2) };
    let Some(context) = real_device("one_contiguous_copy_each_way", needs) else { return };
    let request = RegionRequest::new(ByteCount::gib(1));
    let pinned = registered(&context).allocate(&request).unwrap();
    let on_device = DeviceAllocator::new(&context).allocate(&request).unwrap();
    let stream = Stream::new(&context).unwrap();
    let ways = [
        ("host to device", pinned.location(), on_device.location()),
        ("device to host", on_device.location(), pinned.location()),
    ];
    for (way, from, to) in ways {
        let mut times = Vec::new();
        for _ in 0..5 {
            let before = Event::new(&context, Timing::On).unwrap();
            let after = Event::new(&context, Timing::On).unwrap();
            before.record(&stream).unwrap();
            // SAFETY: both are alive until the event has completed.
            unsafe { stream.copy(from, to, request.bytes) }.unwrap();
            after.record(&stream).unwrap();
            after.wait().unwrap();
            times.push(after.elapsed_since(&before).unwrap());
        }
        let time = median(times).as_secs_f64();
        let rate = request.bytes.get() as f64 / time / 1e9;
        eprintln!("measured: 1 GiB contiguous, {way}: {rate:.1} GB/s");
        assert!(rate > 0.1, "no such machine is that slow");
    }
}
