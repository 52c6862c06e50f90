//! Gets of few blocks from one tier of memory.

use std::future::{Future, IntoFuture};
use std::pin::pin;
use std::ptr::NonNull;
use std::sync::{Arc, mpsc};
use std::task::{Context, Poll, Waker};
use std::thread;
use std::time::{Duration, Instant};

use terrane_core::ByteCount;
use terrane_store::{
    BlockGroup, BlockResult, Blocks, CompletionQueue, Job, JobOptions, Presence, Spans, Store,
    StoreError, TierId,
};
use terrane_testkit::engine::{Fault, SimulatedEngine, SimulatedEngineOptions};
use terrane_testkit::process::{in_child, in_fork};
use terrane_transfer::{CopyEngine, Endpoint, TransferManager};

use super::harness::{assert_at_rest, content, key, keys, soon};
use super::memory_tiers::{bytes_of, engine_layout_of, fill};
use super::panics::{Panics, PanicsInSubmit, on_drop};

/// A store of one host tier, whose engine holds copies on request.
struct Rig {
    engine: Arc<SimulatedEngine>,
    memory: Endpoint,
    store: Store,
}

/// Releases the copies that the engine holds, so that a failed assertion ends the test.
impl Drop for Rig {
    fn drop(&mut self) {
        self.engine.release_all();
    }
}

impl Rig {
    /// A rig whose blocks have 307,200 bytes: too much for the store's thread.
    fn new() -> Self {
        Self::of(320)
    }

    /// A store that has the blocks 0 to 3, and 6 slots, with blocks of so many tokens. The engine holds
    /// the next copies.
    fn of(tokens: u32) -> Self {
        let engine = Arc::new(SimulatedEngine::new(SimulatedEngineOptions::default()));
        let manager = TransferManager::new([Arc::clone(&engine) as Arc<dyn CopyEngine>]);
        let memory = Endpoint::new(engine_layout_of(16, tokens)).unwrap();
        let slot = memory.layout().geometry().block_bytes().get().next_multiple_of(4096);
        let builder = Store::builder().group(BlockGroup::of_layout("kv", memory.layout()));
        let (store, _) = builder.host(ByteCount::new(6 * slot)).manager(&manager).open().unwrap();
        let rig = Self { engine, memory, store };
        rig.put(0..4);
        assert_at_rest(&rig.store);
        rig.engine.hold();
        rig
    }

    fn put(&self, numbers: std::ops::Range<usize>) {
        let ids: Vec<u32> = (0..).take(numbers.len()).collect();
        ids.iter().zip(numbers.clone()).for_each(|(&id, number)| fill(&self.memory, id, number));
        let source = Blocks::new(&self.memory, &ids);
        let job = self.store.put(&keys(numbers), source, JobOptions::new().deadline(soon()), ());
        assert!(job.unwrap().wait().is_ok());
    }

    /// Gets blocks from 0 on into block 8 and those after it.
    fn get(&self, count: usize, options: JobOptions, guard: impl Send + 'static) -> Job {
        let ids: Vec<u32> = (8..).take(count).collect();
        ids.iter().for_each(|&id| fill(&self.memory, id, 999));
        self.store.get(&keys(0..count), Blocks::new(&self.memory, &ids), options, guard).unwrap()
    }

    fn has(&self, block: u32, number: usize) -> bool {
        let found = bytes_of(&self.memory, block, u32::MAX);
        found == content(&key(number), found.len())
    }

    /// Waits until no job runs, and checks that nothing is left of any.
    fn check_rest(&self) {
        assert_at_rest(&self.store);
        self.engine.release_all();
        self.put(10..16);
        assert_eq!(self.store.snapshot().tiers[0].groups[0].blocks, 6, "a slot is lost");
    }
}

#[test]
fn the_blocks_stay_pinned_and_arrive_in_the_order_of_their_keys() {
    for count in [1, 4] {
        let rig = Rig::new();
        let job = rig.get(count, JobOptions::new(), ());
        assert!(!job.has_ended());
        // Another job takes the slots of all blocks that are not pinned.
        let full = Blocks::new(&rig.memory, &[0, 1, 2, 3, 4, 5]);
        let other = rig.store.put(&keys(20..26), full, JobOptions::new(), ()).unwrap();
        let mut presence = vec![Presence::Absent; count];
        rig.store.presence(0, &keys(0..count), &mut presence);
        assert!(presence.iter().all(|presence| presence.is_ready()), "{presence:?}");
        other.cancel();
        rig.engine.release_all();
        let outcome = job.wait();
        let hits = u64::try_from(count).unwrap();
        let bytes = rig.memory.layout().geometry().block_bytes();
        assert!(outcome.is_ok() && outcome.results.len() == count, "{outcome:?}");
        assert_eq!(outcome.bytes.get(), bytes.get() * hits);
        assert!((8..).zip(0..count).all(|(block, number)| rig.has(block, number)));
        let tier = &rig.store.snapshot().tiers[0];
        assert_eq!((tier.hits, tier.get_times.count()), (hits, hits));
        assert!(!other.wait().is_ok());
        rig.check_rest();
    }
}

