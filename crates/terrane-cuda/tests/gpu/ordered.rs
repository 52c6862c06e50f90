//! Device memory in the order of streams, from a driver pool.

use terrane_core::{Alignment, Allocate, ByteCount, Memory, RegionRequest};
use terrane_cuda::{DevicePool, Event, PinnedAllocator, PinnedOptions, Stream, Timing};
use terrane_testkit::pattern::{InProcess, PieceAccess};

use crate::needs::{LITTLE, device};

#[test]
fn memory_is_used_and_freed_in_the_order_of_its_stream() {
    let name = "memory_is_used_and_freed_in_the_order_of_its_stream";
    let Some(context) = device(name, LITTLE) else { return };
    let pool = DevicePool::new(&context, ByteCount::mib(64)).unwrap();
    let pinned = PinnedAllocator::new(&context, PinnedOptions::default()).unwrap();
    let slot = ByteCount::kib(4);
    let seen = pinned.allocate(&RegionRequest::new(ByteCount::kib(4 * 64))).unwrap();
    let streams = [(); 2].map(|()| Stream::new(&context).unwrap());
    let request = RegionRequest::new(ByteCount::mib(4)).aligned_to(Alignment::PAGE);
    for round in 0..64_u8 {
        let stream = &streams[usize::from(round % 2)];
        let scratch = pool.allocate_on(stream, &request).unwrap();
        assert!(scratch.location().alignment() >= Alignment::PAGE);
        let offset = slot.checked_mul("round", u64::from(round)).unwrap();
        let out = seen.location().checked_add(offset).unwrap();
        // SAFETY: used in the order of its stream. All other memory lives until the stream has been
        // synchronised.
        unsafe { stream.fill(scratch.location(), !round, scratch.length()) }.unwrap();
        // SAFETY: as above.
        unsafe { stream.fill(scratch.location(), round, scratch.length()) }.unwrap();
        // SAFETY: as above.
        unsafe { stream.copy(scratch.location(), out, slot) }.unwrap();
        // Nothing has waited: the memory is freed when the stream reaches the free.
        drop(scratch);
    }
    for stream in &streams {
        stream.synchronize().unwrap();
    }
    for round in 0..64_u8 {
        let offset = slot.checked_mul("round", u64::from(round)).unwrap();
        let mut found = vec![0; slot.to_usize()];
        // SAFETY: the copies have run.
        unsafe { InProcess.read(seen.location().checked_add(offset).unwrap(), &mut found) }
            .unwrap();
        assert!(found.iter().all(|&byte| byte == round), "round {round}");
    }
    assert_eq!(context.usage().pooled.count, 0);
    assert_eq!((context.failed_drops(), context.lost()), (0, None));
}

#[test]
fn settled_memory_is_usable_on_every_stream() {
    let Some(context) = device("settled_memory_is_usable_on_every_stream", LITTLE) else { return };
    let pool = DevicePool::new(&context, ByteCount::mib(64)).unwrap();
    let [first, second] = [(); 2].map(|()| Stream::new(&context).unwrap());
    let request = RegionRequest::new(ByteCount::mib(1));
    let ordered = pool.allocate_on(&first, &request).unwrap();
    let address = ordered.address();
    // SAFETY: in the order of its stream.
    unsafe { first.fill(ordered.location(), 7, request.bytes) }.unwrap();
    let memory = ordered.settle().unwrap();
    assert_eq!((memory.address(), memory.length()), (address, request.bytes));
    assert_eq!(context.usage().pooled.count, 1);
    // SAFETY: the memory lives until the stream has been synchronised.
    unsafe { second.fill(memory.location(), 9, request.bytes) }.unwrap();
    second.synchronize().unwrap();
    drop(memory);

    // Freed on another stream, which waits for the memory's own stream.
    let ordered = pool.allocate_on(&first, &request).unwrap();
    // SAFETY: in the order of its stream.
    unsafe { first.fill(ordered.location(), 1, request.bytes) }.unwrap();
    let event = Event::new(&context, Timing::Off).unwrap();
    event.record(&first).unwrap();
    second.wait_for(&event).unwrap();
    // SAFETY: after the work that the event marks.
    unsafe { second.fill(ordered.location(), 2, request.bytes) }.unwrap();
    ordered.free_on(&second).unwrap();
    second.synchronize().unwrap();
    let nothing = RegionRequest::new(ByteCount::ZERO);
    let nothing = pool.allocate_on(&first, &nothing).unwrap();
    assert!(nothing.length().is_zero() && nothing.stream().is_idle().unwrap());
    drop(nothing);
    assert_eq!(context.usage().pooled.count, 0);
    // Synchronises the pool's own stream, on which settled memory is freed.
    pool.trim(ByteCount::ZERO).unwrap();
    assert_eq!(pool.in_use().unwrap(), ByteCount::ZERO);
    assert_eq!((context.failed_drops(), context.lost()), (0, None));
}
