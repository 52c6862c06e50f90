//! A cancellation during the end of a predecessor, and ids that become free meanwhile.

use terrane_transfer::{Slots, SlotsError, TicketEnd};

use super::*;

#[test]
fn a_cancelled_transfer_ends_once_and_its_successor_starts_after_its_predecessor() {
    model(|| {
        let engine = Engine::keeping();
        let manager = TransferManager::new([engine.clone() as _]);
        let (from, to) = (endpoint(), endpoint());
        let first = manager.submit(transfer(&from, &to, 0), ()).unwrap();
        let job = engine.take().pop().unwrap();
        let after = transfer(&from, &to, 0).after(&first.ticket());
        let middle = manager.submit(after, ()).unwrap();
        let ticket = middle.ticket();
        let last = transfer(&from, &to, 0).after_end(&ticket);
        let last = manager.submit(last, ()).unwrap();
        let cancels = {
            let ticket = ticket.clone();
            thread::spawn(move || ticket.cancel())
        };
        succeed(job);
        cancels.join().unwrap();
        // Either the engine has the middle transfer, or the last one.
        let jobs = engine.take();
        assert_eq!(jobs.len(), 1);
        let was_cancelled = middle.has_ended();
        jobs.into_iter().for_each(succeed);
        match middle.wait().result {
            Ok(_) => assert!(!was_cancelled),
            Err(TransferError::Cancelled { started: false, .. }) => assert!(was_cancelled),
            Err(other) => panic!("{other}"),
        }
        assert_eq!(ticket.wait() == TicketEnd::Failed, was_cancelled);
        engine.take().into_iter().for_each(succeed);
        assert!(last.wait().result.is_ok());
        assert!(first.wait().result.is_ok());
        assert_free(&to);
    });
}

#[test]
fn an_id_is_allocated_again_only_when_its_transfer_has_ended() {
    model(|| {
        let engine = Engine::keeping();
        let manager = TransferManager::new([engine.clone() as _]);
        let (from, to) = (endpoint(), endpoint());
        let slots = Slots::of_range(&from, 0..1).unwrap();
        let set = slots.take(1).unwrap();
        let completion = manager.submit(transfer(&from, &to, 0), ()).unwrap();
        let job = engine.take().pop().unwrap();
        let ends = thread::spawn(move || succeed(job));
        set.free_after(&completion.ticket());
        match slots.take(1) {
            Ok(set) => drop(from.hold_for_write(&set).unwrap()),
            Err(SlotsError::Exhausted { total: 1, .. }) => {}
            Err(other) => panic!("{other}"),
        }
        assert!(completion.wait().result.is_ok());
        assert_eq!(slots.free(), 1);
        ends.join().unwrap();
    });
}
