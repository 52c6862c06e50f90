//! Transfers after others, and transfers after and against holds.

use super::*;

#[test]
fn a_dependent_starts_after_the_end_of_its_predecessor() {
    model(|| {
        let bytes = Bytes::new();
        let manager = TransferManager::new([Engine::ending(&bytes, succeed) as _]);
        let (from, to) = (endpoint(), endpoint());
        let first = manager.submit(transfer(&from, &to, 0), ()).unwrap();
        // It writes the same bytes as the first transfer: in order, or loom detects a race.
        let second = transfer(&from, &to, 0).after(&first.ticket());
        let second = manager.submit(second, ()).unwrap();
        drop(first);
        assert!(second.wait().result.is_ok());
        assert_eq!(bytes.read(), 2);
        assert_free(&to);
    });
}

#[test]
fn a_dependent_of_a_failed_transfer_ends_with_the_transfers_number() {
    model(|| {
        let bytes = Bytes::new();
        let manager = TransferManager::new([Engine::ending(&bytes, fail) as _]);
        let (from, to) = (endpoint(), endpoint());
        let first = manager.submit(transfer(&from, &to, 0), ()).unwrap();
        let second = transfer(&from, &to, 0).after(&first.ticket());
        let second = manager.submit(second, "guard").unwrap();
        let Outcome { guard, result } = second.wait();
        assert_eq!(guard, "guard");
        let Err(TransferError::PredecessorFailed { predecessor }) = result else {
            panic!("{result:?}")
        };
        assert_eq!(predecessor, first.ticket().id());
        assert!(first.wait().result.is_err());
        assert_eq!(bytes.read(), 1);
        assert_free(&to);
    });
}

#[test]
fn a_dependent_of_two_starts_once_when_the_later_one_has_ended() {
    model(|| {
        let engine = Engine::keeping();
        let manager = TransferManager::new([engine.clone() as _]);
        let (from, to) = (endpoint(), endpoint());
        let first = manager.submit(transfer(&from, &to, 0), ()).unwrap();
        let second = manager.submit(transfer(&from, &to, 1), ()).unwrap();
        let both = Transfer::new(&from, &to).blocks(&[0, 1], &[0, 1]);
        let both = both.after(&first.ticket()).after(&second.ticket());
        let both = manager.submit(both, ()).unwrap();
        let mut jobs = engine.take();
        let later = jobs.pop().unwrap();
        let other = thread::spawn(move || succeed(later));
        jobs.into_iter().for_each(succeed);
        other.join().unwrap();
        let started = engine.take();
        assert_eq!(started.len(), 1, "started {} times", started.len());
        started.into_iter().for_each(succeed);
        assert!(both.wait().result.is_ok());
        assert_free(&to);
    });
}

#[test]
fn a_transfer_after_a_hold_starts_when_the_hold_drops() {
    model(|| {
        let bytes = Bytes::new();
        let manager = TransferManager::new([Engine::ending(&bytes, succeed) as _]);
        let (from, to) = (endpoint(), endpoint());
        let hold = from.hold_for_write(&[0]).unwrap();
        let ticket = hold.ticket();
        let holder = {
            let bytes = bytes.clone();
            thread::spawn(move || {
                bytes.write();
                drop(bytes);
                drop(hold);
            })
        };
        let completion = manager.submit(transfer(&from, &to, 0).after(&ticket), ()).unwrap();
        assert!(completion.wait().result.is_ok());
        assert_eq!(bytes.read(), 2);
        holder.join().unwrap();
    });
}

#[test]
fn a_submission_during_the_drop_of_a_hold_is_refused_or_runs_after_it() {
    model(|| {
        let bytes = Bytes::new();
        let manager = TransferManager::new([Engine::ending(&bytes, succeed) as _]);
        let (from, to) = (endpoint(), endpoint());
        let hold = from.hold_for_write(&[0]).unwrap();
        let holder = {
            let bytes = bytes.clone();
            thread::spawn(move || {
                bytes.write();
                drop(bytes);
                drop(hold);
            })
        };
        match manager.submit(transfer(&from, &to, 0), ()) {
            Ok(completion) => assert!(completion.wait().result.is_ok()),
            Err(rejected) => assert!(rejected.cause.is_conflict()),
        }
        holder.join().unwrap();
        assert_free(&from);
    });
}
