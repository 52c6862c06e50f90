//! Waits for tickets: by threads, by futures, and with a deadline.

use std::future::{Future, IntoFuture};
use std::pin::pin;
use std::task::{Context, Poll, Waker};
use std::thread;
use std::time::{Duration, Instant};

use terrane_testkit::conformance::copy_engine::end_of;
use terrane_testkit::engine::Fault;
use terrane_transfer::{TicketEnd, TransferError};

use crate::support::Rig;

/// An engine that waits for a signal.
fn held() -> Rig {
    let rig = Rig::new(4);
    rig.engine.hold();
    rig
}

#[test]
fn a_thread_waits_for_a_ticket() {
    let rig = held();
    let completion = rig.manager.submit(rig.transfer(&[0], &[0]), ()).unwrap();
    let ticket = completion.ticket();
    let soon = Instant::now() + Duration::from_millis(5);
    assert_eq!(ticket.wait_until(soon), None);
    thread::scope(|scope| {
        let waiting = scope.spawn(|| ticket.wait());
        rig.engine.release_all();
        rig.engine.wait_until_idle();
        assert_eq!(waiting.join().unwrap(), TicketEnd::Succeeded);
    });
    // It has ended, so the wait returns at once.
    assert_eq!(ticket.wait(), TicketEnd::Succeeded);
    assert_eq!(ticket.wait_until(Instant::now()), Some(TicketEnd::Succeeded));
    end_of(completion).result.unwrap();
}

#[test]
fn a_ticket_is_a_future() {
    let rig = held();
    let completion = rig.manager.submit(rig.transfer(&[0], &[0]), ()).unwrap();
    let mut future = pin!(completion.ticket().into_future());
    let mut context = Context::from_waker(Waker::noop());
    assert_eq!(future.as_mut().poll(&mut context), Poll::Pending);
    rig.engine.release_all();
    rig.engine.wait_until_idle();
    assert_eq!(future.as_mut().poll(&mut context), Poll::Ready(TicketEnd::Succeeded));
    end_of(completion).result.unwrap();
}

#[test]
fn a_ticket_of_a_failed_transfer_reports_the_failure() {
    let rig = held();
    rig.engine.fail_next(Fault::Engine);
    let completion = rig.manager.submit(rig.transfer(&[0], &[0]), ()).unwrap();
    let ticket = completion.ticket();
    rig.engine.release_all();
    rig.engine.wait_until_idle();
    assert_eq!(ticket.wait(), TicketEnd::Failed);
    end_of(completion).result.unwrap_err();
}

#[test]
fn a_rejection_becomes_its_cause() {
    let rig = held();
    let submit = || -> Result<(), TransferError> {
        end_of(rig.manager.submit(rig.transfer(&[9], &[0]), ())?).result.map(drop)
    };
    assert!(matches!(submit(), Err(TransferError::NoSuchBlock { block: 9, .. })));
}
