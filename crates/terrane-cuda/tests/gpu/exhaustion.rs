//! Memory is allocated until the driver refuses, and then again after a free.

use std::error::Error as _;

use terrane_core::{Allocate, AllocateError, ByteCount, RegionRequest};
use terrane_cuda::{Context, CudaError, DeviceAllocator, DevicePool, DriverCode};

use crate::needs::{LITTLE, device};

const CHUNK: ByteCount = ByteCount::gib(2);

/// Allocates all memory, frees one chunk, and allocates it again.
fn exhaust_and_recover<A: Allocate>(context: &Context, allocator: &A) {
    let request = RegionRequest::new(CHUNK).labelled("greedy");
    let mut all = Vec::new();
    let error = loop {
        match allocator.allocate(&request) {
            Ok(memory) => all.push(memory),
            Err(error) => break error,
        }
        assert!(all.len() < 1000, "no device has 2 TB");
    };
    eprintln!("{} of {CHUNK} each, and then: {error}", all.len());
    assert!(error.is_exhaustion(), "{error}");
    let AllocateError::OutOfMemory { requested, available, label, .. } = &error else {
        panic!("{error:?}");
    };
    assert_eq!((*requested, label.as_str()), (CHUNK, "greedy"));
    assert!(available.is_some_and(|available| available < CHUNK), "{available:?}");
    let cause = error.source().unwrap().downcast_ref::<CudaError>().unwrap();
    assert_eq!(cause.code(), Some(DriverCode::OUT_OF_MEMORY));
    assert!(cause.to_string().contains("CUDA_ERROR_OUT_OF_MEMORY"), "{cause}");
    assert_eq!(context.lost(), None, "a lack of memory does not lose the context");

    for _ in 0..3 {
        drop(all.pop());
        all.push(allocator.allocate(&request).expect("one chunk was freed"));
    }
    assert!(allocator.allocate(&request).is_err());
}

#[test]
fn exhausted_device_memory_is_usable_after_a_free() {
    let Some(context) = device("exhausted_device_memory_is_usable_after_a_free", LITTLE) else {
        return;
    };
    let (before, _) = context.memory().unwrap();
    exhaust_and_recover(&context, &DeviceAllocator::new(&context));
    let (after, _) = context.memory().unwrap();
    let missing = before.checked_sub(after).unwrap_or(ByteCount::ZERO);
    assert!(missing < ByteCount::mib(64), "{missing} did not come back");
}

#[test]
fn exhausted_pool_memory_is_usable_after_a_free() {
    let Some(context) = device("exhausted_pool_memory_is_usable_after_a_free", LITTLE) else {
        return;
    };
    let (before, _) = context.memory().unwrap();
    let pool = DevicePool::new(&context, ByteCount::new(u64::MAX)).unwrap();
    exhaust_and_recover(&context, &pool);
    pool.trim(ByteCount::ZERO).unwrap();
    let (after, _) = context.memory().unwrap();
    let missing = before.checked_sub(after).unwrap_or(ByteCount::ZERO);
    assert!(missing < ByteCount::mib(64), "{missing} did not come back");
}
