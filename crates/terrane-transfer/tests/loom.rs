//! Every interleaving of submitters, engines and waiters, with a bounded number of preemptions.
//!
//! Run with `RUSTFLAGS="--cfg loom" cargo test --release -p terrane-transfer --test loom`. The
//! engines of these models copy no bytes. They write a cell that loom tracks, so a missing
//! happens-before is detected as a data race. A lost wake-up is detected as a deadlock.
#![cfg(loom)]
#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    missing_docs,
    reason = "tests say what they expect by unwrapping it"
)]

#[path = "loom/cancels.rs"]
mod cancels;
#[path = "loom/helping.rs"]
mod helping;
#[path = "loom/layers.rs"]
mod layers;
#[path = "loom/orders.rs"]
mod orders;

use std::fmt;
use std::future::{Future, IntoFuture};
use std::pin::pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::task::{Context, Poll, Wake, Waker};

use loom::cell::UnsafeCell;
use loom::sync::{Condvar, Mutex};
use loom::thread;
use terrane_layout::{ElementFormat, LayoutBuilder, LayoutConfig};
use terrane_testkit::memory::HeapAllocator;
use terrane_transfer::{
    Completion, CopyEngine, CopyFailure, CopyJob, Declined, Endpoint, LayerError, OnlyPath,
    Outcome, Quote, Transfer, TransferError, TransferManager, TransferOptions, TransferPlan,
    WaiterProgress,
};

/// Almost all bugs of this kind appear with two preemptions (Musuvathi and Qadeer, PLDI 2007).
const PREEMPTIONS: usize = 2;

fn model(run: impl Fn() + Sync + Send + 'static) {
    let mut builder = loom::model::Builder::new();
    builder.preemption_bound.get_or_insert(PREEMPTIONS);
    builder.check(run);
}

/// The bytes that a copy writes, as a cell that loom tracks.
#[derive(Clone)]
struct Bytes(Arc<UnsafeCell<u32>>);

// SAFETY: loom detects unsynchronised access.
unsafe impl Send for Bytes {}
// SAFETY: as above.
unsafe impl Sync for Bytes {}

impl Bytes {
    fn new() -> Self {
        Self(Arc::new(UnsafeCell::new(0)))
    }

    fn write(&self) {
        // SAFETY: loom fails the model if another thread could access the cell at this point.
        self.0.with_mut(|value| unsafe { *value += 1 });
    }

    fn read(&self) -> u32 {
        // SAFETY: loom fails the model if another thread could write the cell at this point.
        self.0.with(|value| unsafe { *value })
    }
}

/// Ends a job.
type End = fn(CopyJob);

fn succeed(job: CopyJob) {
    job.finish(Ok(()));
}

fn fail(job: CopyJob) {
    job.finish(Err(CopyFailure::Engine { source: "told to fail".into() }));
}

/// Executes each job on a new thread, or keeps the jobs until the model takes them.
struct Engine {
    bytes: Bytes,
    end: Option<End>,
    kept: Mutex<Vec<CopyJob>>,
}

impl Engine {
    fn ending(bytes: &Bytes, end: End) -> Arc<Self> {
        Arc::new(Self { bytes: bytes.clone(), end: Some(end), kept: Mutex::default() })
    }

    fn keeping() -> Arc<Self> {
        Arc::new(Self { bytes: Bytes::new(), end: None, kept: Mutex::default() })
    }

    fn take(&self) -> Vec<CopyJob> {
        std::mem::take(&mut *self.kept.lock().unwrap())
    }
}

impl fmt::Debug for Engine {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Engine")
    }
}

// SAFETY: it accesses no byte of any plan.
unsafe impl CopyEngine for Engine {
    fn name(&self) -> &'static str {
        "model"
    }

    fn quote(&self, _: &TransferPlan, _: &TransferOptions) -> Result<Quote, Declined> {
        Ok(Quote::constant(Default::default(), &OnlyPath { path: "none", reason: "of a model" }))
    }

    fn submit(&self, job: CopyJob) {
        let Some(end) = self.end else {
            self.kept.lock().unwrap().push(job);
            return;
        };
        let bytes = self.bytes.clone();
        thread::spawn(move || {
            job.start();
            bytes.write();
            drop(bytes);
            end(job);
        });
    }
}

fn endpoint() -> Endpoint {
    endpoint_of(1)
}

fn endpoint_of(layers: u32) -> Endpoint {
    let config = LayoutConfig::builder()
        .num_blocks(2)
        .num_layers(layers)
        .outer_dim(1)
        .page_size(1)
        .inner_dim(1)
        .element(ElementFormat::Width(1))
        .build()
        .unwrap();
    let allocator = HeapAllocator::system();
    let builder = LayoutBuilder::new(config).fully_contiguous().allocate(&allocator);
    Endpoint::new(builder.unregistered().build().unwrap()).unwrap()
}

fn transfer(from: &Endpoint, to: &Endpoint, block: u32) -> Transfer {
    Transfer::new(from, to).blocks(&[block], &[block])
}

