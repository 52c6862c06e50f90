//! Waiting threads: what they poll, and when they wake.

use std::fmt::{self, Debug, Formatter};
use std::ops::Range;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, channel};
use std::sync::{Arc, Mutex};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use terrane_core::ByteCount;
use terrane_testkit::memory::HeapAllocator;
use terrane_transfer::engines::{RelayEngine, RelayOptions};
use terrane_transfer::{
    Completion, CopyEngine, CopyJob, Declined, OnlyPath, Quote, Transfer, TransferManager,
    TransferOptions, TransferPlan, WaiterProgress,
};

use crate::layers::Keeping;
use crate::support::*;

/// A limit for tests that fail.
const LONG: Duration = Duration::from_secs(60);

/// Ends its job at the first poll after a query of the expected end, which is now.
#[derive(Default)]
struct EndsAfterQuery {
    asked: AtomicBool,
    job: Mutex<Option<CopyJob>>,
}

impl WaiterProgress for EndsAfterQuery {
    fn poll(&self) {
        if self.asked.load(Ordering::SeqCst)
            && let Some(job) = self.job.lock().unwrap().take()
        {
            job.finish(Ok(()));
        }
    }

    fn expected_end(&self) -> Option<Range<Instant>> {
        self.asked.store(true, Ordering::SeqCst);
        Some(Instant::now()..Instant::now() + LONG)
    }
}

impl EndsAfterQuery {
    fn invite(job: CopyJob) -> Arc<Self> {
        let attendant = Arc::new(Self::default());
        job.invite_waiters(attendant.clone());
        *attendant.job.lock().unwrap() = Some(job);
        attendant
    }
}

/// Does not know the expected end, and records the first query.
#[derive(Default)]
struct UnknownEnd(AtomicBool);

impl WaiterProgress for UnknownEnd {
    fn poll(&self) {}

    fn expected_end(&self) -> Option<Range<Instant>> {
        self.0.store(true, Ordering::SeqCst);
        None
    }
}

/// A layer-by-layer transfer that only the test ends.
fn kept() -> (Completion<()>, CopyJob) {
    let engine = Arc::new(Keeping::default());
    let manager = TransferManager::new([engine.clone() as _]);
    let [from, to] = [CONTIGUOUS, OUTER_FIRST].map(|kind| endpoint(config(8), kind));
    let transfer = Transfer::new(&from, &to).blocks(&[0], &[1]).layer_by_layer();
    (manager.submit(transfer, ()).unwrap(), engine.take())
}

/// Waits for the end, until a deadline, and for a layer.
const WAITS: [fn(Completion<()>); 3] = [
    |completion| drop(completion.wait().result.unwrap()),
    |completion| drop(completion.wait_until(Instant::now() + 2 * LONG).unwrap().result.unwrap()),
    |completion| completion.layers().unwrap().wait(2).unwrap(),
];

/// A thread that waits. A failing test does not join it.
struct Waiting {
    thread: JoinHandle<()>,
    ended: Receiver<()>,
}

impl Waiting {
    fn of(wait: fn(Completion<()>), completion: Completion<()>) -> Self {
        let (end, ended) = channel();
        let run = move || {
            wait(completion);
            let _ = end.send(());
        };
        let thread = thread::Builder::new().name("waiting".to_owned()).spawn(run).unwrap();
        Self { thread, ended }
    }

    #[track_caller]
    fn end(self, otherwise: &str) {
        self.ended.recv_timeout(LONG).expect(otherwise);
        self.thread.join().unwrap();
    }
}

#[test]
fn a_thread_that_has_polled_wakes_at_the_expected_end() {
    for wait in WAITS {
        let (completion, job) = kept();
        let waiting = Waiting::of(wait, completion);
        let _attendant = EndsAfterQuery::invite(job);
        waiting.end("no thread woke for the end");
    }
}

