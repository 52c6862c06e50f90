//! Several transfers as one: all start or none does, and one ticket represents all.

use std::future::{Future, IntoFuture};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::task::{Context, Poll, Waker};
use std::time::{Duration, Instant};

use terrane_testkit::conformance::copy_engine::end_of;
use terrane_testkit::engine::{Fault, SimulatedEngineOptions};
use terrane_testkit::process::{in_child, in_fork};
use terrane_transfer::engines::{HostEngine, HostEngineOptions};
use terrane_transfer::{
    CompletionSet, Endpoint, LayerState, RejectedSet, SetOutcome, Transfer, TransferError,
    TransferManager,
};

use crate::support::*;

/// Three transfers of one block each, starting at block `first`.
fn three(rig: &Rig, first: u32) -> impl Iterator<Item = (Transfer, u32)> {
    (first..first + 3).map(|block| (rig.transfer(&[block], &[block]), block))
}

#[track_caller]
fn submit<G: Send + 'static>(
    rig: &Rig,
    transfers: impl IntoIterator<Item = (Transfer, G)>,
) -> CompletionSet<G> {
    rig.manager.submit_all(transfers).unwrap_or_else(|rejected| panic!("refused: {rejected}"))
}

fn guards(outcome: SetOutcome<u32>) -> Vec<u32> {
    outcome.outcomes.into_iter().map(|outcome| outcome.guard).collect()
}

#[test]
fn a_set_copies_all_blocks_and_returns_every_guard() {
    let rig = Rig::new(8);
    rig.engine.hold();
    let set = submit(&rig, three(&rig, 0));
    assert_eq!((set.len(), set.is_empty(), set.tickets().len()), (3, false, 3));
    assert!(!set.has_ended() && !set.ticket().has_ended());
    rig.engine.release(2);
    let set = set.wait_until(Instant::now() + Duration::from_millis(50)).unwrap_err();
    assert!(!set.has_ended());
    rig.engine.release_all();
    let ticket = set.ticket();
    let set = set.wait_until(Instant::now() + Duration::from_secs(60)).unwrap();
    assert!(ticket.has_ended());
    assert!(set.succeeded() && set.first_error().is_none());
    assert_eq!(guards(set), [0, 1, 2]);
    rig.assert_nothing_claimed();
}

#[test]
fn a_set_of_nothing_has_succeeded() {
    let rig = Rig::new(8);
    let set = submit(&rig, Vec::<(Transfer, ())>::new());
    assert!(set.is_empty() && set.has_ended() && set.ticket().has_ended());
    run(&rig.manager, rig.transfer(&[0], &[0]).after(&set.ticket()));
    assert!(set.wait().outcomes.is_empty());
}

#[test]
fn if_one_is_refused_none_is_started() {
    let rig = Rig::new(8);
    let with = |transfer| three(&rig, 0).chain([(transfer, 3)]).chain(three(&rig, 4));
    let wrong = rig.transfer(&[8], &[3]);
    let rejected = rig.manager.submit_all(with(wrong)).unwrap_err();
    assert_eq!((rejected.index, rejected.other), (3, None));
    assert_eq!(rejected.guards, [0, 1, 2, 3, 4, 5, 6]);
    assert!(matches!(rejected.cause, TransferError::NoSuchBlock { block: 8, .. }));
    assert!(rejected.to_string().contains("transfer 3 of the set"), "{rejected}");
    assert_eq!((rig.engine.queued(), rig.engine.ended()), (0, 0));
    rig.assert_nothing_claimed();
    // Nothing was written, so nothing is incomplete.
    for end in [&rig.source, &rig.destination] {
        drop(end.hold_for_read(&[0, 1, 2, 3, 4, 5, 6, 7]).unwrap());
    }

    let hold = rig.destination.hold_for_write(&[3]).unwrap();
    let rejected = rig.manager.submit_all(with(rig.transfer(&[3], &[3]))).unwrap_err();
    assert_eq!((rejected.index, rejected.other), (3, None));
    assert!(rejected.cause.is_conflict());
    drop(hold);
    rig.assert_nothing_claimed();
}

/// The engine panics in the quote of the third transfer.
#[test]
fn an_engine_that_panics_before_the_start_leaves_nothing_claimed() {
    static QUOTES: AtomicU32 = AtomicU32::new(0);
    let options = SimulatedEngineOptions::default()
        .serving(|_, _| QUOTES.fetch_add(1, Ordering::Relaxed) != 2 || panic!("as the test wants"));
    let rig = Rig::with_options(8, options);
    let submit = || rig.manager.submit_all(three(&rig, 0));
    assert!(catch_unwind(AssertUnwindSafe(submit)).is_err());
    drop(rig.destination.hold_for_read(&[0, 1, 2]).unwrap());
    rig.assert_nothing_claimed();
    assert!(submit().unwrap().wait().succeeded());
}

