//! Waiting, polling, awaiting, cancelling.

use std::future::{Future, IntoFuture};
use std::pin::{Pin, pin};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::task::{Context, Poll, Wake, Waker};
use std::thread::{self, Thread};
use std::time::{Duration, Instant};

use terrane_core::ByteCount;
use terrane_testkit::engine::Fault;
use terrane_transfer::{
    Completion, CompletionFuture, EndSink, Outcome, Report, TicketEnd, TransferError,
};

use crate::support::*;

/// A minimal executor: it parks the thread until it is woken.
fn block_on<F: Future>(future: F) -> F::Output {
    struct Unpark(Thread);
    impl Wake for Unpark {
        fn wake(self: Arc<Self>) {
            self.0.unpark();
        }
    }
    let waker = Waker::from(Arc::new(Unpark(thread::current())));
    let mut future = pin!(future);
    loop {
        match future.as_mut().poll(&mut Context::from_waker(&waker)) {
            Poll::Ready(output) => return output,
            Poll::Pending => thread::park(),
        }
    }
}

#[derive(Default)]
pub struct CountsWakes(AtomicUsize);

impl Wake for CountsWakes {
    fn wake(self: Arc<Self>) {
        self.0.fetch_add(1, Ordering::SeqCst);
    }
}

impl CountsWakes {
    pub fn wakes(&self) -> usize {
        self.0.load(Ordering::SeqCst)
    }
}

fn poll<G>(future: &mut CompletionFuture<G>, waker: &Arc<CountsWakes>) -> Poll<Outcome<G>> {
    Pin::new(future).poll(&mut Context::from_waker(&Waker::from(Arc::clone(waker))))
}

fn held() -> (Rig, Completion<&'static str>) {
    let rig = Rig::new(8);
    rig.engine.hold();
    let completion = rig.manager.submit(rig.transfer(&[0, 1], &[0, 1]), "guard").unwrap();
    (rig, completion)
}

#[test]
fn a_wait_blocks_until_the_end_and_returns_the_guard() {
    let (rig, completion) = held();
    thread::scope(|scope| {
        let waiting = scope.spawn(|| completion.wait());
        thread::sleep(Duration::from_millis(2));
        assert!(!waiting.is_finished());
        rig.engine.release_all();
        let outcome = waiting.join().unwrap();
        assert_eq!(outcome.guard, "guard");
        assert!(outcome.result.is_ok());
    });
}

#[test]
fn a_wait_that_reaches_its_deadline_returns_the_completion() {
    let (rig, completion) = held();
    let ticket = completion.ticket();
    let begun = Instant::now();
    let completion = completion.wait_until(begun + Duration::from_millis(10)).unwrap_err();
    assert!(begun.elapsed() >= Duration::from_millis(10));
    // A deadline in the past only checks for the end.
    let completion = completion.wait_until(begun).unwrap_err();
    assert!(!ticket.has_ended(), "the transfer continues");
    rig.engine.release_all();
    let outcome = completion.wait_until(Instant::now() + Duration::from_secs(60)).unwrap();
    assert_eq!(outcome.guard, "guard");
    assert!(outcome.result.is_ok());
}

#[test]
fn an_ended_transfer_is_returned_at_once_whatever_the_deadline() {
    let (rig, completion) = held();
    rig.engine.release_all();
    while !completion.has_ended() {
        thread::yield_now();
    }
    let outcome = completion.wait_until(Instant::now()).unwrap();
    assert!(outcome.result.is_ok());
}

#[test]
fn progress_grows_to_all_the_bytes() {
    let (rig, completion) = held();
    assert!(completion.copied().is_zero());
    rig.engine.release_all();
    while !completion.has_ended() {
        thread::yield_now();
    }
    assert_eq!(completion.copied().get(), 2 * 8 * PIECE);
}

#[test]
fn a_completion_is_awaited_on_any_runtime() {
    let (rig, completion) = held();
    let ended = async {
        let outcome = completion.await;
        (outcome.guard, outcome.result.is_ok())
    };
    thread::scope(|scope| {
        scope.spawn(|| {
            thread::sleep(Duration::from_millis(2));
            rig.engine.release_all();
        });
        assert_eq!(block_on(ended), ("guard", true));
    });
}

#[test]
fn many_completions_are_awaited_by_one_task() {
    let rig = Rig::new(64);
    let all: Vec<_> = (0..64)
        .map(|block| rig.manager.submit(rig.transfer(&[block], &[block]), block).unwrap())
        .collect();
    let guards = block_on(async {
        let mut guards = Vec::new();
        for completion in all {
            guards.push(completion.await.guard);
        }
        guards
    });
    assert_eq!(guards, (0..64).collect::<Vec<_>>());
}

