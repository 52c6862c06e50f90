//! The order in which a thread copies the chunks of its transfers.

use terrane_core::ByteCount;

/// The transfers of one thread. It copies a chunk of each in turn, so a small transfer does not
/// wait for the end of a large one.
///
/// A transfer waits for earlier ones that are not larger. If they took turns, all would end late.
/// A relay's chunks, which have one size, therefore end one after the other, and the other hop of
/// the first begins early.
pub(super) struct Turns<T> {
    /// The transfers and their sizes, in the order of their arrival.
    transfers: Vec<(ByteCount, T)>,
    next: usize,
}

impl<T> Turns<T> {
    pub(super) fn new() -> Self {
        Self { transfers: Vec::new(), next: 0 }
    }

    pub(super) fn is_empty(&self) -> bool {
        self.transfers.is_empty()
    }

    pub(super) fn push(&mut self, bytes: ByteCount, transfer: T) {
        self.transfers.push((bytes, transfer));
    }

    /// Calls `copy` for the next transfer, and removes the transfer if that returns false.
    ///
    /// A transfer that `must_stop` does not wait for others.
    pub(super) fn copy_next(
        &mut self,
        must_stop: impl Fn(&T) -> bool,
        copy: impl FnOnce(&T) -> bool,
    ) {
        let has_turn = |index: usize| {
            let (bytes, transfer) = &self.transfers[index];
            let mut earlier = self.transfers[..index].iter();
            earlier.all(|(earlier, _)| earlier > bytes) || must_stop(transfer)
        };
        let count = self.transfers.len();
        let next = self.next.min(count);
        let Some(index) = (next..count).chain(0..next).find(|&index| has_turn(index)) else {
            return;
        };
        let has_more = copy(&self.transfers[index].1);
        if !has_more {
            self.transfers.remove(index);
        }
        self.next = index + usize::from(has_more);
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
    fn a_transfer_that_must_stop_does_not_wait() {
        assert_eq!(order(&[('a', 3), ('b', 3)], "b"), "abaa");
    }
}