#[test]
fn members_that_conflict_with_each_other_are_refused() {
    let rig = Rig::new(8);
    let again = rig.transfer(&[7], &[1]);
    let RejectedSet { guards, index, cause, other } =
        rig.manager.submit_all(three(&rig, 0).chain([(again, 9)])).unwrap_err();
    assert_eq!((guards, index, other), (vec![0, 1, 2, 9], 3, Some(1)));
    assert!(cause.is_conflict());
    let message = RejectedSet { guards: vec![()], index, cause, other }.to_string();
    assert!(message.contains("transfer 3 of the set conflicts with transfer 1"), "{message}");
    assert_eq!(rig.engine.ended(), 0);
    rig.assert_nothing_claimed();
}

#[test]
fn a_member_that_fails_does_not_affect_the_others() {
    let rig = Rig::new(8);
    rig.engine.hold();
    rig.engine.fail_next(Fault::Engine);
    let set = submit(&rig, three(&rig, 0));
    let reads = rig.back(&[4], &[4]).after(&set.ticket());
    let dependent = rig.manager.submit(reads, ()).unwrap();
    let ends = rig.back(&[1], &[1]).after_end(&set.ticket());
    let follower = rig.manager.submit(ends, ()).unwrap();
    let id = set.ticket().id();
    rig.engine.release_all();
    let outcome = set.wait();
    let (failed, error) = outcome.first_error().unwrap();
    assert!(matches!(error, TransferError::Engine { .. }), "{error:?}");
    assert!(!outcome.succeeded());
    let failures = outcome.outcomes.iter().filter(|outcome| outcome.result.is_err()).count();
    assert_eq!(failures, 1, "{outcome:?}");
    assert_eq!(failed, 0);
    assert_eq!(guards(outcome), [0, 1, 2]);
    let error = end_of(dependent).result.unwrap_err();
    assert!(
        matches!(error, TransferError::PredecessorFailed { predecessor } if predecessor == id),
        "{error:?}"
    );
    end_of(follower).result.unwrap();
}

#[test]
fn a_set_runs_after_a_set() {
    let rig = Rig::new(8);
    rig.engine.hold();
    let first = submit(&rig, three(&rig, 0));
    // It reads the blocks that the first set writes. There is no conflict, because the ticket
    // covers every member.
    let back = |block| rig.back(&[block], &[block]);
    let refused = rig.manager.submit_all((0..3).map(|block| (back(block), ()))).unwrap_err();
    assert!(refused.cause.is_conflict() && refused.other.is_none());
    let after = (0..3).map(|block| (back(block).after(&first.ticket()), block));
    let second = submit(&rig, after);
    let third =
        (0..3).map(|block| (rig.transfer(&[block], &[block]).after(&second.ticket()), block));
    let third = submit(&rig, third);
    rig.engine.release(2);
    assert!(!first.has_ended() && !second.has_ended());
    rig.engine.release_all();
    for set in [third, first, second] {
        let outcome = set.wait();
        assert!(outcome.succeeded(), "{outcome:?}");
        assert_eq!(guards(outcome), [0, 1, 2]);
    }
    rig.assert_nothing_claimed();
}

#[test]
fn a_dropped_set_continues() {
    let rig = Rig::new(8);
    rig.engine.hold();
    let guard = Arc::new(());
    let transfers = (0..3).map(|block| (rig.transfer(&[block], &[block]), Arc::clone(&guard)));
    let set = submit(&rig, transfers);
    let next = rig.manager.submit(rig.back(&[0], &[5]).after(&set.ticket()), ()).unwrap();
    drop(set);
    assert_eq!(Arc::strong_count(&guard), 4, "the transfers own the guards");
    rig.engine.release_all();
    end_of(next).result.unwrap();
    assert_eq!(Arc::strong_count(&guard), 1);
    rig.engine.wait_until_idle();
    rig.assert_nothing_claimed();
}

