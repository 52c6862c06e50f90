//! Events, snapshots, metrics, sizes and waiting.

use std::fs;
use std::future::IntoFuture;
use std::pin::pin;
use std::sync::Arc;
use std::task::{Context, Poll, Wake, Waker};
use std::thread::{self, Thread};
use std::time::{Duration, Instant};

use terrane_core::{ByteCount, Capability};
use terrane_store::{
    EvictionKind, JobOptions, Presence, StoreError, StoreEventKind, TierId, Why, WritePolicy,
};

use super::harness::{
    assert_at_rest, builder, found, get, key, keys, open, put_ok, soon, submit_put,
};

const BLOCK: usize = 4096;

struct Unpark(Thread);

impl Wake for Unpark {
    fn wake(self: Arc<Self>) {
        self.0.unpark();
    }
}

fn block_on<F: IntoFuture>(future: F) -> F::Output {
    let waker = Waker::from(Arc::new(Unpark(thread::current())));
    let mut future = pin!(future.into_future());
    loop {
        match future.as_mut().poll(&mut Context::from_waker(&waker)) {
            Poll::Ready(output) => return output,
            Poll::Pending => thread::park(),
        }
    }
}

#[test]
fn jobs_are_awaited_polled_and_waited_for() {
    let directory = tempfile::tempdir().unwrap();
    let store = open(directory.path(), 4096, 64);
    for number in 0..30 {
        let job = submit_put(&store, &[key(number)], BLOCK, JobOptions::new());
        let outcome = match number % 3 {
            0 => block_on(job),
            1 => {
                while !job.has_ended() {
                    thread::yield_now();
                }
                job.wait_until(Instant::now()).unwrap()
            }
            _ => match job.wait_until(Instant::now()) {
                Ok(outcome) => outcome,
                Err(job) => job.wait_until(soon()).unwrap(),
            },
        };
        assert!(outcome.is_ok() && outcome.bytes.get() == 4096, "{outcome:?}");
    }
    assert_eq!(store.snapshot().ended_jobs, 30);
    assert_at_rest(&store);
}

#[test]
fn deadlines_that_have_passed_and_cancelled_jobs_end_at_once() {
    let directory = tempfile::tempdir().unwrap();
    let store = open(directory.path(), 4096, 64);
    put_ok(&store, &keys(0..1), BLOCK);
    let past = JobOptions::new().deadline(Instant::now());
    let (outcome, _) = get(&store, &keys(0..1), BLOCK, past.clone());
    assert!(matches!(outcome.results[..], [terrane_store::BlockResult::TimedOut]), "{outcome:?}");
    let outcome = submit_put(&store, &keys(5..6), BLOCK, past).wait();
    assert!(matches!(outcome.results[..], [terrane_store::BlockResult::TimedOut]), "{outcome:?}");
    assert_eq!(store.snapshot().timed_out, 2);
    assert_eq!(store.prefix(0, &keys(5..6)), 0);
    for number in 10..40 {
        let job = submit_put(&store, &[key(number)], BLOCK, JobOptions::new());
        job.cancel();
        let result = &job.wait().results[0];
        let is_there = store.prefix(0, &[key(number)]) == 1;
        match result {
            terrane_store::BlockResult::Done { .. } => assert!(is_there),
            terrane_store::BlockResult::Cancelled => assert!(!is_there),
            other => panic!("{other}"),
        }
    }
    assert_at_rest(&store);
}

