//! Transfers that are cancelled: while they wait, while they are queued, and half-way.

use std::future::{Future, IntoFuture};
use std::num::NonZeroUsize;
use std::pin::pin;
use std::sync::{Arc, mpsc};
use std::task::{Context, Poll, Waker};
use std::thread;

use terrane_core::ByteCount;
use terrane_storage::{DiskAllocator, DiskOptions};
use terrane_testkit::conformance::copy_engine::end_of;
use terrane_testkit::pattern::Pattern;
use terrane_testkit::process::{in_child, in_fork};
use terrane_transfer::engines::{DiskEngine, DiskEngineOptions, HostEngine, HostEngineOptions};
use terrane_transfer::{
    CopyEngine, Endpoint, LayerError, Outcome, TicketEnd, Transfer, TransferError, TransferManager,
};

use crate::relays::rig::Steered;
use crate::relays::{BLOCK, slots, until};
use crate::support::*;

/// No submitted transfer starts before it is released.
fn held(num_blocks: u32) -> Rig {
    let rig = Rig::new(num_blocks);
    rig.engine.hold();
    rig
}

/// Whether the copy had started.
#[track_caller]
fn cancelled(error: &TransferError) -> bool {
    let TransferError::Cancelled { started, done, total } = error else { panic!("{error:?}") };
    assert!(done <= total, "{error}");
    assert_eq!(error.is_refusal(), !started);
    *started
}

#[test]
fn a_transfer_that_waits_for_others_ends_at_once_and_copies_nothing() {
    let rig = held(4);
    let first = rig.manager.submit(rig.transfer(&[0], &[0]), ()).unwrap();
    let waiting = rig.transfer(&[1], &[1]).after(&first.ticket()).layer_by_layer();
    let waiting = rig.manager.submit(waiting, "guard").unwrap();
    let layers = waiting.layers().unwrap();
    waiting.cancel();
    assert!(waiting.has_ended());
    let Outcome { guard, result } = waiting.wait();
    assert_eq!(guard, "guard");
    let error = result.unwrap_err();
    assert!(!cancelled(&error));
    assert_says(&error, &["cancelled before it started", "nothing was copied"]);
    assert_eq!(layers.wait(..), Err(LayerError::Failed { layer: 0 }));
    // Its blocks are free, and the predecessor's blocks are not.
    drop(rig.source.hold_for_write(&[1]).unwrap());
    drop(rig.destination.hold_for_read(&[1]).unwrap());
    rig.destination.hold_for_read(&[0]).unwrap_err();
    rig.engine.release_all();
    end_of(first).result.unwrap();
    rig.engine.wait_until_idle();
    assert_eq!(rig.engine.ended(), 1);
}

/// The last transfer may use the blocks of the first, because it runs after a transfer that runs
/// after the first.
#[test]
fn transfers_after_a_cancelled_one_do_not_overtake_its_predecessors() {
    let rig = held(4);
    let first = rig.manager.submit(rig.transfer(&[0], &[0]), ()).unwrap();
    let middle = rig.manager.submit(rig.transfer(&[1], &[0]).after(&first.ticket()), ()).unwrap();
    let ticket = middle.ticket();
    let needs = rig.manager.submit(rig.transfer(&[3], &[3]).after(&ticket), ()).unwrap();
    let last = rig.manager.submit(rig.transfer(&[2], &[0]).after_end(&ticket), ()).unwrap();
    middle.cancel();
    assert!(!cancelled(&end_of(middle).result.unwrap_err()));
    assert!(!ticket.has_ended() && !needs.has_ended());
    assert_eq!(rig.engine.queued(), 1, "only the first may start");
    rig.engine.release(1);
    end_of(first).result.unwrap();
    assert_eq!(ticket.wait(), TicketEnd::Failed);
    let error = end_of(needs).result.unwrap_err();
    assert!(
        matches!(error, TransferError::PredecessorFailed { predecessor } if predecessor == ticket.id())
    );
    rig.engine.release_all();
    end_of(last).result.unwrap();
    rig.assert_nothing_claimed();
}

#[test]
fn a_queued_transfer_ends_at_its_turn_and_copies_nothing() {
    let rig = held(4);
    let queued = rig.manager.submit(rig.transfer(&[0], &[0]), ()).unwrap();
    let next =
        rig.manager.submit(rig.transfer(&[1], &[0]).after_end(&queued.ticket()), ()).unwrap();
    queued.cancel();
    queued.cancel();
    assert!(!queued.has_ended());
    rig.engine.release(1);
    assert!(!cancelled(&end_of(queued).result.unwrap_err()));
    // The destination is unchanged, so it is not incomplete.
    rig.engine.release_all();
    end_of(next).result.unwrap();
    drop(rig.destination.hold_for_read(&[0]).unwrap());
}

