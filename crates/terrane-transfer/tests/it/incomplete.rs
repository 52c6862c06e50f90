//! Order without success, and destinations that failed transfers may have written in part.

use std::task::Poll;
use std::time::Instant;

use terrane_storage::{DiskAllocator, DiskOptions};
use terrane_testkit::conformance::copy_engine::end_of;
use terrane_testkit::engine::Fault;
use terrane_testkit::pattern::Pattern;
use terrane_transfer::{Completion, Transfer, TransferError, TransferManager};

use crate::support::*;

#[track_caller]
fn submit(rig: &Rig, transfer: Transfer) -> Completion<()> {
    rig.manager.submit(transfer, ()).unwrap_or_else(|rejected| panic!("refused: {rejected}"))
}

/// A transfer that fails after some of its runs.
#[track_caller]
fn fail(rig: &Rig, transfer: Transfer) {
    rig.engine.fail_next(Fault::ShortCopy { after_runs: 1 });
    assert!(end_of(submit(rig, transfer)).result.is_err());
}

#[track_caller]
fn incomplete(error: &TransferError) -> Vec<u32> {
    let TransferError::Incomplete { blocks } = error else { panic!("{error:?}") };
    blocks.clone()
}

#[test]
fn after_end_starts_after_a_failure_and_after_does_not() {
    let rig = Rig::new(8);
    Pattern::new(3).fill(&rig.source).unwrap();
    rig.engine.hold();
    rig.engine.fail_next(Fault::ShortCopy { after_runs: 3 });
    let fails = submit(&rig, rig.transfer(&[0, 1], &[4, 5]));
    // They use the same blocks, so the hazards must accept both kinds of order.
    let after_end = submit(&rig, rig.transfer(&[2, 3], &[4, 5]).after_end(&fails.ticket()));
    let after_success = submit(
        &rig,
        rig.back(&[4, 5], &[6, 7]).after(&fails.ticket()).after_end(&after_end.ticket()),
    );
    rig.engine.wait_until_idle();
    assert_eq!(rig.engine.queued(), 1, "both wait for the end");
    rig.engine.release_all();
    assert!(end_of(fails).result.is_err());
    end_of(after_end).result.unwrap();
    let error = end_of(after_success).result.unwrap_err();
    assert!(matches!(error, TransferError::PredecessorFailed { .. }), "{error:?}");
    let found = Pattern::new(3).verify_blocks(&rig.destination, &[4, 5], &[2, 3], 0..4);
    found.unwrap().assert_clean("the destination of the second");
    rig.assert_nothing_claimed();
}

#[test]
fn a_destination_that_failed_half_way_is_not_read_until_it_is_written_again() {
    let rig = Rig::new(8);
    fail(&rig, rig.transfer(&[0, 1], &[2, 3]));
    let error = rig.refused(rig.back(&[1, 3], &[4, 5]));
    assert_eq!(incomplete(&error), [3]);
    assert_says(&error, &["source block 3", "write it again", "allow_incomplete"]);
    assert_eq!(incomplete(&rig.destination.hold_for_read(&[2]).unwrap_err()), [2]);
    // Its source is unchanged.
    run(&rig.manager, rig.transfer(&[0, 1], &[6, 7]));
    run(&rig.manager, rig.back(&[2], &[4]).allow_incomplete());
    // A second failure changes nothing.
    fail(&rig, rig.transfer(&[0], &[2]));
    run(&rig.manager, rig.transfer(&[0], &[2]));
    run(&rig.manager, rig.back(&[2], &[4]));
    assert_eq!(incomplete(&rig.refused(rig.back(&[3], &[4]))), [3]);
    // A write without a transfer counts as well.
    drop(rig.destination.hold_for_write(&[3]).unwrap());
    run(&rig.manager, rig.back(&[3], &[4]));
}

#[test]
fn every_kind_of_failure_leaves_the_destination_incomplete_and_a_refusal_does_not() {
    let rig = Rig::new(8);
    for fault in [Fault::ShortCopy { after_runs: 0 }, Fault::Engine, Fault::DropJob] {
        rig.engine.fail_next(fault);
        let fails = submit(&rig, rig.transfer(&[0], &[0]));
        // It is not started.
        let refused = submit(&rig, rig.transfer(&[1], &[1]).after(&fails.ticket()));
        assert!(end_of(fails).result.is_err());
        assert!(end_of(refused).result.is_err());
        assert_eq!(incomplete(&rig.refused(rig.back(&[0, 1], &[2, 3]))), [0], "{fault:?}");
        run(&rig.manager, rig.transfer(&[0], &[0]));
    }
}

