//! Several threads on one pool.

use std::collections::HashSet;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::scope;

use proptest::prelude::*;
use terrane_core::ByteCount;
use terrane_pool::{Pool, PoolOptions, SizeClasses};

use crate::support::{Block, Counted, address};

const PAGE: ByteCount = ByteCount::kib(4);

#[test]
fn magazines_are_given_back_when_a_thread_ends() {
    let upstream = Counted::unlimited();
    let pool = Pool::new(upstream.clone(), PoolOptions::default()).unwrap();
    for _ in 0..20 {
        scope(|scope| {
            // The end of a scope does not wait for the destructors of thread-locals. A join does.
            let thread = scope.spawn(|| {
                let blocks: Vec<_> = (0..5).map(|_| pool.allocate_bytes(PAGE).unwrap()).collect();
                drop(blocks);
            });
            thread.join().unwrap();
        });
    }
    assert_eq!(upstream.allocations(), 5, "every thread reused the blocks of the previous one");
    let seen = pool.snapshot();
    let class = seen.classes.iter().find(|class| class.size == PAGE).unwrap();
    assert_eq!((class.in_magazines, class.in_queue), (0, 5));
}

#[test]
fn blocks_released_by_one_thread_serve_another() {
    let upstream = Counted::unlimited();
    let pool = Pool::new(upstream.clone(), PoolOptions::default()).unwrap();
    let (sender, receiver) = std::sync::mpsc::sync_channel::<Block>(64);
    scope(|scope| {
        scope.spawn(move || {
            for block in receiver {
                drop(block);
            }
        });
        for _ in 0..100_000 {
            sender.send(pool.allocate_bytes(PAGE).unwrap()).unwrap();
        }
        drop(sender);
    });
    // In flight, in two magazines, and in a few batches between them.
    assert!(upstream.allocations() < 200, "{}", upstream.allocations());
}

#[test]
fn a_sweep_reaches_idle_threads() {
    let upstream = Counted::unlimited();
    let pool = Pool::new(upstream.clone(), PoolOptions::default()).unwrap();
    let (released, done) = (std::sync::Barrier::new(2), std::sync::Barrier::new(2));
    scope(|scope| {
        scope.spawn(|| {
            drop(pool.allocate_bytes(PAGE).unwrap());
            drop(pool.allocate_bytes(PAGE).unwrap());
            released.wait();
            done.wait();
        });
        released.wait();
        assert_eq!(pool.snapshot().cached, PAGE);
        assert_eq!(pool.clear(), PAGE);
        upstream.assert_empty();
        done.wait();
    });
}

#[test]
fn no_block_is_allocated_twice_during_trims() {
    let upstream = Counted::unlimited();
    let options = PoolOptions { cached_bytes: ByteCount::kib(256), ..PoolOptions::default() };
    let pool = Pool::new(upstream.clone(), options).unwrap();
    let owned: Mutex<HashSet<u64>> = Mutex::default();
    let ended = AtomicBool::new(false);
    scope(|scope| {
        let workers: Vec<_> = (1..=3_u64)
            .map(|worker| {
                let (pool, owned) = (&pool, &owned);
                scope.spawn(move || {
                    let mut blocks: Vec<Block> = Vec::new();
                    for round in 0..20_000_u64 {
                        let bytes = PAGE.get() << ((round * worker) % 3);
                        let block = pool.allocate_bytes(ByteCount::new(bytes)).unwrap();
                        assert!(owned.lock().unwrap().insert(address(&block)), "two owners");
                        blocks.push(block);
                        if blocks.len() > 20 || round % 7 == 0 {
                            for block in blocks.drain(..) {
                                assert!(owned.lock().unwrap().remove(&address(&block)));
                            }
                        }
                    }
                    for block in blocks {
                        owned.lock().unwrap().remove(&address(&block));
                    }
                })
            })
            .collect();
        scope.spawn(|| {
            while !ended.load(Ordering::Relaxed) {
                pool.trim(ByteCount::kib(64));
                assert!(pool.snapshot().cached <= ByteCount::kib(256));
                std::thread::yield_now();
            }
        });
        for worker in workers {
            worker.join().unwrap();
        }
        ended.store(true, Ordering::Relaxed);
    });
    let seen = pool.snapshot();
    assert_eq!((seen.live, seen.cached), (ByteCount::ZERO, seen.held));
    pool.clear();
    upstream.assert_empty();
}

#[test]
fn pools_come_and_go_beneath_threads() {
    let upstream = Counted::unlimited();
    scope(|scope| {
        for _ in 0..2 {
            scope.spawn(|| {
                for _ in 0..200 {
                    let pool = Pool::new(upstream.clone(), PoolOptions::default()).unwrap();
                    let block = pool.allocate_bytes(PAGE).unwrap();
                    let (sender, receiver) = std::sync::mpsc::channel::<Block>();
                    std::thread::scope(|inner| {
                        inner.spawn(move || receiver.into_iter().for_each(drop));
                        sender.send(pool.allocate_bytes(PAGE).unwrap()).unwrap();
                        drop(sender);
                        drop(pool);
                    });
                    drop(block);
                }
            });
        }
    });
    upstream.assert_empty();
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(24))]

    /// Every thread runs its own steps. Afterwards the accounts must be exact.
    #[test]
    fn accounts_are_exact_after_any_schedule(
        plans in prop::collection::vec(prop::collection::vec((0..100_000_u64, 0..12_u8), 1..400), 2..4),
        magazine_depth in 0..13_usize,
        cached in 0..1_000_000_u64,
        steps8 in any::<bool>(),
    ) {
        let upstream = Counted::new(ByteCount::mib(8));
        let options = PoolOptions {
            classes: if steps8 { SizeClasses::Steps8 } else { SizeClasses::PowerOfTwo },
            magazine_depth,
            cached_bytes: ByteCount::new(cached),
            ..PoolOptions::default()
        };
        let pool = Pool::new(upstream.clone(), options).unwrap();
        let passed: Mutex<Vec<Block>> = Mutex::default();
        scope(|scope| {
            let (pool, passed) = (&pool, &passed);
            let start = |plan| {
                scope.spawn(move || {
                    let mut own: Vec<Block> = Vec::new();
                    for &(bytes, what) in plan {
                        match what {
                            0 => drop(pool.trim(ByteCount::new(bytes))),
                            1 => drop(std::mem::take(&mut own)),
                            2 => passed.lock().unwrap().extend(own.pop()),
                            3 => drop(passed.lock().unwrap().pop()),
                            4 | 5 => drop(own.pop()),
                            _ => own.extend(pool.allocate_bytes(ByteCount::new(bytes))),
                        }
                    }
                })
            };
            // The end of a scope does not wait for the destructors of thread-locals. A join does.
            let started: Vec<_> = plans.iter().map(start).collect();
            started.into_iter().for_each(|thread| thread.join().unwrap());
        });
        let left: u64 = passed.lock().unwrap().iter().map(|block| block.granted().get()).sum();
        let seen = pool.snapshot();
        prop_assert_eq!(seen.live.get(), left);
        prop_assert_eq!(seen.held, upstream.bytes());
        prop_assert_eq!(seen.cached.get() + left, seen.held.get());
        prop_assert!(seen.cached.get() <= cached);
        passed.lock().unwrap().clear();
        pool.close();
        upstream.assert_empty();
    }
}