#[test]
fn cancelling_an_ended_transfer_or_a_hold_has_no_effect() {
    let rig = held(4);
    let hold = rig.source.hold_for_write(&[0]).unwrap();
    let transfer = rig.transfer(&[0], &[0]).after(&hold.ticket());
    let completion = rig.manager.submit(transfer, ()).unwrap();
    hold.ticket().cancel();
    drop(hold);
    rig.engine.release_all();
    rig.engine.wait_until_idle();
    completion.ticket().cancel();
    assert!(end_of(completion).result.is_ok());
}

#[test]
fn an_awaited_transfer_is_cancelled_through_its_ticket() {
    let rig = held(4);
    let first = rig.manager.submit(rig.transfer(&[0], &[0]), ()).unwrap();
    let waiting = rig.transfer(&[1], &[1]).after(&first.ticket());
    let waiting = rig.manager.submit(waiting, 7).unwrap();
    let ticket = waiting.ticket();
    let mut future = pin!(waiting.into_future());
    let mut context = Context::from_waker(Waker::noop());
    assert!(future.as_mut().poll(&mut context).is_pending());
    ticket.cancel();
    let Poll::Ready(Outcome { guard, result }) = future.as_mut().poll(&mut context) else {
        panic!("it has ended")
    };
    assert_eq!(guard, 7);
    cancelled(&result.unwrap_err());
    rig.engine.release_all();
}

#[test]
fn a_set_is_cancelled_as_a_whole_and_its_ticket_waits_for_predecessors() {
    let rig = held(8);
    let first = rig.manager.submit(rig.transfer(&[0], &[0]), ()).unwrap();
    let members = [
        (rig.transfer(&[1], &[0]).after(&first.ticket()), 1),
        (rig.transfer(&[2], &[2]).after(&first.ticket()), 2),
    ];
    let set = rig.manager.submit_all(members).unwrap();
    let ticket = set.ticket();
    let last = rig.manager.submit(rig.transfer(&[3], &[0]).after_end(&ticket), ()).unwrap();
    set.cancel();
    assert!(set.has_ended());
    for outcome in set.wait().outcomes {
        assert!(!cancelled(&outcome.result.unwrap_err()));
    }
    assert!(!ticket.has_ended());
    assert_eq!(rig.engine.queued(), 1, "only the first may start");
    rig.engine.release_all();
    end_of(first).result.unwrap();
    end_of(last).result.unwrap();
    assert_eq!(ticket.wait(), TicketEnd::Failed);
}

#[test]
fn a_cancelled_transfer_drops_the_guard_of_a_dropped_completion() {
    let rig = held(4);
    let guard = Arc::new(());
    let first = rig.manager.submit(rig.transfer(&[0], &[0]), ()).unwrap();
    let waiting = rig.transfer(&[1], &[1]).after(&first.ticket());
    let ticket = rig.manager.submit(waiting, Arc::clone(&guard)).unwrap().ticket();
    assert_eq!(Arc::strong_count(&guard), 2);
    ticket.cancel();
    assert_eq!(Arc::strong_count(&guard), 1);
    rig.engine.release_all();
}

/// The waiting transfer has the last reference to the engine.
#[test]
fn a_cancellation_joins_no_thread_of_an_engine() {
    let rig = held(4);
    let (busy, blocker) = mpsc::channel::<()>();
    let engine = HostEngine::new(one_thread()).unwrap();
    let manager = TransferManager::new([Arc::new(engine) as _]);
    let end = || endpoint(config(4), CONTIGUOUS);
    let [from, to] = [end(), end()];
    occupy(&manager, (&from, &to), blocker);
    let first = rig.manager.submit(rig.transfer(&[0], &[0]), ()).unwrap();
    let transfer = Transfer::new(&from, &to).blocks(&[1], &[1]).after(&first.ticket());
    let waiting = manager.submit(transfer, ()).unwrap();
    drop(manager);
    // A join would wait for the engine's thread, which waits for this one.
    waiting.cancel();
    cancelled(&waiting.wait().result.unwrap_err());
    drop(busy);
    rig.engine.release_all();
    end_of(first).result.unwrap();
}

