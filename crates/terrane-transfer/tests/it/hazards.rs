//! The transfers in flight on a block determine which other transfers may use it.

use std::sync::Barrier;
use std::thread;

use proptest::prelude::*;
use terrane_core::{Allocate, Region, RegionRequest};
use terrane_layout::LayoutBuilder;
use terrane_testkit::conformance::copy_engine::end_of;
use terrane_testkit::engine::{Fault, SimulatedEngineOptions};
use terrane_testkit::memory::HeapAllocator;
use terrane_testkit::pattern::Pattern;
use terrane_transfer::{
    Access, BlockConflict, Completion, Endpoint, Hold, Side, Transfer, TransferError,
};

use crate::support::*;

/// No submitted transfer ends before it is released.
fn held() -> Rig {
    let rig = Rig::new(8);
    rig.engine.hold();
    rig
}

#[track_caller]
fn submit(rig: &Rig, transfer: Transfer) -> Completion<()> {
    rig.manager.submit(transfer, ()).unwrap_or_else(|rejected| panic!("refused: {rejected}"))
}

#[track_caller]
fn conflicts(error: TransferError) -> Vec<BlockConflict> {
    let TransferError::Conflict { conflicts } = error else { panic!("{error:?}") };
    conflicts
}

#[test]
fn readers_share_a_block_and_a_writer_does_not() {
    let rig = held();
    let first = submit(&rig, rig.transfer(&[3, 4], &[0, 1]));
    let second = submit(&rig, rig.transfer(&[4, 3], &[2, 3]));
    let error = rig.refused(rig.back(&[7, 6], &[4, 5]));
    assert_says(
        &error,
        &["destination block 4 is in use (being read) by transfer or hold", "their tickets"],
    );
    let conflict = |holder: &Completion<()>| BlockConflict {
        side: Side::Destination,
        block: 4,
        wanted: Access::Write,
        held: Access::Read,
        holder: holder.ticket().id(),
    };
    assert_eq!(conflicts(error), [conflict(&first), conflict(&second)]);
    rig.engine.release_all();
    end_of(first).result.unwrap();
    end_of(second).result.unwrap();
    run(&rig.manager, rig.back(&[7, 6], &[4, 5]));
}

#[test]
fn a_refusal_lists_a_limited_number_of_conflicts() {
    let rig = Rig::new(2_000);
    let all: Vec<u32> = (0..2_000).collect();
    let holds = [(); 2].map(|()| rig.destination.hold_for_read(&all).unwrap());
    let found = conflicts(rig.refused(rig.transfer(&all, &all)));
    assert_eq!(found.len(), 1_000);
    assert!(found.iter().all(|conflict| conflict.holder == holds[0].ticket().id()));
    let source = rig.source.hold_for_write(&all).unwrap();
    let found = conflicts(rig.refused(rig.transfer(&all, &all)));
    let at_source = found.iter().filter(|conflict| conflict.side == Side::Source);
    assert_eq!((found.len(), at_source.count()), (2_000, 1_000));
    drop((holds, source));
    run(&rig.manager, rig.transfer(&all, &all));
}

#[test]
fn a_refusal_lists_the_blocks_of_both_ends_and_claims_none() {
    let rig = held();
    let writing = submit(&rig, rig.transfer(&[0, 1, 2], &[0, 1, 2]));
    // The transfer would read blocks that are being written, and write blocks that are being read.
    let error = rig.refused(rig.back(&[1, 2, 5], &[7, 0, 2]));
    assert_says(
        &error,
        &[
            "source block 1 is in use (being written)",
            "destination block 0 is in use (being read)",
            "after their tickets",
        ],
    );
    let listed: Vec<_> = conflicts(error).iter().map(|c| (c.block, c.wanted, c.held)).collect();
    // Pairs in the order of the destination: 2 to 0, 5 to 2, 1 to 7.
    let expected = [
        (2, Access::Read, Access::Write),
        (1, Access::Read, Access::Write),
        (0, Access::Write, Access::Read),
        (2, Access::Write, Access::Read),
    ];
    assert_eq!(listed, expected);
    // The blocks of the refused transfer that did not conflict are free.
    drop(rig.destination.hold_for_write(&[5]).unwrap());
    drop(rig.source.hold_for_write(&[7]).unwrap());
    rig.engine.release_all();
    end_of(writing).result.unwrap();
    rig.assert_nothing_claimed();
}

#[test]
fn many_conflicts_are_counted_in_the_message() {
    let rig = held();
    let _writing = submit(&rig, rig.transfer(&[0, 1, 2, 3, 4, 5], &[0, 1, 2, 3, 4, 5]));
    let error = rig.refused(rig.transfer(&[0, 1, 2, 3, 4, 5], &[5, 4, 3, 2, 1, 0]));
    assert_says(&error, &["block 0", "block 3", "and 2 more"]);
    rig.engine.release_all();
}

#[test]
fn disjoint_layers_of_a_block_do_not_conflict() {
    let rig = held();
    let low = submit(&rig, rig.transfer(&[0], &[0]).layers(0..2));
    let high = submit(&rig, rig.transfer(&[1], &[0]).layers(2..4));
    let error = rig.refused(rig.transfer(&[2], &[0]).layers(1..3));
    assert_eq!(conflicts(error).len(), 2);
    rig.engine.release_all();
    end_of(low).result.unwrap();
    end_of(high).result.unwrap();
}

