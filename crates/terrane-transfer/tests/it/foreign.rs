//! Foreign code on the threads of engines: guards and wakers that panic, engines that drop there,
//! and memory of the wrong kind.

use std::cell::RefCell;
use std::future::IntoFuture;
use std::panic::panic_any;
use std::pin::Pin;
use std::sync::{Arc, Barrier};
use std::task::{Context, Wake, Waker};
use std::thread;

use terrane_core::{
    Allocate, AllocateError, ForeignMemory, Limits, RegionRequest, Span, StorageKind,
};
use terrane_storage::{DiskAllocator, DiskOptions};
use terrane_testkit::conformance::copy_engine::end_of;
use terrane_testkit::engine::Fault;
use terrane_testkit::events::AtEvents;
use terrane_testkit::memory::{HeapAllocator, HeapMemory};
use terrane_transfer::engines::{DiskEngine, DiskEngineOptions, HostEngine, HostEngineOptions};
use terrane_transfer::{
    Completion, CompletionFuture, CopyEngine, Endpoint, Hold, TicketEnd, Transfer, TransferError,
    TransferManager,
};
use tracing::{Level, Subscriber};

use crate::support::*;

fn poll_with<G>(completion: Completion<G>, waker: impl Wake + Send + Sync + 'static) {
    let mut future: CompletionFuture<G> = completion.into_future();
    let waker = Waker::from(Arc::new(waker));
    assert!(
        Future::poll(Pin::new(&mut future), &mut Context::from_waker(&waker)).is_pending(),
        "the transfer must still be in flight"
    );
}

#[derive(Debug)]
struct PanicsOnDrop;

impl Drop for PanicsOnDrop {
    fn drop(&mut self) {
        panic!("expected: a guard that panics");
    }
}

struct PanicsOnWake;

impl Wake for PanicsOnWake {
    fn wake(self: Arc<Self>) {
        panic!("expected: a waker that panics");
    }
}

/// An engine of each kind, and two ends for each.
fn engines() -> Vec<(Arc<dyn CopyEngine>, Endpoint, Endpoint)> {
    let options =
        HostEngineOptions { threads: std::num::NonZeroUsize::MIN, ..HostEngineOptions::default() };
    let host = HostEngine::new(options).unwrap();
    let disk = DiskEngine::new(&DiskEngineOptions::default()).unwrap();
    let memory = || endpoint(config(8), CONTIGUOUS);
    vec![(Arc::new(host), memory(), memory()), (Arc::new(disk), memory(), file())]
}

fn file() -> Endpoint {
    let directory = tempfile::tempdir().unwrap();
    let files = DiskAllocator::new(directory.path(), DiskOptions::default()).unwrap();
    endpoint_in(&files, config(8), CONTIGUOUS)
}

#[test]
fn engines_survive_guards_that_panic() {
    for (engine, source, destination) in engines() {
        let manager = TransferManager::new([engine]);
        let transfer = Transfer::new(&source, &destination).blocks(&[0, 1], &[0, 1]);
        let gate = destination.hold_for_write(&[0]).unwrap();
        drop(manager.submit(transfer.after(&gate.ticket()), PanicsOnDrop).unwrap());
        drop(gate);
        for block in 2..8 {
            let transfer = Transfer::new(&source, &destination).blocks(&[block], &[block]);
            end_of(manager.submit(transfer, ()).unwrap()).result.unwrap();
        }
    }
}

#[test]
fn transfers_run_after_one_whose_waker_panics() {
    for (engine, source, destination) in engines() {
        let manager = TransferManager::new([engine]);
        let transfer = |block| Transfer::new(&source, &destination).blocks(&[block], &[block]);
        let gate = destination.hold_for_write(&[0]).unwrap();
        let first = manager.submit(transfer(0).after(&gate.ticket()), ()).unwrap();
        let second = manager.submit(transfer(1).after(&first.ticket()), ()).unwrap();
        poll_with(first, PanicsOnWake);
        drop(gate);
        end_of(second).result.unwrap();
    }
}

