//! Guards, wakers and engines that panic, and guards that close the store.

use std::future::{Future, IntoFuture};
use std::pin::pin;
use std::sync::{Arc, mpsc};
use std::task::{Context, Poll, Wake, Waker};
use std::thread;
use std::time::Duration;

use terrane_core::ByteCount;
use terrane_store::{BlockGroup, Blocks, JobOptions, MemoryTier, Store, WritePolicy};
use terrane_testkit::engine::{SimulatedEngine, SimulatedEngineOptions};
use terrane_transfer::{
    CopyEngine, CopyJob, Declined, Quote, TransferManager, TransferOptions, TransferPlan,
};

use super::harness::{
    assert_at_rest, content, found, key, keys, open, put_ok, soon, spans, submit_put,
};

const BLOCK: usize = 8192;
const SOON: Duration = Duration::from_secs(60);

/// Runs something when it drops.
pub struct OnDrop<F: FnOnce()>(Option<F>);

impl<F: FnOnce()> Drop for OnDrop<F> {
    fn drop(&mut self) {
        self.0.take().unwrap()();
    }
}

pub fn on_drop<F: FnOnce()>(call: F) -> OnDrop<F> {
    OnDrop(Some(call))
}

/// Puts one block with this guard.
fn put_with(store: &Store, number: usize, guard: impl Send + 'static) -> terrane_store::Job {
    let mut blocks = vec![content(&key(number), BLOCK)];
    // SAFETY: the job gets the blocks with its guard.
    let source = unsafe { Blocks::spans(spans(&mut blocks)) };
    // The fields of a tuple drop in their order.
    let guard = (guard, blocks);
    store.put(&keys(number..number + 1), source, JobOptions::new(), guard).unwrap()
}

#[test]
fn a_guard_that_panics_keeps_no_job_from_its_end() {
    let directory = tempfile::tempdir().unwrap();
    let store = open(directory.path(), 8192, 16);
    let job = put_with(&store, 0, on_drop(|| panic!("a guard of a test")));
    assert!(job.wait_until(soon()).unwrap().is_ok());
    // The first poll ends this one, on this thread.
    let job = put_with(&store, 0, on_drop(|| panic!("a guard of a test")));
    assert!(job.wait_until(soon()).unwrap().is_ok());
    assert_eq!(found(&store, &keys(0..1), BLOCK), [true]);
    assert_at_rest(&store);
    assert_eq!(store.close(soon()).left, 0);
}

pub struct Panics;

impl Wake for Panics {
    fn wake(self: Arc<Self>) {
        panic!("a waker of a test");
    }
}

#[test]
fn a_waker_that_panics_keeps_no_job_from_its_end() {
    let directory = tempfile::tempdir().unwrap();
    let store = open(directory.path(), 8192, 16);
    for number in 0..8 {
        let mut job = pin!(
            submit_put(&store, &keys(number..number + 1), BLOCK, JobOptions::new()).into_future()
        );
        let waker = Waker::from(Arc::new(Panics));
        let mut ended = job.as_mut().poll(&mut Context::from_waker(&waker)).is_ready();
        assert_eq!(store.drain(soon()).left, 0);
        if !ended {
            let polled = job.as_mut().poll(&mut Context::from_waker(Waker::noop()));
            ended = matches!(polled, Poll::Ready(outcome) if outcome.is_ok());
        }
        assert!(ended);
    }
    assert_at_rest(&store);
    assert_eq!(store.close(soon()).left, 0);
}

#[test]
fn a_guard_that_closes_the_store_does_not_wait_for_its_own_job() {
    for is_stored in [false, true] {
        let directory = tempfile::tempdir().unwrap();
        let store = open(directory.path(), 8192, 16);
        if is_stored {
            // The put ends in its first poll.
            put_ok(&store, &keys(0..1), BLOCK);
        }
        let (sender, closed) = mpsc::channel();
        let thread = thread::Builder::new().name(String::from("put"));
        let thread = thread.spawn(move || {
            let clone = store.clone();
            let guard = on_drop(move || {
                clone.close(soon());
                sender.send(()).unwrap();
            });
            put_with(&store, 0, guard).wait();
        });
        let thread = thread.unwrap();
        closed.recv_timeout(SOON / 2).unwrap();
        thread.join().unwrap();
    }
}

/// An engine whose submissions panic.
#[derive(Debug)]
pub struct PanicsInSubmit(SimulatedEngine);

impl PanicsInSubmit {
    pub fn new() -> Self {
        Self(SimulatedEngine::new(SimulatedEngineOptions::default()))
    }
}

// SAFETY: it copies nothing, and the job ends when it drops.
#[expect(unsafe_code, reason = "the trait promises what an engine does with memory")]
unsafe impl CopyEngine for PanicsInSubmit {
    fn name(&self) -> &'static str {
        "panics"
    }

    fn quote(&self, plan: &TransferPlan, options: &TransferOptions) -> Result<Quote, Declined> {
        self.0.quote(plan, options)
    }

    fn submit(&self, _job: CopyJob) {
        panic!("a submission of a test");
    }
}

#[test]
fn jobs_get_slots_after_a_write_back_panicked() {
    let manager = TransferManager::new([Arc::new(PanicsInSubmit::new()) as Arc<dyn CopyEngine>]);
    let bytes = |blocks: u64| ByteCount::new(blocks * 8192);
    let builder = Store::builder().group(BlockGroup::new("kv", 8192)).host(bytes(2));
    let builder = builder.memory_tier(MemoryTier::system("slower", bytes(4))).manager(&manager);
    let (store, _) = builder.write_policy(WritePolicy::Back).open().unwrap();
    for number in 0..6 {
        let outcome = put_with(&store, number, ()).wait_until(soon());
        assert!(outcome.is_ok_and(|outcome| outcome.is_ok()), "put {number}");
    }
    assert_at_rest(&store);
    assert_eq!(store.close(soon()).left, 0);
}