#[test]
fn within_one_layout_both_sides_are_claimed() {
    let rig = held();
    let within =
        |from: u32, to: u32| Transfer::new(&rig.source, &rig.source).blocks(&[from], &[to]);
    let first = submit(&rig, within(0, 1));
    assert_eq!(conflicts(rig.refused(within(1, 2))).len(), 1);
    assert_eq!(conflicts(rig.refused(within(2, 0))).len(), 1);
    assert_eq!(conflicts(rig.refused(within(1, 0))).len(), 2);
    let second = submit(&rig, within(0, 2));
    rig.engine.release_all();
    end_of(first).result.unwrap();
    end_of(second).result.unwrap();
    run(&rig.manager, within(1, 0));
}

#[test]
fn a_transfer_after_a_ticket_may_use_its_blocks_and_reads_its_bytes() {
    let rig = held();
    Pattern::new(7).fill(&rig.source).unwrap();
    let there = submit(&rig, rig.transfer(&[0, 1], &[4, 5]));
    let back = submit(&rig, rig.back(&[4, 5], &[2, 3]).after(&there.ticket()));
    // Transitively: after the second is also after the first.
    let again = submit(&rig, rig.transfer(&[2, 3], &[4, 5]).after(&back.ticket()));
    rig.engine.wait_until_idle();
    assert_eq!(rig.engine.queued(), 1, "only the first was submitted to the engine");
    // A transfer that runs only after the first conflicts with the others.
    let error = rig.refused(rig.transfer(&[7], &[4]).after(&there.ticket()));
    let holders: Vec<_> = conflicts(error).iter().map(|c| c.holder).collect();
    assert_eq!(holders, [back.ticket().id(), again.ticket().id()]);
    rig.engine.release_all();
    for completion in [there, back, again] {
        end_of(completion).result.unwrap();
    }
    let found = Pattern::new(7).verify_blocks(&rig.destination, &[4, 5], &[0, 1], 0..4);
    found.unwrap().assert_clean("copied there, back and there again");
}

#[test]
fn after_several_tickets_is_after_all_of_them() {
    let rig = held();
    let all: Vec<_> = (0..4).map(|block| submit(&rig, rig.transfer(&[block], &[block]))).collect();
    let mut collecting = rig.back(&[0, 1, 2, 3], &[4, 5, 6, 7]);
    for one in &all {
        // Naming a ticket twice has no effect.
        collecting = collecting.after(&one.ticket()).after(&one.ticket());
    }
    let last = submit(&rig, collecting);
    for ended in 1..=4 {
        assert!(!last.has_ended());
        rig.engine.release(1);
        while rig.engine.ended() < ended {
            thread::yield_now();
        }
    }
    rig.engine.release(1);
    end_of(last).result.unwrap();
}

#[test]
fn a_ticket_that_has_ended_orders_nothing() {
    let rig = Rig::new(8);
    let done = submit(&rig, rig.transfer(&[0], &[0]));
    let ticket = done.ticket();
    end_of(done).result.unwrap();
    assert!(ticket.has_ended());
    run(&rig.manager, rig.transfer(&[0], &[0]).after(&ticket));
}

#[test]
fn holds_exclude_transfers_until_they_drop() {
    let rig = Rig::new(8);
    let reading = rig.source.hold_for_read(&[0, 1]).unwrap();
    run(&rig.manager, rig.transfer(&[0], &[0]));
    let error = rig.refused(rig.back(&[0], &[1]));
    assert_says(&error, &["by transfer or hold", "or order this transfer after its ticket"]);
    assert_eq!(conflicts(error)[0].holder, reading.ticket().id());
    let sharing = rig.source.hold_for_read(&[1]).unwrap();
    assert!(rig.source.hold_for_write(&[1]).is_err_and(|error| error.is_conflict()));
    drop(reading);
    assert!(rig.refused(rig.back(&[0], &[1])).is_conflict());
    drop(sharing);
    run(&rig.manager, rig.back(&[0], &[1]));

    let writing = rig.source.hold_for_write(&[2]).unwrap();
    assert!(rig.refused(rig.transfer(&[2], &[2])).is_conflict());
    assert!(rig.source.hold_for_read(&[2]).is_err_and(|error| error.is_conflict()));
    let after = submit(&rig, rig.transfer(&[2], &[2]).after(&writing.ticket()));
    assert!(!after.has_ended());
    drop(writing);
    end_of(after).result.unwrap();
}

#[test]
fn a_hold_claims_the_bytes_after_its_endpoint_has_dropped() {
    let request = RegionRequest::new(config(8).total_bytes());
    let region = Region::new(HeapAllocator::system().allocate(&request).unwrap());
    let layout = || {
        let builder = LayoutBuilder::new(config(8)).fully_contiguous().adopt([region.clone()]);
        builder.unregistered().build().unwrap()
    };
    for hold in [Endpoint::hold_for_read, Endpoint::hold_for_write] {
        let end = Endpoint::new(layout()).unwrap();
        let held = hold(&end, &[3]).unwrap();
        drop(end);
        assert!(Endpoint::new(layout()).is_err(), "a transfer could use the held block");
        drop(held);
        drop(Endpoint::new(layout()).unwrap());
    }
}

