//! Threads that wait: whom they help, and when they wake.

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

/// Ends its job when it is looked at after it has been asked when the end is due, which is now.
#[derive(Default)]
struct OnceAsked {
    asked: AtomicBool,
    job: Mutex<Option<CopyJob>>,
}

impl WaiterProgress for OnceAsked {
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

impl OnceAsked {
    fn invite(job: CopyJob) -> Arc<Self> {
        let attendant = Arc::new(Self::default());
        job.invite_waiters(attendant.clone());
        *attendant.job.lock().unwrap() = Some(job);
        attendant
    }
}

/// Does not know when the end is due, and tells of the first who asks.
#[derive(Default)]
struct Ignorant(AtomicBool);

impl WaiterProgress for Ignorant {
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

/// For the end, until a time, and for a layer.
const WAITS: [fn(Completion<()>); 3] = [
    |completion| drop(completion.wait().result.unwrap()),
    |completion| drop(completion.wait_until(Instant::now() + 2 * LONG).unwrap().result.unwrap()),
    |completion| completion.layers().unwrap().wait(2).unwrap(),
];

/// A thread that waits, which a test that fails leaves behind.
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
fn who_has_helped_for_a_while_wakes_when_the_end_is_due() {
    for wait in WAITS {
        let (completion, job) = kept();
        let waiting = Waiting::of(wait, completion);
        let _attendant = OnceAsked::invite(job);
        waiting.end("no thread woke for the end");
    }
}

#[test]
fn who_sleeps_is_invited_anew_by_another_attendant() {
    for wait in WAITS {
        let (completion, job) = kept();
        let first = Arc::<Ignorant>::default();
        job.invite_waiters(first.clone());
        let waiting = Waiting::of(wait, completion);
        // Then it sleeps until it is woken.
        let begun = Instant::now();
        while !first.0.load(Ordering::SeqCst) {
            assert!(begun.elapsed() < LONG, "the first attendant was not asked");
            thread::yield_now();
        }
        let _second = OnceAsked::invite(job);
        waiting.end("the second attendant was not helped");
    }
}
