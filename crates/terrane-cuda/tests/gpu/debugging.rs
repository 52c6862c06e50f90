//! Poison and guards around device and pinned memory, in the order of a stream.

use std::sync::Arc;

use terrane_core::{Alignment, Allocate, ByteCount, Location, Memory, RegionRequest};
use terrane_cuda::{
    Context, CudaFill, CudaStreams, DeviceAllocator, DevicePool, PinnedAllocator, PinnedOptions,
    Stream,
};
use terrane_pool::adaptors::{
    Adapt, DebugOptions, GuardViolation, OverwrittenSide, Poison, PoisonBytes,
};
use terrane_pool::{Pool, PoolOptions, StreamId, StreamSource};
use terrane_testkit::conformance::{AllocatorFixture, check_allocator};
use terrane_testkit::delayed::Delayed;
use terrane_testkit::pattern::PieceAccess;

use crate::needs::{LITTLE, OnDevice, device};

fn stream_of(context: &Context) -> (CudaStreams, StreamId, Stream) {
    let streams = CudaStreams::new(context);
    let id = StreamSource::create(&streams).unwrap();
    let stream = streams.get(id).unwrap();
    (streams, id, stream)
}

fn seen(access: &OnDevice, at: Location, length: usize) -> Vec<u8> {
    let mut bytes = vec![0x11; length];
    // SAFETY: the memory is alive, and no other code uses it.
    unsafe { access.read(at, &mut bytes) }.unwrap();
    bytes
}

/// New memory consists of one poison byte, freed memory of the other.
fn poisoned<A: Allocate>(context: &Context, upstream: A) {
    let (streams, id, stream) = stream_of(context);
    let access = OnDevice::new(context);
    // The upstream keeps freed memory, so that the test can read it.
    let delayed = Arc::new(Delayed::new(upstream, 1));
    let bytes = PoisonBytes { allocated: 0xA1, freed: 0xF2 };
    let poison = Poison::new(Arc::clone(&delayed), CudaFill::new(&streams), bytes, id);
    let request = RegionRequest::new(ByteCount::kib(64));
    let memory = poison.allocate(&request).unwrap();
    let (at, length) = (memory.location(), memory.length().to_usize());
    // The fill has run, whichever stream reads.
    assert!(seen(&access, at, length).iter().all(|&byte| byte == 0xA1));
    if at.as_host().is_none() {
        // SAFETY: the memory is alive until its free has synchronised the stream.
        unsafe { stream.fill(at, 0x33, request.bytes) }.unwrap();
    }
    drop(memory);
    assert!(seen(&access, at, length).iter().all(|&byte| byte == 0xF2), "after the last write");
    let report = poison.report();
    assert_eq!((report.filled, report.failed), (2, 0), "{:?}", report.last_failure);
}

#[test]
fn new_and_freed_memory_is_poisoned_in_the_order_of_the_stream() {
    let name = "new_and_freed_memory_is_poisoned_in_the_order_of_the_stream";
    let Some(context) = device(name, LITTLE) else { return };
    poisoned(&context, DeviceAllocator::new(&context));
    poisoned(&context, DevicePool::new(&context, ByteCount::mib(32)).unwrap());
    poisoned(&context, PinnedAllocator::new(&context, PinnedOptions::default()).unwrap());
    assert_eq!((context.failed_drops(), context.lost()), (0, None));
}

#[test]
fn an_unknown_stream_poisons_nothing_and_is_an_error() {
    let name = "an_unknown_stream_poisons_nothing_and_is_an_error";
    let Some(context) = device(name, LITTLE) else { return };
    let fill = CudaFill::without_waiting(&CudaStreams::new(&context));
    let no_stream = StreamId::new(u64::MAX);
    let poison = DeviceAllocator::new(&context).poisoned(fill, PoisonBytes::default(), no_stream);
    drop(poison.allocate(&RegionRequest::new(ByteCount::kib(1))).unwrap());
    let report = poison.report();
    assert_eq!((report.filled, report.failed), (0, 2));
    assert!(report.last_failure.unwrap().to_string().contains("stream"));
}

/// Writes out of bounds, by the device or by the processor, are detected at both edges.
fn guarded<A: Allocate>(context: &Context, upstream: A) {
    let (streams, id, stream) = stream_of(context);
    let guard = upstream.guarded_on(CudaFill::new(&streams), id);
    let block = guard.allocate(&RegionRequest::new(ByteCount::kib(8)).labelled("kv")).unwrap();
    assert_eq!(guard.verify(), 0);
    let (at, length) = (block.location(), block.length());
    let (one, behind) = (ByteCount::new(1), at.checked_add(length).unwrap());
    // SAFETY: within the memory that the guard allocated, which no other code uses.
    unsafe { stream.fill(at, 0, length) }.unwrap();
    assert_eq!(guard.verify(), 0, "within bounds");
    // Not synchronised: the guard reads the canaries after this write. SAFETY: as above, one byte
    // behind the block.
    unsafe { stream.fill(behind, 0, one) }.unwrap();
    drop(block);
    let violations = guard.log().violations();
    let [GuardViolation::Overwritten { label, side, distance, .. }] = violations.as_slice() else {
        panic!("{violations:?}");
    };
    assert_eq!((label.as_str(), *side, *distance), ("kv", OverwrittenSide::After, 0));
    assert_eq!(guard.log().live(), 0);
}

