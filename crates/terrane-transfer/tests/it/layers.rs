//! Transfers that report each layer.

use std::future::{Future, IntoFuture};
use std::num::NonZeroUsize;
use std::pin::pin;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::task::{Context, Poll, RawWaker, RawWakerVTable, Wake, Waker};
use std::thread;
use std::time::{Duration, Instant};

use terrane_core::ByteCount;
use terrane_testkit::conformance::copy_engine::end_of;
use terrane_testkit::device::has_happened;
use terrane_testkit::engine::{Fault, SimulatedEngine};
use terrane_testkit::memory::HeapAllocator;
use terrane_transfer::engines::{HostEngine, HostEngineOptions};
use terrane_transfer::{
    Completion, CopyEngine, CopyFailure, CopyJob, DEFAULT_SPIN, Declined, DeviceOrder, Endpoint,
    EventHandle, LayerError, LayerState, Layers, OnlyPath, Planner, Quote, Transfer,
    TransferManager, TransferOptions, TransferPlan, WaiterProgress,
};

use crate::completion::CountsWakes;
use crate::support::*;

/// Keeps jobs until the test ends them.
#[derive(Debug, Default)]
pub struct Keeping(Mutex<Vec<CopyJob>>);

// SAFETY: it accesses no byte of any plan.
unsafe impl CopyEngine for Keeping {
    fn name(&self) -> &'static str {
        "keeping"
    }

    fn quote(&self, _: &TransferPlan, _: &TransferOptions) -> Result<Quote, Declined> {
        Ok(Quote::constant(Duration::ZERO, &OnlyPath { path: "none", reason: "of a test" }))
    }

    fn submit(&self, job: CopyJob) {
        self.0.lock().unwrap().push(job);
    }
}

impl Keeping {
    pub fn take(&self) -> CopyJob {
        self.0.lock().unwrap().pop().unwrap()
    }

    pub fn take_all(&self) -> Vec<CopyJob> {
        std::mem::take(&mut self.0.lock().unwrap())
    }
}

fn ends() -> [Endpoint; 2] {
    [CONTIGUOUS, OUTER_FIRST].map(|kind| endpoint(config(8), kind))
}

fn event(raw: u64) -> EventHandle {
    owned_event(raw, &Arc::new(()))
}

fn owned_event(raw: u64, owner: &Arc<()>) -> EventHandle {
    // SAFETY: no driver gets the handle.
    unsafe { EventHandle::from_raw(Default::default(), raw, Arc::clone(owner) as _) }
}

#[test]
fn layers_are_reported_only_on_request() {
    let rig = Rig::new(8);
    let completion = rig.manager.submit(rig.transfer(&[0], &[0]), ()).unwrap();
    assert!(completion.layers().is_none());
    end_of(completion).result.unwrap();
}

#[test]
fn each_layer_has_its_own_state_and_the_rest_ends_with_the_job() {
    let engine = Arc::new(Keeping::default());
    let manager = TransferManager::new([engine.clone() as _]);
    let [from, to] = ends();
    let transfer = Transfer::new(&from, &to).blocks(&[0], &[1]).layers(1..4).layer_by_layer();
    let completion = manager.submit(transfer, ()).unwrap();
    let layers = completion.layers().unwrap();
    let job = engine.take();
    let signals = job.layers().unwrap();
    let outside = LayerError::NotTransferred { layer: 0, first: 1, last: 3 };
    assert_eq!(layers.state(0), Err(outside));
    assert_eq!(layers.wait(0), Err(outside));
    assert!((1..4).all(|layer| layers.state(layer) == Ok(LayerState::Waiting)));

    // Ranges are clipped to those of the transfer.
    let owner = Arc::new(());
    signals.submitted(0..3, owned_event(7, &owner));
    assert_eq!(layers.event(1), Ok(Some(event(7))));
    assert_eq!(layers.event(2), Ok(Some(event(7))));
    assert_eq!(layers.state(3), Ok(LayerState::Waiting));
    signals.done(2..3);
    assert_eq!(layers.event(2), Ok(None));
    // A layer that is done stays done.
    signals.submitted(2..3, owned_event(8, &owner));
    assert!(layers.is_done(2) && !layers.is_done(1));
    signals.done(9..12);
    signals.done(4..4);
    assert_eq!(layers.state(3), Ok(LayerState::Waiting));

    job.finish(Ok(()));
    assert!((1..4).all(|layer| layers.is_done(layer)));
    end_of(completion).result.unwrap();
    // A stream may still wait for the event.
    assert_eq!(Arc::strong_count(&owner), 3);
    drop(layers);
    assert_eq!(Arc::strong_count(&owner), 1);
}

