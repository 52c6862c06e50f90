//! Slabs: against a model, below pools and budgets, refused, forked, and over system memory.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use proptest::prelude::*;
use terrane_core::{
    Alignment, Allocate, AllocateError, ByteCount, Memory as _, RegionRequest, Span,
};
use terrane_pool::adaptors::{Adapt, Budget, Either, SlabMemory, SlabOptions, Slabs};
use terrane_pool::{Pool, PoolOptions};
use terrane_storage::{FirstTouch, HugePages, SystemAllocator, SystemOptions};
use terrane_testkit::process::{in_child, in_fork};

use crate::support::{Counted, address};

type Block = SlabMemory<<Counted as Allocate>::Memory>;

fn request(bytes: u64) -> RegionRequest {
    RegionRequest::new(ByteCount::new(bytes))
}

fn slabs(upstream: &Counted) -> Slabs<Counted> {
    upstream.clone().in_slabs(SlabOptions::default())
}

#[derive(Clone, Debug)]
enum Step {
    Allocate(u64, u32),
    Free(usize),
    FreeAll,
    Fault,
    Capacity(u64),
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let bytes = prop_oneof![
        4 => (1..9_u64).prop_map(|pages| pages << 12),
        2 => 0..70_000_u64,
        1 => 0..200_000_u64
    ];
    let step = prop_oneof![
        8 => (bytes, 0..18_u32).prop_map(|(bytes, log2)| Step::Allocate(bytes, log2)),
        6 => any::<usize>().prop_map(Step::Free),
        1 => Just(Step::FreeAll),
        1 => Just(Step::Fault),
        1 => (0..2_000_000_u64).prop_map(Step::Capacity),
    ];
    prop::collection::vec(step, 1..300)
}

/// The expected usage, computed from the live blocks.
fn check_usage(source: &Slabs<Counted>, live: &[Block]) -> Result<(), TestCaseError> {
    let (mut regions, mut bytes, mut in_use, mut blocks) = (0, 0, 0, 0);
    let mut slabs = BTreeSet::new();
    for block in live {
        match block {
            Either::First(region) => {
                regions += 1;
                bytes += region.length().get();
            }
            Either::Second(block) => {
                blocks += 1;
                in_use += block.length().get();
                slabs.insert((address(block.slab()), block.slab().length().get()));
            }
        }
    }
    let held: u64 = slabs.iter().map(|&(_, length)| length).sum();
    let usage = source.usage();
    // Slabs without blocks in use were freed.
    prop_assert_eq!(usage.slabs, ByteCount::from_usize(slabs.len()).get());
    prop_assert_eq!(usage.held.get(), held);
    prop_assert_eq!(usage.blocks, blocks);
    prop_assert_eq!(usage.in_use.get(), in_use);
    prop_assert!(usage.peak_held >= usage.held);
    prop_assert_eq!(source.upstream().bytes().get(), held + bytes);
    prop_assert_eq!(source.upstream().regions(), slabs.len() + regions);
    Ok(())
}

proptest! {
    #[test]
    fn blocks_are_where_the_model_says(
        steps in steps(),
        (largest_block, smallest, largest) in (9..18_u32, 9..18_u32, 9..23_u32),
    ) {
        let upstream = Counted::unlimited();
        let options = SlabOptions {
            largest_block: ByteCount::new(1 << largest_block),
            smallest_slab: ByteCount::new(1 << smallest),
            largest_slab: ByteCount::new(1 << largest),
            ..SlabOptions::default()
        };
        let source = upstream.clone().in_slabs(options);
        let mut live: Vec<Block> = Vec::new();
        for step in steps {
            match step {
                Step::Allocate(bytes, log2) => {
                    let alignment = Alignment::new(1 << log2).unwrap();
                    let before = (source.usage(), upstream.bytes());
                    match source.allocate(&request(bytes).aligned_to(alignment)) {
                        Ok(block) => {
                            prop_assert!(block.length().get() >= bytes);
                            prop_assert!(block.location().alignment() >= alignment);
                            let span = Span::of(&block);
                            prop_assert!(!live.iter().any(|other| span.overlaps(&Span::of(other))));
                            let is_small = bytes > 0
                                && bytes.next_multiple_of(alignment.get().max(512)) <= 1 << largest_block;
                            prop_assert_eq!(block.is_second(), is_small);
                            if let Either::Second(block) = &block {
                                let inside = block.offset().get() + block.length().get();
                                prop_assert!(inside <= block.slab().length().get());
                                prop_assert_eq!(
                                    address(block),
                                    address(block.slab()) + block.offset().get()
                                );
                            }
                            live.push(block);
                        }
                        Err(_) => prop_assert_eq!(before, (source.usage(), upstream.bytes())),
                    }
                }
                Step::Free(at) if !live.is_empty() => drop(live.swap_remove(at % live.len())),
                Step::Free(_) => {}
                Step::FreeAll => live.clear(),
                Step::Fault => upstream.fail_next(1),
                Step::Capacity(more) => {
                    upstream.set_capacity(ByteCount::new(upstream.bytes().get() + more));
                }
            }
            check_usage(&source, &live)?;
        }
        // Blocks may outlive their source.
        drop(source);
        drop(live);
        upstream.assert_empty();
    }
}

