//! The rules of [`CopyEngine`].

mod cancels;
mod cases;
mod check;
mod heads;
mod layers;
mod orders;

pub use cancels::the_outcome_of_a_cancelled_transfer_is_true;
pub use check::{check_heads, check_transfer, end_of, ordered};
pub use heads::relayouts_are_exact_or_declined;
pub use layers::{
    every_layer_of_a_failed_transfer_ends, layers_are_complete_when_the_engine_reports_them,
};
pub use orders::a_transfer_waits_for_its_device_order;

use std::any::Any;
use std::ops::Range;
use std::sync::Arc;
use std::thread;
use std::time::Instant;

use terrane_core::{Alignment, StorageKind};
use terrane_layout::{LayoutConfig, LayoutKind};
use terrane_transfer::{
    CopyEngine, Declined, DeviceOrder, Durability, Endpoint, Planner, Transfer, TransferError,
    TransferManager, TransferOptions,
};

use crate::model::Image;
use crate::pattern::{InProcess, PieceAccess};
use crate::random::Seeded;
use cases::{
    for_all_pairs, odd_config, random_blocks, random_config, random_number, random_range, two_ends,
};
use check::TIMEOUT;

/// Describes an engine to its suite.
pub trait EngineFixture {
    /// A new engine.
    fn engine(&self) -> Arc<dyn CopyEngine>;