#[test]
fn blocks_are_free_when_the_outcome_is_available() {
    let rig = Rig::new(8);
    for _ in 0..300 {
        let completion = submit(&rig, rig.transfer(&[0], &[0]));
        let ticket = completion.ticket();
        completion.wait().result.unwrap();
        assert!(ticket.has_ended());
        rig.assert_nothing_claimed();
    }
}

#[test]
fn failed_transfers_free_their_blocks_too() {
    let rig = Rig::new(8);
    for fault in [Fault::ShortCopy { after_runs: 1 }, Fault::Engine, Fault::DropJob] {
        rig.engine.fail_next(fault);
        assert!(end_of(submit(&rig, rig.transfer(&[0, 1], &[2, 3]))).result.is_err());
        rig.assert_nothing_claimed();
    }
}

#[test]
fn transfers_in_opposite_directions_do_not_deadlock() {
    const ROUNDS: u32 = 500;
    let rig = Rig::with_options(8, SimulatedEngineOptions::default());
    let barrier = Barrier::new(4);
    thread::scope(|scope| {
        for number in 0..4_u32 {
            let (rig, barrier) = (&rig, &barrier);
            scope.spawn(move || {
                barrier.wait();
                for _ in 0..ROUNDS {
                    let blocks = [number, number + 4];
                    let transfer = if number % 2 == 0 {
                        rig.transfer(&blocks, &blocks)
                    } else {
                        rig.back(&blocks, &blocks)
                    };
                    end_of(rig.manager.submit(transfer, ()).unwrap()).result.unwrap();
                }
            });
        }
    });
    rig.assert_nothing_claimed();
}

/// A claim of the model: its holder, end, access, blocks and layers.
#[derive(Clone, Debug)]
struct Claimed {
    from: u32,
    to: u32,
    layers: std::ops::Range<u32>,
    forth: bool,
}

impl Claimed {
    fn conflicts_with(&self, other: &Self) -> bool {
        let touches = self.layers.start < other.layers.end && other.layers.start < self.layers.end;
        // Reads at one end, and writes at the other. A conflict needs a common block at one end,
        // and a writer there.
        let same_direction = self.forth == other.forth;
        let common = if same_direction {
            self.to == other.to
        } else {
            self.from == other.to || self.to == other.from
        };
        touches && common
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    #[test]
    fn random_submissions_are_refused_like_in_the_model(
        all in proptest::collection::vec(
            (0..4_u32, 0..4_u32, 0..4_u32, 1..4_u32, any::<bool>()),
            1..24,
        ),
    ) {
        let rig = Rig::new(4);
        rig.engine.hold();
        let mut granted: Vec<Claimed> = Vec::new();
        let mut completions = Vec::new();
        for (from, to, first, count, forth) in all {
            let layers = first..(first + count).min(4);
            let claimed = Claimed { from, to, layers: layers.clone(), forth };
            let expected = granted.iter().filter(|other| claimed.conflicts_with(other)).count();
            let ends = [&rig.source, &rig.destination];
            let [source, destination]: [&Endpoint; 2] = if forth { ends } else { [ends[1], ends[0]] };
            let transfer = Transfer::new(source, destination).blocks(&[from], &[to]);
            match rig.manager.submit(transfer.layers(layers), ()) {
                Ok(completion) => {
                    prop_assert_eq!(expected, 0, "{:?} was accepted", claimed);
                    granted.push(claimed);
                    completions.push(completion);
                }
                Err(rejected) => {
                    let holders: std::collections::BTreeSet<_> =
                        conflicts(rejected.cause).iter().map(|c| c.holder).collect();
                    prop_assert_eq!(holders.len(), expected);
                }
            }
        }
        rig.engine.release_all();
        for completion in completions {
            prop_assert!(end_of(completion).result.is_ok());
        }
        rig.assert_nothing_claimed();
    }
}

#[test]
fn blocks_whose_writer_panicked_are_not_copied() {
    let rig = Rig::new(8);
    let holds = [rig.source.hold_for_write(&[0]).unwrap(), rig.source.hold_for_read(&[1]).unwrap()];
    let submit = |block: u32, hold: &Hold| {
        let transfer = rig.transfer(&[block], &[block]);
        rig.manager.submit(transfer.after(&hold.ticket()), ()).unwrap()
    };
    let (written, read) = (submit(0, &holds[0]), submit(1, &holds[1]));
    let writer = thread::Builder::new().name("writer".to_owned()).spawn(move || {
        let _holds = holds;
        panic!("expected: a writer that panics");
    });
    assert!(writer.unwrap().join().is_err());
    let error = end_of(written).result.unwrap_err();
    assert!(matches!(error, TransferError::PredecessorFailed { .. }), "{error:?}");
    end_of(read).result.unwrap();
    rig.assert_nothing_claimed();
}
