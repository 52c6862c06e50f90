//! The steps of an exhausted pool, one by one.

use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use terrane_core::{Allocate, AllocateError, ByteCount, RegionRequest, delegate_allocate};
use terrane_pool::{Exhausted, Pool, PoolOptions, Retry, StreamId};
use terrane_testkit::simulated::SimulatedStreams;

use crate::support::{Block, Counted};

const PAGE: ByteCount = ByteCount::kib(4);

#[test]
fn a_block_that_is_pending_is_waited_for() {
    let (upstream, streams) = (Counted::new(PAGE), SimulatedStreams::new(1));
    let options = PoolOptions { pending_wait: Duration::MAX, ..PoolOptions::default() };
    let pool = Pool::with_fences(upstream.clone(), options, Arc::new(streams.clone())).unwrap();
    let stream = StreamId::new(1);
    let block = pool.allocate_on(stream, &RegionRequest::new(PAGE)).unwrap();
    streams.submit(stream, || {});
    drop(block);
    std::thread::scope(|scope| {
        let waiting = scope.spawn(|| pool.allocate_bytes(PAGE).map(drop));
        while pool.snapshot().reclaim.exhausted == 0 {
            std::thread::yield_now();
        }
        streams.run_all();
        waiting.join().unwrap().unwrap();
    });
    assert_eq!(pool.snapshot().reclaim.pending, 1);
    drop(pool);
    upstream.assert_empty();
}

#[test]
fn a_wait_that_frees_memory_of_the_upstream_serves_the_request() {
    // A size that is not pooled, and one that is pooled and not cached.
    for (bytes, cached_bytes) in [(ByteCount::kib(8), ByteCount::mib(1)), (PAGE, ByteCount::ZERO)] {
        let (upstream, streams) = (Counted::new(bytes), SimulatedStreams::new(1));
        let options = PoolOptions { largest_class: PAGE, cached_bytes, ..PoolOptions::default() };
        let pool = Pool::with_fences(upstream.clone(), options, Arc::new(streams.clone())).unwrap();
        let stream = StreamId::new(1);
        let block = pool.allocate_on(stream, &RegionRequest::new(bytes)).unwrap();
        streams.submit(stream, || {});
        drop(block);
        streams.run_all();
        drop(pool.allocate_bytes(bytes).unwrap());
        drop(pool);
        upstream.assert_empty();
    }
}

#[test]
fn a_block_that_another_thread_keeps_for_the_stream_needs_no_wait() {
    let (upstream, streams) = (Counted::new(PAGE), SimulatedStreams::new(1));
    let options = PoolOptions { pending_wait: Duration::MAX, ..PoolOptions::default() };
    let pool = Pool::with_fences(upstream.clone(), options, Arc::new(streams.clone())).unwrap();
    let (stream, request) = (StreamId::new(1), RegionRequest::new(PAGE));
    let (kept, is_kept) = std::sync::mpsc::channel();
    let (end, may_end) = std::sync::mpsc::channel::<()>();
    std::thread::scope(|scope| {
        let (pool, request, streams) = (&pool, &request, &streams);
        scope.spawn(move || {
            // Before the second block, the thread has stream magazines with credit.
            drop(pool.allocate_on(stream, request).unwrap());
            let block = pool.allocate_on(stream, request).unwrap();
            streams.submit(stream, || {});
            drop(block);
            kept.send(()).unwrap();
            may_end.recv().unwrap();
        });
        is_kept.recv().unwrap();
        // The work of the stream never ends meanwhile, and the wait has no end.
        let block = pool.allocate_on(stream, request).unwrap();
        end.send(()).unwrap();
        assert_eq!(streams.backlog(stream), 1);
        drop(block);
    });
    assert_eq!(pool.snapshot().reclaim.pending, 1);
    streams.run_all();
    drop(pool);
    upstream.assert_empty();
}

#[test]
fn a_trim_frees_no_more_than_it_must() {
    for magazine_depth in [0, 64] {
        let upstream = Counted::unlimited();
        let options = PoolOptions { magazine_depth, ..PoolOptions::default() };
        let pool = Pool::new(upstream.clone(), options).unwrap();
        let blocks: Vec<_> = (0..14).map(|_| pool.allocate_bytes(PAGE).unwrap()).collect();
        drop(blocks);
        assert_eq!(pool.trim(ByteCount::kib(52)), PAGE);
        assert_eq!(pool.snapshot().cached, ByteCount::kib(52));
    }
}