#[test]
fn where_a_slab_is_refused_a_single_block_serves() {
    let upstream = Counted::new(ByteCount::kib(10));
    let source = slabs(&upstream);
    let blocks = [(); 2].map(|()| source.allocate(&request(4096)).unwrap());
    assert_eq!(upstream.regions(), 2);
    let error = source.allocate(&request(4096)).unwrap_err();
    assert!(error.is_exhaustion(), "{error}");
    assert_eq!(source.usage().in_use, ByteCount::kib(8));
    drop(blocks);
    upstream.assert_empty();
}

#[test]
fn a_failure_that_is_no_exhaustion_is_returned_and_leaves_nothing() {
    let upstream = Counted::unlimited();
    let source = slabs(&upstream);
    upstream.fail_next(1);
    let error = source.allocate(&request(4096)).unwrap_err();
    assert!(matches!(error, AllocateError::Backend { .. }), "{error}");
    assert_eq!(upstream.allocations(), 0, "the request was repeated");
    assert_eq!(source.usage().slabs, 0);
    assert!(source.allocate(&request(4096)).is_ok());
}

#[test]
fn each_slab_is_as_long_as_those_before_it_up_to_the_largest() {
    let upstream = Counted::unlimited();
    let source = slabs(&upstream);
    let blocks: Vec<_> = (0..2048).map(|_| source.allocate(&request(4096)).unwrap()).collect();
    // 64 and 64 KiB, 128 KiB, …, 1 MiB, 2 MiB three times: 8 MiB.
    assert_eq!(upstream.regions(), 9);
    assert_eq!(source.usage().held, ByteCount::mib(8));
    assert_eq!(source.usage().held, source.usage().in_use);
    drop(blocks);
    assert_eq!(source.usage().held, ByteCount::ZERO);
    assert_eq!(source.usage().peak_held, ByteCount::mib(8));
}

#[test]
fn trimming_a_pool_frees_fully_free_slabs() {
    let upstream = Counted::unlimited();
    let budget = Budget::new("slabs", ByteCount::gib(1));
    let (above, options) = (Budget::new("blocks", ByteCount::gib(1)), PoolOptions::default());
    let limited = upstream.clone().limited(budget.clone());
    let source = limited.in_slabs(SlabOptions::default()).limited(above.clone());
    let pool = Pool::new(source, options).unwrap();
    let acquire = |_| pool.allocate_bytes(ByteCount::kib(4)).unwrap();
    let (kept, freed): (Vec<_>, Vec<_>) =
        (0..1000).map(acquire).enumerate().partition(|(index, _)| index % 500 == 0);
    let slabs = || pool.upstream().upstream().usage();
    let exact = || {
        let (seen, usage) = (pool.snapshot(), slabs());
        assert_eq!(seen.held, usage.in_use, "the pool holds blocks");
        assert_eq!(seen.held, above.live(), "the budget above counts blocks");
        assert_eq!(usage.held, budget.live(), "the budget below counts slabs");
        assert_eq!(usage.held, upstream.bytes());
    };
    exact();
    drop(freed);
    exact();
    assert!(pool.snapshot().cached > ByteCount::ZERO);
    pool.clear();
    exact();
    assert_eq!((slabs().blocks, slabs().slabs), (2, 2), "one block keeps its slab");
    drop(kept);
    pool.clear();
    exact();
    assert_eq!(upstream.regions(), 0);
    assert_eq!((budget.live(), above.live()), (ByteCount::ZERO, ByteCount::ZERO));
}

