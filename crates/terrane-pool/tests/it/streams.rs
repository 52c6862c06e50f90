//! The order of streams.

use std::sync::Arc;
use std::time::{Duration, Instant};

use proptest::prelude::*;
use rustc_hash::FxHashMap;
use terrane_core::{ByteCount, RegionRequest};
use terrane_pool::{Access, Pool, PoolError, PoolOptions, StreamId};
use terrane_testkit::simulated::SimulatedStreams;

use crate::support::{Block, Counted, address};

pub const PAGE: ByteCount = ByteCount::kib(4);
pub const A: StreamId = StreamId::new(1);
pub const B: StreamId = StreamId::new(2);

pub fn pool(options: PoolOptions) -> (Pool<Counted>, Counted, SimulatedStreams) {
    waiting_pool(PoolOptions { pending_wait: Duration::from_millis(1), ..options })
}

/// The same, with the waits of the options.
pub fn waiting_pool(options: PoolOptions) -> (Pool<Counted>, Counted, SimulatedStreams) {
    let (upstream, streams) = (Counted::unlimited(), SimulatedStreams::new(3));
    let pool = Pool::with_fences(upstream.clone(), options, Arc::new(streams.clone())).unwrap();
    (pool, upstream, streams)
}

/// A pool with a block that was dropped during work of stream A. Its waits last longer than a test.
pub fn pool_with_a_pending_free() -> (Pool<Counted>, Counted, SimulatedStreams) {
    let pending_wait = Duration::from_secs(60);
    let (pool, upstream, streams) =
        waiting_pool(PoolOptions { pending_wait, ..PoolOptions::default() });
    let block = on(&pool, A);
    streams.submit(A, || {});
    drop(block);
    (pool, upstream, streams)
}

pub fn on(pool: &Pool<Counted>, stream: StreamId) -> Block {
    pool.allocate_on(stream, &RegionRequest::new(PAGE)).unwrap()
}

#[test]
fn the_same_stream_reuses_at_once_and_without_a_fence() {
    let (pool, upstream, streams) = pool(PoolOptions::default());
    for _ in 0..10 {
        let block = on(&pool, A);
        streams.submit(A, || {});
        drop(block);
    }
    assert_eq!(upstream.allocations(), 1);
    assert_eq!(streams.fences_created(), 0);
    assert_eq!(pool.snapshot().pending, PAGE);
    streams.run_all();
    drop(pool);
    upstream.assert_empty();
}

/// By default, a thread keeps blocks of up to 256 MiB for its stream. It keeps none if its magazines
/// may have no bytes.
#[test]
fn a_thread_keeps_a_large_block_of_its_stream() {
    let hits = |bytes: ByteCount, options: PoolOptions| {
        let (pool, upstream, streams) = pool(options);
        for _ in 0..10 {
            drop(pool.allocate_on(A, &RegionRequest::new(bytes)).unwrap());
        }
        assert_eq!((upstream.allocations(), streams.fences_created()), (1, 0));
        let snapshot = pool.snapshot();
        assert_eq!(snapshot.pending, bytes);
        let class = snapshot.classes.iter().find(|class| class.size == bytes).unwrap();
        streams.run_all();
        class.magazine_hits
    };
    // For the first two blocks, the thread has no stream magazines yet. After them, no block
    // becomes pending.
    let (mib, default) = (ByteCount::mib, PoolOptions::default);
    let small = PoolOptions { magazine_bytes: mib(8), ..default() };
    let none = PoolOptions { magazine_bytes: ByteCount::ZERO, ..default() };
    assert_eq!(hits(mib(256), default()), hits(PAGE, default()));
    assert_eq!(hits(mib(8), small.clone()), hits(PAGE, default()));
    for (bytes, options) in [(mib(512), default()), (mib(16), small), (mib(2), none)] {
        assert!(hits(bytes, options) < hits(PAGE, default()), "{bytes}");
    }
}

#[test]
fn another_stream_waits_for_the_fence() {
    let (pool, upstream, streams) = pool(PoolOptions::default());
    let block = on(&pool, A);
    let first = address(&block);
    streams.submit(A, || {});
    drop(block);
    let other = on(&pool, B);
    assert_ne!(address(&other), first);
    streams.run_all();
    let again = on(&pool, B);
    assert_eq!(address(&again), first);
    drop((other, again));
    streams.run_all();
    drop(pool);
    upstream.assert_empty();
}

#[test]
fn an_exhausted_pool_reclaims_stream_magazines() {
    let upstream = Counted::new(PAGE);
    let streams = SimulatedStreams::new(3);
    let fences = Arc::new(streams.clone());
    let pool = Pool::with_fences(upstream.clone(), PoolOptions::default(), fences).unwrap();
    // Before the second block, the thread has stream magazines with credit.
    drop(on(&pool, A));
    drop(on(&pool, A));
    let block = on(&pool, B);
    assert_eq!(pool.snapshot().reclaim.pending, 1);
    drop(block);
    drop(pool);
    upstream.assert_empty();
}

