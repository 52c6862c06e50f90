//! What a hit does not do.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use terrane_core::{Allocate, ByteCount, RegionRequest};
use terrane_pool::{Pool, PoolOptions};
use tracing::span::{Attributes, Id, Record};
use tracing::subscriber::{Interest, with_default};
use tracing::{Event, Metadata, Subscriber};

use crate::support::Counted;

/// Counts everything that it is told or asked.
struct Listener(Arc<AtomicU64>);

impl Listener {
    fn hear(&self) {
        self.0.fetch_add(1, Ordering::Relaxed);
    }
}

impl Subscriber for Listener {
    /// Asked for every place of the program, on whichever thread comes there first: only what is
    /// enabled is told by this thread alone.
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
fn a_hit_traces_nothing_and_asks_the_upstream_for_nothing() {
    let upstream = Counted::unlimited();
    let pool = Pool::new(upstream.clone(), PoolOptions::default()).unwrap();
    let request = RegionRequest::new(ByteCount::kib(4)).labelled("kv");
    drop(pool.allocate(&request).unwrap());
    drop(pool.acquire(ByteCount::kib(64)).unwrap());
    let (heard, asked) = (Arc::new(AtomicU64::new(0)), upstream.allocations());
    with_default(Listener(Arc::clone(&heard)), || {
        for _ in 0..1000 {
            drop(pool.allocate(&request).unwrap());
            drop(pool.acquire(ByteCount::kib(64)).unwrap());
        }
        assert_eq!(heard.load(Ordering::Relaxed), 0, "a hit was traced");
        // It does listen.
        pool.clear();
    });
    assert!(heard.load(Ordering::Relaxed) > 0, "a trim is traced");
    assert_eq!(upstream.allocations(), asked);
}
