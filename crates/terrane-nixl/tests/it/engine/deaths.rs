//! Peers whose process ends: during a transfer, before a notification, and between two transfers.

use std::error::Error;
use std::num::NonZeroUsize;
use std::thread;
use std::time::{Duration, Instant};

use terrane_core::ByteCount;
use terrane_nixl::{ImportError, NixlEngineOptions, NixlError, NixlStep, RequestError};
use terrane_testkit::conformance::copy_engine::end_of;
use terrane_testkit::model::Image;
use terrane_testkit::pattern::InProcess;
use terrane_testkit::process::is_child;
use terrane_transfer::{Completion, Transfer, TransferError};

use super::peer_process::*;

/// The step at which the peer was lost.
#[track_caller]
fn lost_at(error: &TransferError) -> NixlStep {
    match error.source().and_then(|cause| cause.downcast_ref()) {
        Some(RequestError::PeerLost { step, .. }) => *step,
        other => panic!("{other:?} of {error:?}"),
    }
}

/// The maximum time between the end of a peer's process and the failure of a transfer. It takes
/// milliseconds, but this machine may be busy.
const NOTICED_WITHIN: Duration = Duration::from_secs(60);

/// The number of blocks of a transfer that is interrupted: 16 MiB.
const MANY: u32 = 4096;
const BLOCK: ByteCount = ByteCount::kib(4);
const ALL: ByteCount = ByteCount::kib(4 * MANY);

/// Each block is a request. Some are in flight while others have ended.
fn a_block_each() -> NixlEngineOptions {
    NixlEngineOptions {
        request_bytes: BLOCK,
        requests: const { NonZeroUsize::new(3).unwrap() },
        ..NixlEngineOptions::default()
    }
}

/// A transfer of all blocks after some have been copied. It may have ended by now.
fn begun(ends: &Ends) -> Completion<()> {
    let all: Vec<u32> = (0..MANY).collect();
    let write = Transfer::new(&ends.local, ends.remote.endpoint()).blocks(&all, &all);
    let deadline = Instant::now() + 4 * NOTICED_WITHIN;
    let completion = ends.manager.submit(write.deadline(deadline), ()).unwrap();
    while completion.copied().is_zero() {
        assert!(Instant::now() < deadline, "nothing is ever copied");
        thread::yield_now();
    }
    completion
}

/// Waits until no more requests complete. A stopped peer confirms nothing, so requests in flight
/// stay so until the peer is killed.
fn settle(completion: &Completion<()>) {
    let mut copied = ByteCount::ZERO;
    while copied != completion.copied() {
        copied = completion.copied();
        thread::sleep(Duration::from_millis(200));
    }
}

/// The step at which a transfer failed after its peer's end. It must fail soon, and at a block that
/// was not copied. `None` if the transfer completed before.
#[track_caller]
fn cut_short(completion: Completion<()>, died: Instant) -> Option<NixlStep> {
    while !completion.has_ended() {
        assert!(died.elapsed() < NOTICED_WITHIN, "the death was not noticed");
        thread::sleep(Duration::from_millis(1));
    }
    let copied = completion.copied();
    let Err(error) = end_of(completion).result else {
        assert_eq!(copied, ALL);
        return None;
    };
    assert!(!copied.is_zero() && copied < ALL, "{copied}: {error}");
    // Progress counts the bytes before the first failure.
    let TransferError::Copy { source_block, .. } = &error else { panic!("{error:?}") };
    assert!(u64::from(*source_block) * BLOCK.get() >= copied.get(), "{source_block}, {copied}");
    Some(lost_at(&error))
}

#[test]
fn a_peer_that_dies_in_the_middle_is_an_error() {
    const TEST: &str = "engine::deaths::a_peer_that_dies_in_the_middle_is_an_error";
    over_tcp_with(TEST, MANY, || {
        let mut ends = Ends::with(TEST, MANY, a_block_each());
        let completion = loop {
            let completion = begun(&ends);
            ends.process.stop();
            settle(&completion);
            if completion.copied() < ALL {
                break completion;
            }
            ends.process.resume();
            end_of(completion).result.unwrap();
        };
        ends.process.child.kill().unwrap();
        assert_eq!(cut_short(completion, Instant::now()), Some(NixlStep::Transfer));
        // Its memory is free again once the connection is closed. Further transfers fail as well.
        for block in [0, 2, MANY / 2, MANY - 1] {
            free(&ends.local, block);
            free(ends.remote.endpoint(), block);
        }
        let completion = ends.manager.submit(ends.write(2), ()).unwrap();
        assert_eq!(lost_at(&end_of(completion).result.unwrap_err()), NixlStep::Prepare);
        let error = ends.agent.notify(ends.remote.peer(), b"?").unwrap_err();
        assert!(matches!(error, NixlError::PeerLost { .. }), "{error}");
    });
}

