//! Waiting threads: what they poll, and when they wake.

use std::ops::Range;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, channel};
use std::sync::{Arc, Mutex};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use terrane_transfer::{Completion, CopyJob, Transfer, TransferManager, WaiterProgress};

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