#[test]
fn the_guard_drops_before_the_outcome_is_published_to_the_queue() {
    let rig = Rig::new();
    let queue = CompletionQueue::new(1).unwrap();
    let (sender, dropped) = mpsc::channel();
    let seen = queue.clone();
    let guard = on_drop(move || {
        sender.send(seen.len()).unwrap();
        panic!("a guard of a test");
    });
    let job = rig.get(1, JobOptions::new().queue(&queue, 7), guard);
    let to = Blocks::new(&rig.memory, &[9]);
    let refused = rig.store.get(&keys(0..1), to, JobOptions::new().queue(&queue, 8), 5);
    let refused = refused.unwrap_err();
    assert!(matches!(refused.cause, StoreError::Queue(_)) && refused.guard == 5, "{refused}");
    assert!(dropped.try_recv().is_err());
    rig.engine.release_all();
    let outcome = queue.wait(Some(soon())).unwrap();
    assert_eq!((outcome.tag, outcome.is_ok(), outcome.results.len()), (7, true, 1));
    assert_eq!(dropped.recv().unwrap(), 0);
    let outcome = job.wait();
    assert!(outcome.is_ok() && outcome.results.is_empty());
    rig.check_rest();
}

#[test]
fn a_cancellation_and_a_deadline_reach_the_transfer() {
    let rig = Rig::new();
    let cancelled = rig.get(1, JobOptions::new(), ());
    cancelled.cancel();
    // A busy machine may submit a job after its deadline. Such a job copies nothing, and is repeated with more time.
    let mut repeated = 0;
    let (late, deadline) = loop {
        let deadline = Instant::now() + Duration::from_millis(5 << repeated);
        let options = JobOptions::new().deadline(deadline);
        let to = Blocks::new(&rig.memory, &[9]);
        let late = rig.store.get(&keys(1..2), to, options, ()).unwrap();
        while !late.has_ended() && rig.engine.queued() < 2 {
            thread::yield_now();
        }
        if rig.engine.queued() == 2 {
            break (late, deadline);
        }
        let outcome = late.wait();
        assert!(matches!(outcome.results[..], [BlockResult::TimedOut]), "{outcome:?}");
        repeated += 1;
    };
    while Instant::now() <= deadline {
        thread::sleep(Duration::from_millis(1));
    }
    assert!(!cancelled.has_ended() && !late.has_ended());
    rig.engine.release_all();
    let (cancelled, late) = (cancelled.wait(), late.wait());
    assert!(matches!(cancelled.results[..], [BlockResult::Cancelled]), "{cancelled:?}");
    assert!(matches!(late.results[..], [BlockResult::TimedOut]), "{late:?}");
    // A deadline that has passed copies nothing.
    let late = rig.get(1, JobOptions::new().deadline(Instant::now()), ()).wait();
    assert!(matches!(late.results[..], [BlockResult::TimedOut]), "{late:?}");
    assert!(rig.has(8, 999));
    let snapshot = rig.store.snapshot();
    assert_eq!((snapshot.cancelled, snapshot.timed_out), (1, 2 + repeated));
    assert_eq!(snapshot.tiers[0].read_failures, 0);
    rig.check_rest();
}

#[test]
fn a_transfer_that_fails_or_is_refused_fails_the_job() {
    let rig = Rig::new();
    rig.engine.release_all();
    for fault in [Fault::Engine, Fault::DropJob] {
        rig.engine.fail_next(fault);
        let outcome = rig.get(2, JobOptions::new(), ()).wait();
        let failed = [BlockResult::is_ok(&outcome.results[0]), outcome.results[1].is_ok()];
        assert_eq!(failed, [false; 2], "{outcome:?}");
    }
    assert_eq!(rig.store.snapshot().tiers[0].read_failures, 4);
    let (sender, dropped) = mpsc::channel();
    let hold = rig.memory.hold_for_write(&[8]).unwrap();
    let job = rig.store.get(
        &keys(0..1),
        Blocks::new(&rig.memory, &[8]),
        JobOptions::new(),
        on_drop(move || sender.send(()).unwrap()),
    );
    // It ends before the submission returns.
    dropped.try_recv().unwrap();
    let outcome = job.unwrap().wait();
    assert!(matches!(outcome.results[..], [BlockResult::Failed(_)]), "{outcome:?}");
    drop(hold);
    assert!(rig.get(1, JobOptions::new(), ()).wait().is_ok());
    rig.check_rest();
}

