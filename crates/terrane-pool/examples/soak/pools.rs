//! Pools under random sizes, threads, streams, trims and faults.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use terrane_core::{ByteCount, RegionRequest};
use terrane_pool::{Access, Pool, PoolOptions, Retry, SizeClasses, StreamId};
use terrane_testkit::random::Seeded;
use terrane_testkit::simulated::SimulatedStreams;

use crate::support::{Block, Counted};

/// Runs threads on one pool for `duration`, and returns the number of blocks allocated. Panics if
/// the accounts are not exact afterwards.
pub fn soak(classes: SizeClasses, seed: u64, threads: u64, duration: Duration) -> u64 {
    let upstream = Counted::new(ByteCount::mib(64));
    let streams = SimulatedStreams::new(seed);
    streams.set_runs_on_wait(true);
    let options = PoolOptions {
        classes,
        cached_bytes: ByteCount::mib(24),
        largest_class: ByteCount::mib(2),
        blocks_per_class: 64,
        pending_wait: Duration::from_secs(5),
        order_streams: seed.is_multiple_of(2),
        ..PoolOptions::default()
    };
    let pool = Pool::with_fences(upstream.clone(), options, Arc::new(streams.clone()))
        .expect("the options are valid")
        .on_exhaustion(|_, _| Retry::Again);
    let passed: Mutex<Vec<Block>> = Mutex::default();
    let (ended, acquired) = (AtomicBool::new(false), AtomicU64::new(0));
    thread::scope(|scope| {
        let start = |worker: u64| {
            let random = Seeded::new(seed.wrapping_mul(0x1_0000).wrapping_add(worker));
            let (pool, passed, ended, acquired) = (&pool, &passed, &ended, &acquired);
            let streams = &streams;
            scope.spawn(move || {
                acquired.fetch_add(work(pool, passed, streams, ended, random), Ordering::Relaxed);
            })
        };
        let workers: Vec<_> = (0..threads).map(start).collect();
        let mut random = Seeded::new(seed);
        let deadline = Instant::now() + duration;
        while Instant::now() < deadline {
            match random.below_u64(4) {
                0 => drop(pool.trim(ByteCount::new(random.below_u64(30_000 << 10)))),
                1 => upstream.fail_next(1),
                2 => streams.run_all(),
                _ => {
                    let seen = pool.snapshot();
                    let slab = matches!(classes, SizeClasses::ExactSlab { .. });
                    assert!(slab || seen.cached <= ByteCount::mib(24), "over the cap: {seen:?}");
                }
            }
            thread::sleep(Duration::from_micros(200));
        }
        ended.store(true, Ordering::Relaxed);
        // The end of a scope does not wait for the destructors of thread-locals. A join does.
        workers.into_iter().for_each(|worker| worker.join().expect("a worker panicked"));
    });
    let mut passed = passed.lock().unwrap_or_else(PoisonError::into_inner);
    let live: u64 = passed.iter().map(|block| block.granted().get()).sum();
    let seen = pool.snapshot();
    assert_eq!(seen.live.get(), live, "{seen:?}");
    assert_eq!(seen.held, upstream.bytes(), "{seen:?}");
    passed.clear();
    pool.close();
    assert_eq!(pool.snapshot().abandoned, ByteCount::ZERO);
    upstream.assert_empty();
    acquired.load(Ordering::Relaxed)
}

fn work(
    pool: &Pool<Counted>,
    passed: &Mutex<Vec<Block>>,
    streams: &SimulatedStreams,
    ended: &AtomicBool,
    mut random: Seeded,
) -> u64 {
    let lock = || passed.lock().unwrap_or_else(PoisonError::into_inner);
    let (mut own, mut acquired) = (Vec::new(), 0);
    while !ended.load(Ordering::Relaxed) {
        let magnitude = random.below_u64(22);
        let bytes = ByteCount::new(random.below_u64(1 << magnitude));
        let stream = StreamId::new(1 + random.below_u64(3));
        let block = match random.below_u64(16) {
            0 => pool.allocate_on(stream, &RegionRequest::new(bytes).labelled("on a stream")),
            _ => pool.allocate_bytes(bytes),
        };
        if let Ok(mut block) = block {
            acquired += 1;
            if random.below_u64(32) == 0 {
                streams.submit(stream, || {});
                block.record_use(stream, Access::Read).expect("the pool knows streams");
            }
            own.push(block);
        }
        match random.below_u64(64) {
            0 => own.clear(),
            1 => lock().append(&mut own),
            2 => drop(lock().pop()),
            3 => drop(std::mem::take(&mut *lock())),
            4..24 => {}
            _ => drop(own.pop()),
        }
        if own.len() > 200 {
            own.clear();
        }
    }
    lock().extend(own);
    acquired
}
