//! Peers in child processes that answer, and that hang.

use std::io::Read;
use std::thread;
use std::time::{Duration, Instant};

use terrane_layout::LayoutKind;
use terrane_nixl::{ForgetOutcome, ImportError};
use terrane_testkit::conformance::copy_engine::end_of;
use terrane_testkit::memory::HeapAllocator;
use terrane_testkit::model::Image;
use terrane_testkit::pattern::InProcess;
use terrane_testkit::process::is_child;
use terrane_transfer::{Completion, Endpoint, Outcome, Transfer, TransferError, TransferManager};

use super::peer_process::*;
use super::support::*;

/// Submits transfers of block 1 of `end`, of a peer that does not answer, until one is orphaned
/// with a request in flight. On a busy machine, a deadline may pass before there is one. `wait_for`
/// waits for the outcome.
fn orphan_transfer(
    manager: &TransferManager,
    end: &Endpoint,
    transfer: impl Fn() -> Transfer,
    wait_for: impl Fn(Completion<&'static str>) -> Outcome<&'static str>,
) {
    let mut wait = Duration::from_millis(100);
    while end.hold_for_write(&[1]).is_ok() {
        assert!(wait < TIMEOUT, "nothing was ever in flight");
        let transfer = transfer().deadline(Instant::now() + wait);
        let outcome = wait_for(manager.submit(transfer, "guard").unwrap());
        assert_eq!(outcome.guard, "guard");
        match outcome.result {
            Err(TransferError::DeadlineExceeded { .. }) => {}
            other => panic!("{other:?}"),
        }
        wait *= 2;
    }
}

#[test]
fn a_peer_that_hangs_fails_the_transfer_and_keeps_its_memory() {
    const TEST: &str =
        "engine::processes::a_peer_that_hangs_fails_the_transfer_and_keeps_its_memory";
    over_tcp(TEST, || {
        let ends = Ends::new(TEST);
        end_of(ends.manager.submit(ends.write(0), ()).unwrap()).result.unwrap();

        ends.process.stop();
        orphan_transfer(&ends.manager, &ends.local, || ends.write(1), end_of);
        // UCX may still read the local block, so nothing may write it. The peer's block may still
        // be written.
        assert!(ends.local.hold_for_write(&[1]).unwrap_err().is_conflict());
        assert!(ends.remote.endpoint().hold_for_read(&[1]).unwrap_err().is_conflict());
        drop(ends.local.hold_for_write(&[0]).unwrap());
        assert_eq!(
            ends.agent.forget(ends.remote.peer()).unwrap(),
            ForgetOutcome::AfterTransfers(1)
        );

        ends.process.resume();
        free(&ends.local, 1);
    });
}

#[test]
fn a_peer_that_hangs_can_be_replaced_under_its_name() {
    const TEST: &str = "engine::processes::a_peer_that_hangs_can_be_replaced_under_its_name";
    over_tcp(TEST, || {
        let mut ends = Ends::new(TEST);
        let image = Image::scribble(&ends.local, &InProcess, 4);
        ends.process.stop();
        orphan_transfer(&ends.manager, &ends.local, || ends.write(1), end_of);

        let mut next = PeerProcess::start_as(TEST, ends.remote.agent().as_str());
        let export = next.receive();
        let error = ends.agent.import(&export).unwrap_err();
        assert!(matches!(error, ImportError::PeerChanged { .. }), "{error}");
        let hung = std::mem::replace(&mut ends.remote, ends.agent.refresh(&export).unwrap());
        end_of(ends.manager.submit(ends.write(2), ()).unwrap()).result.unwrap();
        let mut expected = Image::of(&ends.local, &InProcess);
        let read = Transfer::new(ends.remote.endpoint(), &ends.local).blocks(&[2], &[5]);
        end_of(ends.manager.submit(read, ()).unwrap()).result.unwrap();
        expected.transfer(&image, &[2], &[5], 0..2);
        Image::of(&ends.local, &InProcess).assert_equals(&expected, "written, and read back");

        // The transfer with the old process stays in flight, and nothing more is posted to that
        // process.
        assert!(ends.local.hold_for_write(&[1]).unwrap_err().is_conflict());
        let write = Transfer::new(&ends.local, hung.endpoint()).blocks(&[3], &[3]);
        assert!(ends.manager.submit(write, ()).is_err());
        ends.process.resume();
        free(&ends.local, 1);
        end_of(ends.manager.submit(ends.write(6), ()).unwrap()).result.unwrap();
    });
}

#[test]
fn a_dropped_engine_keeps_memory_that_may_still_be_written() {
    const TEST: &str = "engine::processes::a_dropped_engine_keeps_memory_that_may_still_be_written";
    over_tcp(TEST, || {
        let Ends { agent, process, remote, local, manager } = Ends::new(TEST);
        process.stop();
        let read = || Transfer::new(remote.endpoint(), &local).blocks(&[1], &[1]);
        // The waiting thread orphans the transfer here.
        let manager = manager.with_spin(TIMEOUT);
        orphan_transfer(&manager, &local, read, Completion::wait);
        drop(manager);
        assert!(local.hold_for_write(&[1]).unwrap_err().is_conflict());
        // Nothing closes its connection, either.
        assert_eq!(agent.forget(remote.peer()).unwrap(), ForgetOutcome::AfterTransfers(1));
        assert_eq!(agent.disconnect(), 0);
        let weak = local.downgrade();
        drop((agent, remote, local));
        assert!(!weak.has_gone(), "the memory of a read that may continue was released");
    });
}

#[test]
fn an_engine_may_wait_without_a_limit_when_it_drops() {
    const TEST: &str = "engine::processes::an_engine_may_wait_without_a_limit_when_it_drops";
    over_tcp(TEST, || {
        let ends = Ends::with_drop_timeout(TEST, Duration::MAX);
        let Ends { agent: _agent, process, remote, local, manager } = ends;
        process.stop();
        let read = || Transfer::new(remote.endpoint(), &local).blocks(&[1], &[1]);
        orphan_transfer(&manager, &local, read, end_of);
        let weak = local.downgrade();
        thread::scope(|scope| {
            scope.spawn(move || drop((manager, local, remote)));
            process.resume();
        });
        assert!(weak.has_gone(), "the engine has not waited");
    });
}

/// A peer that checks the bytes written to it, and answers.
fn answer() {
    let (agent, mut input) = (agent_from_environment(), std::io::stdin().lock());
    let layout = registered(&HeapAllocator::system(), &agent, config(8), LayoutKind::ALL[2]);
    send(&agent.export(&layout).unwrap());
    let asker = agent.import(&receive_from(&mut input)).unwrap();
    let endpoint = Endpoint::new(layout).unwrap();
    let notifications = agent.wait_for_notifications(Instant::now() + TIMEOUT).unwrap();
    assert_eq!(notifications[0].message, b"all written");
    // The requester's bytes, generated again from their seed.
    let theirs = registered(&HeapAllocator::system(), &agent, config(8), CONTIGUOUS);
    let image = Image::scribble(&Endpoint::new(theirs).unwrap(), &InProcess, 5);
    let (all, found) = ((0..8).collect::<Vec<_>>(), Image::of(&endpoint, &InProcess));
    let mut expected = found.clone();
    expected.transfer(&image, &all, &all, 0..2);
    found.assert_equals(&expected, "what the other process has written");
    send(b"right");
    agent.notify(asker.peer(), b"all read").unwrap();
    let _ = input.read_to_end(&mut Vec::new());
}

#[test]
fn blocks_and_messages_are_exchanged_between_processes() {
    const TEST: &str = "engine::processes::blocks_and_messages_are_exchanged_between_processes";
    if is_child(&peer_of(TEST)) {
        return answer();
    }
    let mut ends = Ends::new(TEST);
    let own = registered(&HeapAllocator::system(), &ends.agent, config(1), CONTIGUOUS);
    ends.process.send(&ends.agent.export(&own).unwrap());
    let image = Image::scribble(&ends.local, &InProcess, 5);
    let all: Vec<_> = (0..8).collect();
    let write = Transfer::new(&ends.local, ends.remote.endpoint()).blocks(&all, &all);
    end_of(ends.manager.submit(write.notify(*b"all written"), ()).unwrap()).result.unwrap();
    assert_eq!(ends.process.receive(), b"right");
    let notifications = ends.agent.wait_for_notifications(Instant::now() + TIMEOUT).unwrap();
    assert_eq!(notifications[0].message, b"all read");

    // And back, the other way round.
    let mut expected = Image::scribble(&ends.local, &InProcess, 6);
    let back: Vec<_> = all.iter().rev().copied().collect();
    let read = Transfer::new(ends.remote.endpoint(), &ends.local).blocks(&all, &back);
    end_of(ends.manager.submit(read, ()).unwrap()).result.unwrap();
    expected.transfer(&image, &all, &back, 0..2);
    Image::of(&ends.local, &InProcess).assert_equals(&expected, "read back");
}
