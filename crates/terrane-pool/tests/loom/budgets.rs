//! Budgets: exact at every instant, and no refusal that another refusal caused.

use loom::thread;
use terrane_core::ByteCount;
use terrane_pool::adaptors::Budget;

fn bytes(count: u64) -> ByteCount {
    ByteCount::new(count)
}

#[test]
fn one_of_two_requests_gets_the_last_byte() {
    loom::model(|| {
        let budget = Budget::new("all", bytes(1));
        let other = {
            let budget = budget.clone();
            thread::spawn(move || budget.reserve(bytes(1)).ok())
        };
        let mine = budget.reserve(bytes(1)).ok();
        let theirs = other.join().unwrap();
        assert!(mine.is_some() != theirs.is_some());
        assert_eq!((budget.live(), budget.peak()), (bytes(1), bytes(1)));
        drop((mine, theirs));
        assert!(budget.live().is_zero());
    });
}

#[test]
fn a_refusal_above_never_refuses_what_fits() {
    loom::model(|| {
        let root = Budget::new("root", bytes(4));
        let branch = root.child("branch", bytes(6));
        let leaf = branch.child("leaf", bytes(6));
        // Fits the leaf. Fits the branch, unless the other thread reserves its bytes. Never fits
        // the root.
        let hog = {
            let leaf = leaf.clone();
            thread::spawn(move || {
                let refused = leaf.reserve(bytes(5)).unwrap_err();
                assert_ne!(refused.budget.as_str(), "leaf");
            })
        };
        // Fits whatever the hog does, although 2 + 5 would briefly exceed the branch.
        let fits = {
            let branch = branch.clone();
            thread::spawn(move || branch.reserve(bytes(2)).unwrap())
        };
        let mine = root.reserve(bytes(2)).unwrap();
        hog.join().unwrap();
        drop((fits.join().unwrap(), mine));
        assert!([&root, &branch, &leaf].iter().all(|budget| budget.live().is_zero()));
        assert_eq!((leaf.peak(), branch.peak()), (bytes(0), bytes(2)));
    });
}

#[test]
fn released_bytes_are_free_at_every_level_at_once() {
    loom::model(|| {
        let root = Budget::new("root", bytes(100));
        let branch = root.child("branch", bytes(2));
        let leaf = branch.child("leaf", bytes(1));
        let held = leaf.reserve(bytes(1)).unwrap();
        let other = {
            let (branch, leaf) = (branch.clone(), leaf.clone());
            thread::spawn(move || {
                // If the leaf has room, the branch has room.
                if leaf.reserve(bytes(1)).is_ok() {
                    drop(branch.reserve(bytes(2)).unwrap());
                }
            })
        };
        drop(held);
        other.join().unwrap();
        assert!([&root, &branch, &leaf].iter().all(|budget| budget.live().is_zero()));
    });
}

#[test]
fn branches_share_their_root_exactly() {
    loom::model(|| {
        let root = Budget::new("root", bytes(3));
        let parts = [root.child("device", bytes(3)), root.child("pinned", bytes(3))];
        let threads = parts.clone().map(|part| {
            let root = root.clone();
            thread::spawn(move || {
                let held = part.reserve(bytes(2)).ok();
                assert!(root.live() <= bytes(3));
                held
            })
        });
        let granted = threads.map(|thread| thread.join().unwrap());
        // The thread that releases last finds room again.
        assert!(granted.iter().flatten().count() == 1);
        drop(granted);
        assert!(parts[1].reserve(bytes(3)).is_ok());
        assert_eq!(root.peak(), bytes(3));
    });
}

#[test]
fn a_peak_that_is_reset_is_never_below_what_is_live() {
    loom::model(|| {
        let budget = Budget::new("all", bytes(4));
        let other = {
            let budget = budget.clone();
            thread::spawn(move || budget.reserve(bytes(3)).unwrap())
        };
        budget.reset_peak();
        let held = other.join().unwrap();
        assert_eq!(budget.peak(), held.bytes());
    });
}
