//! Every lock-free path, in all interleavings of a few threads.
//!
//! `RUSTFLAGS="--cfg loom" cargo test --release -p terrane-pool --test loom`
#![cfg(loom)]
#![allow(
    missing_docs,
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    clippy::missing_panics_doc,
    reason = "a failed expectation panics"
)]

#[path = "loom/budgets.rs"]
mod budgets;

use std::sync::Arc;
use std::sync::atomic::AtomicU64 as PlainU64;
use std::time::Duration;

use loom::cell::UnsafeCell;
use loom::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use loom::thread;
use terrane_core::{
    Allocate, AllocateError, ByteCount, DeviceAddress, DeviceId, ForeignMemory, Limits, Location,
    Memory, RegionRequest, Span, StorageKind,
};
use terrane_pool::{
    Fence, FenceError, FenceSource, Pool, PoolBlock, PoolOptions, SizeClasses, StreamId,
};

const SIZE: ByteCount = ByteCount::new(512);

/// Numbers its blocks from 0, and counts the live ones.
#[derive(Clone, Debug)]
struct Numbers {
    out: Arc<AtomicUsize>,
    next: Arc<PlainU64>,
    /// One cell for each block. The owner of the block writes the cell, so the model checker
    /// detects two owners of one block.
    owners: Arc<Vec<UnsafeCell<()>>>,
    most: usize,
}

#[derive(Debug)]
struct Token(Arc<AtomicUsize>);

impl Drop for Token {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::SeqCst);
    }
}

impl Numbers {
    fn new(most: usize) -> Self {
        Self {
            out: Arc::new(AtomicUsize::new(0)),
            next: Arc::new(PlainU64::new(0)),
            owners: Arc::new((0..8).map(|_| UnsafeCell::new(())).collect()),
            most,
        }
    }

    fn out(&self) -> usize {
        self.out.load(Ordering::SeqCst)
    }

    /// Writes the block's cell, as its owner.
    fn own(&self, block: &PoolBlock<ForeignMemory<Token>>) {
        let number = (number(block) - 1) as usize;
        self.owners[number].with_mut(|_| ());
    }
}

fn number(block: &PoolBlock<ForeignMemory<Token>>) -> u64 {
    let Location::Device { address, .. } = block.location() else { panic!("a device's") };
    address.get() / SIZE.get()
}

// SAFETY: the returned memory belongs to the test alone.
unsafe impl Allocate for Numbers {
    type Memory = ForeignMemory<Token>;

    fn kind(&self) -> StorageKind {
        StorageKind::Device(DeviceId::new(0))
    }

    fn limits(&self) -> Limits {
        Limits::NONE
    }

    fn allocate(&self, request: &RegionRequest) -> Result<Self::Memory, AllocateError> {
        if self.out.fetch_add(1, Ordering::SeqCst) >= self.most {
            self.out.fetch_sub(1, Ordering::SeqCst);
            return Err(AllocateError::OutOfMemory {
                kind: self.kind(),
                requested: request.bytes,
                available: None,
                label: request.label.clone(),
                source: None,
            });
        }
        let number = 1 + self.next.fetch_add(1, Ordering::SeqCst);
        let address = DeviceAddress::new(number * SIZE.get());
        let location = Location::Device { device: DeviceId::new(0), address };
        let span = Span { kind: self.kind(), location, length: request.bytes };
        // SAFETY: no code accesses memory of a device that does not exist.
        Ok(unsafe { ForeignMemory::new(span, Token(Arc::clone(&self.out))) })
    }
}

fn options() -> PoolOptions {
    PoolOptions {
        classes: SizeClasses::PowerOfTwo,
        smallest_class: SIZE,
        largest_class: SIZE,
        magazine_depth: 1,
        threads: 3,
        pending_wait: Duration::ZERO,
        ..PoolOptions::default()
    }
}

fn model(test: impl Fn() + Send + Sync + 'static) {
    let mut builder = loom::model::Builder::new();
    // All interleavings with three preemptions take seconds; with five, minutes.
    builder.preemption_bound = builder.preemption_bound.or(Some(3));
    builder.check(test);
}

#[test]
fn a_block_has_one_owner_on_its_way_between_magazines() {
    model(|| {
        let upstream = Numbers::new(8);
        let pool = Arc::new(Pool::new(upstream.clone(), options()).unwrap());
        // Three blocks: one in this thread's magazine, two in the shared queue.
        let blocks: Vec<_> = (0..3).map(|_| pool.allocate_bytes(SIZE).unwrap()).collect();
        drop(blocks);
        let other = {
            let (pool, upstream) = (Arc::clone(&pool), upstream.clone());
            thread::spawn(move || {
                let block = pool.allocate_bytes(SIZE).unwrap();
                upstream.own(&block);
                drop(block);
            })
        };
        let first = pool.allocate_bytes(SIZE).unwrap();
        let second = pool.allocate_bytes(SIZE).unwrap();
        upstream.own(&first);
        upstream.own(&second);
        drop((first, second));
        other.join().unwrap();
        let seen = pool.snapshot();
        assert_eq!(seen.live, ByteCount::ZERO);
        assert_eq!(seen.cached, seen.held);
        drop(pool);
        assert_eq!(upstream.out(), 0);
    });
}

