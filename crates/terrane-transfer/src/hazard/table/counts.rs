//! The number of claims in flight that read and write each block.

use std::ops::Range;

use super::blocks::{as_parts, widen};
use crate::hazard::conflict::Access;

/// The counts of one layout's blocks, in segments that are allocated with the first claim in them.
///
/// A peer may state the number of blocks, so an unused block occupies no memory.
pub(super) struct BlockCounts {
    num_blocks: u32,
    /// Empty if none of the segment's blocks was ever claimed.
    segments: Vec<Box<[Count]>>,
}

/// The number of readers of a block in the low half, and of writers in the high half.
type Count = u64;

/// One claim.
const fn one(access: Access) -> Count {
    match access {
        Access::Read => 1,
        Access::Write => 1 << 32,
    }
}

/// The bits of a count that are zero unless other claims exclude this access.
const fn excluding(access: Access) -> Count {
    match access {
        Access::Read => Count::MAX << 32,
        Access::Write => Count::MAX,
    }
}

/// The blocks of a segment, a power of two. Their counts take 32 KiB.
const SEGMENT: u32 = 4096;

impl BlockCounts {
    pub(super) fn new(num_blocks: u32) -> Self {
        Self { num_blocks, segments: Vec::new() }
    }

    /// Whether no claim in flight excludes this access to any of the blocks.
    pub(super) fn are_free(&self, blocks: &[u32], access: Access) -> bool {
        // Without a branch for each element, the compiler vectorises the ranges.
        let former = match as_parts(blocks) {
            (range, []) => parts(range).fold(0, |former, (segment, part)| {
                let counts = self.segment(segment).get(part).unwrap_or_default();
                counts.iter().fold(former, |former, count| former | count)
            }),
            (_, list) => list.iter().fold(0, |former, block| {
                let counts = self.segment(block / SEGMENT);
                former | counts.get(widen(block % SEGMENT)).copied().unwrap_or(0)
            }),
        };
        former & excluding(access) == 0
    }

    /// Adds a claim on these blocks to the counts. Returns whether no other claim excludes it.
    pub(super) fn add(&mut self, blocks: &[u32], access: Access) -> bool {
        self.change(as_parts(blocks), one(access)) & excluding(access) == 0
    }

    /// Removes a claim on these blocks from the counts.
    pub(super) fn remove(&mut self, (range, list): (Range<u32>, &[u32]), access: Access) {
        self.change((range, list), one(access).wrapping_neg());
    }

    /// Adds `by` to the counts. Returns the bits that were set in any of them.
    fn change(&mut self, (range, list): (Range<u32>, &[u32]), by: Count) -> Count {
        let mut former = 0;
        for (segment, part) in parts(range) {
            let counts = self.segment_mut(segment).get_mut(part).unwrap_or_default();
            former = counts.iter().fold(former, |former, count| former | count);
            counts.iter_mut().for_each(|count| *count = count.wrapping_add(by));
        }
        let mut rest = list;
        while let Some(&first) = rest.first() {
            let base = first / SEGMENT * SEGMENT;
            let counts = self.segment_mut(first / SEGMENT);
            // The blocks up to the first one of another segment.
            let mut changed = 0;
            for block in rest {
                let Some(count) = counts.get_mut(widen(block.wrapping_sub(base))) else { break };
                former |= *count;
                *count = count.wrapping_add(by);
                changed += 1;
            }
            rest = rest.get(changed.max(1)..).unwrap_or_default();
        }
        former
    }

    fn segment(&self, number: u32) -> &[Count] {
        self.segments.get(widen(number)).map_or(&[], |counts| counts)
    }

    fn segment_mut(&mut self, number: u32) -> &mut [Count] {
        if self.segment(number).is_empty() {
            self.add_segment(number);
        }
        self.segments.get_mut(widen(number)).map_or(&mut [], |counts| counts)
    }

    #[cold]
    fn add_segment(&mut self, number: u32) {
        let index = widen(number);
        if self.segments.len() <= index {
            self.segments.resize_with(index + 1, Box::default);
        }
        let left = self.num_blocks.saturating_sub(number.saturating_mul(SEGMENT));
        if let Some(counts) = self.segments.get_mut(index) {
            *counts = vec![0; widen(left.min(SEGMENT))].into();
        }
    }
}

/// The segments of a range, with the part of the range in each.
fn parts(range: Range<u32>) -> impl Iterator<Item = (u32, Range<usize>)> {
    (range.start / SEGMENT..range.end.div_ceil(SEGMENT)).map(move |number| {
        let base = number * SEGMENT;
        let from = range.start.max(base) - base;
        (number, widen(from)..widen((range.end - base).min(SEGMENT)))
    })
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    #[test]
    fn blocks_that_were_never_claimed_occupy_no_memory() {
        let mut counts = BlockCounts::new(u32::MAX);
        assert_eq!(counts.segments.capacity(), 0);
        assert!(counts.are_free(&[0, u32::MAX - 1], Access::Write));
        assert_eq!(counts.segments.capacity(), 0);
        assert!(counts.add(&[5000], Access::Read));
        assert_eq!(counts.segments.iter().filter(|counts| !counts.is_empty()).count(), 1);
        assert!(!counts.are_free(&[5000], Access::Write));
    }

    #[test]
    fn a_range_over_several_segments_is_counted_in_each() {
        let mut counts = BlockCounts::new(3 * SEGMENT - 1);
        let range: Vec<u32> = (SEGMENT - 2..3 * SEGMENT - 1).collect();
        assert!(counts.add(&range, Access::Write));
        for (block, is_free) in [
            (SEGMENT - 3, true),
            (SEGMENT - 2, false),
            (2 * SEGMENT, false),
            (3 * SEGMENT - 2, false),
        ] {
            assert_eq!(counts.are_free(&[block], Access::Read), is_free, "block {block}");
        }
        assert!(!counts.are_free(&range[1..], Access::Read));
        counts.remove(as_parts(&range), Access::Write);
        assert!(counts.are_free(&range, Access::Write));
    }
}
