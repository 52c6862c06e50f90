//! The order in which a thread copies the chunks of its transfers.

use std::collections::VecDeque;

use terrane_core::ByteCount;

/// The transfers of one thread. It copies a chunk of each in turn, so a small transfer does not
/// wait for the end of a large one.
///
/// A transfer waits for earlier ones that are not larger. If they took turns, all would end late.
/// A relay's chunks, which have one size, therefore end one after the other, and the other hop of
/// the first begins early.
pub(super) struct Turns<T> {
    /// The transfer that was copied last is the last one.
    transfers: VecDeque<Waiting<T>>,
    arrivals: u64,
}

struct Waiting<T> {
    arrival: u64,
    bytes: ByteCount,
    transfer: T,
}

impl<T> Turns<T> {
    pub(super) fn new() -> Self {
        Self { transfers: VecDeque::new(), arrivals: 0 }
    }

    pub(super) fn is_empty(&self) -> bool {
        self.transfers.is_empty()
    }

    pub(super) fn push(&mut self, bytes: ByteCount, transfer: T) {
        self.transfers.push_back(Waiting { arrival: self.arrivals, bytes, transfer });
        self.arrivals += 1;
    }

    /// Calls `copy` for the next transfer, and removes the transfer if that returns false.
    ///
    /// A transfer that `must_stop` does not wait for others.
    pub(super) fn copy_next(
        &mut self,
        must_stop: impl Fn(&T) -> bool,
        copy: impl FnOnce(&T) -> bool,
    ) {
        let has_turn = |it: &Waiting<T>| {
            let waits_for =
                |other: &Waiting<T>| other.arrival < it.arrival && other.bytes <= it.bytes;
            !self.transfers.iter().any(waits_for) || must_stop(&it.transfer)
        };
        let next = self.transfers.iter().position(has_turn);
        let Some(next) = next.and_then(|index| self.transfers.remove(index)) else { return };
        if copy(&next.transfer) {
            self.transfers.push_back(next);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns the transfers in the order of their copies. Each has a size in chunks, and those in
    /// `stopped` must stop.
    fn order(sizes: &[(char, u32)], stopped: &str) -> String {
        let mut turns = Turns::new();
        let mut left: Vec<(char, u32)> = sizes.to_vec();
        for &(name, size) in sizes {
            turns.push(ByteCount::mib(size), name);
        }
        let mut order = String::new();
        while !turns.is_empty() {
            turns.copy_next(
                |&name| stopped.contains(name),
                |&name| {
                    order.push(name);
                    let (_, left) = left.iter_mut().find(|(other, _)| *other == name).unwrap();
                    *left -= 1;
                    *left > 0 && !stopped.contains(name)
                },
            );
        }
        order
    }

    #[test]
    fn a_small_transfer_takes_turns_with_a_large_one() {
        assert_eq!(order(&[('a', 6), ('b', 2)], ""), "ababaaaa");
    }

    #[test]
    fn a_transfer_waits_for_earlier_ones_that_are_not_larger() {
        assert_eq!(order(&[('a', 3), ('b', 3), ('c', 3)], ""), "aaabbbccc");
        assert_eq!(order(&[('a', 2), ('b', 4)], ""), "aabbbb");
        assert_eq!(order(&[('a', 6), ('b', 2), ('c', 2)], ""), "ababcacaaa");
    }

    #[test]
    fn a_large_transfer_has_turns_while_small_ones_arrive() {
        let mut turns = Turns::new();
        let mut order = String::new();
        turns.push(ByteCount::mib(9), 'a');
        for _ in 0..8 {
            turns.push(ByteCount::mib(1), 'b');
            turns.copy_next(
                |_| false,
                |&name| {
                    order.push(name);
                    name == 'a'
                },
            );
        }
        assert_eq!(order, "ababbabb");
    }

    #[test]
    fn a_transfer_that_must_stop_does_not_wait() {
        assert_eq!(order(&[('a', 3), ('b', 3)], "b"), "abaa");
    }
}