fn assert_free(end: &Endpoint) {
    drop(end.hold_for_write(&[0, 1]).unwrap());
}

#[test]
fn a_thread_with_the_outcome_sees_all_effects() {
    model(|| {
        let bytes = Bytes::new();
        let manager = TransferManager::new([Engine::ending(&bytes, succeed) as _]);
        let (from, to) = (endpoint(), endpoint());
        let completion = manager.submit(transfer(&from, &to, 0), "guard").unwrap();
        let ticket = completion.ticket();
        let Outcome { guard, result } = completion.wait();
        assert_eq!(guard, "guard");
        assert!(result.is_ok());
        assert!(ticket.has_ended());
        assert_eq!(bytes.read(), 1);
        assert_free(&from);
        assert_free(&to);
    });
}

/// Waits on loom's primitives for a waker to be called.
#[derive(Default)]
struct Flag {
    woken: Mutex<bool>,
    changed: Condvar,
}

impl Wake for Flag {
    fn wake(self: Arc<Self>) {
        *self.woken.lock().unwrap() = true;
        self.changed.notify_one();
    }
}

impl Flag {
    fn wait(&self) {
        let mut woken = self.woken.lock().unwrap();
        while !*woken {
            woken = self.changed.wait(woken).unwrap();
        }
        *woken = false;
    }
}

#[test]
fn the_last_waker_is_woken_or_the_outcome_is_available() {
    model(|| {
        let bytes = Bytes::new();
        let manager = TransferManager::new([Engine::ending(&bytes, succeed) as _]);
        let (from, to) = (endpoint(), endpoint());
        let completion = manager.submit(transfer(&from, &to, 0), ()).unwrap();
        let mut future = pin!(completion.into_future());
        // Another task polled first, and passed the future on.
        let mut outcome = future.as_mut().poll(&mut Context::from_waker(Waker::noop()));
        let flag = Arc::<Flag>::default();
        let waker = Waker::from(Arc::clone(&flag));
        while outcome.is_pending() {
            outcome = future.as_mut().poll(&mut Context::from_waker(&waker));
            if outcome.is_pending() {
                flag.wait();
            }
        }
        let Poll::Ready(outcome) = outcome else { unreachable!("the loop ends with an outcome") };
        assert!(outcome.result.is_ok());
        assert_eq!(bytes.read(), 1);
    });
}

#[test]
fn exactly_one_of_two_conflicting_submissions_is_accepted() {
    model(|| {
        let engine = Engine::keeping();
        let manager = TransferManager::new([engine.clone() as _]);
        let (from, to) = (endpoint(), endpoint());
        let other = {
            let (manager, from, to) = (manager.clone(), from.clone(), to.clone());
            thread::spawn(move || manager.submit(transfer(&from, &to, 0), ()).ok())
        };
        let mine = manager.submit(transfer(&from, &to, 0), ()).ok();
        let theirs = other.join().unwrap();
        assert!(mine.is_some() != theirs.is_some(), "both won, or none");
        engine.take().into_iter().for_each(succeed);
        let winner: Completion<()> = mine.or(theirs).unwrap();
        assert!(winner.wait().result.is_ok());
        assert_free(&to);
    });
}

#[test]
fn submissions_in_opposite_directions_are_both_accepted() {
    model(|| {
        let engine = Engine::keeping();
        let manager = TransferManager::new([engine.clone() as _]);
        let (here, there) = (endpoint(), endpoint());
        let other = {
            let (manager, here, there) = (manager.clone(), here.clone(), there.clone());
            thread::spawn(move || manager.submit(transfer(&there, &here, 1), ()).is_ok())
        };
        assert!(manager.submit(transfer(&here, &there, 0), ()).is_ok());
        assert!(other.join().unwrap());
        engine.take().into_iter().for_each(succeed);
        assert_free(&here);
        assert_free(&there);
    });
}

struct CountsDrops(Arc<AtomicUsize>);

impl Drop for CountsDrops {
    fn drop(&mut self) {
        self.0.fetch_add(1, Ordering::SeqCst);
    }
}

#[test]
fn the_guard_of_a_dropped_completion_drops_once_and_after_the_copy() {
    model(|| {
        let drops = Arc::<AtomicUsize>::default();
        let engine = Engine::keeping();
        let manager = TransferManager::new([engine.clone() as _]);
        let (from, to) = (endpoint(), endpoint());
        let guard = CountsDrops(Arc::clone(&drops));
        let completion = manager.submit(transfer(&from, &to, 0), guard).unwrap();
        let ending = {
            let drops = Arc::clone(&drops);
            thread::spawn(move || {
                let jobs = engine.take();
                assert_eq!(drops.load(Ordering::SeqCst), 0, "the copy has not ended");
                jobs.into_iter().for_each(succeed);
            })
        };
        drop(completion);
        ending.join().unwrap();
        assert_eq!(drops.load(Ordering::SeqCst), 1);
    });
}