/// As above, with the transport that UCX chooses on this machine. With shared memory, bytes are
/// copied without the peer, and its end is detected only later.
#[test]
fn a_peer_of_this_machine_that_dies_in_the_middle_is_an_error() {
    const TEST: &str = "engine::deaths::a_peer_of_this_machine_that_dies_in_the_middle_is_an_error";
    if is_child(&peer_of(TEST)) {
        return serve(MANY);
    }
    let begun_at = Instant::now();
    loop {
        let mut ends = Ends::with(TEST, MANY, a_block_each());
        let completion = begun(&ends);
        ends.process.child.kill().unwrap();
        ends.process.child.wait().unwrap();
        // At any step: the next request may just be in preparation.
        if cut_short(completion, Instant::now()).is_some() {
            return free(&ends.local, 0);
        }
        assert!(begun_at.elapsed() < TIMEOUT, "never in the middle");
    }
}

/// A transfer without bytes posts no request, so notifying the peer detects the loss.
#[test]
fn a_dead_peer_cannot_be_notified() {
    const TEST: &str = "engine::deaths::a_dead_peer_cannot_be_notified";
    over_tcp(TEST, || {
        let mut ends = Ends::new(TEST);
        let tell = || {
            let nothing = Transfer::new(&ends.local, ends.remote.endpoint());
            end_of(ends.manager.submit(nothing.notify(*b"nothing"), ()).unwrap()).result
        };
        tell().unwrap();
        ends.process.child.kill().unwrap();
        ends.process.child.wait().unwrap();
        // A message counts as sent once the system has it. So the first one may succeed, and the
        // loss is detected afterwards.
        let died = Instant::now();
        let error = loop {
            if let Err(error) = tell() {
                break error;
            }
            assert!(died.elapsed() < NOTICED_WITHIN, "the death was not noticed");
            thread::sleep(Duration::from_millis(1));
        };
        assert_eq!(lost_at(&error), NixlStep::Notify);
        // NIXL no longer knows the peer, so copies fail too.
        let completion = ends.manager.submit(ends.write(0), ()).unwrap();
        assert_eq!(lost_at(&end_of(completion).result.unwrap_err()), NixlStep::Prepare);
    });
}

/// After a restart under the same name it is reached again, whether or not the loss was detected
/// before.
#[test]
fn a_killed_peer_can_return_under_its_name() {
    const TEST: &str = "engine::deaths::a_killed_peer_can_return_under_its_name";
    over_tcp(TEST, || {
        let mut ends = Ends::new(TEST);
        let image = Image::scribble(&ends.local, &InProcess, 3);
        for is_noticed in [true, false] {
            end_of(ends.manager.submit(ends.write(0), ()).unwrap()).result.unwrap();
            ends.process.child.kill().unwrap();
            ends.process.child.wait().unwrap();
            if is_noticed {
                let error = end_of(ends.manager.submit(ends.write(1), ()).unwrap()).result;
                lost_at(&error.unwrap_err());
                free(&ends.local, 1);
            }
            ends.process = PeerProcess::start_as(TEST, ends.remote.agent().as_str());
            let export = ends.process.receive();
            let error = ends.agent.import(&export).unwrap_err();
            assert!(matches!(error, ImportError::PeerChanged { .. }), "{error}");
            let again = ends.agent.refresh(&export).unwrap();
            assert_ne!(again.peer(), ends.remote.peer());
            ends.remote = again;
        }
        end_of(ends.manager.submit(ends.write(2), ()).unwrap()).result.unwrap();
        let mut expected = Image::of(&ends.local, &InProcess);
        let read = Transfer::new(ends.remote.endpoint(), &ends.local).blocks(&[2], &[5]);
        end_of(ends.manager.submit(read, ()).unwrap()).result.unwrap();
        expected.transfer(&image, &[2], &[5], 0..2);
        Image::of(&ends.local, &InProcess).assert_equals(&expected, "written, and read back");
    });
}