/// For every length within a granule, the first byte behind the block is overwritten.
fn overrun<A: Allocate>(context: &Context, upstream: A) {
    let (streams, id, stream) = stream_of(context);
    let guard = upstream.guarded_on(CudaFill::new(&streams), id);
    for (found, bytes) in (1..).zip([1, 63, 1000, 4095, 4097].map(ByteCount::new)) {
        let block = guard.allocate(&RegionRequest::new(bytes)).unwrap();
        let (at, length) = (block.location(), block.length());
        assert_eq!(length, bytes);
        // SAFETY: within the memory that the guard allocated, which no other code uses.
        unsafe { stream.fill(at, 0, length) }.unwrap();
        assert_eq!(guard.verify(), 0, "within bounds");
        let behind = at.checked_add(bytes).unwrap();
        // SAFETY: as above, one byte behind the requested length.
        unsafe { stream.fill(behind, 0, ByteCount::new(1)) }.unwrap();
        drop(block);
        let violations = guard.log().violations();
        let Some(GuardViolation::Overwritten { side, distance, .. }) = violations.last() else {
            panic!("{violations:?}");
        };
        assert_eq!(
            (guard.log().found(), *side, *distance),
            (found, OverwrittenSide::After, 0),
            "{bytes}"
        );
    }
}

#[test]
fn a_write_to_the_first_byte_behind_a_block_is_found_in_every_memory() {
    let name = "a_write_to_the_first_byte_behind_a_block_is_found_in_every_memory";
    let Some(context) = device(name, LITTLE) else { return };
    let device = || DeviceAllocator::new(&context);
    overrun(&context, device());
    overrun(&context, DevicePool::new(&context, ByteCount::mib(32)).unwrap());
    overrun(&context, Pool::new(device(), PoolOptions::default()).unwrap());
    if context.device().uses_host_addresses {
        overrun(&context, PinnedAllocator::new(&context, PinnedOptions::default()).unwrap());
    }
    assert_eq!((context.failed_drops(), context.lost()), (0, None));
}

#[test]
fn a_write_out_of_bounds_is_found_in_device_memory() {
    let name = "a_write_out_of_bounds_is_found_in_device_memory";
    let Some(context) = device(name, LITTLE) else { return };
    guarded(&context, DeviceAllocator::new(&context));
    guarded(&context, Pool::new(DeviceAllocator::new(&context), PoolOptions::default()).unwrap());
    if context.device().uses_host_addresses {
        let pinned = PinnedAllocator::new(&context, PinnedOptions::default()).unwrap();
        guarded(&context, pinned);
    }
    // Without access to the device, a guard still detects overlapping blocks.
    let guard = DeviceAllocator::new(&context).guarded();
    let _block = guard.allocate(&RegionRequest::new(ByteCount::kib(8))).unwrap();
    assert_eq!(guard.verify(), 0);
    assert_eq!((context.failed_drops(), context.lost()), (0, None));
}

#[test]
fn variables_put_poison_and_guard_around_device_memory() {
    let name = "variables_put_poison_and_guard_around_device_memory";
    let Some(context) = device(name, LITTLE) else { return };
    let (streams, id, stream) = stream_of(&context);
    let access = OnDevice::new(&context);
    let options = DebugOptions::from_variables(|name| match name {
        DebugOptions::GUARD => Some("1".into()),
        DebugOptions::POISON => Some("0c,0d".into()),
        _ => None,
    })
    .unwrap();
    let (source, log) = options.around(DeviceAllocator::new(&context), CudaFill::new(&streams), id);
    let block = source.allocate(&RegionRequest::new(ByteCount::new(1000))).unwrap();
    assert!(seen(&access, block.location(), 1000).iter().all(|&byte| byte == 0x0C));
    let before = block.location().position().start - 1;
    let before = Location::Device {
        device: context.device().id,
        address: terrane_core::DeviceAddress::new(before),
    };
    // SAFETY: within the memory that the guard allocated, which no other code uses.
    unsafe { stream.fill(before, 0, ByteCount::new(1)) }.unwrap();
    drop(block);
    assert_eq!(log.unwrap().found(), 1);
}

/// A stack of adaptors from a function.
struct Stack<F>(F, OnDevice);

impl<A: Allocate, F: Fn() -> A> AllocatorFixture for Stack<F> {
    type Allocator = A;

    fn allocator(&self) -> A {
        (self.0)()
    }

    fn access(&self) -> &dyn PieceAccess {
        &self.1
    }

    fn strictest_alignment(&self) -> Alignment {
        Alignment::PAGE
    }

    /// The driver counts the memory of all processes.
    fn live(&self, _: &A) -> Option<u64> {
        None
    }
}

#[test]
fn debugged_memory_of_every_kind_conforms() {
    let name = "debugged_memory_of_every_kind_conforms";
    let Some(context) = device(name, LITTLE) else { return };
    let (streams, id, _stream) = stream_of(&context);
    let options = DebugOptions { guard: true, poison: Some(PoisonBytes::default()) };
    let fill = || CudaFill::new(&streams);
    let on_device = || options.around(DeviceAllocator::new(&context), fill(), id).0;
    check_allocator(&Stack(on_device, OnDevice::new(&context)));
    let pinned = || {
        let pinned = PinnedAllocator::new(&context, PinnedOptions::default()).unwrap();
        options.around(pinned, fill(), id).0
    };
    check_allocator(&Stack(pinned, OnDevice::new(&context)));
    assert_eq!((context.failed_drops(), context.lost()), (0, None));
}
