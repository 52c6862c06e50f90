//! Compares one transfer with the model.

use std::ops::Range;
use std::thread;
use std::time::{Duration, Instant};

use terrane_transfer::{
    Completion, Declined, DeviceOrder, Endpoint, Outcome, Report, Transfer, TransferError,
    TransferManager,
};

use crate::model::{Image, origin};
use crate::pattern::PieceAccess;

/// The time that a rule waits for a transfer that should have ended. It is long, because a disk
/// that syncs during writes is slow; only a hang takes all of it.
pub(super) const TIMEOUT: Duration = Duration::from_secs(240);

/// Waits for the end of a transfer, and panics if none comes.
#[track_caller]
pub fn end_of<G>(completion: Completion<G>) -> Outcome<G> {
    let begun = Instant::now();
    while !completion.has_ended() {
        let waited = begun.elapsed();
        assert!(waited < TIMEOUT, "{completion:?} has not ended in {waited:?}");
        thread::sleep(Duration::from_micros(50));
    }
    completion.wait()
}

/// Adds the order that a transfer with a device needs. Its stream has no work.
pub fn ordered(transfer: Transfer, source: &Endpoint, destination: &Endpoint) -> Transfer {
    if source.kind().is_device() || destination.kind().is_device() {
        transfer.device_order(DeviceOrder::AlreadySynchronised)
    } else {
        transfer
    }
}

/// Runs one transfer and compares every byte of both ends with the model.
#[track_caller]
pub fn check_transfer(
    manager: &TransferManager,
    access: &dyn PieceAccess,
    (source, from): (&Endpoint, &[u32]),
    (destination, to): (&Endpoint, &[u32]),
    layers: Range<u32>,
) -> Report {
    check_heads(manager, access, (source, from), (destination, to), layers, None)
        .unwrap_or_else(|error| panic!("refused: {error}"))
}

/// Runs one transfer, of all heads or of some at each end, and compares every byte of both ends
/// with the model.
///
/// # Errors
///
/// The refusal, if every engine that supports the kinds declined
/// [broken-up pieces](Declined::BrokenPieces), which engines may. Any other refusal is a panic.
#[track_caller]
pub fn check_heads(
    manager: &TransferManager,
    access: &dyn PieceAccess,
    (source, from): (&Endpoint, &[u32]),
    (destination, to): (&Endpoint, &[u32]),
    layers: Range<u32>,
    heads: Option<[Range<u32>; 2]>,
) -> Result<Report, TransferError> {
    let before = Image::of(source, access);
    let mut expected = Image::of(destination, access);
    let transfer =
        ordered(Transfer::new(source, destination), source, destination).blocks(from, to);
    let transfer = transfer.layers(layers.clone());
    let submitted = match heads.clone() {
        None => {
            expected.transfer(&before, from, to, layers.clone());
            manager.submit(transfer, "guard")
        }
        Some([read, written]) => {
            let heads = [read.clone(), written.clone()];
            expected.transfer_heads(&before, from, to, layers.clone(), heads);
            manager.submit(transfer.heads(read, written), "guard")
        }
    };
    let completion = match submitted {
        Ok(completion) => completion,
        Err(rejected) if breaks_pieces(&rejected.cause) => return Err(rejected.cause),
        Err(rejected) => panic!("refused: {rejected}"),
    };
    let outcome = end_of(completion);
    assert_eq!(outcome.guard, "guard", "the guard of another transfer was returned");
    let report = outcome.result.unwrap_or_else(|error| panic!("{}", with_causes(&error)));
    let origins = [source, destination].map(origin);
    let orders = origins.map(|(config, _)| config.token_order());
    let kinds = origins.map(|(_, kind)| kind);
    let what = format!(
        "{} in {} to {} in {}, {from:?} to {to:?}, layers {layers:?}, heads {heads:?}, {} to {}",
        kinds[0],
        source.kind(),
        kinds[1],
        destination.kind(),
        orders[0],
        orders[1],
    );
    Image::of(destination, access).assert_equals(&expected, &format!("destination, {what}"));
    if !std::ptr::eq(source.layout(), destination.layout()) {
        Image::of(source, access).assert_equals(&before, &format!("source, {what}"));
    }
    Ok(report)
}

/// Whether a transfer was refused because no engine copies broken-up pieces.
fn breaks_pieces(refusal: &TransferError) -> bool {
    match refusal {
        TransferError::NoEngine { declined, .. } => {
            let mut reasons =
                declined.iter().map(|(_, why)| why).filter(|&why| *why != Declined::Kinds);
            reasons.next().is_some_and(|first| {
                *first == Declined::BrokenPieces && reasons.all(|why| why == first)
            })
        }
        _ => false,
    }
}

/// An error's message with those of all its causes.
fn with_causes(error: &dyn std::error::Error) -> String {
    let causes = std::iter::successors(Some(error), |error| error.source());
    causes.map(ToString::to_string).collect::<Vec<_>>().join(": ")
}