#[test]
fn events_name_the_change_the_tier_and_the_key() {
    let directory = tempfile::tempdir().unwrap();
    let builder = builder(directory.path(), 4096, 4).host(ByteCount::kib(8));
    let (store, _) = builder.eviction(EvictionKind::Lru).keep_keys(true).open().unwrap();
    let (events, few) = (store.events(100).unwrap(), store.events(1).unwrap());
    assert!(matches!(store.events(0).unwrap_err(), StoreError::Queue(_)));
    for number in 0..5 {
        put_ok(&store, &[key(number)], BLOCK);
    }
    assert!(store.remove(0, &keys(4..5)).unwrap().wait().is_ok());
    assert!(store.clear().unwrap().wait().is_ok());
    let mut taken = Vec::new();
    events.take_all(&mut taken);
    let count = |kind, tier: Option<u8>| {
        let tier = tier.map(TierId::new);
        taken.iter().filter(|event| event.kind == kind && event.tier == tier).count()
    };
    assert_eq!(count(StoreEventKind::Stored, Some(0)), 5);
    assert_eq!(count(StoreEventKind::Stored, Some(1)), 5);
    assert_eq!(count(StoreEventKind::Evicted, Some(0)), 3);
    assert_eq!(count(StoreEventKind::Evicted, Some(1)), 1);
    assert_eq!(count(StoreEventKind::Removed, None), 1);
    assert_eq!(count(StoreEventKind::Cleared, None), 1);
    let evicted = taken.iter().find(|e| e.kind == StoreEventKind::Evicted).unwrap();
    assert_eq!(evicted.key.as_ref().unwrap().to_string(), "0x7072656669782030");
    assert_eq!(few.lost(), u64::try_from(taken.len()).unwrap() - 1);
    assert!(few.try_take().is_some());
    put_ok(&store, &keys(9..10), BLOCK);
    assert!(few.wait(soon()).is_some());
    assert!(events.wait(soon()).is_some());
}

#[test]
fn a_tier_shrinks_by_eviction_and_grows_again() {
    let directory = tempfile::tempdir().unwrap();
    let (store, _) = builder(directory.path(), 4096, 32).host(ByteCount::kib(64)).open().unwrap();
    put_ok(&store, &keys(0..16), BLOCK);
    put_ok(&store, &keys(16..32), BLOCK);
    let disk = TierId::new(1);
    assert_eq!(store.resize(disk, ByteCount::kib(40)).unwrap(), ByteCount::kib(40));
    let snapshot = store.snapshot();
    assert_eq!((snapshot.tiers[1].groups[0].slots, snapshot.tiers[1].groups[0].blocks), (10, 10));
    assert_eq!(snapshot.tiers[1].capacity, ByteCount::kib(40));
    store.resize(TierId::new(0), ByteCount::ZERO).unwrap();
    assert_eq!(found(&store, &keys(0..32), BLOCK).iter().filter(|&&found| found).count(), 10);
    put_ok(&store, &keys(40..45), BLOCK);
    assert_eq!(store.snapshot().tiers[1].groups[0].blocks, 10);
    assert_eq!(store.resize(disk, ByteCount::gib(1)).unwrap(), ByteCount::kib(128));
    put_ok(&store, &keys(50..72), BLOCK);
    assert_eq!(store.snapshot().tiers[1].groups[0].blocks, 32);
    assert!(found(&store, &keys(50..72), BLOCK).iter().all(|&found| found));
    assert!(matches!(
        store.resize(TierId::new(2), ByteCount::ZERO).unwrap_err(),
        StoreError::NoSuchTier { tiers: 2, .. }
    ));
    assert_at_rest(&store);
}

#[test]
fn metrics_are_exported_as_openmetrics() {
    let directory = tempfile::tempdir().unwrap();
    let store = open(directory.path(), 4096, 8);
    put_ok(&store, &keys(0..2), BLOCK);
    found(&store, &keys(0..3), BLOCK);
    let path = directory.path().join("metrics");
    store.export_metrics(&path, Duration::from_millis(10)).unwrap();
    let first = fs::read_to_string(&path).unwrap();
    assert!(first.contains("terrane_store_tier_hits_total{tier=\"disk\"} 2\n"), "{first}");
    assert!(first.contains("terrane_store_misses_total{reason=\"absent\"} 1\n"), "{first}");
    assert!(first.contains("terrane_store_job_duration_seconds_count 2\n"), "{first}");
    assert!(first.ends_with("# EOF\n"));
    put_ok(&store, &keys(5..6), BLOCK);
    let until = soon();
    while !fs::read_to_string(&path).unwrap().contains("tier_stored_total{tier=\"disk\"} 3\n") {
        assert!(Instant::now() < until);
        thread::yield_now();
    }
    let missing = directory.path().join("none").join("metrics");
    let error = store.export_metrics(&missing, Duration::from_secs(1)).unwrap_err();
    assert!(matches!(error, StoreError::Export { .. }), "{error}");
}