#[test]
fn all_dependents_are_notified_of_an_end_although_one_panics() {
    let rig = Rig::new(8);
    rig.engine.hold();
    rig.engine.fail_next(Fault::Engine);
    let first = rig.manager.submit(rig.transfer(&[0], &[0]), ()).unwrap();
    let after_first = |block| rig.transfer(&[block], &[block]).after(&first.ticket());
    // Before and after it, in either order of notification.
    let before = rig.manager.submit(after_first(1), ()).unwrap();
    drop(rig.manager.submit(after_first(2), PanicsOnDrop).unwrap());
    let behind = rig.manager.submit(after_first(3), ()).unwrap();
    rig.engine.release_all();
    for dependent in [before, behind] {
        let error = end_of(dependent).result.unwrap_err();
        assert!(matches!(error, TransferError::PredecessorFailed { .. }), "{error:?}");
    }
}

/// A subscriber that panics at each error.
pub fn panics_at_errors() -> impl Subscriber + Send + Sync {
    AtEvents::any(|event| {
        assert_ne!(*event.metadata().level(), Level::ERROR, "expected: a subscriber that panics");
    })
}

/// A guard that panics with a value whose drop panics as well.
struct PanicsWithABomb;

impl Drop for PanicsWithABomb {
    fn drop(&mut self) {
        panic_any(PanicsOnDrop);
    }
}

#[test]
fn transfers_run_after_one_although_the_subscriber_panics() {
    let rig = Rig::new(8);
    let gate = rig.source.hold_for_read(&[7]).unwrap();
    let first = rig.transfer(&[0], &[0]).after(&gate.ticket());
    // It is cancelled on this thread, which has the subscriber. Its guard panics.
    let first = rig.manager.submit(first, PanicsWithABomb).unwrap();
    let ticket = first.ticket();
    let next = rig.transfer(&[1], &[1]).after_end(&ticket).after_end(&gate.ticket());
    let next = rig.manager.submit(next, ()).unwrap();
    drop(first);
    let mut waits = Box::pin(gate.ticket().into_future());
    let waker = Waker::from(Arc::new(PanicsOnWake));
    assert!(waits.as_mut().poll(&mut Context::from_waker(&waker)).is_pending());
    let last = rig.manager.submit(rig.transfer(&[2], &[2]).after(&gate.ticket()), ()).unwrap();
    tracing::subscriber::with_default(panics_at_errors(), || {
        ticket.cancel();
        drop(gate);
    });
    assert_eq!(ticket.wait(), TicketEnd::Failed);
    end_of(next).result.unwrap();
    end_of(last).result.unwrap();
    // Later notifications of this thread are delivered as well.
    let gate = rig.source.hold_for_read(&[7]).unwrap();
    let later = rig.manager.submit(rig.transfer(&[3], &[3]).after(&gate.ticket()), ()).unwrap();
    drop(gate);
    end_of(later).result.unwrap();
}

#[test]
fn dependents_start_in_the_order_in_which_they_were_submitted() {
    let rig = Rig::new(8);
    rig.engine.hold();
    let gate = rig.source.hold_for_read(&[0]).unwrap();
    let submit = |block| {
        let transfer = rig.transfer(&[block], &[block]).after(&gate.ticket());
        rig.manager.submit(transfer, ()).unwrap()
    };
    let all: Vec<_> = (0..8).map(submit).collect();
    drop(gate);
    for (number, completion) in all.into_iter().enumerate() {
        assert_eq!(rig.engine.ended(), number);
        rig.engine.release(1);
        end_of(completion).result.unwrap();
        rig.engine.wait_until_idle();
    }
}