#[test]
fn a_clear_loses_no_block_released_at_the_same_time() {
    model(|| {
        let upstream = Numbers::new(8);
        let pool = Arc::new(Pool::new(upstream.clone(), options()).unwrap());
        let block = pool.allocate_bytes(SIZE).unwrap();
        let other = {
            let (pool, upstream) = (Arc::clone(&pool), upstream.clone());
            thread::spawn(move || {
                upstream.own(&block);
                drop(block);
                // A hit, if the clear did not run in between.
                let block = pool.allocate_bytes(SIZE).unwrap();
                upstream.own(&block);
            })
        };
        pool.clear();
        other.join().unwrap();
        pool.clear();
        assert_eq!(upstream.out(), 0);
        assert_eq!(pool.snapshot().held, ByteCount::ZERO);
    });
}

#[test]
fn a_clear_finds_what_is_on_its_way_to_the_shared_queue() {
    model(|| {
        let upstream = Numbers::new(8);
        let pool = Arc::new(Pool::new(upstream.clone(), options()).unwrap());
        let blocks: Vec<_> = (0..2).map(|_| pool.allocate_bytes(SIZE).unwrap()).collect();
        let released = Arc::new(AtomicBool::new(false));
        let other = {
            let released = Arc::clone(&released);
            thread::spawn(move || {
                for block in blocks {
                    // The release of the second block moves the first block out of the magazine.
                    drop(block);
                    released.store(true, Ordering::SeqCst);
                }
            })
        };
        let was_released = released.load(Ordering::SeqCst);
        pool.clear();
        other.join().unwrap();
        if was_released {
            assert!(upstream.out() <= 1, "a block that was released before the clear survived it");
        }
        drop(pool);
        assert_eq!(upstream.out(), 0);
    });
}

#[test]
fn a_cleared_block_was_released_before() {
    model(|| {
        let upstream = Numbers::new(8);
        let pool = Arc::new(Pool::new(upstream.clone(), options()).unwrap());
        // Registered, and with a block in the magazine.
        drop(pool.allocate_bytes(SIZE).unwrap());
        let other = {
            let pool = Arc::clone(&pool);
            thread::spawn(move || pool.clear())
        };
        let block = pool.allocate_bytes(SIZE).unwrap();
        upstream.own(&block);
        other.join().unwrap();
        assert_eq!(upstream.out(), 1);
        drop(block);
    });
}

#[test]
fn nothing_is_kept_after_a_close() {
    model(|| {
        let upstream = Numbers::new(8);
        let pool = Arc::new(Pool::new(upstream.clone(), options()).unwrap());
        drop(pool.allocate_bytes(SIZE).unwrap());
        let other = {
            let pool = Arc::clone(&pool);
            thread::spawn(move || pool.close())
        };
        match pool.allocate_bytes(SIZE) {
            Ok(block) => {
                upstream.own(&block);
                drop(block);
            }
            Err(error) => assert!(matches!(error, AllocateError::Closed { .. }), "{error}"),
        }
        other.join().unwrap();
        assert_eq!(upstream.out(), 0);
        assert!(pool.allocate_bytes(SIZE).is_err());
    });
}

#[test]
fn a_close_finds_every_class_whatever_others_evict() {
    // Together, the blocks exceed the 64 MiB that may always be cached, so a miss evicts the
    // smaller one.
    const SMALL: ByteCount = ByteCount::mib(32);
    const LARGE: ByteCount = ByteCount::mib(64);
    model(|| {
        let upstream = Numbers::new(8);
        let options = PoolOptions {
            smallest_class: SMALL,
            largest_class: ByteCount::mib(128),
            magazine_depth: 0,
            threads: 0,
            cached_percent: 0,
            ..options()
        };
        let pool = Arc::new(Pool::new(upstream.clone(), options).unwrap());
        let blocks = [SMALL, LARGE].map(|bytes| pool.allocate_bytes(bytes).unwrap());
        drop(blocks);
        let other = {
            let pool = Arc::clone(&pool);
            thread::spawn(move || drop(pool.allocate_bytes(ByteCount::mib(128))))
        };
        pool.close();
        other.join().unwrap();
        assert_eq!(upstream.out(), 0);
    });
}