#[test]
fn latencies_are_counted_for_the_tier_that_had_the_block() {
    let directory = tempfile::tempdir().unwrap();
    let builder = || builder(directory.path(), 4096, 16).host(ByteCount::kib(16));
    let (store, _) = builder().open().unwrap();
    let counts = |store: &terrane_store::Store| {
        let tiers = store.snapshot().tiers;
        [&tiers[0], &tiers[1]].map(|tier| (tier.get_times.count(), tier.put_times.count()))
    };
    // Four go to both tiers, and four more evict them from memory.
    put_ok(&store, &keys(0..4), BLOCK);
    put_ok(&store, &keys(4..8), BLOCK);
    assert_eq!(counts(&store), [(0, 8), (0, 8)]);
    assert_eq!(found(&store, &keys(4..8), BLOCK), [true; 4]);
    assert_eq!(found(&store, &keys(0..3), BLOCK), [true; 3]);
    assert_eq!(found(&store, &keys(20..21), BLOCK), [false]);
    assert_eq!(counts(&store), [(4, 8), (3, 8)]);
    let promoted = store.promote(&keys(0..1), TierId::new(0), JobOptions::new()).unwrap().wait();
    assert!(promoted.is_ok(), "{promoted:?}");
    // A copy from tier to tier is no put and no get.
    assert_eq!(counts(&store), [(4, 8), (3, 8)]);
    let snapshot = store.snapshot();
    let [host, disk] = [&snapshot.tiers[0], &snapshot.tiers[1]];
    assert_eq!((host.hits, host.read_bytes, host.stored), (4, 4 * 4096, 9));
    assert_eq!((disk.hits, disk.read_bytes, disk.written_bytes), (3, 4 * 4096, 8 * 4096));
    assert_eq!((disk.requests, disk.reads_queued, disk.writes_queued), (12, 0, 0));
    assert_eq!((disk.read_failures, disk.write_failures), (0, 0));
    assert_eq!(snapshot.ended_jobs, snapshot.job_times.count());
    let longest = snapshot.job_times.sum();
    assert!(disk.get_times.sum() > 0 && disk.get_times.sum() <= 4 * longest);
    let mut text = String::new();
    snapshot.write_openmetrics(&mut text).unwrap();
    for line in [
        "terrane_store_get_duration_seconds_count{tier=\"host\"} 4\n",
        "terrane_store_get_duration_seconds_count{tier=\"disk\"} 3\n",
        "terrane_store_put_duration_seconds_count{tier=\"disk\"} 8\n",
        "terrane_store_tier_queued{tier=\"disk\",direction=\"read\"} 0\n",
        "terrane_store_tier_requests_total{tier=\"disk\"} 12\n",
        "terrane_store_tier_read_failures_total{tier=\"disk\"} 0\n",
    ] {
        assert!(text.contains(line), "{line} is not in {text}");
    }
    assert!(text.contains("terrane_transfers_refused"), "{text}");
    assert_at_rest(&store);
}

