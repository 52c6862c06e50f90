//! Another CUDA library in the same process: threads, its streams, its memory.

use std::sync::Arc;
use std::thread;

use cudarc::driver::{CudaContext, CudaStream, DevicePtr, sys};
use terrane_core::{
    Allocate, ByteCount, DeviceAddress, DeviceId, ForeignMemory, Location, Memory, RegionRequest,
};
use terrane_cuda::{
    Context, CudaError, CudaStreams, DeviceAllocator, PinnedAllocator, PinnedOptions, Stream, probe,
};
use terrane_pool::FenceSource;
use terrane_testkit::pattern::{Pattern, Piece, PieceAccess};

use crate::needs::{LITTLE, OnDevice, device};

fn current() -> sys::CUcontext {
    let mut context = std::ptr::null_mut();
    // SAFETY: one handle is written.
    let code = unsafe { sys::cuCtxGetCurrent(&raw mut context) };
    assert_eq!(code, sys::CUresult::CUDA_SUCCESS);
    context
}

#[test]
fn the_probe_lists_the_devices() {
    let Some(context) = device("the_probe_lists_the_devices", LITTLE) else { return };
    let found = probe().unwrap();
    eprintln!("{found:?}");
    assert_eq!(&found.devices[0], context.device());
    assert!(found.version.major >= 11);
    let first = &found.devices[0];
    assert!(first.memory > ByteCount::gib(1) && first.multiprocessors > 0);
    assert!(first.pci_address.is_some());
    let beyond = DeviceId::new(u32::try_from(found.devices.len()).unwrap());
    let error = Context::primary(beyond).unwrap_err();
    assert!(matches!(error, CudaError::UnknownDevice { .. }), "{error}");
    let code = terrane_cuda::DriverCode::new(700);
    assert_eq!(code.name(), Some("CUDA_ERROR_ILLEGAL_ADDRESS"));
    assert_eq!(terrane_cuda::DriverCode::new(123_456).name(), None);
}

#[test]
fn every_thread_may_call_and_keeps_its_own_context() {
    let name = "every_thread_may_call_and_keeps_its_own_context";
    let Some(context) = device(name, LITTLE) else { return };
    let shared = Stream::new(&context).unwrap();
    thread::scope(|scope| {
        for number in 0..8_u32 {
            let (context, shared) = (&context, &shared);
            scope.spawn(move || {
                assert!(current().is_null());
                let request = RegionRequest::new(ByteCount::mib(1));
                let options = PinnedOptions::default();
                let pinned = PinnedAllocator::new(context, options).unwrap();
                let (from, to) =
                    (pinned.allocate(&request).unwrap(), pinned.allocate(&request).unwrap());
                let on_device = DeviceAllocator::new(context).allocate(&request).unwrap();
                let own = OnDevice::new(context);
                let pattern = Pattern::new(17);
                for round in 0..20 {
                    let piece = Piece { block: number, layer: round, outer: 0 };
                    let mut bytes = vec![0; 1 << 20];
                    pattern.write(piece, 0, &mut bytes);
                    // SAFETY: only this thread uses the memory.
                    unsafe { own.write(from.location(), &bytes) }.unwrap();
                    let stream = if round % 2 == 0 { shared } else { &own.0 };
                    // SAFETY: as above, and the stream is synchronised.
                    unsafe { stream.copy(from.location(), on_device.location(), request.bytes) }
                        .unwrap();
                    // SAFETY: as above.
                    unsafe { stream.copy(on_device.location(), to.location(), request.bytes) }
                        .unwrap();
                    stream.synchronize().unwrap();
                    bytes.fill(0);
                    // SAFETY: the copies have run.
                    unsafe { own.read(to.location(), &mut bytes) }.unwrap();
                    assert_eq!(pattern.mismatches(piece, 0, &bytes), 0);
                    assert!(current().is_null(), "the thread's current context is unchanged");
                }
            });
        }
    });
    assert_eq!((context.failed_drops(), context.lost()), (0, None));
}

#[test]
fn streams_and_memory_of_cudarc_are_accepted() {
    let name = "streams_and_memory_of_cudarc_are_accepted";
    let Some(context) = device(name, LITTLE) else { return };
    let theirs = CudaContext::new(0).unwrap();
    let before = current();
    let stream: Arc<CudaStream> = theirs.new_stream().unwrap();
    let numbers: Vec<u8> = (0..=255).cycle().take(1 << 20).collect();
    let slice = stream.clone_htod(&numbers).unwrap();
    let (pointer, guard) = slice.device_ptr(&stream);
    let address = DeviceAddress::new(pointer);
    drop(guard);
    let length = ByteCount::from_usize(numbers.len());
    let span = context.device_span(address, length).unwrap();
    assert_eq!((span.length, span.kind), (length, context.kind()));
    let too_long = length.checked_add(ByteCount::gib(1)).unwrap();
    for (address, length) in [
        (address, too_long),
        (DeviceAddress::new(0), length),
        (DeviceAddress::new(0x1000), length),
        (DeviceAddress::new(u64::MAX), length),
    ] {
        let error = context.device_span(address, length).unwrap_err();
        assert!(matches!(error, CudaError::NotDeviceMemory { .. }), "{error}");
    }
    let pinned = PinnedAllocator::new(&context, PinnedOptions::default()).unwrap();
    let pinned = pinned.allocate(&RegionRequest::new(length)).unwrap();
    let alias = pinned.device_alias().unwrap();
    assert!(context.device_span(alias, length).is_err(), "that is the host's memory");

    // SAFETY: the slice is the owner, and the span is its memory.
    let memory = unsafe { ForeignMemory::new(span, slice) };
    let handle = stream.cu_stream().cast();
    // SAFETY: the stream is alive for as long as its owner.
    let borrowed = unsafe { Stream::borrow(&context, handle, Arc::clone(&stream)) }.unwrap();
    assert!(borrowed.is_borrowed());
    // SAFETY: both are alive until the stream has been synchronised.
    unsafe { borrowed.copy(memory.location(), pinned.location(), length) }.unwrap();
    let streams = CudaStreams::new(&context);
    let id = streams.add(borrowed).unwrap();
    let fence = FenceSource::create(&streams).unwrap();
    fence.record(id).unwrap();
    assert!(fence.wait(std::time::Duration::from_secs(120)).unwrap());
    let mut seen = vec![0; numbers.len()];
    // SAFETY: the copy has run.
    unsafe { OnDevice::new(&context).read(pinned.location(), &mut seen) }.unwrap();
    assert!(seen == numbers);
    drop((streams, fence));
    assert_eq!(
        Arc::strong_count(&stream),
        2,
        "the slice and this test; the borrowed stream has dropped"
    );
    stream.synchronize().expect("a borrowed stream is not destroyed");
    assert_eq!(current(), before, "cudarc's context is still current");
    theirs.check_err().expect("nothing was left for the next caller");
    assert!(matches!(memory.location(), Location::Device { .. }));
}
