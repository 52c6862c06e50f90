//! What an exhausted pool does, rung by rung.

use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use terrane_core::{Allocate as _, AllocateError, ByteCount, RegionRequest};
use terrane_pool::{Exhausted, Pool, PoolOptions, Retry, SimulatedStreams, StreamId};

use crate::support::{Block, Counted};

const PAGE: ByteCount = ByteCount::kib(4);

#[test]
fn a_block_that_is_pending_is_waited_for() {
    let (upstream, streams) = (Counted::new(PAGE), SimulatedStreams::new(1));
    let options = PoolOptions { pending_wait: Duration::MAX, ..PoolOptions::default() };
    let pool = Pool::with_fences(upstream.clone(), options, Arc::new(streams.clone())).unwrap();
    let stream = StreamId::new(1);
    let block = pool.acquire_on(stream, &RegionRequest::new(PAGE)).unwrap();
    streams.submit(stream, || {});
    drop(block);
    std::thread::scope(|scope| {
        let waiting = scope.spawn(|| pool.acquire(PAGE).map(drop));
        while pool.snapshot().ladder.exhausted == 0 {
            std::thread::yield_now();
        }
        streams.run_all();
        waiting.join().unwrap().unwrap();
    });
    assert_eq!(pool.snapshot().ladder.pending, 1);
    drop(pool);
    upstream.assert_empty();
}

#[test]
fn a_larger_block_serves_in_need() {
    let upstream = Counted::new(ByteCount::kib(64));
    let pool = Pool::new(upstream.clone(), PoolOptions::default()).unwrap();
    drop(pool.acquire(ByteCount::kib(64)).unwrap());
    let block = pool.acquire(PAGE).unwrap();
    assert_eq!(block.granted(), ByteCount::kib(64));
    assert_eq!(pool.snapshot().ladder.larger, 1);
    drop(block);
    assert_eq!(pool.clear(), ByteCount::kib(64));
    upstream.assert_empty();
}

#[test]
fn own_classes_are_trimmed_for_a_larger_request() {
    let upstream = Counted::new(ByteCount::kib(64));
    let pool = Pool::new(upstream.clone(), PoolOptions::default()).unwrap();
    let small: Vec<_> = (0..16).map(|_| pool.acquire(PAGE).unwrap()).collect();
    drop(small);
    let block = pool.acquire(ByteCount::kib(64)).unwrap();
    assert_eq!(pool.snapshot().ladder.trimmed, 1);
    drop(block);
}

#[test]
fn the_upstream_is_trimmed_then_the_callback_asked_and_no_more_than_allowed() {
    let upstream = Counted::new(PAGE);
    let (trims, calls) = (Arc::new(AtomicU32::new(0)), Arc::new(AtomicU32::new(0)));
    let (trimmed, called) = (Arc::clone(&trims), Arc::clone(&calls));
    let pool = Pool::new(upstream.clone(), PoolOptions::default())
        .unwrap()
        .with_upstream_trim(move |_wanted| {
            trimmed.fetch_add(1, Ordering::Relaxed);
            ByteCount::ZERO
        })
        .on_exhaustion(move |state, wanted| {
            assert_eq!((state.live, wanted), (PAGE, PAGE));
            called.fetch_add(1, Ordering::Relaxed);
            Retry::Again
        });
    let held = pool.allocate(&RegionRequest::new(PAGE).labelled("weights")).unwrap();
    let error = pool.acquire(PAGE).unwrap_err();
    assert_eq!((trims.load(Ordering::Relaxed), calls.load(Ordering::Relaxed)), (1, 3));
    assert!(matches!(error, AllocateError::OutOfMemory { .. }));
    let source = std::error::Error::source(&error).unwrap();
    let state = source.downcast_ref::<Exhausted>().unwrap();
    assert_eq!((state.held, state.live, state.callback_attempts), (PAGE, PAGE, 3));
    assert_eq!(state.top_labels, [("weights".into(), PAGE)]);
    assert!(state.to_string().contains("weights (4 KiB)"), "{state}");
    assert!(state.refusal.is_some());
    assert_eq!(pool.snapshot().ladder.refused, 1);
    drop(held);
}

#[test]
fn a_callback_may_release_blocks_of_the_pool() {
    let upstream = Counted::new(PAGE);
    let spare: Arc<Mutex<Option<Block>>> = Arc::default();
    let given = Arc::clone(&spare);
    let pool = Pool::new(upstream, PoolOptions::default()).unwrap().on_exhaustion(move |_, _| {
        if given.lock().unwrap().take().is_some() { Retry::Again } else { Retry::GiveUp }
    });
    *spare.lock().unwrap() = Some(pool.acquire(PAGE).unwrap());
    let block = pool.acquire(PAGE).unwrap();
    assert_eq!(pool.snapshot().ladder.callback, 1);
    assert!(pool.acquire(PAGE).is_err());
    drop(block);
}

#[test]
fn a_failure_that_is_no_exhaustion_does_not_climb() {
    let upstream = Counted::unlimited();
    let pool = Pool::new(upstream.clone(), PoolOptions::default()).unwrap();
    upstream.fail_next(1);
    let error = pool.acquire(PAGE).unwrap_err();
    assert!(matches!(error, AllocateError::Backend { .. }), "{error}");
    assert_eq!(pool.snapshot().ladder.exhausted, 0);
    assert!(pool.acquire(PAGE).is_ok());
}
