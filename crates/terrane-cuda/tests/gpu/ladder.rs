//! A pool whose device has no free memory.

use std::error::Error as _;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use terrane_core::{Allocate, AllocateError, ByteCount, Memory, RegionRequest};
use terrane_cuda::{Context, CudaStreams, DeviceAllocator, DeviceMemory};
use terrane_pool::{Exhausted, Pool, PoolOptions, Retry, StreamSource};

use crate::needs::{LITTLE, device};

/// A power of two that is small beside the free memory, and half of it.
fn unit(context: &Context) -> (ByteCount, ByteCount) {
    let (free, _) = context.memory().unwrap();
    let unit = 1 << (free.get() / 16).ilog2();
    (ByteCount::new(unit), ByteCount::new(unit / 2))
}

/// Allocates all remaining memory, in pieces.
fn take_all(context: &Context, piece: ByteCount) -> Vec<DeviceMemory> {
    let device = DeviceAllocator::new(context);
    let mut all = Vec::new();
    for bytes in [piece, ByteCount::new(piece.get() / 8)] {
        while let Ok(memory) = device.allocate(&RegionRequest::new(bytes)) {
            all.push(memory);
        }
    }
    all
}

/// A pool that keeps all freed blocks, in classes up to `largest`.
fn keeping(largest: ByteCount) -> PoolOptions {
    PoolOptions {
        largest_class: largest,
        cached_bytes: ByteCount::gib(512),
        cached_percent: 100,
        magazine_bytes: largest,
        pending_wait: Duration::from_secs(60),
        ..PoolOptions::default()
    }
}

#[test]
fn an_exhausted_pool_frees_its_cached_blocks_before_it_refuses() {
    let name = "an_exhausted_pool_frees_its_cached_blocks_before_it_refuses";
    let Some(context) = device(name, LITTLE) else { return };
    let (unit, half) = unit(&context);
    let pool = Pool::new(DeviceAllocator::new(&context), keeping(unit)).unwrap();
    drop([(); 3].map(|()| pool.allocate_bytes(half).unwrap()));
    assert_eq!(pool.snapshot().cached, half.checked_mul("blocks", 3).unwrap());
    let greedy = take_all(&context, half);

    // A larger class than any cached block: only freeing the cached blocks makes room for it.
    let block = pool.allocate_bytes(unit).expect("the cached blocks made room");
    let reclaim = pool.snapshot().reclaim;
    assert_eq!((reclaim.exhausted, reclaim.trimmed, reclaim.refused), (1, 1, 0), "{reclaim:?}");

    let error = pool.allocate_bytes(unit).unwrap_err();
    assert!(error.is_exhaustion(), "{error}");
    let AllocateError::OutOfMemory { requested, .. } = &error else { panic!("{error:?}") };
    assert!(*requested >= unit);
    let state = error.source().unwrap().downcast_ref::<Exhausted>().unwrap();
    assert_eq!(state.live, block.length(), "{state}");
    assert_eq!(pool.snapshot().reclaim.refused, 1);
    assert_eq!(context.lost(), None);

    drop(greedy);
    let second = pool.allocate_bytes(unit).expect("there is room again");
    drop((block, second));
    pool.clear();
    assert_eq!(context.usage().device.count, 0);
}

#[test]
fn a_block_that_a_stream_still_uses_is_waited_for() {
    let name = "a_block_that_a_stream_still_uses_is_waited_for";
    let Some(context) = device(name, LITTLE) else { return };
    let (unit, half) = unit(&context);
    let streams = CudaStreams::new(&context);
    let id = StreamSource::create(&streams).unwrap();
    let upstream = DeviceAllocator::new(&context);
    let pool = Pool::with_fences(upstream, keeping(unit), Arc::new(streams.clone())).unwrap();
    let request = RegionRequest::new(half);
    let block = pool.allocate_on(id, &request).unwrap();
    let greedy = take_all(&context, half);
    let stream = streams.get(id).unwrap();
    for round in 0..20 {
        // SAFETY: the block belongs to this stream until it is released on it.
        unsafe { stream.fill(block.location(), round, half) }.unwrap();
    }
    let at = block.location();
    block.release_on(id).map_err(|(_, error)| error).unwrap();
    let again = pool.allocate_bytes(half).expect("the only block, after its stream");
    assert_eq!(again.location(), at);
    assert!(stream.is_idle().unwrap(), "it was waited for");
    drop((again, greedy));
    assert_eq!((context.failed_drops(), context.lost()), (0, None));
}

#[test]
fn the_callback_may_make_room() {
    let Some(context) = device("the_callback_may_make_room", LITTLE) else { return };
    let (unit, half) = unit(&context);
    let greedy = Arc::new(Mutex::new(Vec::new()));
    let held = Arc::clone(&greedy);
    let pool = Pool::new(DeviceAllocator::new(&context), keeping(unit)).unwrap().on_exhaustion(
        move |state, wanted| {
            eprintln!("{wanted} wanted: {state}");
            let mut held = held.lock().unwrap();
            let freed = held.drain(..).count();
            if freed > 0 { Retry::Again } else { Retry::GiveUp }
        },
    );
    *greedy.lock().unwrap() = take_all(&context, half);
    let block = pool.allocate_bytes(unit).expect("the callback freed everything");
    let reclaim = pool.snapshot().reclaim;
    assert_eq!((reclaim.callback, reclaim.refused), (1, 0), "{reclaim:?}");
    // The second time, the callback has nothing to free.
    let rest = take_all(&context, half);
    let error = pool.allocate_bytes(unit).unwrap_err();
    let state = error.source().unwrap().downcast_ref::<Exhausted>().unwrap();
    assert_eq!((state.callback_attempts, state.live), (1, block.length()), "{state}");
    drop((block, rest));
    pool.clear();
    assert_eq!(context.usage().device.count, 0);
}