#[test]
fn the_last_waker_is_woken_once_and_no_other() {
    let (rig, completion) = held();
    let mut future = completion.into_future();
    let (first, last) = (Arc::<CountsWakes>::default(), Arc::<CountsWakes>::default());
    assert!(poll(&mut future, &first).is_pending());
    assert!(poll(&mut future, &first).is_pending());
    assert!(poll(&mut future, &last).is_pending());
    rig.engine.release_all();
    rig.engine.wait_until_idle();
    assert_eq!((first.wakes(), last.wakes()), (0, 1));
    assert!(matches!(poll(&mut future, &last), Poll::Ready(Outcome { guard: "guard", .. })));
    // The outcome has been returned, so the future stays pending.
    assert!(poll(&mut future, &last).is_pending());
    assert_eq!(last.wakes(), 1);
}

#[test]
fn dropping_a_future_does_not_cancel_its_transfer() {
    let (rig, completion) = held();
    let ticket = completion.ticket();
    let wakes = Arc::<CountsWakes>::default();
    let mut future = completion.into_future();
    assert!(poll(&mut future, &wakes).is_pending());
    drop(future);
    assert!(rig.refused(rig.transfer(&[2], &[0])).is_conflict(), "the blocks are still in use");
    rig.engine.release_all();
    rig.engine.wait_until_idle();
    assert!(ticket.has_ended());
    assert!(Arc::strong_count(&wakes) == 1, "the waker is gone with the transfer");
    rig.assert_nothing_claimed();
}

#[test]
fn a_failure_is_awaited_like_a_success() {
    let (rig, completion) = held();
    rig.engine.fail_next(Fault::DropJob);
    rig.engine.release_all();
    let outcome = block_on(completion.into_future());
    assert_eq!(outcome.guard, "guard");
    assert!(matches!(outcome.result, Err(TransferError::EngineStopped)));
}

#[test]
fn completions_and_their_futures_can_cross_threads() {
    fn crosses<T: Send + 'static>(_: &T) {}
    let (rig, completion) = held();
    crosses(&completion);
    let future = completion.into_future();
    crosses(&future);
    rig.engine.release_all();
    assert!(block_on(future).result.is_ok());
}

/// Counts the ends of transfers, and keeps their results.
#[derive(Default)]
struct Ends(Mutex<Vec<Result<ByteCount, TransferError>>>);

impl EndSink for Ends {
    fn ended(&self, result: Result<Report, TransferError>) {
        self.0.lock().unwrap().push(result.map(|report| report.explanation.bytes));
    }
}

impl Ends {
    fn take(&self) -> Vec<Result<ByteCount, TransferError>> {
        std::mem::take(&mut self.0.lock().unwrap())
    }
}

#[test]
fn a_sink_gets_each_end_once_and_is_kept_until_then() {
    let rig = Rig::new(8);
    rig.engine.hold();
    let ends = Arc::new(Ends::default());
    let submit = |transfer| rig.manager.submit_to(transfer, Arc::clone(&ends));
    let copied = submit(rig.transfer(&[0], &[0]).layer_by_layer()).unwrap();
    let waits = submit(rig.transfer(&[1], &[1]).after(&copied)).unwrap();
    let failed = submit(rig.transfer(&[2], &[2])).unwrap();
    // The sink of a refused transfer gets no end.
    let refused = submit(rig.transfer(&[3], &[0])).unwrap_err();
    assert!(matches!(refused, TransferError::Conflict { .. }), "{refused}");
    assert_eq!(Arc::strong_count(&ends), 4);
    waits.cancel();
    let [Err(TransferError::Cancelled { started: false, .. })] = ends.take()[..] else { panic!() };
    assert_eq!(Arc::strong_count(&ends), 3);
    rig.engine.release(1);
    assert_eq!(copied.wait(), TicketEnd::Succeeded);
    rig.engine.fail_next(Fault::DropJob);
    rig.engine.release_all();
    assert_eq!(failed.wait(), TicketEnd::Failed);
    rig.engine.wait_until_idle();
    let bytes = rig.source.layout().geometry().block_bytes();
    let [Ok(done), Err(TransferError::EngineStopped)] = ends.take()[..] else { panic!() };
    assert_eq!(done, bytes);
    assert_eq!(Arc::strong_count(&ends), 1);
}