#[test]
fn a_wait_for_layers_or_their_events_ends_at_its_deadline() {
    let engine = Arc::new(Keeping::default());
    let manager = TransferManager::new([engine.clone() as _]);
    let [from, to] = ends();
    let transfer = Transfer::new(&from, &to).blocks(&[0], &[1]).layer_by_layer();
    let completion = manager.submit(transfer, ()).unwrap();
    let (layers, job) = (completion.layers().unwrap(), engine.take());
    let soon = || Instant::now() + Duration::from_millis(20);
    let begun = Instant::now();
    assert_eq!(layers.wait_until(0, soon()), Ok(false));
    assert_eq!(layers.events_until(.., soon()), Ok(None));
    assert!(begun.elapsed() >= Duration::from_millis(40));
    let signals = job.layers().unwrap();
    signals.submitted(0..2, event(7));
    signals.done(0..1);
    // A deadline that has passed changes nothing for layers that are there.
    let passed = Instant::now();
    assert_eq!(
        (layers.wait_until(0, passed), layers.wait_until(0..2, passed)),
        (Ok(true), Ok(false))
    );
    assert_eq!(layers.events_until(0..2, passed), Ok(Some(vec![event(7)])));
    assert_eq!(layers.events_until(0..3, passed), Ok(None));
    thread::scope(|scope| {
        let waits = scope.spawn(|| layers.wait_until(.., Instant::now() + Duration::from_secs(60)));
        thread::sleep(Duration::from_millis(5));
        job.finish(Err(CopyFailure::Engine { source: "a fault of a test".into() }));
        assert_eq!(waits.join().unwrap(), Err(LayerError::Failed { layer: 1 }));
    });
    assert!(end_of(completion).result.is_err());
}

#[test]
fn unfinished_layers_of_a_dropped_job_fail() {
    let engine = Arc::new(Keeping::default());
    let manager = TransferManager::new([engine.clone() as _]);
    let [from, to] = ends();
    let transfer = Transfer::new(&from, &to).blocks(&[0], &[1]).layer_by_layer();
    let completion = manager.submit(transfer, ()).unwrap();
    let layers = completion.layers().unwrap();
    let job = engine.take();
    job.layers().unwrap().done(0..1);
    job.layers().unwrap().submitted(1..2, event(1));
    drop(job);
    assert_eq!(layers.wait(0), Ok(()));
    for layer in 1..4 {
        assert_eq!(layers.event(layer), Err(LayerError::Failed { layer }));
        assert_eq!(layers.wait(layer), Err(LayerError::Failed { layer }));
    }
    assert!(end_of(completion).result.is_err());
}

#[test]
fn futures_of_layers_are_woken_when_their_layer_ends() {
    let engine = Arc::new(Keeping::default());
    let manager = TransferManager::new([engine.clone() as _]);
    let [from, to] = ends();
    let transfer = Transfer::new(&from, &to).blocks(&[0], &[1]).layer_by_layer();
    let completion = manager.submit(transfer, ()).unwrap();
    let layers = completion.layers().unwrap();
    let job = engine.take();
    let [first, second] = [(); 2].map(|()| Arc::<CountsWakes>::default());
    let wakers = [&first, &second].map(|wakes| Waker::from(Arc::clone(wakes)));
    let (mut zero, mut one) = (pin!(layers.future(0)), pin!(layers.future(1)));
    let mut dropped = Box::pin(layers.future(0));
    for _ in 0..2 {
        assert!(zero.as_mut().poll(&mut Context::from_waker(&wakers[0])).is_pending());
        assert!(one.as_mut().poll(&mut Context::from_waker(&wakers[1])).is_pending());
        assert!(dropped.as_mut().poll(&mut Context::from_waker(&wakers[1])).is_pending());
    }
    drop(dropped);
    job.layers().unwrap().done(0..1);
    assert_eq!((first.wakes(), second.wakes()), (1, 0));
    assert_eq!(zero.as_mut().poll(&mut Context::from_waker(&wakers[0])), Poll::Ready(Ok(())));
    job.finish(Ok(()));
    assert_eq!((first.wakes(), second.wakes()), (1, 1));
    assert_eq!(one.as_mut().poll(&mut Context::from_waker(&wakers[1])), Poll::Ready(Ok(())));
    let none = pin!(layers.future(4)).poll(&mut Context::from_waker(Waker::noop()));
    assert!(matches!(none, Poll::Ready(Err(LayerError::NotTransferred { layer: 4, .. }))));
    end_of(completion).result.unwrap();
}