#[test]
fn a_set_is_a_future() {
    let rig = Rig::new(8);
    rig.engine.hold();
    let mut future = submit(&rig, three(&rig, 0)).into_future();
    let mut context = Context::from_waker(Waker::noop());
    rig.engine.release(1);
    assert!(Pin::new(&mut future).poll(&mut context).is_pending());
    rig.engine.release_all();
    rig.engine.wait_until_idle();
    let Poll::Ready(outcome) = Pin::new(&mut future).poll(&mut context) else {
        panic!("still pending");
    };
    assert_eq!(guards(outcome), [0, 1, 2]);
    assert!(Pin::new(&mut future).poll(&mut context).is_pending(), "ready once");
}

#[test]
fn members_report_the_state_of_their_layers() {
    let rig = Rig::new(8);
    let transfers = [rig.transfer(&[0], &[0]).layer_by_layer(), rig.transfer(&[1], &[1])];
    let set = submit(&rig, transfers.map(|transfer| (transfer, ())));
    let layers = set.layers(0).unwrap();
    assert!(set.layers(1).is_none() && set.layers(2).is_none());
    assert!(set.wait().succeeded());
    assert_eq!(layers.state(3), Ok(LayerState::Done));
}

/// Real engines, with waits on several threads at once.
#[test]
fn sets_are_waited_for_from_many_threads() {
    let manager = TransferManager::with_default_engines().unwrap();
    std::thread::scope(|scope| {
        for _ in 0..4 {
            scope.spawn(|| {
                let end = |kind| endpoint(config(8), kind);
                let (from, to) = (end(CONTIGUOUS), end(OUTER_FIRST));
                for _ in 0..50 {
                    let transfer =
                        |block: u32| (Transfer::new(&from, &to).blocks(&[block], &[block]), block);
                    let set = manager.submit_all((0..4).map(transfer)).unwrap();
                    let ticket = set.ticket();
                    let outcome = set.wait();
                    assert!(ticket.has_ended() && outcome.succeeded());
                }
            });
        }
    });
}

#[test]
fn a_child_gets_an_error_from_its_parents_set() {
    in_child("sets::a_child_gets_an_error_from_its_parents_set", || {
        let host = || Arc::new(HostEngine::new(HostEngineOptions::default()).unwrap());
        let manager = TransferManager::new([host() as _]);
        let [from, to] = [CONTIGUOUS, OUTER_FIRST].map(|kind| endpoint(config(8), kind));
        let gate = from.hold_for_read(&[7]).unwrap();
        let submit = || {
            let transfer = |block: u32| {
                let transfer = Transfer::new(&from, &to).blocks(&[block], &[block]);
                (transfer.after(&gate.ticket()), block)
            };
            Some(manager.submit_all((0..2).map(transfer)))
        };
        let mut set = submit().map(Result::unwrap);
        in_fork(|| {
            let rejected = submit().unwrap().unwrap_err();
            assert_eq!((rejected.guards, rejected.index), (vec![0, 1], 0));
            assert!(matches!(rejected.cause, TransferError::Forked(_)));
            let set = set.take().unwrap();
            assert!(set.has_ended() && set.ticket().has_ended());
            check_lost(set.wait());
        });
        in_fork(|| {
            let mut future = set.take().unwrap().into_future();
            let mut context = Context::from_waker(Waker::noop());
            let Poll::Ready(outcome) = Pin::new(&mut future).poll(&mut context) else {
                panic!("pending");
            };
            check_lost(outcome);
        });
        drop(gate);
        assert!(set.unwrap().wait().succeeded());
    });
}

fn check_lost(outcome: SetOutcome<u32>) {
    let lost = |error: &TransferError| matches!(error, TransferError::LostByFork);
    assert!(outcome.outcomes.iter().all(|it| it.result.as_ref().is_err_and(lost)));
    assert_eq!(guards(outcome), [0, 1]);
}

#[test]
fn groups_of_the_parent_refuse_to_work_in_a_child() {
    in_child("sets::groups_of_the_parent_refuse_to_work_in_a_child", || {
        let end = |kind| {
            let heap = terrane_testkit::memory::HeapAllocator::system();
            let builder = terrane_layout::LayoutBuilder::new(config(8)).kind(kind).allocate(&heap);
            builder.unregistered().build().unwrap()
        };
        let mut groups = Some(Endpoint::of_groups([CONTIGUOUS, OUTER_FIRST].map(end)).unwrap());
        in_fork(|| {
            let groups = groups.take().unwrap();
            for group in &groups {
                let error = group.hold_for_write(&[0]).unwrap_err();
                assert!(matches!(error, TransferError::Forked(_)), "{error:?}");
            }
        });
        groups.unwrap().iter().for_each(assert_unclaimed);
    });
}
