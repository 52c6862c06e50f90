//! The conformance suite over every upstream and every adaptor of this crate, alone and stacked.

use std::sync::Arc;

use terrane_core::{Alignment, ByteCount, Limits};
use terrane_pool::Retry;
use terrane_pool::adaptors::{
    Adapt, Binning, Budget, Counters, Erased, FillHost, LiveBlocks, PoisonBytes, SlabOptions,
    TraceSink,
};
use terrane_pool::{Pool, PoolOptions, StreamId};
use terrane_testkit::fault::{FaultPlan, InjectFaults as _};
use terrane_testkit::simulated::{Reuse, Simulated, SimulatedOptions};

use crate::conformance::{Fixture, check};
use crate::heap::Heap;

const CAPACITY: ByteCount = ByteCount::mib(64);
const RETRIES: std::num::NonZeroU32 = std::num::NonZeroU32::new(2).unwrap();

/// A fixture over a fresh heap, with `stack` on top of it.
fn on_heap<A>(stack: impl Fn(Heap) -> A) -> impl Fn() -> Fixture<A> {
    move || {
        let heap = Heap::new(CAPACITY);
        let source = stack(heap.clone());
        Fixture { source, live_blocks: Box::new(move || heap.live_blocks()), is_bounded: true }
    }
}

/// The same over a simulated device.
fn on_device<A>(stack: impl Fn(Arc<Simulated>) -> A) -> impl Fn() -> Fixture<A> {
    move || {
        let limits = Limits {
            alignment: Alignment::new(256).unwrap(),
            granule: Alignment::SECTOR,
            largest_region: None,
        };
        let device = Arc::new(Simulated::new(SimulatedOptions {
            capacity: CAPACITY,
            limits,
            reuse: Reuse::FirstFit,
            device: 3,
        }));
        let source = stack(Arc::clone(&device));
        let live_blocks = Box::new(move || device.usage().live_blocks);
        Fixture { source, live_blocks, is_bounded: true }
    }
}

fn budget() -> Budget {
    Budget::new("node", ByteCount::gib(1)).child("tier", ByteCount::mib(32))
}

#[test]
fn upstreams() {
    check("heap", on_heap(|heap| heap));
    check("device, first fit", on_device(|device| device));
    check("device, no reuse", || {
        let options = SimulatedOptions {
            capacity: CAPACITY,
            limits: Limits { largest_region: Some(ByteCount::mib(1)), ..Limits::NONE },
            ..SimulatedOptions::default()
        };
        let device = Arc::new(Simulated::new(options));
        let source = Arc::clone(&device);
        let live_blocks = Box::new(move || device.usage().live_blocks);
        Fixture { source, live_blocks, is_bounded: false }
    });
}

#[test]
fn each_adaptor() {
    check("limit", on_heap(|heap| heap.limited(budget())));
    check("statistics", on_heap(|heap| heap.counted(Counters::new())));
    check("trace", on_heap(|heap| heap.traced(TraceSink::new(Vec::new()))));
    check("guard", on_heap(Adapt::guarded));
    check("poison", on_heap(poisoned));
    check("tags", on_heap(|heap| heap.tagged(LiveBlocks::new())));
    check("on failure", on_heap(|heap| heap.on_failure(RETRIES, |_| Retry::Again)));
    check("fallback", on_heap(|heap| Heap::new(ByteCount::kib(4)).or_else(heap).unwrap()));
    check("no faults", on_heap(|heap| heap.failing(FaultPlan::new())));
    check("delayed", on_heap(|heap| heap.delayed(5)));
    check("erased", on_heap(Adapt::erased));
    check("slabs", on_heap(in_slabs));
    check("slabs of a device", on_device(|device| device.in_slabs(SlabOptions::default())));
    check(
        "binning",
        on_heap(|heap| Binning::new(heap.clone()).with_bin(ByteCount::kib(1), heap).unwrap()),
    );
}

fn in_slabs(heap: Heap) -> terrane_pool::adaptors::Slabs<Heap> {
    heap.in_slabs(SlabOptions::default())
}

fn poisoned(heap: Heap) -> terrane_pool::adaptors::Poison<Heap> {
    heap.poisoned(FillHost, PoisonBytes::default(), StreamId::new(0))
}

#[test]
fn pools_and_what_stands_above_and_below_them() {
    let pool = |upstream| Pool::new(upstream, PoolOptions::default()).unwrap();
    check("pool", on_heap(pool));
    check("guarded pool", on_heap(|heap| pool(heap).guarded()));
    check(
        "pool over slabs",
        on_heap(|heap| Pool::new(in_slabs(heap), PoolOptions::default()).unwrap()),
    );
    check(
        "guarded slabs over poison over a guard",
        on_heap(|heap| {
            let below = poisoned(heap).guarded();
            Pool::new(below.in_slabs(SlabOptions::default()).guarded(), PoolOptions::default())
                .unwrap()
        }),
    );
    check(
        "limited pool over poison",
        on_heap(|heap| {
            Pool::new(poisoned(heap), PoolOptions::default()).unwrap().limited(budget())
        }),
    );
    check(
        "pool over delayed memory over a guard",
        on_heap(|heap| Pool::new(heap.guarded().delayed(3), PoolOptions::default()).unwrap()),
    );
    check(
        "counted pool on a device",
        on_device(|device| {
            Pool::new(device, PoolOptions::default()).unwrap().counted(Counters::new())
        }),
    );
}

#[test]
fn stacks_in_several_orders() {
    check(
        "everything",
        on_heap(|heap| {
            heap.guarded()
                .poisoned(FillHost, PoisonBytes::default(), StreamId::new(0))
                .limited(budget())
                .counted(Counters::new())
                .traced(TraceSink::new(Vec::new()))
                .tagged(LiveBlocks::new())
                .on_failure(RETRIES, |_| Retry::Again)
        }),
    );
    check(
        "everything, in the opposite order",
        on_heap(|heap| {
            heap.on_failure(RETRIES, |_| Retry::Again)
                .tagged(LiveBlocks::new())
                .traced(TraceSink::new(Vec::new()))
                .counted(Counters::new())
                .limited(budget())
                .poisoned(FillHost, PoisonBytes::default(), StreamId::new(0))
                .guarded()
        }),
    );
    check(
        "a guarded guard over delayed memory",
        on_heap(|heap| heap.guarded().delayed(3).guarded()),
    );
    check(
        "bins of different types on a device",
        on_device(|device| {
            let small = Erased::shared(Arc::clone(&device).limited(budget()).guarded());
            let rest = Erased::shared(device.counted(Counters::new()));
            Binning::new(rest).with_bin(ByteCount::kib(2), small).unwrap()
        }),
    );
    check("guard on a device", on_device(Adapt::guarded));
}