    /// The kinds of ends that it copies between, with names that the fixture chooses.
    fn ends(&self) -> &[&'static str];

    /// A new endpoint of such a kind.
    fn endpoint(&self, end: &str, config: LayoutConfig, kind: LayoutKind) -> Endpoint;

    /// Whether it copies from one kind to the other.
    fn serves(&self, source: &str, destination: &str) -> bool {
        let _ = (source, destination);
        true
    }

    /// An endpoint that it can neither read nor write, because of its kind or because its memory is
    /// not registered. `None` states that it copies between all
    /// kinds, so that [`unsupported_kinds_are_declined`] checks nothing.
    fn unserved(&self, config: LayoutConfig) -> Option<Endpoint>;

    /// A device order that is not satisfied until the value beside it drops. `None` states that it
    /// has no device, or one that cannot be blocked, so that
    /// [`a_transfer_waits_for_its_device_order`] checks nothing.
    fn unreached(&self) -> Option<(DeviceOrder, Box<dyn Any>)>;

    /// The least number of transfers that [`relayouts_are_exact_or_declined`] must find exact, of the
    /// twelve for each pair in the complete suite. 0 states that the engine may decline all of them.
    fn least_relayouts(&self) -> usize;

    /// Accesses the bytes of its ends.
    fn access(&self) -> &dyn PieceAccess {
        &InProcess
    }
}

/// Checks all rules.
pub fn check_copy_engine(fixture: &impl EngineFixture) {
    bytes_are_exact_and_neighbours_untouched(fixture);
    random_transfers_match_the_model(fixture, 0x434F_5059, 40);
    a_transfer_of_no_blocks_succeeds(fixture);
    a_transfer_waits_for_its_device_order(fixture);
    a_quote_changes_nothing(fixture);
    reports_match_the_copy(fixture);
    unsupported_kinds_are_declined(fixture);
    many_transfers_in_flight_all_succeed(fixture);
    a_deadline_in_the_past_ends_the_transfer(fixture);
    the_outcome_of_a_cancelled_transfer_is_true(fixture);
    durability_is_granted_or_declined(fixture);
    let relayouts = relayouts_are_exact_or_declined(fixture, 0x4845_4144, 12);
    let least = fixture.least_relayouts();
    assert!(relayouts >= least, "{relayouts} relayouts were exact, and the fixture states {least}");
    layers_are_complete_when_the_engine_reports_them(fixture);
    every_layer_of_a_failed_transfer_ends(fixture);
    dropping_the_engine_ends_all_transfers(fixture);
    a_waiting_transfer_keeps_its_engine_alive(fixture);
}

/// Between all kinds of ends and all kinds of layouts, the requested bytes arrive and no other byte
/// changes. Other blocks, other layers, the padding and the source are unchanged.
pub fn bytes_are_exact_and_neighbours_untouched(fixture: &impl EngineFixture) {
    let manager = TransferManager::new([fixture.engine()]);
    let cases: [(&[u32], &[u32], Range<u32>); 4] = [
        (&[0, 1, 2, 3, 4], &[0, 1, 2, 3, 4], 0..3),
        (&[4, 0, 2], &[1, 5, 3], 0..3),
        (&[3, 3], &[6, 0], 0..3),
        (&[1, 2, 0], &[2, 3, 6], 1..2),
    ];
    for_all_pairs(fixture, |source, destination| {
        for source_kind in LayoutKind::ALL {
            for destination_kind in LayoutKind::ALL {
                let from = fixture.endpoint(source, odd_config(5, 1), source_kind);
                let to = fixture.endpoint(destination, odd_config(7, 64), destination_kind);
                Image::scribble(&from, fixture.access(), 1);
                Image::scribble(&to, fixture.access(), 2);
                for (read, written, layers) in &cases {
                    check_transfer(
                        &manager,
                        fixture.access(),
                        (&from, read),
                        (&to, written),
                        layers.clone(),
                    );
                }
            }
        }
    });
}

/// For any shapes and blocks, the bytes are those of the model.
pub fn random_transfers_match_the_model(fixture: &impl EngineFixture, seed: u64, cases: usize) {
    let manager = TransferManager::new([fixture.engine()]);
    let mut random = Seeded::new(seed);
    for_all_pairs(fixture, |source, destination| {
        for _ in 0..cases {
            let shape = random_config(&mut random);
            let mut end = |name: &str| {
                let blocks = u32::try_from(1 + random.below(12)).expect("small");
                let alignment = Alignment::new(1 << random.below(11)).expect("a power of two");
                let config = shape.with_num_blocks(blocks).expect("a valid config");
                let config = config.with_block_alignment(alignment).expect("a valid config");
                let endpoint = fixture.endpoint(name, config, LayoutKind::ALL[random.below(3)]);
                Image::scribble(&endpoint, fixture.access(), random.next_u64());
                endpoint
            };
            let (from, to) = (end(source), end(destination));
            let (read, written) = random_blocks(&mut random, &from, &to);
            let layers = random_range(&mut random, shape.num_layers());
            check_transfer(&manager, fixture.access(), (&from, &read), (&to, &written), layers);
        }
    });
}

/// A transfer of no blocks succeeds and changes nothing.
pub fn a_transfer_of_no_blocks_succeeds(fixture: &impl EngineFixture) {
    let manager = TransferManager::new([fixture.engine()]);
    for_all_pairs(fixture, |source, destination| {
        let [from, to] = two_ends(fixture, source, destination);
        let report = check_transfer(&manager, fixture.access(), (&from, &[]), (&to, &[]), 0..3);
        assert!(report.explanation.bytes.is_zero(), "{report}");
    });
}

/// A quote changes no byte, and a second quote has the same path.
pub fn a_quote_changes_nothing(fixture: &impl EngineFixture) {
    let engine = fixture.engine();
    for_all_pairs(fixture, |source, destination| {
        let [from, to] = two_ends(fixture, source, destination);
        let before = [&from, &to].map(|end| Image::of(end, fixture.access()));
        let transfer = ordered(Transfer::new(&from, &to), &from, &to).blocks(&[0, 1], &[3, 2]);
        let plan = Planner::new().plan(&transfer).expect("a valid transfer");
        let mut options = TransferOptions::default();
        if from.kind().is_device() || to.kind().is_device() {
            options.device_order = Some(DeviceOrder::AlreadySynchronised);
        }
        let quote = || engine.quote(&plan, &options).expect("the fixture states support for this");
        assert_eq!(quote().path(), quote().path(), "the same plan was quoted with two paths");
        drop(plan);
        for (end, before) in [&from, &to].into_iter().zip(&before) {
            Image::of(end, fixture.access()).assert_equals(before, "after a quote");
        }
    });
}

/// The report names the engine and the quoted path, and counts all bytes.
pub fn reports_match_the_copy(fixture: &impl EngineFixture) {
    let engine = fixture.engine();
    let name = engine.name();
    let manager = TransferManager::new([engine]);
    for_all_pairs(fixture, |source, destination| {
        let [from, to] = two_ends(fixture, source, destination);
        let transfer = ordered(Transfer::new(&from, &to), &from, &to).blocks(&[0, 1], &[3, 2]);
        let explained = manager.explain(&transfer).expect("an explanation");
        let begun = Instant::now();
        let completion = manager.submit(transfer, ()).expect("it is accepted");
        while !completion.has_ended() && begun.elapsed() < TIMEOUT {
            thread::yield_now();
        }
        let copied = completion.copied();
        let report = end_of(completion).result.expect("it ends well");
        let most = begun.elapsed();
        assert_eq!(report.explanation.engine, name);
        assert_eq!(report.explanation, explained, "the copy differs from the explanation");
        assert_eq!(copied, explained.bytes, "the final progress is not all bytes");
        assert!(report.queued + report.copied <= most, "{report}; the most is {most:?}");
        assert!(!report.explanation.reason().is_empty(), "{} has no reason", explained.path());
    });
}

/// Unsupported kinds, and memory that is not registered, are declined without an attempt to copy.
pub fn unsupported_kinds_are_declined(fixture: &impl EngineFixture) {
    let Some(foreign) = fixture.unserved(odd_config(4, 1)) else { return };
    let engine = fixture.engine();
    let options = |a: &Endpoint, b: &Endpoint| {
        let mut options = TransferOptions::default();
        if a.kind().is_device() || b.kind().is_device() {
            options.device_order = Some(DeviceOrder::AlreadySynchronised);
        }
        options
    };
    for &end in fixture.ends() {
        let own = fixture.endpoint(end, odd_config(4, 1), LayoutKind::FullyContiguous);
        for (from, to) in [(&own, &foreign), (&foreign, &own)] {
            let transfer = Transfer::new(from, to).blocks(&[0], &[0]);
            let plan = Planner::new().plan(&transfer).expect("a valid transfer");
            let quote = engine.quote(&plan, &options(from, to));
            assert!(
                matches!(quote, Err(Declined::Kinds | Declined::NotRegistered(_))),
                "from {} to {}: {quote:?}",
                from.kind(),
                to.kind()
            );
        }
    }
}

/// Hundreds of transfers that several threads submit at once all succeed.
pub fn many_transfers_in_flight_all_succeed(fixture: &impl EngineFixture) {
    const THREADS: u32 = 4;
    const EACH: u32 = 64;
    let manager = TransferManager::new([fixture.engine()]);
    for_all_pairs(fixture, |source, destination| {
        let config = odd_config(THREADS * EACH, 1);
        let from = fixture.endpoint(source, config, LayoutKind::FullyContiguous);
        let to = fixture.endpoint(destination, config, LayoutKind::ALL[2]);
        let image = Image::scribble(&from, fixture.access(), 5);
        let mut expected = Image::of(&to, fixture.access());
        thread::scope(|scope| {
            for first in (0..THREADS).map(|thread| thread * EACH) {
                let (manager, from, to) = (&manager, &from, &to);
                scope.spawn(move || {
                    let submit = |block: u32| {
                        let there = THREADS * EACH - 1 - block;
                        let transfer = Transfer::new(from, to).blocks(&[block], &[there]);
                        manager.submit(ordered(transfer, from, to), block).expect("accepted")
                    };
                    let all: Vec<_> = (first..first + EACH).map(submit).collect();
                    for (block, completion) in (first..).zip(all) {
                        let outcome = end_of(completion);
                        assert_eq!(outcome.guard, block, "the guards were exchanged");
                        outcome.result.expect("it ends well");
                    }
                });
            }
        });
        let read: Vec<_> = (0..THREADS * EACH).collect();
        let written: Vec<_> = read.iter().rev().copied().collect();
        expected.transfer(&image, &read, &written, 0..config.num_layers());
        Image::of(&to, fixture.access()).assert_equals(&expected, "many in flight");
    });
}

/// A transfer whose deadline has passed ends with that error. It does not hang, and does not start:
/// its destination is unchanged and can be read.
pub fn a_deadline_in_the_past_ends_the_transfer(fixture: &impl EngineFixture) {
    let manager = TransferManager::new([fixture.engine()]);
    for_all_pairs(fixture, |source, destination| {
        let [from, to] = two_ends(fixture, source, destination);
        let before = Image::of(&to, fixture.access());
        let transfer = ordered(Transfer::new(&from, &to), &from, &to).blocks(&[0, 1], &[3, 2]);
        let completion =
            manager.submit(transfer.deadline(Instant::now()), ()).expect("it is accepted");
        match end_of(completion).result {
            Err(TransferError::DeadlineExceeded { .. }) => {}
            other => panic!(
                "the deadline had passed before the transfer began, and it ended with {other:?}"
            ),
        }
        let reading = to.hold_for_read(&[2, 3]);
        let reading = reading.expect("a transfer that was late before its start did not start");
        Image::of(&to, fixture.access()).assert_equals(&before, "after a deadline in the past");
        drop(reading);
    });
}

/// For written files, durability is granted, and the bytes are correct; or the quote declines it.
pub fn durability_is_granted_or_declined(fixture: &impl EngineFixture) {
    let manager = TransferManager::new([fixture.engine()]);
    for_all_pairs(fixture, |source, destination| {
        let [from, to] = two_ends(fixture, source, destination);
        if to.kind() != StorageKind::Disk {
            return;
        }
        for durability in [Durability::Data, Durability::Full] {
            let mut expected = Image::of(&to, fixture.access());
            expected.transfer(&Image::of(&from, fixture.access()), &[0, 1], &[3, 2], 0..3);
            let transfer = Transfer::new(&from, &to).blocks(&[0, 1], &[3, 2]);
            let transfer = ordered(transfer, &from, &to).durability(durability);
            match manager.submit(transfer, ()) {
                Ok(completion) => {
                    end_of(completion).result.expect("it ends well");
                    let found = Image::of(&to, fixture.access());
                    found.assert_equals(&expected, "durable");
                }
                Err(rejected) => match rejected.cause {
                    TransferError::NoEngine { declined, .. } => {
                        assert!(declined.iter().all(|(_, why)| *why == Declined::Durability));
                    }
                    other => panic!("durability was refused with {other}"),
                },
            }
        }
    });
}

/// When the engine drops, all transfers in flight end: with the right bytes, or with an error. No
/// transfer hangs.
pub fn dropping_the_engine_ends_all_transfers(fixture: &impl EngineFixture) {
    for_all_pairs(fixture, |source, destination| {
        let config = odd_config(32, 1);
        let from = fixture.endpoint(source, config, LayoutKind::FullyContiguous);
        let to = fixture.endpoint(destination, config, LayoutKind::ALL[1]);
        let image = Image::scribble(&from, fixture.access(), 6);
        let mut expected = Image::of(&to, fixture.access());
        let manager = TransferManager::new([fixture.engine()]);
        let submit = |block: u32| {
            let transfer = Transfer::new(&from, &to).blocks(&[block], &[block]);
            manager.submit(ordered(transfer, &from, &to), ()).expect("it is accepted")
        };
        let all: Vec<_> = (0..32).map(submit).collect();
        drop(manager);
        for (block, completion) in (0..32).zip(all) {
            match end_of(completion).result {
                Ok(_) => expected.transfer(&image, &[block], &[block], 0..config.num_layers()),
                // The bytes of a failed copy do not matter.
                Err(_) => return,
            }
        }
        Image::of(&to, fixture.access()).assert_equals(&expected, "after the engine dropped");
    });
}

/// A transfer that waits for another one keeps its engine alive. It succeeds after the manager and
/// every other reference to the engine were dropped, and so do its successors. The last reference
/// then drops on the engine's own thread, which must not wait for itself.
pub fn a_waiting_transfer_keeps_its_engine_alive(fixture: &impl EngineFixture) {
    for_all_pairs(fixture, |source, destination| {
        let [from, to] = two_ends(fixture, source, destination);
        let manager = TransferManager::new([fixture.engine()]);
        let hold = from.hold_for_write(&[0]).expect("nothing is in flight");
        let transfer =
            |block: u32| ordered(Transfer::new(&from, &to), &from, &to).blocks(&[block], &[block]);
        let first = manager.submit(transfer(0).after(&hold.ticket()), ()).expect("it waits");
        let second = manager.submit(transfer(1).after(&first.ticket()), ()).expect("it waits");
        let third = manager.submit(transfer(2).after(&second.ticket()), ()).expect("it waits");
        drop(manager);
        assert!(!first.has_ended(), "the transfer did not wait for the hold");
        drop(hold);
        for completion in [first, second, third] {
            end_of(completion).result.expect("it ends well");
        }
    });
}