/// Blocks the thread that drops it until the other end of the channel drops.
struct WaitsInDrop(Option<mpsc::Receiver<()>>);

impl Drop for WaitsInDrop {
    fn drop(&mut self) {
        let _ = self.0.take().map(|other_end| other_end.recv());
    }
}

/// Copies block 0, and blocks the engine's thread at the end of the transfer until the sender of
/// `blocker` drops. Returns once the transfer has ended.
fn occupy(
    manager: &TransferManager,
    (from, to): (&Endpoint, &Endpoint),
    blocker: mpsc::Receiver<()>,
) {
    // The transfer starts after its completion was dropped. Otherwise it might end before, and this
    // thread would drop the guard.
    let gate = from.hold_for_read(&[0]).unwrap();
    let transfer = Transfer::new(from, to).blocks(&[0], &[0]).after(&gate.ticket());
    let completion = manager.submit(transfer, WaitsInDrop(Some(blocker))).unwrap();
    let ticket = completion.ticket();
    drop(completion);
    drop(gate);
    // It ends before the guard drops.
    while !ticket.has_ended() {
        thread::yield_now();
    }
}

fn one_thread() -> HostEngineOptions {
    HostEngineOptions { threads: NonZeroUsize::MIN, ..HostEngineOptions::default() }
}

/// The engine's only thread is busy with the guard of another transfer.
fn is_cancelled_in_the_queue(engine: Arc<dyn CopyEngine>, from: &Endpoint, to: &Endpoint) {
    let manager = TransferManager::new([engine]);
    Pattern::new(1).fill(from).unwrap();
    Pattern::new(2).fill(to).unwrap();
    let (busy, blocker) = mpsc::channel::<()>();
    occupy(&manager, (from, to), blocker);
    let transfer = Transfer::new(from, to).blocks(&[1, 2], &[1, 2]);
    let queued = manager.submit(transfer, ()).unwrap();
    queued.cancel();
    drop(busy);
    assert!(!cancelled(&end_of(queued).result.unwrap_err()));
    let unchanged = Pattern::new(2).verify_blocks(to, &[1, 2], &[1, 2], 0..4).unwrap();
    unchanged.assert_clean("a cancelled transfer wrote them");
    drop(to.hold_for_read(&[1, 2]).unwrap());
    assert_unclaimed(to);
}

#[test]
fn the_host_engine_copies_nothing_of_a_job_that_was_cancelled_in_its_queue() {
    let end = || endpoint(config(4), CONTIGUOUS);
    let engine = HostEngine::new(one_thread()).unwrap();
    is_cancelled_in_the_queue(Arc::new(engine), &end(), &end());
}

fn disk() -> Arc<DiskEngine> {
    Arc::new(DiskEngine::new(&DiskEngineOptions::default()).unwrap())
}

#[test]
fn the_disk_engine_copies_nothing_of_a_job_that_was_cancelled_in_its_queue() {
    let folder = tempfile::tempdir().unwrap();
    let files = DiskAllocator::new(folder.path(), DiskOptions::default()).unwrap();
    let end = || endpoint(config(4), CONTIGUOUS);
    let file = || endpoint_in(&files, config(4), CONTIGUOUS);
    is_cancelled_in_the_queue(disk(), &end(), &file());
    is_cancelled_in_the_queue(disk(), &file(), &end());
}

#[test]
fn a_relay_begins_no_chunk_of_a_cancelled_transfer() {
    let rig = Steered::new(&slots(3, BLOCK));
    rig.system.hold();
    let all: Vec<u32> = (0..8).collect();
    let completion = rig.manager.submit(rig.transfer(&all, &all), ()).unwrap();
    until(|| rig.device.ended() == 3 && rig.system.queued() == 1);
    completion.cancel();
    rig.system.release_all();
    let error = end_of(completion).result.unwrap_err();
    assert!(cancelled(&error));
    assert_eq!(rig.device.ended(), 3);
    let incomplete = rig.destination.hold_for_read(&all).unwrap_err();
    assert!(matches!(incomplete, TransferError::Incomplete { .. }), "{incomplete:?}");
    assert_unclaimed(&rig.destination);
    // The slots are free for others.
    end_of(rig.manager.submit(rig.transfer(&all, &all), ()).unwrap()).result.unwrap();
}

