//! The rules of cancelled transfers.

use terrane_transfer::{Transfer, TransferError, TransferManager};

use super::{EngineFixture, check_transfer, end_of, for_all_pairs, ordered, two_ends};
use crate::model::Image;

/// The outcome of a cancelled transfer matches the destination, whether or not the engine stops it.
/// The blocks can be used again.
pub fn the_outcome_of_a_cancelled_transfer_is_true(fixture: &impl EngineFixture) {
    const ROUNDS: usize = 8;
    let manager = TransferManager::new([fixture.engine()]);
    for_all_pairs(fixture, |source, destination| {
        let [from, to] = two_ends(fixture, source, destination);
        for round in 0..ROUNDS {
            let before = Image::of(&to, fixture.access());
            let mut copied = before.clone();
            copied.transfer(&Image::of(&from, fixture.access()), &[0, 1], &[3, 2], 0..3);
            let transfer = ordered(Transfer::new(&from, &to), &from, &to).blocks(&[0, 1], &[3, 2]);
            let completion = manager.submit(transfer, ()).expect("it is accepted");
            // Cancelled at once, or after a few polls.
            let _polls = (0..round).filter(|_| completion.has_ended()).count();
            completion.cancel();
            let result = end_of(completion).result;
            let reading = to.hold_for_read(&[2, 3]);
            let found = || Image::of(&to, fixture.access());
            match result {
                Ok(_) => found().assert_equals(&copied, "after a cancel that came too late"),
                Err(TransferError::Cancelled { started: false, .. }) => {
                    found().assert_equals(&before, "after a cancel before the start");
                }
                Err(TransferError::Cancelled { started: true, .. }) => {
                    assert!(
                        matches!(&reading, Err(TransferError::Incomplete { blocks }) if blocks == &[2, 3]),
                        "a destination that was partly written: {reading:?}"
                    );
                    // A whole transfer makes the destination complete again.
                    let whole = ordered(Transfer::new(&from, &to), &from, &to);
                    let whole = manager.submit(whole.blocks(&[0, 1], &[3, 2]), ());
                    end_of(whole.expect("it is accepted")).result.expect("it succeeds");
                    continue;
                }
                Err(other) => panic!("a cancelled transfer ended with {other}"),
            }
            drop(reading.expect("the destination is complete"));
        }
        check_transfer(&manager, fixture.access(), (&from, &[0, 1]), (&to, &[3, 2]), 0..3);
    });
}