#[test]
fn a_read_only_tier_serves_and_evicts_nothing() {
    let directory = tempfile::tempdir().unwrap();
    drop({
        let store = open(directory.path(), 4096, 4);
        put_ok(&store, &keys(0..4), BLOCK);
        store
    });
    let tier = super::harness::disk(directory.path(), 4 * 4096).read_only(true);
    let (store, _) = builder(directory.path(), 4096, 4).disk(tier).open().unwrap();
    let outcome = super::harness::put(&store, &keys(9..10), BLOCK);
    let [terrane_store::BlockResult::Failed(error)] = &outcome.results[..] else { panic!() };
    assert!(matches!(**error, StoreError::ReadOnly), "{error}");
    assert_eq!(found(&store, &keys(0..4), BLOCK), [true; 4]);
    assert!(store.snapshot().tiers[0].read_only.is_some());
    assert!(!store.remove(0, &keys(0..1)).unwrap().wait().is_ok());
    assert!(!store.clear().unwrap().wait().is_ok());
    assert_at_rest(&store);
    drop(store);

    // With a tier of memory, puts go there alone, and cannot be durable.
    let tier = super::harness::disk(directory.path(), 4 * 4096).read_only(true);
    let builder = builder(directory.path(), 4096, 4).disk(tier).host(ByteCount::kib(8));
    let (store, _) = builder.open().unwrap();
    put_ok(&store, &keys(9..11), BLOCK);
    put_ok(&store, &keys(11..13), BLOCK);
    assert_eq!(found(&store, &keys(0..4), BLOCK), [true; 4]);
    assert_eq!(found(&store, &keys(11..13), BLOCK), [true; 2]);
    let durable = JobOptions::new().durable(true);
    for _ in 0..2 {
        let outcome = submit_put(&store, &keys(20..21), BLOCK, durable.clone()).wait();
        assert!(!outcome.is_ok(), "{outcome:?}");
    }
    assert!(!store.sync().unwrap().wait().is_ok());
    assert_at_rest(&store);
}

#[test]
fn a_store_that_is_not_persistent_begins_empty() {
    let directory = tempfile::tempdir().unwrap();
    drop({
        let store = open(directory.path(), 4096, 4);
        put_ok(&store, &keys(0..4), BLOCK);
        store
    });
    let tier = super::harness::disk(directory.path(), 4 * 4096).read_only(true);
    let refused = builder(directory.path(), 4096, 4).disk(tier).persistent(false).open();
    assert!(matches!(refused, Err(StoreError::ReadOnlyNotPersistent)));
    assert_eq!(open(directory.path(), 4096, 4).prefix(0, &keys(0..4)), 4);
    let (store, recovery) = builder(directory.path(), 4096, 4).persistent(false).open().unwrap();
    assert_eq!((recovery.found, store.prefix(0, &keys(0..4))), (0, 0));
}

#[test]
fn many_puts_are_followed_by_a_checkpoint() {
    let directory = tempfile::tempdir().unwrap();
    let builder = || builder(directory.path(), 64, 64).write_policy(WritePolicy::Through);
    let (store, _) = builder().open().unwrap();
    // Keys of 60,000 bytes make a journal grow fast.
    let long = |number: usize| [vec![7; 60_000], key(number)].concat();
    let until = soon();
    let mut number = 0;
    while store.snapshot().catalog.unwrap().checkpoint.is_none() {
        put_ok(&store, &[long(number)], 64);
        number += 1;
        assert!(Instant::now() < until, "{number}");
    }
    assert!(number >= 1000, "{number}");
    drop(store);
    let (store, recovery) = builder().open().unwrap();
    assert_eq!(recovery.found, 64);
    assert!(found(&store, &[long(number - 1)], 64) == [true]);
    let mut presence = [Presence::Absent];
    store.presence(0, &[long(number - 1)], &mut presence);
    assert!(presence[0].is_ready());
    let granted = store.capabilities();
    assert!(granted.status(&Capability::IoUring).is_some());
}

#[test]
fn a_block_that_was_evicted_after_a_second_put_is_not_called_removed() {
    let directory = tempfile::tempdir().unwrap();
    let store = open(directory.path(), 4096, 4);
    put_ok(&store, &[key(0)], 4096);
    assert!(store.remove(0, &[key(0)]).unwrap().wait().is_ok());
    assert_eq!(store.why(0, &key(0)), Why::Removed);
    put_ok(&store, &[key(0)], 4096);
    for number in 1..6 {
        put_ok(&store, &[key(number)], 4096);
    }
    assert_eq!(store.why(0, &key(0)), Why::Evicted);
    // A second removal is remembered again.
    put_ok(&store, &[key(0)], 4096);
    assert!(store.remove(0, &[key(0)]).unwrap().wait().is_ok());
    assert_eq!(store.why(0, &key(0)), Why::Removed);
}
