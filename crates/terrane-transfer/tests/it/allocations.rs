//! Counts the allocations of planning and submitting: none per span.

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;

use terrane_layout::{LayoutConfig, LayoutConfigBuilder, LayoutKind, TokenOrder};
use terrane_testkit::conformance::copy_engine::end_of;
use terrane_transfer::engines::{HostEngine, HostEngineOptions};
use terrane_transfer::{Endpoint, Planner, Transfer, TransferManager};

use crate::support::*;

thread_local! {
    /// The allocations of this thread. The counter has no destructor, so it outlives all values
    /// that have one.
    static ALLOCATIONS: Cell<u64> = const { Cell::new(0) };
}

/// The system's allocator with a count per thread, so that tests do not affect each other.
struct Counting;

#[global_allocator]
static COUNTING: Counting = Counting;

fn count() {
    ALLOCATIONS.with(|count| count.set(count.get() + 1));
}

// SAFETY: every call is forwarded to the system's allocator unchanged, and counting allocates
// nothing.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        count();
        // SAFETY: the caller guarantees it.
        unsafe { System.alloc(layout) }
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        count();
        // SAFETY: the caller guarantees it.
        unsafe { System.alloc_zeroed(layout) }
    }

    unsafe fn realloc(&self, block: *mut u8, layout: Layout, bytes: usize) -> *mut u8 {
        count();
        // SAFETY: the caller guarantees it.
        unsafe { System.realloc(block, layout, bytes) }
    }

    unsafe fn dealloc(&self, block: *mut u8, layout: Layout) {
        // SAFETY: the caller guarantees it.
        unsafe { System.dealloc(block, layout) }
    }
}

/// The number of allocations of `body` on this thread.
fn allocations<T>(body: impl FnOnce() -> T) -> (u64, T) {
    let before = ALLOCATIONS.get();
    let result = body();
    (ALLOCATIONS.get() - before, result)
}

const LAYERS: u32 = 32;

fn wide(blocks: u32) -> LayoutConfig {
    shape().num_blocks(2 * blocks).num_layers(LAYERS).build().unwrap()
}

/// Every other block, in an order in which no two can be joined.
fn scattered(source: &Endpoint, destination: &Endpoint, blocks: u32) -> Transfer {
    let from: Vec<_> = (0..blocks).map(|n| (n * 7 + 3) % blocks * 2).collect();
    let to: Vec<_> = (0..blocks).map(|n| (n * 5 + 1) % blocks * 2 + 1).collect();
    Transfer::new(source, destination).blocks(&from, &to)
}

fn every_pair_of_kinds(mut body: impl FnMut(LayoutKind, LayoutKind)) {
    for from in LayoutKind::ALL {
        for to in LayoutKind::ALL {
            body(from, to);
        }
    }
}

#[test]
fn the_counter_counts() {
    let (counted, lists) = allocations(|| [vec![1_u8], vec![2]]);
    assert_eq!((counted, lists.len()), (2, 2));
}

#[test]
fn a_plan_in_the_steady_state_allocates_nothing() {
    every_pair_of_kinds(|from, to| {
        for blocks in [16, 512] {
            let [source, destination] = [from, to].map(|kind| endpoint(wide(blocks), kind));
            let transfer = scattered(&source, &destination, blocks);
            let planner = Planner::new();
            assert!(!planner.plan(&transfer).unwrap().runs().is_empty());
            let (counted, runs) = allocations(|| planner.plan(&transfer).unwrap().runs().len());
            assert_eq!(counted, 0, "{blocks} blocks in {runs} runs, {from} to {to}");
            // The same without a request for the list. Its buffer is kept for a later request.
            let (counted, count) = allocations(|| planner.plan(&transfer).unwrap().run_count());
            assert_eq!((counted, count), (0, u64::try_from(runs).unwrap()));
            let (counted, _) = allocations(|| planner.plan(&transfer).unwrap().runs().len());
            assert_eq!(counted, 0, "the buffer of the list was lost");
        }
    });
}

/// Submitting a re-layout does not list its runs, of which there may be millions.
#[test]
fn a_relayout_is_planned_without_its_runs() {
    every_pair_of_kinds(|from, to| {
        let config = wide(512);
        let heads = |order| {
            let builder = LayoutConfigBuilder::from(config).num_heads(10).token_order(order);
            builder.build().unwrap()
        };
        let [source, destination] = [(from, TokenOrder::HeadMajor), (to, TokenOrder::TokenMajor)]
            .map(|(kind, order)| endpoint(heads(order), kind));
        let transfer = scattered(&source, &destination, 512);
        let planner = Planner::new();
        drop(planner.plan(&transfer).unwrap());
        let (counted, plan) = allocations(|| planner.plan(&transfer).unwrap());
        assert_eq!(counted, 0, "{from} to {to}");
        assert_eq!(plan.run_count(), 512 * u64::from(LAYERS) * 2 * 3 * 10);
        assert_eq!(plan.grids().unwrap()[0].bytes.get(), 2);
        assert_eq!(plan.mean_run().get(), 2);
    });
}

/// The first plan allocates its lists, which grow by doubling, or at once.
#[test]
fn the_first_plan_allocates_a_few_lists_and_nothing_per_span() {
    every_pair_of_kinds(|from, to| {
        let blocks = 512;
        let [source, destination] = [from, to].map(|kind| endpoint(wide(blocks), kind));
        let transfer = scattered(&source, &destination, blocks);
        let planner = Planner::new();
        let (counted, runs) = allocations(|| planner.plan(&transfer).unwrap().runs().len());
        assert!(counted <= 16, "{counted} allocations for {runs} runs, {from} to {to}");
    });
}

#[test]
fn submitting_allocates_as_much_for_many_spans_as_for_few() {
    let engine = HostEngine::new(HostEngineOptions::default()).unwrap();
    let manager = TransferManager::new([std::sync::Arc::new(engine) as _]);
    every_pair_of_kinds(|from, to| {
        let [few, many] = [16, 512].map(|blocks| {
            let [source, destination] = [from, to].map(|kind| endpoint(wide(blocks), kind));
            let transfer = scattered(&source, &destination, blocks);
            for _ in 0..2 {
                end_of(manager.submit(transfer.clone(), ()).unwrap()).result.unwrap();
            }
            let (counted, completion) = allocations(|| manager.submit(transfer, ()).unwrap());
            end_of(completion).result.unwrap();
            counted
        });
        // The hazards of many blocks are in one allocated list for each end, and the channel to the
        // engine's threads occasionally grows by a block.
        assert!(many <= few + 3, "{few} for 16 blocks, {many} for 512, {from} to {to}");
        assert!(few <= 24, "{few} allocations to submit a small transfer");
    });
}