#[test]
fn an_exhausted_pool_gives_slabs_back_for_another_class() {
    let upstream = Counted::new(ByteCount::mib(1));
    let pool = Pool::new(slabs(&upstream), PoolOptions::default()).unwrap();
    let acquire = |bytes| pool.allocate_bytes(ByteCount::new(bytes));
    let small: Vec<_> = (0..256).map(|_| acquire(4096).unwrap()).collect();
    assert!(acquire(32 << 10).unwrap_err().is_exhaustion());
    drop(small);
    assert!(acquire(32 << 10).is_ok());
    assert!(acquire(1 << 20).is_ok(), "the whole device, past the slabs");
}

#[test]
fn a_forked_process_is_refused_and_does_not_hang() {
    let test = "slabs::a_forked_process_is_refused_and_does_not_hang";
    in_child(test, || {
        let source = SystemAllocator::new(lean()).in_slabs(SlabOptions::default());
        let (source, stop) = (Arc::new(source), AtomicBool::new(false));
        std::thread::scope(|scope| {
            scope.spawn(|| {
                while !stop.load(Ordering::Relaxed) {
                    drop(source.allocate(&request(4096)).unwrap());
                }
            });
            for _ in 0..50 {
                let (shared, block) =
                    (Arc::clone(&source), source.allocate(&request(512)).unwrap());
                in_fork(move || {
                    let error = shared.allocate(&request(4096)).unwrap_err();
                    assert!(!error.is_exhaustion(), "{error}");
                    assert_eq!(shared.usage().slabs, 0);
                    drop(block);
                });
            }
            stop.store(true, Ordering::Relaxed);
        });
        assert_eq!(source.usage().slabs, 0);
    });
}

/// Base pages, populated on first use.
fn lean() -> SystemOptions {
    SystemOptions {
        huge_pages: HugePages::None,
        first_touch: FirstTouch::None,
        ..SystemOptions::default()
    }
}

/// The lines of `/proc/self/maps`.
fn mappings() -> usize {
    std::fs::read_to_string("/proc/self/maps").unwrap().lines().count()
}

#[test]
fn small_blocks_of_system_memory_need_few_mappings() {
    const BLOCKS: usize = 200_000;
    let test = "slabs::small_blocks_of_system_memory_need_few_mappings";
    in_child(test, || {
        let source = SystemAllocator::new(lean()).in_slabs(SlabOptions::default());
        let pool = Pool::new(source, PoolOptions::default()).unwrap();
        let before = mappings();
        let acquire = |_| pool.allocate_bytes(ByteCount::kib(4)).unwrap();
        let blocks: Vec<_> = (0..BLOCKS).map(acquire).collect();
        assert!(mappings() - before < 2_000, "{} mappings", mappings() - before);
        assert_eq!(pool.upstream().usage().blocks, 200_000);

        // Drops every second block. If each block were a mapping, 100,000 mappings would stay.
        let (even, odd): (Vec<_>, Vec<_>) =
            blocks.into_iter().enumerate().partition(|(index, _)| index % 2 == 0);
        drop(odd);
        pool.clear();
        assert!(mappings() - before < 2_000, "{} mappings", mappings() - before);
        assert_eq!(pool.upstream().usage().blocks, 100_000);
        // Other memory can still be mapped.
        drop(pool.allocate_bytes(ByteCount::mib(1)).unwrap());

        drop(even);
        pool.clear();
        let usage = pool.upstream().usage();
        assert_eq!((usage.slabs, usage.held), (0, ByteCount::ZERO));
        // The tolerance is for the test's own memory.
        assert!(mappings() < before + 50, "{} mappings stay", mappings() - before);
    });
}