#[test]
fn a_block_that_wastes_little_serves_an_exhausted_pool() {
    let upstream = Counted::new(ByteCount::kib(5));
    let pool = Pool::new(upstream.clone(), PoolOptions::default()).unwrap();
    drop(pool.allocate_bytes(ByteCount::kib(5)).unwrap());
    let block = pool.allocate_bytes(PAGE).unwrap();
    assert_eq!(block.granted(), ByteCount::kib(5));
    assert_eq!(pool.snapshot().reclaim.larger, 1);
}

#[test]
fn a_block_that_wastes_much_is_returned_to_the_upstream_instead() {
    let upstream = Counted::new(ByteCount::mib(4));
    let pool = Pool::new(upstream.clone(), PoolOptions::default()).unwrap();
    drop(pool.allocate_bytes(ByteCount::mib(4)).unwrap());
    let block = pool.allocate_bytes(PAGE).unwrap();
    assert_eq!((block.granted(), upstream.bytes()), (PAGE, PAGE));
    assert_eq!((pool.snapshot().reclaim.larger, pool.snapshot().reclaim.trimmed), (0, 1));
}

#[test]
fn a_cached_block_smaller_than_the_request_makes_room_for_it() {
    let upstream = Counted::new(ByteCount::kib(8));
    let pool = Pool::new(upstream.clone(), PoolOptions::default()).unwrap();
    drop(pool.allocate_bytes(PAGE).unwrap());
    let whole = pool.allocate_bytes(ByteCount::kib(8)).unwrap();
    drop(whole);
    // From now on, blocks are released to the shared queues.
    let first = pool.allocate_bytes(PAGE).unwrap();
    assert!(pool.allocate_bytes(ByteCount::kib(8)).is_err());
    drop(first);
    // The upstream has 4 KiB, and the queue has the other 4 KiB.
    assert!(pool.allocate_bytes(ByteCount::kib(8)).is_ok());
}

#[test]
fn the_accepted_waste_is_an_option() {
    let upstream = Counted::new(ByteCount::kib(5));
    let options = PoolOptions { larger_class_waste: 24, ..PoolOptions::default() };
    let pool = Pool::new(upstream, options).unwrap();
    drop(pool.allocate_bytes(ByteCount::kib(5)).unwrap());
    assert_eq!(pool.allocate_bytes(PAGE).unwrap().granted(), PAGE);
}

#[test]
fn a_block_that_wastes_much_serves_before_a_refusal() {
    let upstream = Counted::new(ByteCount::mib(4));
    let spare: Arc<Mutex<Option<Block>>> = Arc::default();
    let given = Arc::clone(&spare);
    // The block is released to the pool after the pool has freed its cached blocks.
    let pool = Pool::new(upstream, PoolOptions::default()).unwrap().with_upstream_trim(move |_| {
        drop(given.lock().unwrap().take());
        ByteCount::ZERO
    });
    *spare.lock().unwrap() = Some(pool.allocate_bytes(ByteCount::mib(4)).unwrap());
    let block = pool.allocate_bytes(PAGE).unwrap();
    assert_eq!(block.granted(), ByteCount::mib(4));
    assert_eq!(pool.snapshot().reclaim.larger, 1);
}

/// Numbers below a bound, equal in each run (Knuth's linear congruential generator).
fn random() -> impl FnMut(usize) -> usize {
    let mut state = 1_u64;
    move |below| {
        state =
            state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        usize::try_from(state >> 33).unwrap() % below
    }
}

/// The sizes of Mooncake's allocator benchmark: 70 % of 4 KiB, 20 % of 256 KiB, 10 % of 3.12 MiB.
#[test]
fn a_full_pool_of_mixed_sizes_holds_at_most_a_quarter_more_than_requested() {
    let upstream = Counted::new(ByteCount::mib(256));
    let pool = Pool::new(upstream.clone(), PoolOptions::default()).unwrap();
    let mut random = random();
    let (mut live, mut requested): (Vec<(Block, u64)>, u64) = (Vec::new(), 0);
    let (mut refusals, mut worst) = (0, 0);
    while refusals < 3_000 {
        let bytes = match random(10) {
            0..7 => 4 << 10,
            7..9 => 256 << 10,
            _ => (312 << 20) / 100,
        };
        match pool.allocate_bytes(ByteCount::new(bytes)) {
            Ok(block) => {
                requested += bytes;
                live.push((block, bytes));
            }
            Err(error) => {
                assert!(error.is_exhaustion(), "{error}");
                refusals += 1;
                worst = worst.max(upstream.bytes().get() * 100 / requested);
                let index = random(live.len());
                requested -= live.swap_remove(index).1;
            }
        }
    }
    assert!(worst <= 125, "{worst} % of the requested bytes are held");
}