#[test]
fn a_block_is_complete_again_when_all_of_its_layers_have_been_written() {
    let rig = Rig::new(8);
    fail(&rig, rig.transfer(&[0], &[0]).layers(1..4));
    run(&rig.manager, rig.back(&[0], &[1]).layers(0..1));
    run(&rig.manager, rig.transfer(&[0], &[0]).layers(0..3));
    run(&rig.manager, rig.back(&[0], &[1]).layers(0..3));
    assert_eq!(incomplete(&rig.refused(rig.back(&[0], &[1]))), [0]);
    run(&rig.manager, rig.transfer(&[0], &[0]).layers(3..4));
    run(&rig.manager, rig.back(&[0], &[1]));
}

/// A write of one token leaves the other tokens of the block as they are.
#[test]
fn a_block_is_complete_again_when_all_of_its_tokens_have_been_written() {
    let rig = Rig::new(8);
    fail(&rig, rig.transfer(&[0], &[3]));
    run(&rig.manager, rig.transfer(&[1], &[3]).tokens(0..1, 0..1));
    assert_eq!(incomplete(&rig.refused(rig.back(&[3], &[4]))), [3]);
    assert_eq!(incomplete(&rig.refused(rig.back(&[3], &[4]).tokens(0..2, 0..2))), [3]);
    assert_eq!(incomplete(&rig.destination.hold_for_read(&[3]).unwrap_err()), [3]);
    // The written token is read, also by a transfer that waits.
    run(&rig.manager, rig.back(&[3], &[4]).tokens(0..1, 1..2));
    let gate = rig.source.hold_for_read(&[5]).unwrap();
    let reads = rig.back(&[3], &[4]).after(&gate.ticket());
    let all = submit(&rig, reads);
    let reads = rig.back(&[3], &[5]).after_end(&all.ticket()).after(&gate.ticket());
    let one = submit(&rig, reads.tokens(0..1, 0..1));
    drop(gate);
    assert_eq!(incomplete(&end_of(all).result.unwrap_err()), [3]);
    end_of(one).result.unwrap();
    run(&rig.manager, rig.transfer(&[1], &[3]).tokens(1..3, 1..3));
    run(&rig.manager, rig.back(&[3], &[4]));
    drop(rig.destination.hold_for_read(&[3]).unwrap());
    // A write of some tokens that fails leaves only those incomplete.
    fail(&rig, rig.transfer(&[0], &[3]).tokens(2..3, 1..2));
    assert_eq!(incomplete(&rig.refused(rig.back(&[3], &[4]))), [3]);
    run(&rig.manager, rig.back(&[3], &[4]).tokens(2..3, 0..1));
    run(&rig.manager, rig.transfer(&[1], &[3]));
    run(&rig.manager, rig.back(&[3], &[4]));
}

#[test]
fn a_reader_in_a_chain_is_checked_when_its_turn_comes() {
    let rig = Rig::new(8);
    fail(&rig, rig.transfer(&[0, 1], &[0, 1]));
    rig.engine.hold();
    let writes = submit(&rig, rig.transfer(&[0], &[0]));
    let reads = submit(&rig, rig.back(&[0], &[4]).after(&writes.ticket()));
    let reads_more = submit(&rig, rig.back(&[0, 1], &[5, 6]).after_end(&reads.ticket()));
    let does_not_mind =
        submit(&rig, rig.back(&[1], &[7]).after_end(&reads_more.ticket()).allow_incomplete());
    rig.engine.release_all();
    end_of(writes).result.unwrap();
    end_of(reads).result.unwrap();
    let error = end_of(reads_more).result.unwrap_err();
    assert_eq!(incomplete(&error), [1]);
    assert!(error.is_refusal(), "it has not been started");
    end_of(does_not_mind).result.unwrap();
    rig.assert_nothing_claimed();
}

/// The clock is read before the copy starts, so the destination is unchanged.
#[test]
fn a_deadline_that_passes_before_the_copy_leaves_the_destination_as_it_was() {
    let manager = TransferManager::with_default_engines().unwrap();
    let directory = tempfile::tempdir().unwrap();
    let files = DiskAllocator::new(directory.path(), DiskOptions::default()).unwrap();
    let memory = || endpoint(config(8), CONTIGUOUS);
    let file = || endpoint_in(&files, config(8), BLOCK_FIRST);
    for [from, to] in [[memory(), memory()], [memory(), file()], [file(), memory()]] {
        let gate = from.hold_for_write(&[0]).unwrap();
        let transfer = Transfer::new(&from, &to).blocks(&[0], &[3]).after_end(&gate.ticket());
        let late = manager.submit(transfer.deadline(Instant::now()), ()).unwrap();
        drop(gate);
        let error = end_of(late).result.unwrap_err();
        assert!(matches!(error, TransferError::DeadlineExceeded { .. }), "{error:?}");
        drop(to.hold_for_read(&[3]).unwrap());
    }
}

