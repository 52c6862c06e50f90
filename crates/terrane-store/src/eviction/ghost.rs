//! The keys of blocks that were evicted lately.

use std::collections::VecDeque;

use hashbrown::HashTable;
use terrane_core::convert::to_usize;

use crate::KeyHash;

/// A bounded list of evicted keys, the oldest forgotten first.
///
/// A key is remembered by the lower half of its hash. Two keys share it with probability 2⁻⁶⁴, which
/// costs one wrong guess of the policy.
#[derive(Debug)]
pub(super) struct Ghost {
    /// The keys. One that was removed stays here until it is the oldest.
    order: VecDeque<u64>,
    /// The numbers of the keys in `order`. Each insertion takes the next number; they wrap.
    numbers: HashTable<u32>,
    /// The number of the oldest key in `order`.
    first: u32,
    capacity: usize,
}

impl Ghost {
    pub(super) fn new(capacity: u32) -> Self {
        let capacity = to_usize(capacity.into());
        Self { order: VecDeque::new(), numbers: HashTable::new(), first: 0, capacity }
    }

    /// Sets the most keys that are remembered, and frees the memory of others.
    pub(super) fn set_capacity(&mut self, capacity: u32) {
        self.capacity = to_usize(capacity.into());
        while self.order.len() > self.capacity {
            self.forget_oldest();
        }
        let Self { order, numbers, first, capacity } = self;
        order.shrink_to(*capacity);
        numbers.shrink_to(*capacity, |&number| key_at(order, *first, number));
    }

    /// Remembers a key as the newest.
    pub(super) fn insert(&mut self, key: KeyHash) {
        if self.capacity == 0 {
            return;
        }
        self.remove(key);
        while self.order.len() >= self.capacity {
            self.forget_oldest();
        }
        let key = key.low();
        let number = self.first.wrapping_add(u32::try_from(self.order.len()).unwrap_or(u32::MAX));
        self.order.push_back(key);
        let Self { order, numbers, first, .. } = self;
        numbers.insert_unique(key, number, |&number| key_at(order, *first, number));
    }

    pub(super) fn is_empty(&self) -> bool {
        self.numbers.is_empty()
    }

    pub(super) fn has(&self, key: KeyHash) -> bool {
        let key = key.low();
        self.numbers.find(key, |&number| key_at(&self.order, self.first, number) == key).is_some()
    }

    /// Forgets a key. Returns whether it was remembered.
    pub(super) fn remove(&mut self, key: KeyHash) -> bool {
        let Self { order, numbers, first, .. } = self;
        let key = key.low();
        let is_key = |&number: &u32| key_at(order, *first, number) == key;
        numbers.find_entry(key, is_key).map(|found| found.remove()).is_ok()
    }

    fn forget_oldest(&mut self) {
        let Some(&key) = self.order.front() else { return };
        let first = self.first;
        // The entry may belong to a newer eviction of the same key.
        if let Ok(found) = self.numbers.find_entry(key, |&number| number == first) {
            found.remove();
        }
        self.order.pop_front();
        self.first = first.wrapping_add(1);
    }
}

fn key_at(order: &VecDeque<u64>, first: u32, number: u32) -> u64 {
    let place = usize::try_from(number.wrapping_sub(first)).ok();
    place.and_then(|place| order.get(place)).copied().unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn key(value: u64) -> KeyHash {
        KeyHash::from_halves(7, value)
    }

    #[test]
    fn the_oldest_key_is_forgotten_first() {
        let mut ghost = Ghost::new(3);
        for value in [1, 2, 3, 4] {
            ghost.insert(key(value));
        }
        assert_eq!([1, 2, 3, 4].map(|value| ghost.has(key(value))), [false, true, true, true]);
        // It becomes the newest again.
        ghost.insert(key(2));
        ghost.insert(key(5));
        ghost.insert(key(6));
        assert_eq!([2, 3, 4, 5, 6].map(|v| ghost.has(key(v))), [true, false, false, true, true]);
    }

    #[test]
    fn a_removed_key_is_not_found_and_its_place_is_reused() {
        let mut ghost = Ghost::new(2);
        ghost.insert(key(1));
        ghost.insert(key(2));
        assert!(ghost.remove(key(1)));
        assert!(!ghost.remove(key(1)));
        assert!(!ghost.has(key(1)));
        ghost.insert(key(3));
        assert!(ghost.has(key(2)) && ghost.has(key(3)));
    }

    #[test]
    fn a_smaller_list_keeps_the_newest_keys_and_no_more_memory_than_it_needs() {
        let mut ghost = Ghost::new(1000);
        (0..1000).for_each(|value| ghost.insert(key(value)));
        ghost.set_capacity(3);
        assert!(ghost.order.capacity() < 100 && ghost.numbers.capacity() < 100, "{ghost:?}");
        assert_eq!([996, 997, 998, 999].map(|v| ghost.has(key(v))), [false, true, true, true]);
        ghost.insert(key(1000));
        assert_eq!([997, 998, 1000].map(|value| ghost.has(key(value))), [false, true, true]);
        ghost.set_capacity(4);
        ghost.insert(key(1001));
        assert!(ghost.has(key(998)) && ghost.remove(key(1000)));
        ghost.set_capacity(0);
        assert!(ghost.is_empty() && !ghost.has(key(1001)));
    }

    #[test]
    fn without_room_nothing_is_remembered() {
        let mut ghost = Ghost::new(0);
        ghost.insert(key(1));
        assert!(!ghost.has(key(1)));
    }
}