#[test]
fn a_submission_that_panics_fails_the_job_alone() {
    let rig = Rig::new();
    let engine = PanicsInSubmit::new();
    let manager = TransferManager::new([Arc::new(engine) as Arc<dyn CopyEngine>]);
    let builder = Store::builder().group(BlockGroup::of_layout("kv", rig.memory.layout()));
    let (store, _) = builder.host(ByteCount::mib(1)).manager(&manager).open().unwrap();
    let length = rig.memory.layout().geometry().block_bytes().to_usize();
    let block = content(b"panic", length);
    let mut spans = Spans::new();
    let first = NonNull::from(block.first().unwrap());
    spans.add(first.cast(), block.len());
    // SAFETY: the bytes outlive the job, which only reads them.
    #[expect(unsafe_code, reason = "a put of host memory without an engine")]
    let source = unsafe { Blocks::spans(spans) };
    let put = store.put(&keys(0..1), source, JobOptions::new(), ()).unwrap().wait();
    assert!(put.is_ok(), "{put:?}");
    let (sender, dropped) = mpsc::channel();
    let guard = on_drop(move || sender.send(()).unwrap());
    let to = Blocks::new(&rig.memory, &[8]);
    let outcome = store.get(&keys(0..1), to, JobOptions::new(), guard).unwrap().wait();
    assert!(!outcome.is_ok(), "{outcome:?}");
    dropped.try_recv().unwrap();
    assert_eq!(store.drain(soon()).left, 0);
}

#[test]
fn a_waker_that_panics_keeps_no_job_from_its_end() {
    let rig = Rig::new();
    let mut job = pin!(rig.get(1, JobOptions::new(), ()).into_future());
    let waker = Waker::from(Arc::new(Panics));
    assert!(job.as_mut().poll(&mut Context::from_waker(&waker)).is_pending());
    rig.engine.release_all();
    assert_eq!(rig.store.drain(soon()).left, 0);
    let polled = job.as_mut().poll(&mut Context::from_waker(Waker::noop()));
    assert!(matches!(polled, Poll::Ready(outcome) if outcome.is_ok()));
    rig.check_rest();
}

#[test]
fn a_drain_and_a_close_wait_for_the_transfer() {
    let rig = Rig::new();
    let job = rig.get(1, JobOptions::new(), ());
    assert_eq!(rig.store.drain(Instant::now()).left, 1);
    // It has passed when the close begins, so the close cancels the job at once.
    let deadline = Instant::now();
    let left = thread::scope(|scope| {
        let close = scope.spawn(|| rig.store.close(deadline));
        // This begins no job, so it shows only whether the close has begun.
        let refusal = || rig.store.promote(&keys(0..1), TierId::new(9), JobOptions::new());
        while !matches!(refusal(), Err(StoreError::Closed)) {
            thread::yield_now();
        }
        // A close that does not wait for the copy ends in this time.
        thread::sleep(Duration::from_millis(200));
        assert!(!close.is_finished() && !job.has_ended());
        rig.engine.release_all();
        close.join().unwrap().left
    });
    assert_eq!(left, 1);
    let outcome = job.wait();
    assert!(matches!(outcome.results[..], [BlockResult::Cancelled]), "{outcome:?}");
}

#[test]
fn a_guard_that_closes_the_store_waits_neither_for_its_own_job_nor_for_another() {
    let rig = Rig::new();
    let (clone, (sender, closed)) = (rig.store.clone(), mpsc::channel());
    let guard = on_drop(move || {
        clone.close(soon());
        sender.send(()).unwrap();
    });
    let job = rig.get(1, JobOptions::new(), guard);
    let other = rig.store.get(&keys(1..2), Blocks::new(&rig.memory, &[9]), JobOptions::new(), ());
    rig.engine.release(1);
    closed.recv_timeout(Duration::from_secs(30)).unwrap();
    assert!(job.wait().is_ok());
    // The thread of the store ends it.
    rig.engine.release_all();
    let outcome = other.unwrap().wait();
    assert!(matches!(outcome.results[..], [BlockResult::Cancelled]), "{outcome:?}");
}

#[test]
fn a_forked_process_loses_the_job_of_its_parent() {
    in_child("store::direct_gets::a_forked_process_loses_the_job_of_its_parent", || {
        let rig = Rig::new();
        let job = rig.get(1, JobOptions::new(), ());
        in_fork(|| {
            job.cancel();
            assert!(job.has_ended());
            let to = Blocks::new(&rig.memory, &[9]);
            let refused = rig.store.get(&keys(1..2), to, JobOptions::new(), ());
            assert!(matches!(refused.unwrap_err().cause, StoreError::Forked(_)));
        });
        rig.engine.release_all();
        assert!(job.wait().is_ok());
        rig.check_rest();
    });
}

