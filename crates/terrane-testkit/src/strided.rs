//! Copies of cells between two buffers, each with its own strides, and their expected bytes.

use crate::random::Seeded;

/// A copy of `pairs · layers · outers · rows · columns` cells between two buffers.
#[derive(Clone, Debug)]
pub struct StridedCase {
    /// Pairs, layers, outers, rows, columns.
    pub counts: [u32; 5],
    /// The length of a cell.
    pub bytes: u64,
    /// The source of the cells.
    pub source: StridedEnd,
    /// The destination of the cells.
    pub destination: StridedEnd,
}

/// One end of a [`StridedCase`]: offsets into a buffer.
#[derive(Clone, Debug)]
pub struct StridedEnd {
    /// The length of the buffer. No cell uses its last byte.
    pub length: usize,
    /// The offset that is added to all others.
    pub base: u64,
    /// The offset of each layer's region, if layers have separate regions.
    pub bases: Option<Vec<u64>>,
    /// How the block ids are passed.
    pub ids: StridedIds,
    /// The block id of each pair.
    pub blocks: Vec<u32>,
    /// The distance from a block, layer, outer, row and column to the next.
    pub strides: [u64; 5],
}

/// How the block ids of an end are passed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum StridedIds {
    /// The ids are 0, 1, 2 and so on.
    Identity,
    /// As a list in memory.
    Listed,
    /// As parameters of the call.
    Inline,
}

impl StridedCase {
    /// Creates a case with these counts. The seed determines everything else: the nesting of
    /// dimensions, gaps, regions, block ids, and the first offset. All offsets and strides are
    /// multiples of `unit`, and no two cells overlap.
    #[must_use]
    pub fn new(seed: u64, counts: [u32; 5], bytes: u64, unit: u64) -> Self {
        let mut random = Seeded::new(seed);
        let mut end = || StridedEnd::new(&mut random, counts, bytes, unit);
        Self { counts, bytes, source: end(), destination: end() }
    }

    /// Creates a case with about `cells` cells. The seed also determines the counts and the unit.
    #[must_use]
    pub fn of_about(seed: u64, cells: u32, bytes: u64) -> Self {
        let mut random = Seeded::new(seed ^ 0x5eed);
        let mut left = cells.max(1);
        let mut counts = [1; 5];
        let mut order = [0, 1, 2, 3, 4];
        random.shuffle(&mut order);
        for dimension in order {
            if random.once_in(3) {
                continue;
            }
            let bound = usize::try_from(left.min(40)).expect("a small number");
            let count = u32::try_from(random.below(bound)).expect("a small number") + 1;
            if let Some(slot) = counts.get_mut(dimension) {
                *slot = count;
            }
            left = (left / count).max(1);
        }
        Self::new(seed, counts, bytes, 1 << random.below(5))
    }

    /// Copies every cell from one byte buffer to the other.
    pub fn copy(&self, source: &[u8], destination: &mut [u8]) {
        let [pairs, layers, outers, rows, columns] = self.counts;
        for pair in 0..pairs {
            for layer in 0..layers {
                for outer in 0..outers {
                    for row in 0..rows {
                        for column in 0..columns {
                            let cell = [pair, layer, outer, row, column];
                            let bytes = usize::try_from(self.bytes).expect("a buffer's length");
                            let (from, to) =
                                (self.source.offset(cell), self.destination.offset(cell));
                            let word = source.get(from..from + bytes).expect("within the source");
                            destination
                                .get_mut(to..to + bytes)
                                .expect("within the destination")
                                .copy_from_slice(word);
                        }
                    }
                }
            }
        }
    }
}

impl StridedEnd {
    fn new(random: &mut Seeded, counts: [u32; 5], bytes: u64, unit: u64) -> Self {
        let [pairs, layers, ..] = counts;
        let gap = |random: &mut Seeded| match random.below(3) {
            0 => unit * u64::try_from(random.below(5)).expect("a small number"),
            _ => 0,
        };
        let ids = match random.below(3) {
            0 => StridedIds::Identity,
            1 => StridedIds::Listed,
            _ => StridedIds::Inline,
        };
        let spare = if ids == StridedIds::Identity { 0 } else { random.below(4) };
        let pool = pairs + u32::try_from(spare).expect("a small number");
        let mut blocks: Vec<u32> = (0..pool).collect();
        if ids != StridedIds::Identity {
            random.shuffle(&mut blocks);
        }
        blocks.truncate(usize::try_from(pairs).expect("a length"));

        let has_regions = random.once_in(2);
        let mut sizes = counts;
        sizes[0] = pool;
        let mut order: Vec<usize> = (0..5).filter(|&at| !(has_regions && at == 1)).collect();
        random.shuffle(&mut order);
        let mut strides = [0; 5];
        let mut extent = bytes.next_multiple_of(unit) + gap(random);
        for dimension in order {
            strides[dimension] = extent;
            extent = extent * u64::from(sizes[dimension]) + gap(random);
        }
        let base = unit * u64::try_from(random.below(9)).expect("a small number");
        let mut end = base + extent;
        let bases = has_regions.then(|| {
            let mut bases: Vec<u64> = (0..u64::from(layers)).map(|at| at * extent).collect();
            end = base + extent * u64::from(layers);
            random.shuffle(&mut bases);
            bases
        });
        let length = usize::try_from(end + 1).expect("a buffer's length");
        Self { length, base, bases, ids, blocks, strides }
    }

    /// The start of a cell; the indices are pair, layer, outer, row and column.
    fn offset(&self, [pair, layer, outer, row, column]: [u32; 5]) -> usize {
        let at = |index: u32| usize::try_from(index).expect("a length");
        let region = self.bases.as_ref().map_or(0, |bases| bases[at(layer)]);
        let block = self.blocks[at(pair)];
        let steps = [block, layer, outer, row, column].into_iter().zip(self.strides);
        let inner: u64 = steps.map(|(index, stride)| u64::from(index) * stride).sum();
        usize::try_from(self.base + region + inner).expect("a buffer's length")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_cell_arrives_and_none_overlap() {
        for seed in 0..300 {
            let bytes = 1 + seed % 40;
            let case = StridedCase::of_about(seed, 60, bytes);
            let source: Vec<u8> = (0..case.source.length).map(|_| 1).collect();
            let mut destination = vec![0; case.destination.length];
            case.copy(&source, &mut destination);
            let cells: u64 = case.counts.iter().map(|&count| u64::from(count)).product();
            let written: u64 = destination.iter().map(|&byte| u64::from(byte)).sum();
            assert_eq!(written, cells * bytes, "{case:?}");
            assert_eq!(destination.last(), Some(&0));
        }
    }
}