#[test]
fn a_late_release_goes_to_the_upstream() {
    model(|| {
        let upstream = Numbers::new(8);
        let pool = Pool::new(upstream.clone(), options()).unwrap();
        let (first, second) =
            (pool.allocate_bytes(SIZE).unwrap(), pool.allocate_bytes(SIZE).unwrap());
        let other = thread::spawn(move || drop(first));
        drop(pool);
        drop(second);
        other.join().unwrap();
        assert_eq!(upstream.out(), 0);
    });
}

#[test]
fn an_exhausted_pool_finds_the_block_in_the_other_thread() {
    model(|| {
        let upstream = Numbers::new(2);
        let pool = Arc::new(Pool::new(upstream.clone(), options()).unwrap());
        let kept = pool.allocate_bytes(SIZE).unwrap();
        drop(pool.allocate_bytes(SIZE).unwrap());
        // One block is in use, and one is in this thread's magazine. The other thread must take the
        // block from this magazine.
        let other = {
            let (pool, upstream) = (Arc::clone(&pool), upstream.clone());
            thread::spawn(move || match pool.allocate_bytes(SIZE) {
                Ok(block) => upstream.own(&block),
                Err(error) => assert!(error.is_exhaustion(), "{error}"),
            })
        };
        match pool.allocate_bytes(SIZE) {
            Ok(block) => upstream.own(&block),
            Err(error) => assert!(error.is_exhaustion(), "{error}"),
        }
        other.join().unwrap();
        upstream.own(&kept);
        drop(kept);
        pool.clear();
        assert_eq!(upstream.out(), 0);
    });
}

#[test]
fn the_cap_holds_whoever_releases() {
    model(|| {
        let upstream = Numbers::new(8);
        let options = PoolOptions { cached_bytes: SIZE, ..options() };
        let pool = Arc::new(Pool::new(upstream.clone(), options).unwrap());
        let (first, second) =
            (pool.allocate_bytes(SIZE).unwrap(), pool.allocate_bytes(SIZE).unwrap());
        let other = thread::spawn(move || drop(first));
        drop(second);
        other.join().unwrap();
        // Each block alone fits. One of them is refused, but not both.
        assert_eq!(pool.snapshot().cached, SIZE);
        assert_eq!(upstream.out(), 1);
    });
}

#[derive(Clone, Debug)]
struct Device {
    reached: Arc<AtomicBool>,
}

impl FenceSource for Device {
    fn create(&self) -> Result<Arc<dyn Fence>, FenceError> {
        Ok(Arc::new(self.clone()))
    }
}

impl Fence for Device {
    fn record(&self, _stream: StreamId) -> Result<(), FenceError> {
        Ok(())
    }

    fn is_complete(&self) -> Result<bool, FenceError> {
        Ok(self.reached.load(Ordering::Acquire))
    }

    fn wait(&self, _timeout: Duration) -> Result<bool, FenceError> {
        self.is_complete()
    }
}

#[test]
fn another_stream_gets_a_block_after_its_fence_only() {
    model(|| {
        let upstream = Numbers::new(8);
        let device = Device { reached: Arc::new(AtomicBool::new(false)) };
        let fences = Arc::new(device.clone());
        let pool = Arc::new(Pool::with_fences(upstream.clone(), options(), fences).unwrap());
        let (compute, copy) = (StreamId::new(1), StreamId::new(2));
        let request = RegionRequest::new(SIZE);
        let block = pool.allocate_on(compute, &request).unwrap();
        let other = {
            let device = device.clone();
            thread::spawn(move || {
                drop(block);
                device.reached.store(true, Ordering::Release);
            })
        };
        let block = pool.allocate_on(copy, &request).unwrap();
        if number(&block) == 1 {
            assert!(device.reached.load(Ordering::Relaxed));
        }
        upstream.own(&block);
        // A thread of the model releases its blocks after it was joined, so the test cannot check a
        // count here.
        other.join().unwrap();
        drop(block);
    });
}

#[test]
fn a_close_frees_nothing_that_a_stream_still_uses() {
    model(|| {
        let upstream = Numbers::new(8);
        let fences = Arc::new(Device { reached: Arc::new(AtomicBool::new(false)) });
        let pool = Arc::new(Pool::with_fences(upstream.clone(), options(), fences).unwrap());
        let (compute, request) = (StreamId::new(1), RegionRequest::new(SIZE));
        drop(pool.allocate_on(compute, &request).unwrap());
        let other = {
            let pool = Arc::clone(&pool);
            thread::spawn(move || pool.close())
        };
        for _ in 0..2 {
            match pool.allocate_on(compute, &request) {
                Ok(block) => upstream.own(&block),
                Err(error) => assert!(matches!(error, AllocateError::Closed { .. }), "{error}"),
            }
        }
        other.join().unwrap();
        let ever = upstream.next.load(Ordering::SeqCst);
        assert_eq!(upstream.out() as u64, ever, "the stream has not ended");
    });
}
