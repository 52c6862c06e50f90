//! The free block ids of an allocator, lowest first.

use std::ops::Range;

use terrane_core::convert::to_usize;

use smallvec::SmallVec;

/// Free ids of one range. The lowest ids are allocated first.
///
/// Adjacent low ids give transfers long runs, and claims that are one range. A peer may state the
/// number of blocks, so an id that was never allocated occupies no memory.
pub(super) struct FreeIds {
    /// The first id of the range. Bit positions are relative to it.
    first: u32,
    /// The ids that were never allocated.
    fresh: Range<u32>,
    /// One bit for each id below `fresh`: whether it is free.
    words: Vec<u64>,
    /// One bit for each word: whether any of its bits is set.
    summary: Vec<u64>,
    /// The words of the summary before this one have no bit set.
    lowest: u32,
    /// The number of bits set in `words`.
    returned: usize,
}

/// The bits of a word.
const WORD: u32 = u64::BITS;

impl FreeIds {
    /// Creates a range whose ids are all free.
    pub(super) fn new(ids: Range<u32>) -> Self {
        Self {
            first: ids.start,
            fresh: ids,
            words: Vec::new(),
            summary: Vec::new(),
            lowest: 0,
            returned: 0,
        }
    }

    pub(super) fn len(&self) -> usize {
        self.returned + self.fresh.len()
    }

    /// Moves the `count` lowest ids to `taken`, in ascending order; all of them if there are fewer.
    pub(super) fn take(&mut self, count: usize, taken: &mut SmallVec<[u32; 2]>) {
        let mut left = count;
        while left > 0 && self.returned > 0 {
            left -= self.take_of_lowest_word(left, taken);
        }
        let fresh = u32::try_from(left).unwrap_or(u32::MAX).min(self.fresh.end - self.fresh.start);
        let end = self.fresh.start + fresh;
        taken.extend(self.fresh.start..end);
        self.fresh.start = end;
        // Their bits are allocated now, so that returning the ids allocates nothing.
        let words = index((end - self.first).div_ceil(WORD));
        if words > self.words.len() {
            self.words.resize(words, 0);
            self.summary.resize(words.div_ceil(index(WORD)), 0);
        }
    }

    /// Takes at most `most` ids from the lowest word that has any. Returns their number.
    fn take_of_lowest_word(&mut self, most: usize, taken: &mut SmallVec<[u32; 2]>) -> usize {
        let rest = self.summary.get(index(self.lowest)..).unwrap_or_default();
        let skipped = rest.iter().zip(0_u32..).find(|&(&bits, _)| bits != 0);
        let Some((&bits, skipped)) = skipped else { return 0 };
        self.lowest += skipped;
        let number = self.lowest * WORD + bits.trailing_zeros();
        let Some(word) = self.words.get_mut(index(number)) else { return 0 };
        let mut count = 0;
        while *word != 0 && count < most {
            taken.push(self.first + number * WORD + word.trailing_zeros());
            *word &= *word - 1;
            count += 1;
        }
        if *word == 0
            && let Some(bits) = self.summary.get_mut(index(self.lowest))
        {
            *bits &= !(1 << (number % WORD));
        }
        self.returned -= count;
        count
    }

    /// Frees an id that was taken.
    pub(super) fn put(&mut self, id: u32) {
        let at = id - self.first;
        let (number, group) = (at / WORD, at / WORD / WORD);
        let word = self.words.get_mut(index(number));
        let summary = self.summary.get_mut(index(group));
        if let (Some(word), Some(summary)) = (word, summary) {
            *word |= 1 << (at % WORD);
            *summary |= 1 << (number % WORD);
            self.lowest = self.lowest.min(group);
            self.returned += 1;
        }
    }
}

fn index(number: u32) -> usize {
    to_usize(number.into())
}

#[cfg(all(test, not(loom)))]
mod tests {
    use std::collections::BTreeSet;

    use proptest::prelude::*;

    use super::*;

    fn taken(free: &mut FreeIds, count: usize) -> Vec<u32> {
        let mut taken = SmallVec::new();
        free.take(count, &mut taken);
        taken.into_vec()
    }

    #[test]
    fn ids_that_were_never_allocated_occupy_no_memory() {
        let mut free = FreeIds::new(0..u32::MAX);
        assert_eq!(free.len(), 4_294_967_295);
        assert_eq!(taken(&mut free, 3), [0, 1, 2]);
        assert_eq!((free.words.len(), free.summary.len()), (1, 1));
    }

    #[test]
    fn the_last_ids_of_the_largest_range_are_allocated_and_returned() {
        let mut free = FreeIds::new(u32::MAX - 70..u32::MAX);
        let all: Vec<u32> = (u32::MAX - 70..u32::MAX).collect();
        assert_eq!(taken(&mut free, 71), all);
        assert_eq!((free.len(), taken(&mut free, 1)), (0, vec![]));
        all.iter().rev().for_each(|&id| free.put(id));
        assert_eq!(taken(&mut free, usize::MAX), all);
    }

    proptest! {
        /// Compared with a sorted set. The range spans several words of the summary.
        #[test]
        fn free_ids_equal_a_sorted_set(
            first in 0_u32..200,
            steps in prop::collection::vec((any::<bool>(), 0_usize..6_000, any::<prop::sample::Index>()), 1..40),
        ) {
            let ids = first..first + 10_000;
            let mut free = FreeIds::new(ids.clone());
            let mut model: BTreeSet<u32> = ids.collect();
            let mut held: Vec<u32> = Vec::new();
            for (takes, count, at) in steps {
                if takes {
                    let expected: Vec<u32> = model.iter().copied().take(count).collect();
                    expected.iter().for_each(|id| { model.remove(id); });
                    prop_assert_eq!(&taken(&mut free, count), &expected);
                    held.extend(expected);
                } else if !held.is_empty() {
                    let start = at.index(held.len());
                    let end = (start + count).min(held.len());
                    for id in held.drain(start..end) {
                        free.put(id);
                        model.insert(id);
                    }
                }
                prop_assert_eq!(free.len(), model.len());
            }
        }
    }
}