#[test]
fn a_hold_may_drop_with_its_thread() {
    thread_local! {
        static KEPT: RefCell<Option<Hold>> = const { RefCell::new(None) };
    }
    let rig = Rig::new(8);
    let holds = [0, 1].map(|block| rig.source.hold_for_read(&[block]).unwrap());
    let submit = |number: usize, block: u32| {
        let transfer = rig.transfer(&[block], &[block]).after(&holds[number].ticket());
        rig.manager.submit(transfer, ()).unwrap()
    };
    let (first, second) = (submit(0, 2), submit(1, 3));
    let thread = thread::Builder::new().name("holder".to_owned()).spawn(move || {
        let [kept, dropped] = holds;
        // In this order, the thread-local hold outlives all thread-locals of this library.
        KEPT.set(Some(kept));
        drop(dropped);
    });
    thread.unwrap().join().unwrap();
    end_of(first).result.unwrap();
    end_of(second).result.unwrap();
}

/// Blocks an engine's thread at the end of a transfer until others have reached the barrier.
struct Meets(Arc<Barrier>);

impl Wake for Meets {
    fn wake(self: Arc<Self>) {
        self.0.wait();
    }
}

#[test]
fn two_engines_that_drop_on_each_others_threads_do_not_wait_for_each_other() {
    let ends = engines();
    let manager = TransferManager::new(ends.iter().map(|(engine, ..)| Arc::clone(engine)));
    let ends: Vec<_> = ends.into_iter().map(|(_, from, to)| (from, to)).collect();
    let transfer = |end: usize, block: u32| {
        Transfer::new(&ends[end].0, &ends[end].1).blocks(&[block], &[block])
    };
    let gate = ends[0].0.hold_for_read(&[7]).unwrap();
    let meeting = Arc::new(Barrier::new(2));
    let [first, second] =
        [0, 1].map(|end| manager.submit(transfer(end, 0).after(&gate.ticket()), ()).unwrap());
    // At the end, the last reference to each engine is in a transfer that waits for the other
    // engine.
    let on_host = manager.submit(transfer(0, 1).after(&second.ticket()), ()).unwrap();
    let on_disk = manager.submit(transfer(1, 1).after(&first.ticket()), ()).unwrap();
    poll_with(first, Meets(Arc::clone(&meeting)));
    poll_with(second, Meets(meeting));
    drop(manager);
    drop(gate);
    end_of(on_host).result.unwrap();
    end_of(on_disk).result.unwrap();
}

/// Memory that breaks its contract: its kind is disk, and its location is a host address.
struct WrongKind(HeapAllocator);

// SAFETY: only the test uses the memory.
unsafe impl Allocate for WrongKind {
    type Memory = ForeignMemory<HeapMemory>;

    fn kind(&self) -> StorageKind {
        StorageKind::Disk
    }

    fn limits(&self) -> Limits {
        self.0.limits()
    }

    fn allocate(&self, request: &RegionRequest) -> Result<Self::Memory, AllocateError> {
        let memory = self.0.allocate(request)?;
        let span = Span { kind: StorageKind::Disk, ..Span::of(&memory) };
        // SAFETY: the kind is wrong, which an engine must detect before it accesses a byte.
        Ok(unsafe { ForeignMemory::new(span, memory) })
    }
}

#[test]
fn the_disk_engine_reuses_the_buffers_of_failed_transfers() {
    let options = DiskEngineOptions { bounce_buffers: 1, ..DiskEngineOptions::default() };
    let manager = TransferManager::new([Arc::new(DiskEngine::new(&options).unwrap()) as _]);
    let (wrong, from, to) =
        (endpoint_in(&WrongKind(HeapAllocator::system()), config(8), CONTIGUOUS), file(), file());
    let transfer = Transfer::new(&wrong, &to).blocks(&[0], &[0]);
    let error = end_of(manager.submit(transfer, ()).unwrap()).result.unwrap_err();
    assert_says(&error, &["engine disk failed"]);
    let transfer = Transfer::new(&from, &to).blocks(&[1], &[1]);
    end_of(manager.submit(transfer, ()).unwrap()).result.unwrap();
}