#[test]
fn plans_by_layer_never_copy_two_together() {
    for from in terrane_layout::LayoutKind::ALL {
        for to in terrane_layout::LayoutKind::ALL {
            let [source, destination] = [from, to].map(|kind| endpoint(config(8), kind));
            let transfer = Transfer::new(&source, &destination).blocks(&[0, 1, 2], &[4, 5, 6]);
            let plan = Planner::new().plan(&transfer.layer_by_layer()).unwrap();
            assert_eq!(plan.grids().unwrap()[0].layers, 4, "{from} to {to}");
            let layers: Vec<_> = (0..plan.runs().len()).map(|run| plan.layer(run)).collect();
            assert!(layers.is_sorted(), "{from} to {to}: {layers:?}");
            for layer in 0..4 {
                let runs =
                    plan.runs().iter().enumerate().filter(|(run, _)| plan.layer(*run) == layer);
                let bytes: u64 = runs.map(|(_, run)| run.bytes().get()).sum();
                assert_eq!(bytes, 3 * 2 * PIECE, "{from} to {to}, layer {layer}");
            }
        }
    }
}

#[test]
fn the_host_engine_reports_layers_before_the_end() {
    let options = HostEngineOptions {
        threads: NonZeroUsize::MIN,
        chunk: ByteCount::new(7),
        ..HostEngineOptions::default()
    };
    let manager = TransferManager::new([Arc::new(HostEngine::new(options).unwrap()) as _]);
    let [from, to] = ends();
    let transfer = Transfer::new(&from, &to).blocks(&[0, 3], &[1, 2]).layer_by_layer();
    let completion = manager.submit(transfer, ()).unwrap();
    let layers = completion.layers().unwrap();
    // In their order, because one thread copies the layers one after the other.
    for layer in 0..4 {
        assert_eq!(layers.event(layer), Ok(None));
        assert!((0..=layer).all(|before| layers.is_done(before)));
    }
    end_of(completion).result.unwrap();
}

#[test]
fn events_of_layers_outlive_the_transfer() {
    let manager = TransferManager::new([Arc::new(SimulatedEngine::default()) as _]);
    let [from, to] = [DEVICE, terrane_core::StorageKind::Pinned]
        .map(|kind| endpoint_in(&HeapAllocator::new(kind), config(8), OUTER_FIRST));
    let transfer = Transfer::new(&from, &to).blocks(&[0, 3], &[1, 2]).layer_by_layer();
    let transfer = transfer.device_order(DeviceOrder::AlreadySynchronised);
    let completion = manager.submit(transfer, ()).unwrap();
    let layers = completion.layers().unwrap();
    let events: Vec<_> = (0..4).filter_map(|layer| layers.event(layer).unwrap()).collect();
    end_of(completion).result.unwrap();
    for event in &events {
        assert_eq!(has_happened(event), Some(true));
    }
    drop(layers);
    assert!(events.iter().all(|event| has_happened(event) == Some(true)));
    // Only the handles keep the events alive.
    let raw: Vec<u64> = events.iter().map(EventHandle::raw).collect();
    drop(events);
    assert!(raw.into_iter().all(|raw| has_happened(&event(raw)).is_none()));
}

#[test]
fn layers_end_with_every_failure() {
    let rig = Rig::new(8);
    for fault in [Fault::Engine, Fault::DropJob, Fault::ShortCopy { after_runs: 3 }] {
        rig.engine.fail_next(fault);
        let transfer = rig.transfer(&[0, 1], &[0, 1]).layer_by_layer();
        let completion = rig.manager.submit(transfer, ()).unwrap();
        let layers = completion.layers().unwrap();
        assert_eq!(layers.wait(3), Err(LayerError::Failed { layer: 3 }));
        assert!(end_of(completion).result.is_err());
    }
}

/// Ends its job at the n-th poll.
struct EndsAtPoll {
    left: AtomicUsize,
    job: Mutex<Option<CopyJob>>,
}

impl WaiterProgress for EndsAtPoll {
    fn poll(&self) {
        if self.left.fetch_sub(1, Ordering::SeqCst) == 1 {
            let job = self.job.lock().unwrap().take();
            job.unwrap().finish(Ok(()));
        }
    }
}

