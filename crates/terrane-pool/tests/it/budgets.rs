//! Budgets against a model, and under threads.

use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;

use proptest::prelude::*;
use terrane_core::ByteCount;
use terrane_pool::adaptors::{Budget, Reservation};

/// The parent of each budget of a tree. Parents come before their children; the first is the root.
const PARENTS: [Option<usize>; 7] = [None, Some(0), Some(0), Some(1), Some(1), Some(3), Some(2)];

fn tree(limits: &[u64; 7]) -> Vec<Budget> {
    let mut budgets: Vec<Budget> = Vec::new();
    for (parent, &limit) in PARENTS.into_iter().zip(limits) {
        let limit = ByteCount::new(limit);
        budgets.push(match parent {
            None => Budget::new("root", limit),
            Some(parent) => budgets[parent].child("part", limit),
        });
    }
    budgets
}

fn path(budget: usize) -> impl Iterator<Item = usize> {
    std::iter::successors(Some(budget), |&budget| PARENTS[budget])
}

#[derive(Clone, Debug)]
enum Operation {
    Reserve { budget: usize, bytes: u64 },
    Release(prop::sample::Index),
    Resize(prop::sample::Index, u64),
    Split(prop::sample::Index, u64),
}

fn operation() -> impl Strategy<Value = Operation> {
    prop_oneof![
        3 => (0..7_usize, 0..60_u64).prop_map(|(budget, bytes)| Operation::Reserve { budget, bytes }),
        2 => any::<prop::sample::Index>().prop_map(Operation::Release),
        1 => (any::<prop::sample::Index>(), 0..60_u64).prop_map(|(i, b)| Operation::Resize(i, b)),
        1 => (any::<prop::sample::Index>(), 0..60_u64).prop_map(|(i, b)| Operation::Split(i, b)),
    ]
}

proptest! {
    /// One thread: a request is granted if and only if it fits at every level, and counted at every
    /// level.
    #[test]
    fn a_tree_agrees_with_its_model(
        limits in prop::array::uniform7(0..200_u64),
        operations in prop::collection::vec(operation(), 0..100),
    ) {
        let budgets = tree(&limits);
        let mut live = [0_u64; 7];
        let mut peaks = [0_u64; 7];
        let mut held: Vec<(usize, Reservation)> = Vec::new();
        for operation in operations {
            match operation {
                Operation::Reserve { budget, bytes } => {
                    let fits = bytes == 0 || path(budget).all(|b| live[b] + bytes <= limits[b]);
                    prop_assert_eq!(budgets[budget].check(ByteCount::new(bytes)).is_ok(), fits);
                    let reserved = budgets[budget].reserve(ByteCount::new(bytes));
                    prop_assert_eq!(reserved.is_ok(), fits);
                    if let Ok(reservation) = reserved {
                        path(budget).for_each(|b| live[b] += bytes);
                        held.push((budget, reservation));
                    }
                }
                Operation::Release(index) if !held.is_empty() => {
                    let (budget, reservation) = held.swap_remove(index.index(held.len()));
                    path(budget).for_each(|b| live[b] -= reservation.bytes().get());
                }
                Operation::Resize(index, bytes) if !held.is_empty() => {
                    let at = index.index(held.len());
                    let (budget, reservation) = &mut held[at];
                    let old = reservation.bytes().get();
                    let fits = bytes <= old
                        || path(*budget).all(|b| live[b] - old + bytes <= limits[b]);
                    prop_assert_eq!(reservation.resize(ByteCount::new(bytes)).is_ok(), fits);
                    if fits {
                        path(*budget).for_each(|b| live[b] = live[b] - old + bytes);
                    }
                }
                Operation::Split(index, bytes) if !held.is_empty() => {
                    let at = index.index(held.len());
                    let (budget, reservation) = &mut held[at];
                    let budget = *budget;
                    if let Some(part) = reservation.split(ByteCount::new(bytes)) {
                        held.push((budget, part));
                    }
                }
                _ => {}
            }
            for (index, budget) in budgets.iter().enumerate() {
                peaks[index] = peaks[index].max(live[index]);
                prop_assert_eq!(budget.live().get(), live[index]);
                prop_assert_eq!(budget.peak().get(), peaks[index]);
                let remaining = path(index).map(|b| limits[b] - live[b]).min();
                prop_assert_eq!(Some(budget.remaining().get()), remaining);
            }
        }
        drop(held);
        prop_assert!(budgets.iter().all(|budget| budget.live().is_zero()));
    }
}

proptest! {
    // Each thread must run in each case. With few processors, a case lasts for many time slices.
    #![proptest_config(ProptestConfig::with_cases(32))]

    /// Several threads: some request more than a level above theirs has. A thread within its share
    /// is never refused.
    #[test]
    fn refusals_never_make_a_fitting_request_fail(share in 1..50_u64, hogs in 1..3_usize) {
        // Two threads stay within one share each. The root has capacity for exactly both.
        let root = Budget::new("root", ByteCount::new(2 * share));
        let parts = [root.child("a", ByteCount::new(1000)), root.child("b", ByteCount::new(1000))];
        let nested = parts[0].child("nested", ByteCount::new(1000));
        let stop = AtomicBool::new(false);
        let fitting = thread::scope(|scope| {
            for hog in 0..hogs {
                let budget = [&parts[0], &nested][hog % 2];
                let stop = &stop;
                scope.spawn(move || {
                    while !stop.load(Ordering::Relaxed) {
                        assert!(budget.reserve(ByteCount::new(2 * share + 1)).is_err());
                    }
                });
            }
            let modest: Vec<_> = [&nested, &parts[1]]
                .map(|budget| {
                    scope.spawn(move || {
                        (0..2_000).all(|_| budget.reserve(ByteCount::new(share)).is_ok())
                    })
                })
                .into_iter()
                .collect();
            let fitting: Vec<_> = modest.into_iter().map(|thread| thread.join().unwrap()).collect();
            stop.store(true, Ordering::Relaxed);
            fitting
        });
        prop_assert_eq!(fitting, [true, true]);
        prop_assert!(root.live().is_zero() && nested.live().is_zero());
    }
}
