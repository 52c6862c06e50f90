//! Memory: bounds, registrations, pools, leaks.

use terrane_simulated_cuda::exports::*;

use crate::support::*;

#[test]
fn accesses_beyond_an_allocation_are_refused() {
    let _cuda = Cuda::new(small());
    let (memory, other) = (allocate(1000), allocate(1000));
    let stream = stream(NON_BLOCKING);
    assert_eq!(fill(memory, 0, 1001, stream), INVALID_VALUE);
    assert_eq!(copy(other, memory + 999, 2, stream), INVALID_VALUE);
    assert_eq!(copy(other + 1, memory, 1000, stream), INVALID_VALUE);
    assert_eq!(fill(0, 0, 1, stream), INVALID_VALUE);
    // SAFETY: no pointers.
    ok(unsafe { cuMemFree_v2(memory) });
    assert_eq!(fill(memory, 0, 1, stream), INVALID_VALUE, "it is freed");
    // SAFETY: no pointers.
    assert_eq!(unsafe { cuMemFree_v2(memory) }, INVALID_VALUE);
    ok(fill(other, 0, 1000, stream));
    ok(synchronize(stream));
}

#[test]
fn exhausted_memory_is_available_after_a_free() {
    let _cuda = Cuda::new(small());
    let large = allocate(12 << 20);
    let mut address = 0;
    // SAFETY: one address is written.
    assert_eq!(unsafe { cuMemAlloc_v2(Out::to(&mut address), 8 << 20) }, 2);
    let (mut free, mut total) = (0, 0);
    // SAFETY: two numbers are written.
    ok(unsafe { cuMemGetInfo_v2(Out::to(&mut free), Out::to(&mut total)) });
    assert_eq!((free, total), (4 << 20, 16 << 20));
    // SAFETY: no pointers.
    ok(unsafe { cuMemFree_v2(large) });
    allocate(8 << 20);
}

#[test]
fn registered_memory_has_a_device_address() {
    let _cuda = Cuda::new(small());
    let memory = Pinned::new(3 << 12);
    let pages = memory.address;
    // SAFETY: the memory lives as long as the test.
    assert_eq!(unsafe { cuMemHostRegister_v2(pages, 4096, 0) }, 712, "pinned already");
    let owned = vec![0_u8; 5 << 12];
    let start = u64::try_from(owned.as_ptr().expose_provenance()).unwrap().next_multiple_of(4096);
    // SAFETY: the memory outlives the registrations.
    ok(unsafe { cuMemHostRegister_v2(start, 4096, 0) });
    // SAFETY: as above.
    ok(unsafe { cuMemHostRegister_v2(start + 4096, 8192, 0) });
    // SAFETY: as above.
    assert_eq!(unsafe { cuMemHostRegister_v2(start + 8192, 8192, 0) }, 712);
    // SAFETY: there is no memory at the address.
    assert_eq!(unsafe { cuMemHostRegister_v2(0x10_0000, 4096, 0) }, INVALID_VALUE);
    let (on_device, stream) = (allocate(16384), stream(NON_BLOCKING));
    ok(copy(on_device, start, 4096, stream));
    assert_eq!(copy(on_device, start + 2048, 4096, stream), INVALID_VALUE, "across two");
    assert_eq!(copy(on_device, start + 8192, 8192, stream), INVALID_VALUE, "beyond the last");
    let mut alias = 0;
    // SAFETY: one address is written.
    ok(unsafe { cuMemHostGetDevicePointer_v2(Out::to(&mut alias), start + 100, 0) });
    assert_ne!(alias, start + 100);
    ok(copy(on_device, alias, 64, stream));
    ok(fill(alias, 0x5A, 64, stream));
    assert_eq!(fill(start, 0, 64, stream), INVALID_VALUE, "that is the host's address");
    ok(synchronize(stream));
    assert_eq!(owned[usize::try_from(start).unwrap() - owned.as_ptr().addr() + 100], 0x5A);
    // SAFETY: no pointers.
    ok(unsafe { cuMemHostUnregister(start) });
    // SAFETY: no pointers.
    assert_eq!(unsafe { cuMemHostUnregister(start) }, 713);
    assert_eq!(copy(on_device, alias, 64, stream), INVALID_VALUE);
    // SAFETY: no pointers.
    ok(unsafe { cuMemHostUnregister(start + 4096) });
    // SAFETY: no pointers.
    ok(unsafe { cuMemFreeHost(memory.address) });
    assert_eq!(count(4), 0);
}

#[test]
fn unregistering_during_a_copy_loses_the_context() {
    let _cuda = Cuda::new(lazy());
    let owned = vec![0_u8; 2 << 12];
    let start = u64::try_from(owned.as_ptr().expose_provenance()).unwrap().next_multiple_of(4096);
    // SAFETY: the memory outlives the copy.
    ok(unsafe { cuMemHostRegister_v2(start, 4096, 0) });
    let mut alias = 0;
    // SAFETY: one address is written.
    ok(unsafe { cuMemHostGetDevicePointer_v2(Out::to(&mut alias), start, 0) });
    let (on_device, stream) = (allocate(4096), stream(NON_BLOCKING));
    hold(stream);
    ok(copy(on_device, alias, 4096, stream));
    // SAFETY: no pointers.
    ok(unsafe { cuMemHostUnregister(start) });
    release(stream);
    assert_eq!(synchronize(stream), ILLEGAL_ADDRESS);
}