#[test]
fn every_stream_that_was_recorded_is_waited_for() {
    let (pool, upstream, streams) = pool(PoolOptions::default());
    let mut block = on(&pool, A);
    let first = address(&block);
    block.record_use(B, Access::Read).unwrap();
    block.record_use(B, Access::Write).unwrap();
    block.record_use(B, Access::Read).unwrap();
    assert_eq!(block.uses(), [(B, Access::Write)]);
    streams.submit(B, || {});
    drop(block);
    let second = on(&pool, A);
    assert_ne!(address(&second), first, "the other stream still uses it");
    streams.run_all();
    assert_eq!(address(&on(&pool, A)), first);
    drop(second);
    streams.run_all();
    drop(pool);
    upstream.assert_empty();
}

#[test]
fn one_stream_can_be_ordered_after_another() {
    let options = PoolOptions { order_streams: true, ..PoolOptions::default() };
    let (pool, upstream, streams) = pool(options);
    let block = on(&pool, A);
    let first = address(&block);
    streams.submit(A, || {});
    drop(block);
    let block = on(&pool, B);
    assert_eq!(address(&block), first);
    assert!(!streams.step(B), "it waits for the other");
    assert!(streams.step(A));
    assert!(streams.step(B));
    drop(block);
    drop(pool);
    upstream.assert_empty();
}

#[test]
fn fences_are_recorded_once_for_many_frees_and_kept() {
    // More blocks than the stream magazines can store; those need no fences.
    let options = PoolOptions { magazine_depth: 0, ..PoolOptions::default() };
    let (pool, upstream, streams) = pool(options);
    for _ in 0..20 {
        let blocks: Vec<_> = (0..8).map(|_| on(&pool, A)).collect();
        streams.submit(A, || {});
        drop(blocks);
        pool.reap();
        streams.run_all();
        pool.reap();
    }
    assert_eq!(pool.snapshot().pending, ByteCount::ZERO);
    assert_eq!(streams.fences_created(), 1);
    assert_eq!(upstream.allocations(), 8);
}

#[test]
fn a_block_of_a_stream_that_never_ends_is_abandoned_rather_than_freed() {
    let (pool, upstream, streams) = pool(PoolOptions::default());
    upstream.expect_leaks(1);
    let block = on(&pool, A);
    streams.submit(A, || {});
    drop(block);
    pool.close();
    let snapshot = pool.snapshot();
    assert_eq!((snapshot.abandoned, snapshot.live), (PAGE, ByteCount::ZERO));
    assert_eq!(upstream.bytes(), PAGE);
}

#[test]
fn a_late_release_has_a_wait_of_its_own() {
    // On a busy machine, the wait of a late release can end before its stream has run. That proves
    // nothing, so the test is repeated with a longer wait.
    let waits = [100, 1_000, 10_000, 100_000].map(Duration::from_millis);
    let Some((abandoned, held)) = waits.into_iter().find_map(release_late) else {
        panic!("the stream did not run in time within {waits:?}");
    };
    assert_eq!((abandoned, held), (PAGE, PAGE));
}

/// Releases a block during the close of its pool, which waits for another block, and runs its
/// stream after the close. Returns the abandoned bytes and the live bytes of the upstream. `None`
/// if the wait of the release was too short.
fn release_late(wait: Duration) -> Option<(ByteCount, ByteCount)> {
    let (pool, upstream, streams) =
        waiting_pool(PoolOptions { pending_wait: wait, ..PoolOptions::default() });
    upstream.expect_leaks(2);
    let (endless, late) = (on(&pool, A), on(&pool, B));
    streams.submit(A, || {});
    streams.submit(B, || {});
    drop(endless);
    let took = std::thread::scope(|scope| {
        let closer = scope.spawn(|| pool.close());
        std::thread::sleep(wait / 2);
        let released = Instant::now();
        scope.spawn(move || drop(late));
        closer.join().unwrap();
        streams.step(B);
        released.elapsed()
    });
    (took < wait).then(|| (pool.snapshot().abandoned, upstream.bytes()))
}

#[test]
fn a_late_release_on_a_stream_waits_for_it() {
    let (pool, upstream, streams) = pool(PoolOptions::default());
    streams.set_runs_on_wait(true);
    let block = on(&pool, A);
    streams.submit(A, || {});
    drop(pool);
    assert_eq!(upstream.bytes(), PAGE);
    drop(block);
    upstream.assert_empty();
    assert_eq!(streams.backlog(A), 0);
}

#[test]
fn requests_during_a_close_free_no_block_in_use() {
    // The close is still waiting during the request.
    let (pool, upstream, streams) = pool_with_a_pending_free();
    let (refused, held) = std::thread::scope(|scope| {
        scope.spawn(|| pool.close());
        while pool.allocate_bytes(ByteCount::ZERO).is_ok() {
            std::thread::yield_now();
        }
        let refused = pool.allocate_on(A, &RegionRequest::new(PAGE)).is_err();
        let held = upstream.bytes();
        streams.run_all();
        (refused, held)
    });
    assert!(refused);
    assert_eq!(held, PAGE, "the stream had not finished with the block");
    upstream.assert_empty();
}

