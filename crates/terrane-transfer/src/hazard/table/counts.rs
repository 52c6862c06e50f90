//! The number of claims in flight that read and write each block.

use std::ops::Range;

use super::blocks::{Blocks, range_of, widen};
use crate::hazard::conflict::Access;

/// The counts of one layout's blocks, in segments that are allocated with the first claim in them.
///
/// A peer may state the number of blocks, so an unused block occupies no memory.
pub(super) struct BlockCounts {
    num_blocks: u32,
    segments: Vec<Option<Box<[Count]>>>,
}

#[derive(Clone, Copy, Default)]
struct Count {
    readers: u32,
    writers: u32,
}

/// The blocks of a segment, a power of two. Their counts take 32 KiB.
const SEGMENT: u32 = 4096;

impl BlockCounts {
    pub(super) fn new(num_blocks: u32) -> Self {
        Self { num_blocks, segments: Vec::new() }
    }

    /// Whether no claim in flight excludes this access to any of the blocks. This is the usual
    /// case, so there is no branch for each block.
    pub(super) fn are_free(&self, blocks: &[u32], access: Access) -> bool {
        match range_of(blocks) {
            Some(range) => parts(range).all(|(segment, part)| {
                let counts = self.segment(segment).get(part).unwrap_or_default();
                are_free(counts.iter().copied(), access)
            }),
            None => by_segment(blocks).all(|(segment, blocks)| {
                let counts = self.segment(segment);
                are_free(blocks.iter().map(|&block| of(counts, block)), access)
            }),
        }
    }

    /// Adds a claim on these blocks to the counts.
    pub(super) fn add(&mut self, blocks: &Blocks, access: Access) {
        self.change(blocks, access, |count| *count += 1);
    }

    /// Removes a claim on these blocks from the counts.
    pub(super) fn remove(&mut self, blocks: &Blocks, access: Access) {
        self.change(blocks, access, |count| *count -= 1);
    }

    fn change(&mut self, blocks: &Blocks, access: Access, change: impl Fn(&mut u32)) {
        let change = |counts: &mut Count| {
            change(match access {
                Access::Read => &mut counts.readers,
                Access::Write => &mut counts.writers,
            });
        };
        match blocks {
            Blocks::Range(range) => {
                for (segment, part) in parts(range.clone()) {
                    let counts = self.segment_mut(segment).get_mut(part);
                    counts.unwrap_or_default().iter_mut().for_each(change);
                }
            }
            Blocks::List(blocks, _) => {
                for (segment, blocks) in by_segment(blocks) {
                    let counts = self.segment_mut(segment);
                    for &block in blocks {
                        counts.get_mut(widen(block % SEGMENT)).map(change);
                    }
                }
            }
        }
    }

    /// The counts of a segment; empty if none of its blocks was ever claimed.
    fn segment(&self, number: u32) -> &[Count] {
        self.segments.get(widen(number)).and_then(Option::as_deref).unwrap_or_default()
    }

    fn segment_mut(&mut self, number: u32) -> &mut [Count] {
        let index = widen(number);
        if self.segments.len() <= index {
            self.segments.resize_with(index + 1, || None);
        }
        let left = self.num_blocks.saturating_sub(number.saturating_mul(SEGMENT));
        let new = || vec![Count::default(); widen(left.min(SEGMENT))].into();
        self.segments
            .get_mut(index)
            .map(|slot| &mut **slot.get_or_insert_with(new))
            .unwrap_or_default()
    }
}

/// The segments of a range, with the part of the range in each.
fn parts(range: Range<u32>) -> impl Iterator<Item = (u32, Range<usize>)> {
    let last = range.end.saturating_sub(1) / SEGMENT;
    (range.start / SEGMENT..=last).map(move |number| {
        let base = number * SEGMENT;
        let from = range.start.max(base) - base;
        (number, widen(from)..widen((range.end - base).min(SEGMENT)))
    })
}

/// Splits the blocks into consecutive blocks of one segment, with the number of that segment.
fn by_segment(blocks: &[u32]) -> impl Iterator<Item = (u32, &[u32])> {
    let first = blocks.first().copied();
    // All blocks are nearly always in one segment: numbers of one segment differ in low bits only.
    // Without a branch for each element, the compiler vectorises the comparison.
    let differing = blocks.iter().fold(0, |bits, block| bits | (block ^ first.unwrap_or(0)));
    let one = first.filter(|_| differing < SEGMENT).map(|first| (first / SEGMENT, blocks));
    let several = if one.is_some() { &[] } else { blocks };
    let stretches = several.chunk_by(|one, next| one / SEGMENT == next / SEGMENT);
    let number = |blocks: &[u32]| blocks.first().map_or(0, |first| first / SEGMENT);
    one.into_iter().chain(stretches.map(move |blocks| (number(blocks), blocks)))
}

/// The count of a block of this segment.
fn of(segment: &[Count], block: u32) -> Count {
    segment.get(widen(block % SEGMENT)).copied().unwrap_or_default()
}

fn are_free(counts: impl Iterator<Item = Count>, access: Access) -> bool {
    let excluding = match access {
        Access::Read => counts.fold(0, |any, found| any | found.writers),
        Access::Write => counts.fold(0, |any, found| any | found.readers | found.writers),
    };
    excluding == 0
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
        counts.add(&Blocks::new(&[5000]), Access::Read);
        assert_eq!(counts.segments.iter().flatten().count(), 1);
        assert!(!counts.are_free(&[5000], Access::Write));
    }

    #[test]
    fn a_range_over_several_segments_is_counted_in_each() {
        let mut counts = BlockCounts::new(3 * SEGMENT - 1);
        let range: Vec<u32> = (SEGMENT - 2..3 * SEGMENT - 1).collect();
        counts.add(&Blocks::new(&range), Access::Write);
        for (block, is_free) in [
            (SEGMENT - 3, true),
            (SEGMENT - 2, false),
            (2 * SEGMENT, false),
            (3 * SEGMENT - 2, false),
        ] {
            assert_eq!(counts.are_free(&[block], Access::Read), is_free, "block {block}");
        }
        assert!(!counts.are_free(&range[1..], Access::Read));
        counts.remove(&Blocks::new(&range), Access::Write);
        assert!(counts.are_free(&range, Access::Write));
    }
}
