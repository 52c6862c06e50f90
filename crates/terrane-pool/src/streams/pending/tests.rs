//! Streams that are created and destroyed, and fences that report wrong results.
#![allow(clippy::unwrap_used, reason = "a failed expectation panics")]

use std::sync::atomic::AtomicU32;

use super::*;
use crate::streams::fence::{Access, Fence};
use crate::streams::simulated::SimulatedStreams;
use crate::{Pool, PoolOptions};
use terrane_core::RegionRequest;
use terrane_testkit::simulated::{Simulated, SimulatedOptions};

/// Streams with contradictory fences: a wait reports completion or fails at once, and a query never
/// reports completion.
#[derive(Clone, Debug)]
struct Contradictory {
    waits_fail: bool,
    waits: Arc<AtomicU32>,
}

impl FenceSource for Contradictory {
    fn create(&self) -> Result<Arc<dyn Fence>, FenceError> {
        Ok(Arc::new(self.clone()))
    }
}

impl Fence for Contradictory {
    fn record(&self, _: StreamId) -> Result<(), FenceError> {
        Ok(())
    }

    fn is_complete(&self) -> Result<bool, FenceError> {
        Ok(false)
    }

    fn wait(&self, _: Duration) -> Result<bool, FenceError> {
        self.waits.fetch_add(1, Ordering::Relaxed);
        let error = || FenceError { operation: "wait", source: "broken".into() };
        if self.waits_fail { Err(error()) } else { Ok(true) }
    }
}

#[test]
fn waits_end_and_do_not_spin_whatever_fences_say() {
    for waits_fail in [false, true] {
        let fences = Contradictory { waits_fail, waits: Arc::default() };
        let upstream = SimulatedOptions { capacity: ByteCount::kib(4), ..Default::default() };
        let pending_wait = Duration::from_millis(20);
        let options = PoolOptions { pending_wait, ..PoolOptions::default() };
        let source = Arc::new(fences.clone());
        let pool = Pool::with_fences(Simulated::new(upstream), options, source).unwrap();
        let request = RegionRequest::new(ByteCount::kib(4));
        drop(pool.allocate_on(StreamId::new(1), &request).unwrap());
        assert!(pool.allocate_on(StreamId::new(2), &request).is_err());
        pool.close();
        let waits = fences.waits.load(Ordering::Relaxed);
        assert!(!waits_fail || waits < 1000, "{waits} waits in 40 ms");
    }
}

/// Creates a pool over streams that the test runs.
fn pool_over(streams: &SimulatedStreams) -> Pool<Simulated> {
    let upstream = SimulatedOptions { capacity: ByteCount::mib(4), ..Default::default() };
    let options = PoolOptions { pending_wait: Duration::ZERO, ..PoolOptions::default() };
    Pool::with_fences(Simulated::new(upstream), options, Arc::new(streams.clone())).unwrap()
}

/// Returns the number of streams in the pool's table.
fn remembered(pool: &Pool<Simulated>) -> usize {
    pool.cache.pending.as_ref().unwrap().table.lock().streams.len()
}

fn pending(pool: &Pool<Simulated>) -> u64 {
    pool.cache.pending.as_ref().unwrap().bytes()
}

/// Releases a block that these streams use.
fn release(pool: &Pool<Simulated>, own: StreamId, other: StreamId) {
    let request = RegionRequest::new(ByteCount::kib(4));
    let mut block = pool.allocate_on(own, &request).unwrap();
    block.record_use(other, Access::Read).unwrap();
    block.release_on(own).unwrap();
}

#[test]
fn streams_that_nothing_is_pending_on_are_forgotten() {
    let streams = SimulatedStreams::new(1);
    let pool = pool_over(&streams);
    for number in 0..100 {
        let [own, other] = [2 * number, 2 * number + 1].map(StreamId::new);
        streams.submit(own, || {});
        release(&pool, own, other);
        pool.reap();
        assert!(pending(&pool) > 0 && remembered(&pool) > 0);
        streams.run_all();
        pool.reap();
        assert_eq!((pending(&pool), remembered(&pool)), (0, 0));
    }
}

#[test]
fn a_forgotten_stream_that_comes_again_holds_up_no_block_of_before() {
    let [quick, slow] = [1, 2].map(StreamId::new);
    let streams = SimulatedStreams::new(1);
    let pool = pool_over(&streams);
    streams.submit(slow, || {});
    release(&pool, quick, slow);
    let before = pending(&pool);
    for _ in 0..2 {
        pool.reap();
    }
    assert_eq!((pending(&pool), remembered(&pool)), (before, 1), "the quick one is done");
    // The epochs of the stream start again, and a block is pending on it.
    streams.submit(quick, || {});
    release(&pool, quick, StreamId::new(3));
    assert_eq!(pending(&pool), 2 * before);
    while streams.step(slow) {}
    pool.reap();
    assert_eq!(pending(&pool), before);
    streams.run_all();
    pool.reap();
    assert_eq!((pending(&pool), remembered(&pool)), (0, 0));
}

/// Streams that the source no longer knows.
#[derive(Debug, Default)]
struct Gone {
    records: Arc<AtomicU32>,
}

impl FenceSource for Gone {
    fn create(&self) -> Result<Arc<dyn Fence>, FenceError> {
        Ok(Arc::new(Self { records: Arc::clone(&self.records) }))
    }
}

impl Fence for Gone {
    fn record(&self, _: StreamId) -> Result<(), FenceError> {
        self.records.fetch_add(1, Ordering::Relaxed);
        Err(FenceError { operation: "record", source: "no such stream".into() })
    }

    fn is_complete(&self) -> Result<bool, FenceError> {
        Ok(true)
    }

    fn wait(&self, _: Duration) -> Result<bool, FenceError> {
        Ok(true)
    }
}

#[test]
fn a_stream_that_has_gone_is_forgotten_unless_a_block_waits_for_it() {
    let records = Arc::<AtomicU32>::default();
    let upstream = SimulatedOptions { capacity: ByteCount::mib(4), ..Default::default() };
    let options = PoolOptions { pending_wait: Duration::ZERO, ..PoolOptions::default() };
    let source = Arc::new(Gone { records: Arc::clone(&records) });
    let pool = Pool::with_fences(Simulated::new(upstream), options, source).unwrap();
    let taken = StreamId::new(1);
    let request = RegionRequest::new(ByteCount::kib(4));
    drop(pool.allocate_on(taken, &request).unwrap());
    // A block that only its own stream used is pending once the trim has taken it from the thread.
    pool.trim(ByteCount::ZERO);
    release(&pool, StreamId::new(2), StreamId::new(3));
    let two = pending(&pool);
    let block = pool.allocate_on(taken, &request).unwrap();
    assert_eq!((2 * pending(&pool), remembered(&pool)), (two, 3));
    for _ in 0..2 {
        pool.reap();
        assert_eq!(remembered(&pool), 2);
    }
    assert_eq!(2 * pending(&pool), two, "a stream may still use a block that was allocated again");
    drop(block);
    assert!(records.load(Ordering::Relaxed) > 0);
}