#[test]
fn a_block_whose_writer_panicked_is_incomplete() {
    let rig = Rig::new(8);
    let hold = rig.source.hold_for_write(&[0]).unwrap();
    let after_end = submit(&rig, rig.transfer(&[0], &[0]).after_end(&hold.ticket()));
    let writer = std::thread::Builder::new().name("writer".to_owned()).spawn(move || {
        let _hold = hold;
        panic!("expected: a writer that panics");
    });
    assert!(writer.unwrap().join().is_err());
    assert_eq!(incomplete(&end_of(after_end).result.unwrap_err()), [0]);
    assert_eq!(incomplete(&rig.refused(rig.transfer(&[0], &[0]))), [0]);
}

#[test]
fn a_writer_names_the_blocks_that_it_did_not_write_completely() {
    let rig = Rig::new(8);
    let hold = rig.source.hold_for_write(&[0, 1, 2]).unwrap();
    let after_end = submit(&rig, rig.transfer(&[2], &[2]).after_end(&hold.ticket()));
    let after_success = submit(&rig, rig.transfer(&[2], &[3]).after(&hold.ticket()));
    hold.end_incomplete(&[1]);
    end_of(after_end).result.unwrap();
    end_of(after_success).result.unwrap_err();
    assert_eq!(incomplete(&rig.refused(rig.transfer(&[0, 1, 2], &[0, 1, 2]))), [1]);
    // The next write completes it.
    drop(rig.source.hold_for_write(&[1]).unwrap());
    end_of(submit(&rig, rig.transfer(&[0, 1, 2], &[0, 1, 2]))).result.unwrap();
}

/// The orphaned copy may still write.
#[test]
fn blocks_of_an_orphaned_copy_are_not_used_after_its_transfer_has_ended() {
    type MakeTransfer = fn(&Rig) -> Transfer;
    let cases: [(MakeTransfer, bool); 4] = [
        (|rig| rig.transfer(&[1], &[0]), false),
        (|rig| rig.back(&[0], &[2]).allow_incomplete(), false),
        (|rig| rig.back(&[7], &[0]), false),
        (|rig| rig.transfer(&[0], &[7]), true),
    ];
    for (transfer, is_granted) in cases {
        let rig = Rig::new(8);
        rig.engine.fail_next(Fault::Hang);
        let hangs = submit(&rig, rig.transfer(&[0], &[0]));
        let ticket = hangs.ticket();
        let after_end = submit(&rig, transfer(&rig).after_end(&ticket));
        while rig.engine.hung() == 0 {
            std::thread::yield_now();
        }
        rig.engine.orphan_hung();
        assert!(end_of(hangs).result.is_err());
        let result = end_of(after_end).result;
        if is_granted {
            drop(result.unwrap());
        } else {
            assert!(result.unwrap_err().is_conflict());
            // The same applies to a transfer that is submitted now.
            assert!(rig.refused(transfer(&rig).after_end(&ticket)).is_conflict());
        }
        rig.engine.end_orphaned();
        assert_eq!(incomplete(&rig.refused(rig.back(&[0], &[2]))), [0]);
        run(&rig.manager, rig.transfer(&[1], &[0]));
        run(&rig.manager, rig.back(&[0], &[2]));
    }
}

#[test]
fn an_incomplete_source_is_found_before_a_future_is_polled() {
    let rig = Rig::new(8);
    fail(&rig, rig.transfer(&[0], &[0]));
    let gate = rig.source.hold_for_read(&[5]).unwrap();
    let reads = submit(&rig, rig.back(&[0], &[2]).after_end(&gate.ticket()));
    drop(gate);
    let mut future = Box::pin(reads.into_future());
    let mut context = std::task::Context::from_waker(std::task::Waker::noop());
    let Poll::Ready(outcome) = Future::poll(future.as_mut(), &mut context) else {
        panic!("pending")
    };
    assert_eq!(incomplete(&outcome.result.unwrap_err()), [0]);
}
