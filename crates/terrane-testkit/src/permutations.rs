//! Every order of some values, for tests of drops.

use std::panic::resume_unwind;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;

/// The number of permutations that [`for_each`] checks at a time. Tests of drops mostly wait, for the
/// kernel or for other threads.
const AT_A_TIME: usize = 8;

/// The permutation with this number of the values below `count`.
///
/// # Panics
///
/// If `number` is `count!` or more.
pub fn permutation(number: usize, count: usize) -> Vec<usize> {
    let mut rest = number;
    let mut left: Vec<usize> = (0..count).collect();
    let found = (1..=count).rev().map(|choices| {
        let choice = left.remove(rest % choices);
        rest /= choices;
        choice
    });
    let found = found.collect();
    assert_eq!(rest, 0, "{count} values have no permutation {number}");
    found
}

/// Calls `check` with the number of each permutation of `count` values, and with the permutation, on
/// several threads.
///
/// # Panics
///
/// If a call panics, with its payload.
pub fn for_each(count: usize, check: impl Fn(usize, &[usize]) + Sync) {
    let number = AtomicUsize::new(0);
    let numbers = (1..=count).product();
    let work = || {
        // Relaxed: each number is taken once, and orders nothing else.
        loop {
            let next = number.fetch_add(1, Ordering::Relaxed);
            if next >= numbers {
                return;
            }
            check(next, &permutation(next, count));
        }
    };
    thread::scope(|scope| {
        let threads: Vec<_> = (0..AT_A_TIME).map(|_| scope.spawn(work)).collect();
        for thread in threads {
            thread.join().unwrap_or_else(|payload| resume_unwind(payload));
        }
    });
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;
    use std::sync::Mutex;

    use terrane_core::sync::lock;

    use super::*;

    #[test]
    fn each_permutation_is_checked_once() {
        let found = Mutex::new(Vec::new());
        for_each(5, |number, order| lock(&found).push((number, order.to_vec())));
        let found = found.into_inner().unwrap();
        assert_eq!(found.len(), 120);
        let orders: BTreeSet<&Vec<usize>> = found.iter().map(|(_, order)| order).collect();
        assert_eq!(orders.len(), 120);
        for (number, order) in &found {
            assert_eq!(order, &permutation(*number, 5));
            assert_eq!(order.iter().collect::<BTreeSet<_>>().len(), 5);
        }
    }

    #[test]
    #[should_panic(expected = "in order 3")]
    fn a_failed_check_panics_with_its_message() {
        for_each(3, |number, _| assert_ne!(number, 3, "in order {number}"));
    }
}