/// The number of tokens of a block that the store's own thread copies.
const SHORT: u32 = 8;

#[test]
fn a_short_copy_needs_no_engine() {
    for count in [1, 3] {
        let rig = Rig::of(SHORT);
        let (sender, dropped) = mpsc::channel();
        let guard = on_drop(move || sender.send(()).unwrap());
        let outcome = rig.get(count, JobOptions::new().deadline(soon()), guard).wait();
        let hits = u64::try_from(count).unwrap();
        let bytes = rig.memory.layout().geometry().block_bytes().get() * hits;
        assert!(outcome.is_ok() && outcome.results.len() == count, "{outcome:?}");
        assert_eq!(outcome.bytes.get(), bytes);
        dropped.try_recv().unwrap();
        assert!((8..).zip(0..count).all(|(block, number)| rig.has(block, number)));
        let tier = &rig.store.snapshot().tiers[0];
        assert_eq!((tier.hits, tier.get_times.count()), (hits, hits));
        // The blocks are free for other uses once the outcome is there.
        drop(rig.memory.hold_for_write(&[8]).unwrap());
        rig.check_rest();
    }
}

#[test]
fn the_first_tokens_of_a_block_arrive_and_the_others_stay() {
    let rig = Rig::of(SHORT);
    rig.engine.release_all();
    fill(&rig.memory, 0, 7);
    let source = Blocks::new(&rig.memory, &[0]).tokens(&[5]);
    let put = rig.store.put(&keys(7..8), source, JobOptions::new(), ()).unwrap().wait();
    assert!(put.is_ok(), "{put:?}");
    rig.engine.hold();
    fill(&rig.memory, 8, 999);
    let to = Blocks::new(&rig.memory, &[8]).tokens(&[5]);
    let outcome = rig.store.get(&keys(7..8), to, JobOptions::new(), ()).unwrap().wait();
    assert!(outcome.is_ok(), "{outcome:?}");
    assert_eq!(bytes_of(&rig.memory, 8, 5), bytes_of(&rig.memory, 0, 5));
    fill(&rig.memory, 1, 999);
    let (found, before) = (bytes_of(&rig.memory, 8, u32::MAX), bytes_of(&rig.memory, 1, u32::MAX));
    // Each layer has a piece of K and one of V, and a piece has 160 bytes of each token.
    let pieces = found.chunks(8 * 160).zip(before.chunks(8 * 160));
    assert_eq!(pieces.len(), 6);
    pieces.for_each(|(found, before)| assert_eq!(found[5 * 160..], before[5 * 160..]));
    rig.check_rest();
}

#[test]
fn a_destination_in_use_refuses_a_short_copy_as_it_refuses_a_transfer() {
    let rig = Rig::of(SHORT);
    let hold = rig.memory.hold_for_read(&[8]).unwrap();
    let to = Blocks::new(&rig.memory, &[8]);
    let outcome = rig.store.get(&keys(0..1), to, JobOptions::new(), ()).unwrap().wait();
    let [BlockResult::Failed(error)] = &outcome.results[..] else { panic!("{outcome:?}") };
    assert!(error.to_string().contains("block 8"), "{error}");
    drop(hold);
    assert!(rig.get(1, JobOptions::new(), ()).wait().is_ok());
    rig.check_rest();
}

#[test]
fn an_engine_copies_what_would_wait_behind_other_work_of_the_store() {
    let rig = Rig::of(SHORT);
    let (enter, entered) = mpsc::channel();
    let (release, released) = mpsc::channel::<()>();
    let guard = on_drop(move || {
        enter.send(()).unwrap();
        let _ = released.recv();
    });
    let get = |key: usize, block| {
        let to = Blocks::new(&rig.memory, &[block]);
        rig.store.get(&keys(key..key + 1), to, JobOptions::new(), ()).unwrap()
    };
    let running = rig.get(1, JobOptions::new(), guard);
    entered.recv_timeout(Duration::from_secs(30)).unwrap();
    let (behind, by_engine) = (get(1, 9), get(2, 10));
    drop(release);
    assert!(running.wait().is_ok() && behind.wait().is_ok());
    assert!(!by_engine.has_ended());
    rig.engine.release_all();
    assert!(by_engine.wait().is_ok());
    assert!(rig.has(8, 0) && rig.has(9, 1) && rig.has(10, 2));
    rig.check_rest();
}