#[test]
fn a_sleeping_thread_accepts_another_invitation() {
    for wait in WAITS {
        let (completion, job) = kept();
        let first = Arc::<UnknownEnd>::default();
        job.invite_waiters(first.clone());
        let waiting = Waiting::of(wait, completion);
        // Then the thread sleeps until it is woken.
        let begun = Instant::now();
        while !first.0.load(Ordering::SeqCst) {
            assert!(begun.elapsed() < LONG, "the first invitation was not used");
            thread::yield_now();
        }
        let _second = EndsAfterQuery::invite(job);
        waiting.end("the second invitation was not used");
    }
}

/// A part that only a thread that waits for the transfer ends.
#[derive(Default)]
struct EndsByWaiter(Mutex<Option<CopyJob>>);

impl WaiterProgress for EndsByWaiter {
    fn poll(&self) {}

    fn poll_blocking(&self) -> bool {
        let job = self.0.lock().unwrap().take();
        job.map(|job| job.finish(Ok(()))).is_some()
    }
}

/// Has no thread.
#[derive(Default)]
struct OnlyWaiters(Mutex<Vec<Arc<EndsByWaiter>>>);

impl Debug for OnlyWaiters {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        f.write_str("OnlyWaiters")
    }
}

// SAFETY: it accesses no byte of any plan.
unsafe impl CopyEngine for OnlyWaiters {
    fn name(&self) -> &'static str {
        "only waiters"
    }

    fn quote(&self, _: &TransferPlan, _: &TransferOptions) -> Result<Quote, Declined> {
        Ok(Quote::constant(Duration::ZERO, &OnlyPath { path: "none", reason: "of a test" }))
    }

    fn submit(&self, job: CopyJob) {
        let part = Arc::<EndsByWaiter>::default();
        job.invite_waiters(part.clone());
        *part.0.lock().unwrap() = Some(job);
        self.0.lock().unwrap().push(part);
    }
}

/// A relay by this engine, and a transfer of eight blocks through it.
fn relayed(engine: &Arc<impl CopyEngine + 'static>) -> (TransferManager, Completion<()>) {
    let options = RelayOptions { slots: 4, slot_bytes: ByteCount::mib(1) };
    let pinned = HeapAllocator::pinned();
    let relay = RelayEngine::new(engine.clone(), engine.clone(), pinned, &options).unwrap();
    let manager = TransferManager::new([Arc::new(relay) as _]);
    let [from, to] = [CONTIGUOUS, OUTER_FIRST].map(|kind| endpoint(config(8), kind));
    let all: Vec<u32> = (0..8).collect();
    let completion = manager.submit(Transfer::new(&from, &to).blocks(&all, &all), ()).unwrap();
    (manager, completion)
}

#[test]
fn a_thread_that_waits_for_a_relay_helps_the_engines_of_its_parts() {
    let (_manager, completion) = relayed(&Arc::new(OnlyWaiters::default()));
    Waiting::of(WAITS[0], completion).end("the thread did not help");
}

/// An engine may invite threads long after it got the part.
#[test]
fn a_thread_that_waits_for_a_relay_sleeps_until_a_part_invites_it() {
    let engine = Arc::new(Keeping::default());
    let (_manager, completion) = relayed(&engine);
    let waiting = Waiting::of(WAITS[0], completion);
    // Both hops of one chunk: each part is kept until its turn.
    let begun = Instant::now();
    while !waiting.thread.is_finished() {
        assert!(begun.elapsed() < LONG, "the invitation of a part was not passed on");
        // The thread has spun, and sleeps.
        thread::sleep(Duration::from_millis(5));
        for job in engine.take_all() {
            let part = Arc::<EndsByWaiter>::default();
            *part.0.lock().unwrap() = Some(job);
            let late = part.0.lock().unwrap();
            late.as_ref().unwrap().invite_waiters(part.clone());
            drop(late);
            while part.0.lock().unwrap().is_some() && begun.elapsed() < LONG {
                thread::yield_now();
            }
        }
    }
    waiting.end("the relay did not end");
}