/// A transfer that ends at the n-th poll, and in no other way.
fn ending_at_poll(looks: usize, spin: Duration) -> (Completion<()>, Arc<EndsAtPoll>) {
    let engine = Arc::new(Keeping::default());
    let manager = TransferManager::new([engine.clone() as _]).with_spin(spin);
    let [from, to] = ends();
    let transfer = Transfer::new(&from, &to).blocks(&[0], &[1]).layer_by_layer();
    let completion = manager.submit(transfer, ()).unwrap();
    let job = Mutex::new(None);
    let on_look = Arc::new(EndsAtPoll { left: looks.into(), job });
    let job = engine.take();
    job.invite_waiters(on_look.clone());
    *on_look.job.lock().unwrap() = Some(job);
    (completion, on_look)
}

#[test]
fn waits_and_queries_poll_the_engine() {
    let long = Duration::from_secs(3600);
    let (completion, _engine) = ending_at_poll(5, long);
    completion.wait().result.unwrap();

    let (completion, _engine) = ending_at_poll(5, long);
    let deadline = Instant::now() + long;
    completion.wait_until(deadline).unwrap().result.unwrap();

    let (completion, _engine) = ending_at_poll(5, long);
    completion.layers().unwrap().wait(2).unwrap();
    completion.wait().result.unwrap();

    // A query is one poll, whatever the spin time is.
    let (completion, _engine) = ending_at_poll(3, Duration::ZERO);
    let looks = [completion.has_ended(), completion.has_ended(), completion.has_ended()];
    assert_eq!(looks, [false, false, true]);
    completion.wait().result.unwrap();

    let (completion, _engine) = ending_at_poll(2, Duration::ZERO);
    let mut future = pin!(completion.into_future());
    let mut context = Context::from_waker(Waker::noop());
    assert!(future.as_mut().poll(&mut context).is_pending());
    assert!(future.as_mut().poll(&mut context).is_ready());
}

#[test]
fn sleeping_threads_are_woken_by_the_engine() {
    let (completion, engine) = ending_at_poll(1, Duration::ZERO);
    thread::scope(|scope| {
        let waiting = scope.spawn(move || completion.wait());
        engine.poll();
        waiting.join().unwrap().result.unwrap();
    });
}

#[test]
fn dropped_waiter_progress_is_not_polled() {
    let (completion, engine) = ending_at_poll(1, DEFAULT_SPIN);
    let job = engine.job.lock().unwrap().take();
    drop(engine);
    assert!(!completion.has_ended());
    drop(job);
    assert!(completion.wait().result.is_err());
}

/// Queries the layers of a transfer when it drops, like a task with a future of a layer.
struct QueriesInDrop(Layers);

impl Wake for QueriesInDrop {
    fn wake(self: Arc<Self>) {}
}

impl Drop for QueriesInDrop {
    fn drop(&mut self) {
        assert!(!self.0.is_done(0));
    }
}

/// A future that moves from task to task. The first task drops with its waker.
#[test]
fn a_value_that_drops_with_a_waker_may_query_layers() {
    let engine = Arc::new(Keeping::default());
    let manager = TransferManager::new([engine.clone() as _]);
    let [from, to] = ends();
    let transfer = Transfer::new(&from, &to).blocks(&[0], &[1]).layer_by_layer();
    let completion = manager.submit(transfer, ()).unwrap();
    let layers = completion.layers().unwrap();
    let mut future = Box::pin(layers.future(0));
    let first = Waker::from(Arc::new(QueriesInDrop(layers.clone())));
    assert!(future.as_mut().poll(&mut Context::from_waker(&first)).is_pending());
    drop(first);
    assert!(future.as_mut().poll(&mut Context::from_waker(Waker::noop())).is_pending());

    let mut future = Box::pin(completion.into_future());
    let first = Waker::from(Arc::new(QueriesInDrop(layers)));
    assert!(future.as_mut().poll(&mut Context::from_waker(&first)).is_pending());
    drop(first);
    assert!(future.as_mut().poll(&mut Context::from_waker(Waker::noop())).is_pending());
    engine.take().finish(Ok(()));
    assert!(future.as_mut().poll(&mut Context::from_waker(Waker::noop())).is_ready());
}

/// A waker that calls a function when it is cloned.
fn runs_as_it_is_cloned(run: impl Fn() + Send + Sync + 'static) -> Waker {
    type Run = Box<dyn Fn() + Send + Sync>;

    /// # Safety
    ///
    /// `data` comes from `runs_as_it_is_cloned`.
    unsafe fn clone(data: *const ()) -> RawWaker {
        // SAFETY: the data comes from `runs_as_it_is_cloned`, and is never freed.
        let run: &Run = unsafe { &*data.cast() };
        run();
        RawWaker::new(data, &TABLE)
    }
    fn nothing(_: *const ()) {}
    static TABLE: RawWakerVTable = RawWakerVTable::new(clone, nothing, nothing, nothing);

    let run: Run = Box::new(run);
    let run: &'static Run = Box::leak(Box::new(run));
    // SAFETY: the functions of the table accept such data, which is shared and never freed.
    unsafe { Waker::new(std::ptr::from_ref(run).cast(), &TABLE) }
}

