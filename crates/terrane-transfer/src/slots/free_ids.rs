//! The free block ids of an allocator, lowest first.

use std::cmp::Reverse;
use std::collections::BinaryHeap;
use std::iter;
use std::ops::Range;

use smallvec::SmallVec;

/// Free ids of one range. The lowest ids are allocated first.
///
/// Adjacent low ids give transfers long runs, and claims that are one range. A peer may state the
/// number of blocks, so an id that was never allocated occupies no memory.
pub(super) struct FreeIds {
    /// The ids that were never allocated.
    fresh: Range<u32>,
    /// The ids that were allocated and returned. All are below the fresh ones.
    returned: BinaryHeap<Reverse<u32>>,
}

impl FreeIds {
    /// Creates a range whose ids are all free.
    pub(super) fn new(ids: Range<u32>) -> Self {
        Self { fresh: ids, returned: BinaryHeap::new() }
    }

    pub(super) fn len(&self) -> usize {
        self.returned.len() + self.fresh.len()
    }

    /// Moves the `count` lowest ids to `taken`, in ascending order; all of them if there are fewer.
    pub(super) fn take(&mut self, count: usize, taken: &mut SmallVec<[u32; 2]>) {
        let returned = iter::from_fn(|| self.returned.pop().map(|Reverse(id)| id));
        taken.extend(returned.chain(self.fresh.by_ref()).take(count));
    }

    /// Frees an id that was taken.
    pub(super) fn put(&mut self, id: u32) {
        self.returned.push(Reverse(id));
    }
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

    impl FreeIds {
        /// The ids for which the list of returned ids has memory.
        pub(in crate::slots) fn capacity(&self) -> usize {
            self.returned.capacity()
        }
    }

    #[test]
    fn ids_that_were_never_allocated_occupy_no_memory() {
        let mut free = FreeIds::new(0..u32::MAX);
        assert_eq!(free.len(), 4_294_967_295);
        assert_eq!(taken(&mut free, 3), [0, 1, 2]);
        assert_eq!((free.returned.capacity(), free.len()), (0, 4_294_967_292));
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
        /// Compared with a sorted set.
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
