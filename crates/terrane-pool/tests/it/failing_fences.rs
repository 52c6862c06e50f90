//! Fences that fail or panic.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use terrane_core::{ByteCount, RegionRequest};
use terrane_pool::{Fence, FenceError, FenceSource, Pool, PoolOptions};
use terrane_testkit::simulated::SimulatedStreams;

use crate::streams::{A, B, PAGE, on, pool, pool_with_a_pending_free, waiting_pool};
use crate::support::{Counted, address};

#[test]
fn a_failing_fence_proves_nothing() {
    let (pool, upstream, streams) = pool(PoolOptions::default());
    let block = on(&pool, A);
    let first = address(&block);
    streams.submit(A, || {});
    drop(block);
    streams.run_all();
    streams.fail_next(1);
    let other = on(&pool, B);
    assert_ne!(address(&other), first, "no fence proves that the stream has finished");
    assert_eq!(address(&on(&pool, B)), first);
    drop(other);
    streams.run_all();
    drop(pool);
    upstream.assert_empty();
}

#[test]
fn a_closing_pool_tries_again_to_record_fences() {
    let (pool, upstream, streams) = pool_with_a_pending_free();
    streams.run_all();
    streams.fail_next(3);
    pool.close();
    assert_eq!(pool.snapshot().abandoned, ByteCount::ZERO);
    upstream.assert_empty();
}

#[test]
fn a_close_without_a_limit_ends_if_no_fence_can_be_recorded() {
    let pending_wait = Duration::MAX;
    let (pool, upstream, streams) =
        waiting_pool(PoolOptions { pending_wait, ..PoolOptions::default() });
    upstream.expect_leaks(1);
    let block = on(&pool, A);
    streams.submit(A, || {});
    drop(block);
    streams.fail_next(u32::MAX);
    pool.close();
    assert_eq!(pool.snapshot().abandoned, PAGE);
}

/// A pool without a limit to its waits and without free memory. A fence is recorded for its one block,
/// which a stream still uses, before all operations on fences begin to fail.
fn with_a_recorded_fence_that_fails() -> Pool<Counted> {
    let (upstream, streams) = (Counted::new(PAGE), SimulatedStreams::new(3));
    upstream.expect_leaks(1);
    let pending_wait = Duration::MAX;
    let options = PoolOptions { pending_wait, magazine_depth: 0, ..PoolOptions::default() };
    let pool = Pool::with_fences(upstream, options, Arc::new(streams.clone())).unwrap();
    let block = on(&pool, A);
    streams.submit(A, || {});
    drop(block);
    pool.reap();
    assert_eq!(streams.fences_created(), 1);
    streams.fail_next(u32::MAX);
    pool
}

#[test]
fn a_close_without_a_limit_ends_if_every_recorded_fence_fails() {
    let pool = with_a_recorded_fence_that_fails();
    pool.close();
    assert_eq!(pool.snapshot().abandoned, PAGE);
}

#[test]
fn a_request_without_a_limit_ends_if_every_recorded_fence_fails() {
    let pool = with_a_recorded_fence_that_fails();
    let refused = pool.allocate_on(B, &RegionRequest::new(PAGE));
    assert!(refused.is_err_and(|error| error.is_exhaustion()));
    assert_eq!(pool.snapshot().pending, PAGE);
}

/// Fences of simulated streams. The first one panics as it is made.
#[derive(Debug)]
struct PanicsOnce(SimulatedStreams, AtomicBool);

impl FenceSource for PanicsOnce {
    fn create(&self) -> Result<Arc<dyn Fence>, FenceError> {
        if !self.1.swap(true, Ordering::Relaxed) {
            std::panic::resume_unwind(Box::new("a source of a test"));
        }
        self.0.create()
    }
}

#[test]
fn a_source_that_panics_once_leaves_every_stream_a_fence_to_come() {
    let (upstream, streams) = (Counted::unlimited(), SimulatedStreams::new(3));
    let source = Arc::new(PanicsOnce(streams.clone(), AtomicBool::new(false)));
    let options = PoolOptions { magazine_depth: 0, ..PoolOptions::default() };
    let pool = Pool::with_fences(upstream.clone(), options, source).unwrap();
    let blocks = [on(&pool, A), on(&pool, B)];
    [A, B].into_iter().for_each(|stream| streams.submit(stream, || {}));
    drop(blocks);
    streams.run_all();
    let reap = std::panic::AssertUnwindSafe(|| pool.reap());
    assert!(std::panic::catch_unwind(reap).is_err());
    pool.reap();
    assert_eq!(pool.snapshot().pending, ByteCount::ZERO);
    drop(pool);
    upstream.assert_empty();
}