#[test]
fn a_relay_ends_a_cancelled_transfer_that_waits_for_a_slot() {
    let rig = Steered::new(&slots(1, BLOCK));
    rig.system.hold();
    let long = rig.manager.submit(rig.transfer(&[0, 1, 2], &[0, 1, 2]), ()).unwrap();
    until(|| rig.system.queued() == 1);
    let short = rig.manager.submit(rig.transfer(&[9], &[9]), ()).unwrap();
    short.cancel();
    rig.system.release(1);
    let error = end_of(short).result.unwrap_err();
    assert!(!cancelled(&error));
    drop(rig.destination.hold_for_read(&[9]).unwrap());
    rig.system.release_all();
    end_of(long).result.unwrap();
}

/// The engine of its first hop hangs, so its turn does not come.
#[test]
fn a_relay_ends_a_cancelled_transfer_that_waits_for_its_turn_at_once() {
    let rig = Steered::new(&slots(8, BLOCK));
    rig.device.hold();
    let all: Vec<u32> = (0..8).collect();
    let long = rig.manager.submit(rig.transfer(&all, &all), ()).unwrap();
    // Four are at the engine, and one more waits for it.
    until(|| rig.device.queued() == 4 && rig.relay.slots().held == 5);
    let short = rig.manager.submit(rig.transfer(&[9], &[9]), ()).unwrap();
    short.cancel();
    assert!(!cancelled(&end_of(short).result.unwrap_err()));
    drop(rig.destination.hold_for_read(&[9]).unwrap());
    rig.device.release_all();
    end_of(long).result.unwrap();
}

/// At any moment of the cancellation, the outcome matches the destination.
fn check_races(manager: &TransferManager, from: &Endpoint, to: &Endpoint, all: &[u32]) {
    Pattern::new(1).fill(from).unwrap();
    for round in 0..100_u64 {
        Pattern::new(2).fill(to).unwrap();
        drop(to.hold_for_write(all).unwrap());
        let first = from.hold_for_read(all).unwrap();
        let mut transfer = Transfer::new(from, to).blocks(all, all);
        if round % 2 == 0 {
            transfer = transfer.after(&first.ticket());
        }
        let completion = manager.submit(transfer, ()).unwrap();
        let ticket = completion.ticket();
        let outcome = thread::scope(|scope| {
            scope.spawn(move || drop(first));
            scope.spawn(move || {
                (0..round * 20).for_each(|_| std::hint::spin_loop());
                ticket.cancel();
            });
            end_of(completion)
        });
        let is_of = |pattern: u64| {
            let found = Pattern::new(pattern).verify_blocks(to, all, all, 0..4).unwrap();
            found.assert_clean("another pattern");
        };
        match outcome.result {
            Ok(_) => is_of(1),
            Err(error) if cancelled(&error) => {
                let refused = to.hold_for_read(all).unwrap_err();
                assert!(matches!(refused, TransferError::Incomplete { .. }), "{refused:?}");
            }
            Err(_) => {
                drop(to.hold_for_read(all).unwrap());
                is_of(2);
            }
        }
        assert_unclaimed(to);
    }
}

#[test]
fn a_cancellation_that_races_with_the_host_engine_reports_the_true_outcome() {
    let options = HostEngineOptions { chunk: ByteCount::new(500), ..HostEngineOptions::default() };
    let manager = TransferManager::new([Arc::new(HostEngine::new(options).unwrap()) as _]);
    let end = || endpoint(config(64), CONTIGUOUS);
    let all: Vec<u32> = (0..64).collect();
    check_races(&manager, &end(), &end(), &all);
}

#[test]
fn a_cancellation_that_races_with_the_disk_engine_reports_the_true_outcome() {
    let folder = tempfile::tempdir().unwrap();
    let files = DiskAllocator::new(folder.path(), DiskOptions::default()).unwrap();
    let manager = TransferManager::new([disk() as _]);
    let all: Vec<u32> = (0..64).collect();
    let end = endpoint(config(64), BLOCK_FIRST);
    check_races(&manager, &end, &endpoint_in(&files, config(64), CONTIGUOUS), &all);
}

#[test]
fn a_forked_process_does_not_cancel_transfers_of_its_parent() {
    in_child("cancels::a_forked_process_does_not_cancel_transfers_of_its_parent", || {
        let rig = held(4);
        let first = rig.manager.submit(rig.transfer(&[0], &[0]), ()).unwrap();
        let waiting = rig.transfer(&[1], &[1]).after(&first.ticket());
        let waiting = rig.manager.submit(waiting, ()).unwrap();
        in_fork(|| waiting.cancel());
        rig.engine.release_all();
        end_of(first).result.unwrap();
        end_of(waiting).result.unwrap();
    });
}