/// Like the waker of an executor that logs, and whose logger queries the transfer.
#[test]
fn a_waker_may_end_the_transfer_when_it_is_cloned() {
    for of_a_layer in [true, false] {
        let engine = Arc::new(Keeping::default());
        let manager = TransferManager::new([engine.clone() as _]);
        let [from, to] = ends();
        let transfer = Transfer::new(&from, &to).blocks(&[0], &[1]).layer_by_layer();
        let completion = manager.submit(transfer, ()).unwrap();
        let layers = completion.layers().unwrap();
        let job = Mutex::new(Some(engine.take()));
        let waker = runs_as_it_is_cloned(move || {
            let job = job.lock().unwrap().take();
            job.into_iter().for_each(|job| job.finish(Ok(())));
        });
        let mut context = Context::from_waker(&waker);
        if of_a_layer {
            assert_eq!(Box::pin(layers.future(2)).as_mut().poll(&mut context), Poll::Ready(Ok(())));
        }
        let mut future = Box::pin(completion.into_future());
        let Poll::Ready(outcome) = future.as_mut().poll(&mut context) else { panic!("pending") };
        drop(outcome.result.unwrap());
    }
}

/// Waits for a transfer when it drops.
struct WaitsAsItDrops(Option<Completion<()>>);

impl Drop for WaitsAsItDrops {
    fn drop(&mut self) {
        let waited = self.0.take().map(Completion::wait);
        assert!(waited.is_none_or(|outcome| outcome.result.is_err()));
    }
}

/// Two transfers fail with a third. While the first of them is notified, its guard drops and waits
/// for the second. The same thread notifies the second next.
#[test]
fn a_guard_may_wait_for_a_transfer_that_ends_on_its_thread() {
    let engine = Arc::new(Keeping::default());
    let manager = TransferManager::new([engine.clone() as _]);
    let [from, to] = ends();
    let transfer = |block| Transfer::new(&from, &to).blocks(&[block], &[block]);
    let failing = manager.submit(transfer(0), ()).unwrap();
    let (told_first, told_next) = (transfer(1), transfer(2));
    // The guard is set once the transfer to wait for exists.
    let guard = Arc::new(Mutex::new(WaitsAsItDrops(None)));
    let first = manager.submit(told_first.after(&failing.ticket()), guard.clone()).unwrap();
    let next = manager.submit(told_next.after(&failing.ticket()), ()).unwrap();
    guard.lock().unwrap().0 = Some(next);
    drop((first, guard));
    let (ended, end) = std::sync::mpsc::channel();
    let job = engine.take();
    // Not a scoped thread: the scope would wait for a thread that waits for itself.
    let finish = move || {
        job.finish(Err(CopyFailure::DeadlineExceeded));
        let _ = ended.send(());
    };
    let finishing = thread::Builder::new().spawn(finish).unwrap();
    end.recv_timeout(Duration::from_secs(60)).expect("a thread waits for itself");
    finishing.join().unwrap();
    assert!(failing.wait().result.is_err());
}

/// Looks at the layers whenever it is written to.
struct Looks<'a>(&'a Layers, String);

impl std::fmt::Write for Looks<'_> {
    fn write_str(&mut self, text: &str) -> std::fmt::Result {
        assert_eq!(self.0.state(0), Ok(LayerState::Waiting));
        self.1.push_str(text);
        Ok(())
    }
}

#[test]
fn a_writer_of_the_debug_text_may_look_at_the_layers() {
    let engine = Arc::new(Keeping::default());
    let manager = TransferManager::new([engine.clone() as _]);
    let [from, to] = ends();
    let transfer = Transfer::new(&from, &to).blocks(&[0], &[1]).layer_by_layer();
    let completion = manager.submit(transfer, ()).unwrap();
    let layers = completion.layers().unwrap();
    let mut looks = Looks(&layers, String::new());
    std::fmt::Write::write_fmt(&mut looks, format_args!("{layers:?}")).unwrap();
    assert!(looks.1.contains("Waiting"), "{}", looks.1);
    engine.take().finish(Ok(()));
    end_of(completion).result.unwrap();
}
