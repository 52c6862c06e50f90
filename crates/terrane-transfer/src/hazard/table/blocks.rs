//! The blocks of a claim.

use std::ops::Range;

use smallvec::SmallVec;
use terrane_core::convert::to_usize;

/// Block numbers, with possible duplicates.
pub(super) enum Blocks {
    /// Consecutive blocks, such as those of a sequence that was allocated at once. They need no
    /// list. Their counts are adjacent, so the compiler vectorises reads and changes.
    Range(Range<u32>),
    /// Other blocks, and whether they are in ascending order, which allows binary search. They are
    /// sorted at the first search, which is rare.
    List(SmallVec<[u32; 16]>, bool),
}

impl Blocks {
    pub(super) fn new(blocks: &[u32]) -> Self {
        match as_parts(blocks) {
            (range, []) => Self::Range(range),
            (_, list) => Self::List(SmallVec::from_slice(list), false),
        }
    }

    /// The blocks as a range, or as a list. The other one is empty.
    pub(super) fn parts(&self) -> (Range<u32>, &[u32]) {
        match self {
            Self::Range(range) => (range.clone(), &[]),
            Self::List(blocks, _) => (0..0, blocks),
        }
    }

    /// The number of blocks. Each duplicate counts.
    pub(super) fn len(&self) -> usize {
        match self {
            Self::Range(range) => range.len(),
            Self::List(blocks, _) => blocks.len(),
        }
    }

    /// Whether a block is one of these.
    pub(super) fn has(&mut self, block: u32) -> bool {
        let (range, list) = self.sorted();
        range.contains(&block) || list.binary_search(&block).is_ok()
    }

    /// The blocks in ascending order, without duplicates.
    pub(super) fn distinct(&mut self) -> impl Iterator<Item = u32> + '_ {
        let (range, list) = self.sorted();
        let listed = list.chunk_by(|one, next| one == next).filter_map(|same| same.first());
        range.chain(listed.copied())
    }

    /// The [parts](Self::parts), with a sorted list.
    fn sorted(&mut self) -> (Range<u32>, &[u32]) {
        if let Self::List(blocks, is_sorted) = self
            && !std::mem::replace(is_sorted, true)
            && !blocks.is_sorted()
        {
            blocks.sort_unstable();
        }
        self.parts()
    }

    pub(super) fn to_vec(&self) -> Vec<u32> {
        let (range, list) = self.parts();
        range.chain(list.iter().copied()).collect()
    }
}

/// The blocks as a range, if they are consecutive and in this order, or as a list. The other one is
/// empty.
pub(super) fn as_parts(blocks: &[u32]) -> (Range<u32>, &[u32]) {
    range_of(blocks).map_or((0..0, blocks), |range| (range, &[]))
}

/// The range that has exactly these blocks, in this order; `None` if there is none.
fn range_of(blocks: &[u32]) -> Option<Range<u32>> {
    let (first, end) = (*blocks.first()?, blocks.last()?.checked_add(1)?);
    if first >= end || widen(end - first) != blocks.len() {
        return None;
    }
    // Without a branch for each element, the compiler vectorises the comparison.
    let is_range =
        blocks.iter().zip(first..end).fold(true, |all, (&block, id)| all & (block == id));
    is_range.then_some(first..end)
}

/// The entries of a block in a list that is sorted by blocks.
pub(super) fn entries_of<T>(sorted: &[(u32, T)], block: u32) -> impl Iterator<Item = &(u32, T)> {
    let begin = sorted.partition_point(|&(other, _)| other < block);
    let from = sorted.get(begin..).unwrap_or_default().iter();
    from.take_while(move |&&(other, _)| other == block)
}

/// A block number as an index.
pub(super) fn widen(block: u32) -> usize {
    to_usize(block.into())
}

/// Whether two ranges overlap.
pub(crate) fn overlap(a: &Range<u32>, b: &Range<u32>) -> bool {
    a.start < b.end && b.start < a.end
}
