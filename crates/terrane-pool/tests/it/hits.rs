//! A hit calls no upstream, takes no lock and traces nothing.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use terrane_core::{Allocate, ByteCount, Label, RegionRequest};
use terrane_pool::{Pool, PoolOptions, StreamId};
use terrane_testkit::simulated::SimulatedStreams;
use tracing::span::{Attributes, Id, Record};
use tracing::subscriber::{Interest, with_default};
use tracing::{Event, Metadata, Subscriber};

use crate::support::Counted;

/// Counts all events and queries.
struct Listener(Arc<AtomicU64>);

impl Listener {
    fn hear(&self) {
        self.0.fetch_add(1, Ordering::Relaxed);
    }
}

impl Subscriber for Listener {
    /// Called for every call site of the program, on the first thread that reaches it. Only this
    /// thread reports the events that are enabled.
    fn register_callsite(&self, _: &'static Metadata<'static>) -> Interest {
        Interest::sometimes()
    }
    fn enabled(&self, metadata: &Metadata<'_>) -> bool {
        if metadata.target().starts_with("terrane_pool") {
            self.hear();
        }
        true
    }
    fn new_span(&self, _: &Attributes<'_>) -> Id {
        self.hear();
        Id::from_u64(1)
    }
    fn record(&self, _: &Id, _: &Record<'_>) {}
    fn record_follows_from(&self, _: &Id, _: &Id) {}
    fn event(&self, _: &Event<'_>) {
        self.hear();
    }
    fn enter(&self, _: &Id) {}
    fn exit(&self, _: &Id) {}
}

#[test]
fn a_miss_returns_cached_blocks_only_to_stay_below_the_peak() {
    let upstream = Counted::unlimited();
    let options = PoolOptions { magazine_depth: 0, ..PoolOptions::default() };
    let pool = Pool::new(upstream.clone(), options).unwrap();
    let blocks: Vec<_> =
        (0..100).map(|_| pool.allocate_bytes(ByteCount::mib(2)).unwrap()).collect();
    drop(blocks);
    pool.trim(ByteCount::mib(150));
    let cached = pool.snapshot().cached;
    assert!(cached > ByteCount::mib(100), "more than a tenth of what is held");

    let small = pool.allocate_bytes(ByteCount::mib(3)).unwrap();
    assert_eq!(pool.snapshot().cached, cached, "it fits below the peak");
    let large = pool.allocate_bytes(ByteCount::mib(64)).unwrap();
    let seen = pool.snapshot();
    assert_eq!(seen.peak_held, ByteCount::mib(200));
    // As many blocks of 2 MiB as exceed the peak.
    assert!(seen.held > ByteCount::mib(198), "{}", seen.held);
    assert_eq!(seen.held, upstream.bytes());
    drop((small, large));
}

#[test]
fn a_miss_at_the_peak_takes_a_cached_block_of_a_slightly_larger_class() {
    let upstream = Counted::unlimited();
    let options = PoolOptions { magazine_depth: 0, ..PoolOptions::default() };
    let pool = Pool::new(upstream.clone(), options).unwrap();
    let allocate = |bytes| pool.allocate_bytes(bytes).unwrap();
    drop((0..100).map(|_| allocate(ByteCount::mib(20))).collect::<Vec<_>>());
    assert_eq!(upstream.allocations(), 100);

    let close = allocate(ByteCount::mib(18));
    assert_eq!(close.granted(), ByteCount::mib(20), "within a waste of 25 %");
    assert_eq!(upstream.allocations(), 100);
    let far = allocate(ByteCount::mib(14));
    assert_eq!(far.granted(), ByteCount::mib(14), "20 MiB would waste more");
    assert_eq!(upstream.allocations(), 101);
    let seen = pool.snapshot();
    assert!(seen.held <= ByteCount::mib(2000) && seen.held == upstream.bytes(), "{}", seen.held);
    assert_eq!(seen.live, ByteCount::mib(34));
    drop((close, far));
    drop(pool);
    upstream.assert_empty();
}

#[test]
fn a_class_that_is_used_often_gets_blocks_of_its_own() {
    let upstream = Counted::unlimited();
    let pool = Pool::new(upstream.clone(), PoolOptions::default()).unwrap();
    let allocate = |bytes| pool.allocate_bytes(bytes).unwrap();
    drop((0..100).map(|_| allocate(ByteCount::mib(20))).collect::<Vec<_>>());
    for _ in 0..200 {
        drop(allocate(ByteCount::mib(18)));
    }
    assert_eq!(upstream.allocations(), 101, "once, after some larger blocks");
    let seen = pool.snapshot();
    let class = seen.classes.iter().find(|class| class.size == ByteCount::mib(18)).unwrap();
    assert!(class.magazine_hits > 100 && class.misses < 100, "{class}");
    assert!(seen.held <= ByteCount::mib(2000), "a cached block was freed for it");
}

#[test]
fn a_miss_takes_no_larger_block_for_a_stream_or_if_all_memory_may_be_cached() {
    let streams = SimulatedStreams::new(1);
    let upstream = Counted::unlimited();
    let all = PoolOptions { cached_percent: 100, ..PoolOptions::default() };
    for (options, stream) in [(PoolOptions::default(), Some(StreamId::new(1))), (all, None)] {
        let fences = Arc::new(streams.clone());
        let pool = Pool::with_fences(upstream.clone(), options, fences).unwrap();
        drop(
            (0..100).map(|_| pool.allocate_bytes(ByteCount::mib(20)).unwrap()).collect::<Vec<_>>(),
        );
        let request = RegionRequest::new(ByteCount::mib(18));
        let block = match stream {
            Some(stream) => pool.allocate_on(stream, &request).unwrap(),
            None => pool.allocate(&request).unwrap(),
        };
        assert_eq!(block.granted(), ByteCount::mib(18));
        drop(block);
        streams.run_all();
    }
}

#[test]
fn a_block_that_is_released_on_a_stream_no_longer_counts_to_its_label() {
    let streams = SimulatedStreams::new(1);
    let stream = StreamId::new(1);
    let fences = Arc::new(streams.clone());
    let pool = Pool::with_fences(Counted::unlimited(), PoolOptions::default(), fences).unwrap();
    let labelled = RegionRequest::new(ByteCount::kib(4)).labelled("kv");
    let block = pool.allocate(&labelled).unwrap();
    assert_eq!(pool.snapshot().labels, [(Label::from("kv"), ByteCount::kib(4))]);
    block.release_on(stream).unwrap();
    assert!(pool.snapshot().labels.is_empty());
}

#[test]
fn a_hit_traces_nothing_and_asks_the_upstream_for_nothing() {
    let upstream = Counted::unlimited();
    let pool = Pool::new(upstream.clone(), PoolOptions::default()).unwrap();
    let request = RegionRequest::new(ByteCount::kib(4)).labelled("kv");
    drop(pool.allocate(&request).unwrap());
    drop(pool.allocate_bytes(ByteCount::kib(64)).unwrap());
    let (heard, allocations) = (Arc::new(AtomicU64::new(0)), upstream.allocations());
    with_default(Listener(Arc::clone(&heard)), || {
        for _ in 0..1000 {
            drop(pool.allocate(&request).unwrap());
            drop(pool.allocate_bytes(ByteCount::kib(64)).unwrap());
        }
        assert_eq!(heard.load(Ordering::Relaxed), 0, "a hit was traced");
        // Checks that the subscriber is active.
        pool.clear();
    });
    assert!(heard.load(Ordering::Relaxed) > 0, "a trim is traced");
    assert_eq!(upstream.allocations(), allocations);
}