/// An upstream that counts its requests.
#[derive(Clone, Debug)]
struct CountingUpstream(Counted, Arc<AtomicU32>);

// SAFETY: blocks are those of the inner allocator.
unsafe impl Allocate for CountingUpstream {
    type Memory = <Counted as Allocate>::Memory;

    delegate_allocate!(self, self.0);

    fn allocate(&self, request: &RegionRequest) -> Result<Self::Memory, AllocateError> {
        self.1.fetch_add(1, Ordering::Relaxed);
        self.0.allocate(request)
    }
}

#[test]
fn a_refusal_of_a_pool_that_caches_nothing_asks_the_upstream_once() {
    let upstream = CountingUpstream(Counted::new(ByteCount::kib(8)), Arc::default());
    let pool = Pool::new(upstream.clone(), PoolOptions::default()).unwrap();
    let mut blocks = [PAGE; 2].map(|bytes| Some(pool.allocate_bytes(bytes).unwrap()));
    assert!(pool.allocate_bytes(PAGE).is_err());
    for _ in 0..3 {
        upstream.1.store(0, Ordering::Relaxed);
        assert!(pool.allocate_bytes(PAGE).is_err());
        assert_eq!(upstream.1.load(Ordering::Relaxed), 1);
        // The pool finds the blocks that the caller evicts without a request to the upstream.
        for block in &mut blocks {
            drop(block.take());
            *block = Some(pool.allocate_bytes(PAGE).unwrap());
        }
        assert_eq!(upstream.1.load(Ordering::Relaxed), 1);
    }
}

#[test]
fn blocks_released_during_exhaustion_are_in_no_magazine() {
    let upstream = Counted::new(ByteCount::kib(8));
    let pool = Pool::new(upstream, PoolOptions::default()).unwrap();
    let blocks = [PAGE; 2].map(|bytes| pool.allocate_bytes(bytes).unwrap());
    assert!(pool.allocate_bytes(PAGE).is_err());
    drop(blocks);
    let snapshot = pool.snapshot();
    let in_threads = snapshot.classes.iter().map(|class| class.in_magazines).sum::<usize>();
    assert_eq!((in_threads, snapshot.cached), (0, ByteCount::kib(8)));
}

#[test]
fn own_classes_are_trimmed_for_a_larger_request() {
    let upstream = Counted::new(ByteCount::kib(64));
    let pool = Pool::new(upstream.clone(), PoolOptions::default()).unwrap();
    let small: Vec<_> = (0..16).map(|_| pool.allocate_bytes(PAGE).unwrap()).collect();
    drop(small);
    let block = pool.allocate_bytes(ByteCount::kib(64)).unwrap();
    assert_eq!(pool.snapshot().reclaim.trimmed, 1);
    drop(block);
}

#[test]
fn the_upstream_is_trimmed_before_the_callback_is_called() {
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
    let error = pool.allocate_bytes(PAGE).unwrap_err();
    assert_eq!((trims.load(Ordering::Relaxed), calls.load(Ordering::Relaxed)), (1, 3));
    assert!(matches!(error, AllocateError::OutOfMemory { .. }));
    let source = std::error::Error::source(&error).unwrap();
    let state = source.downcast_ref::<Exhausted>().unwrap();
    assert_eq!((state.held, state.live, state.callback_attempts), (PAGE, PAGE, 3));
    assert_eq!(state.top_labels, [("weights".into(), PAGE)]);
    assert!(state.to_string().contains("weights (4 KiB)"), "{state}");
    assert!(state.refusal.is_some());
    assert_eq!(pool.snapshot().reclaim.refused, 1);
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
    *spare.lock().unwrap() = Some(pool.allocate_bytes(PAGE).unwrap());
    let block = pool.allocate_bytes(PAGE).unwrap();
    assert_eq!(pool.snapshot().reclaim.callback, 1);
    assert!(pool.allocate_bytes(PAGE).is_err());
    drop(block);
}

#[test]
fn a_failure_that_is_no_exhaustion_does_not_climb() {
    let upstream = Counted::unlimited();
    let pool = Pool::new(upstream.clone(), PoolOptions::default()).unwrap();
    upstream.fail_next(1);
    let error = pool.allocate_bytes(PAGE).unwrap_err();
    assert!(matches!(error, AllocateError::Backend { .. }), "{error}");
    assert_eq!(pool.snapshot().reclaim.exhausted, 0);
    assert!(pool.allocate_bytes(PAGE).is_ok());
}