fn from_pool(length: usize, stream: u64) -> u64 {
    let mut address = 0;
    // SAFETY: one address is written.
    ok(unsafe { cuMemAllocAsync(Out::to(&mut address), length, stream) });
    address
}

#[test]
fn stream_ordered_memory_is_usable_in_the_order_of_its_stream() {
    for config in configs() {
        let _cuda = Cuda::new(config.clone());
        let (first, second) = (stream(NON_BLOCKING), stream(NON_BLOCKING));
        let memory = from_pool(1 << 20, first);
        ok(fill(memory, 4, 1 << 20, first));
        let filled = event();
        record(filled, first);
        wait_for(second, filled);
        let seen = Pinned::new(64);
        ok(copy(seen.address, memory + 77, 64, second));
        ok(synchronize(second));
        assert_eq!(seen.bytes(), [4; 64], "{config:?}");
        // SAFETY: no pointers.
        ok(unsafe { cuMemFreeAsync(memory, second) });
        // SAFETY: no pointers.
        assert_eq!(unsafe { cuMemFreeAsync(memory, second) }, INVALID_VALUE, "twice");
        ok(synchronize(second));
        assert_eq!(count(3), 0);
    }
}

#[test]
fn stream_ordered_memory_is_not_usable_before_or_afterwards() {
    // Before: the stream that allocates is held back, and another one uses the memory.
    let cuda = Cuda::new(small());
    let (first, second) = (stream(NON_BLOCKING), stream(NON_BLOCKING));
    hold(first);
    let memory = from_pool(4096, first);
    ok(fill(memory, 1, 4096, second));
    assert_eq!(synchronize(second), ILLEGAL_ADDRESS);
    drop(cuda);
    // Afterwards: the stream that frees has reached the free, and the one that uses the memory has
    // not reached its use.
    let _cuda = Cuda::new(small());
    let (first, second) = (stream(NON_BLOCKING), stream(NON_BLOCKING));
    let memory = from_pool(4096, first);
    ok(synchronize(first));
    hold(second);
    ok(fill(memory, 1, 4096, second));
    // SAFETY: no pointers.
    ok(unsafe { cuMemFreeAsync(memory, first) });
    ok(synchronize(first));
    release(second);
    assert_eq!(synchronize(second), ILLEGAL_ADDRESS);
}

#[test]
fn a_pool_keeps_up_to_its_threshold() {
    let _cuda = Cuda::new(small());
    let stream = stream(NON_BLOCKING);
    let free = || {
        let (mut free, mut total) = (0, 0);
        // SAFETY: two numbers are written.
        ok(unsafe { cuMemGetInfo_v2(Out::to(&mut free), Out::to(&mut total)) });
        free
    };
    let before = free();
    let mut pool = 0;
    // SAFETY: one handle is written.
    ok(unsafe { cuDeviceGetDefaultMemPool(Out::to(&mut pool), 0) });
    for (threshold, kept) in [(0_u64, 0), (4 << 20, 4 << 20), (u64::MAX, 8 << 20)] {
        let [low, high] = [threshold & 0xFFFF_FFFF, threshold >> 32];
        let halves = [low, high].map(|half| u32::try_from(half).unwrap());
        // SAFETY: eight bytes are read.
        ok(unsafe { cuMemPoolSetAttribute(pool, 4, In::of(&halves)) });
        let memory = from_pool(8 << 20, stream);
        // SAFETY: no pointers.
        ok(unsafe { cuMemFreeAsync(memory, stream) });
        ok(synchronize(stream));
        assert_eq!(before - free(), kept, "{threshold}");
    }
    // SAFETY: no pointers.
    ok(unsafe { cuMemPoolTrimTo(pool, 0) });
    assert_eq!(before, free());
}

#[test]
fn pointer_attributes_describe_the_memory() {
    let cuda = Cuda::new(small());
    let (memory, pinned) = (allocate(1000), Pinned::new(4096));
    let ask = |attribute: u32, address: u64| {
        let mut value = 0;
        // SAFETY: at most eight bytes are written.
        let code = unsafe { cuPointerGetAttribute(Out::to(&mut value), attribute, address) };
        (code == 0).then_some(value)
    };
    assert_eq!(ask(1, memory), Some(cuda.context));
    assert_eq!((ask(2, memory + 999), ask(2, pinned.address)), (Some(2), Some(1)));
    assert_eq!((ask(11, memory + 5), ask(12, memory + 5)), (Some(memory), Some(1000)));
    assert_eq!(ask(2, memory + 1000), None);
    let own = [0_u8; 64];
    assert_eq!(ask(2, u64::try_from(own.as_ptr().expose_provenance()).unwrap()), None);
}

#[test]
fn resources_are_counted_and_end_with_their_context() {
    let _cuda = Cuda::new(small());
    let sorts = || (0..7).map(count).collect::<Vec<u64>>();
    assert_eq!(sorts(), [1, 0, 0, 0, 0, 0, 0]);
    let (_stream, _event, _memory, _pinned) = (stream(0), event(), allocate(10), Pinned::new(10));
    assert_eq!(sorts(), [1, 1, 1, 1, 1, 0, 0]);
    // SAFETY: no pointers.
    ok(unsafe { cuDevicePrimaryCtxRelease_v2(0) });
    assert_eq!(sorts(), [0; 7]);
    // SAFETY: no pointers.
    assert_eq!(unsafe { cuCtxSynchronize() }, 709, "the current context is destroyed");
    make_current(0);
    allocate(10);
}
