//! Transfers end when the engine's thread panics. Here a subscriber of `tracing` makes it panic.

use std::error::Error;
use std::sync::atomic::{AtomicBool, Ordering};

use terrane_nixl::NixlEngineOptions;
use terrane_testkit::conformance::copy_engine::end_of;
use terrane_testkit::events::AtEvents;
use terrane_testkit::process::in_child;
use terrane_transfer::{Transfer, TransferError, TransferManager};
use tracing::Event;

use super::support::*;

static ARMED: AtomicBool = AtomicBool::new(false);

/// Panics at the first event on an engine's thread once `ARMED` is set.
fn panic_if_armed(event: &Event<'_>) {
    let is_engine = std::thread::current().name() == Some("terrane-nixl");
    if is_engine && ARMED.swap(false, Ordering::Relaxed) {
        panic!("at {:?}", event.metadata());
    }
}

#[test]
fn no_thread_waits_for_an_engine_whose_thread_has_panicked() {
    in_child("engine::panics::no_thread_waits_for_an_engine_whose_thread_has_panicked", || {
        tracing::subscriber::set_global_default(AtEvents::any(panic_if_armed)).unwrap();
        let pair = Pair::new();
        let manager = TransferManager::new([pair.engine(NixlEngineOptions::default())]);
        let (local, remote) =
            (pair.local(config(8), CONTIGUOUS), pair.remote(config(8), CONTIGUOUS));
        let write = |block| Transfer::new(&local, &remote).blocks(&[block], &[block]);
        end_of(manager.submit(write(0), ()).unwrap()).result.unwrap();
        ARMED.store(true, Ordering::Relaxed);
        // The transfer that the thread starts, those after it, and a later submission.
        let submitted: Vec<_> =
            (1..5).map(|block| manager.submit(write(block), block).unwrap()).collect();
        for (completion, block) in submitted.into_iter().zip(1..) {
            let outcome = end_of(completion);
            assert_eq!(outcome.guard, block);
            stopped(&outcome.result.unwrap_err());
        }
        stopped(&end_of(manager.submit(write(5), ()).unwrap()).result.unwrap_err());
        // Nothing was in flight, so all blocks are free.
        drop(local.hold_for_write(&[0, 1, 2, 3, 4, 5]).unwrap());
    });
}

#[track_caller]
fn stopped(error: &TransferError) {
    assert!(matches!(error, TransferError::EngineStopped), "{error:?} {:?}", error.source());
}