#[test]
fn a_wait_may_have_no_end() {
    let (upstream, streams) = (Counted::new(PAGE), SimulatedStreams::new(3));
    streams.set_runs_on_wait(true);
    let options = PoolOptions { pending_wait: Duration::MAX, ..PoolOptions::default() };
    let fences = Arc::new(streams.clone());
    let pool = Pool::with_fences(upstream.clone(), options, fences).unwrap();
    let block = on(&pool, A);
    streams.submit(A, || {});
    drop(block);
    let block = on(&pool, B);
    assert_eq!(pool.snapshot().reclaim.pending, 1);
    streams.submit(B, || {});
    drop(block);
    drop(pool);
    upstream.assert_empty();
}

#[test]
fn without_fences_there_are_no_streams() {
    let pool = Pool::new(Counted::unlimited(), PoolOptions::default()).unwrap();
    assert!(pool.allocate_on(A, &RegionRequest::new(PAGE)).is_err());
    let mut block = pool.allocate_bytes(PAGE).unwrap();
    assert!(matches!(block.record_use(A, Access::Read), Err(PoolError::NoFences)));
    let (block, error) = block.release_on(A).unwrap_err();
    assert!(matches!(error, PoolError::NoFences));
    drop(block);
}

#[test]
fn released_on_another_stream_than_acquired() {
    let (pool, _upstream, streams) = pool(PoolOptions::default());
    let block = on(&pool, A);
    let first = address(&block);
    streams.submit(A, || {});
    assert!(block.release_on(B).is_ok());
    assert_ne!(address(&on(&pool, B)), first, "the first stream may still use it");
    streams.run_all();
}

#[derive(Clone, Debug)]
enum Step {
    Acquire(u64),
    Use(usize, u64),
    Release(usize),
    Run(u64),
    Reap,
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let step = prop_oneof![
        3 => (0..4_u64).prop_map(Step::Acquire),
        2 => (any::<usize>(), 1..4_u64).prop_map(|(at, stream)| Step::Use(at, stream)),
        3 => any::<usize>().prop_map(Step::Release),
        3 => (1..4_u64).prop_map(Step::Run),
        1 => Just(Step::Reap),
    ];
    prop::collection::vec(step, 1..120)
}

proptest! {
    /// Stream 0 represents the host. For each address, the model stores the position that each
    /// stream must reach before another user may get the block.
    #[test]
    fn blocks_in_use_by_a_stream_are_not_reused(steps in steps(), depth in 0..4_usize) {
        let options = PoolOptions { magazine_depth: depth, ..PoolOptions::default() };
        let (pool, upstream, streams) = pool(options);
        let mut live: Vec<(Block, Vec<u64>)> = Vec::new();
        let mut busy: FxHashMap<u64, Vec<(u64, u64)>> = FxHashMap::default();
        let (mut submitted, mut completed) = ([0_u64; 4], [0_u64; 4]);
        for step in steps {
            match step {
                Step::Acquire(stream) => {
                    let block = if stream == 0 {
                        pool.allocate_bytes(PAGE).unwrap()
                    } else {
                        on(&pool, StreamId::new(stream))
                    };
                    for (other, mark) in busy.remove(&address(&block)).unwrap_or_default() {
                        let at = usize::try_from(other).unwrap();
                        prop_assert!(other == stream || completed[at] >= mark);
                    }
                    prop_assert!(live.iter().all(|(other, _)| address(other) != address(&block)));
                    let mut used = Vec::new();
                    if stream != 0 {
                        used.push(stream);
                        streams.submit(StreamId::new(stream), || {});
                        submitted[usize::try_from(stream).unwrap()] += 1;
                    }
                    live.push((block, used));
                }
                Step::Use(at, stream) if !live.is_empty() => {
                    let at = at % live.len();
                    let (block, used) = &mut live[at];
                    block.record_use(StreamId::new(stream), Access::Read).unwrap();
                    used.push(stream);
                    streams.submit(StreamId::new(stream), || {});
                    submitted[usize::try_from(stream).unwrap()] += 1;
                }
                Step::Release(at) if !live.is_empty() => {
                    let (block, used) = live.swap_remove(at % live.len());
                    let marks = used.into_iter().map(|stream| {
                        (stream, submitted[usize::try_from(stream).unwrap()])
                    });
                    busy.insert(address(&block), marks.collect());
                    drop(block);
                }
                Step::Run(stream) => {
                    let ran = streams.step(StreamId::new(stream));
                    completed[usize::try_from(stream).unwrap()] += u64::from(ran);
                }
                Step::Reap => pool.reap(),
                _ => {}
            }
            let seen = pool.snapshot();
            let live_bytes = PAGE.get() * u64::try_from(live.len()).unwrap();
            prop_assert_eq!(seen.live.get(), live_bytes);
            prop_assert_eq!(seen.held, upstream.bytes());
        }
        drop(live);
        streams.run_all();
        drop(pool);
        upstream.assert_empty();
    }
}
