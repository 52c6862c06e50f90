//! The parts of blocks whose content is unknown after a failed transfer.

use std::ops::Range;

use rustc_hash::FxHashMap;
use smallvec::SmallVec;

use super::blocks::{Blocks, overlap};

/// Some layers, heads and tokens of a block, in the numbers of one group.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Area {
    pub(crate) layers: Range<u32>,
    /// A layout that does not state its heads counts as one head.
    pub(crate) heads: Range<u32>,
    /// Conflicts ignore them.
    pub(crate) tokens: Range<u32>,
}

/// The areas that failed transfers may have written in part.
#[derive(Default)]
pub(super) struct Incomplete {
    /// By block. The areas of a block that have equal groups do not overlap.
    marks: FxHashMap<u32, SmallVec<[Mark; 1]>>,
    /// The whole block of each group, if several share the blocks.
    wholes: Box<[Area]>,
}

/// An area that one group must not read.
#[derive(Clone)]
struct Mark {
    /// The group whose write failed.
    writer: u32,
    /// The group that the area counts for.
    reader: u32,
    area: Area,
}

impl Incomplete {
    /// Creates the table for groups that share the blocks. Their numbers count from 0 in this
    /// order.
    pub(super) fn of_groups(wholes: Box<[Area]>) -> Self {
        Self { wholes, ..Self::default() }
    }

    pub(super) fn is_empty(&self) -> bool {
        self.marks.is_empty()
    }

    /// Records that a write of this area by `group` failed. The whole block is incomplete for other
    /// groups, because their layers, heads and tokens have other offsets in it.
    pub(super) fn add(&mut self, blocks: &Blocks, group: u32, area: &Area) {
        for block in blocks.to_vec() {
            let marks = self.marks.entry(block).or_default();
            subtract(marks, group, area, |mark| mark.writer == group);
            marks.retain(|mark| mark.writer != group || mark.reader == group);
            marks.push(Mark { writer: group, reader: group, area: area.clone() });
            let others = (0_u32..).zip(&self.wholes).filter(|&(reader, _)| reader != group);
            marks.extend(others.map(|(reader, whole)| {
                let area = whole.clone();
                Mark { writer: group, reader, area }
            }));
        }
    }

    /// Records that `group` has written this area. Once a group has rewritten everything that it
    /// failed to write, the block is complete for the other groups as well.
    pub(super) fn remove(&mut self, blocks: &Blocks, group: u32, area: &Area) {
        if self.marks.is_empty() {
            return;
        }
        for block in blocks.to_vec() {
            let Some(marks) = self.marks.get_mut(&block) else { continue };
            subtract(marks, group, area, |_| true);
            if !marks.iter().any(|mark| mark.writer == group && mark.reader == group) {
                marks.retain(|mark| mark.writer != group);
            }
            if marks.is_empty() {
                self.marks.remove(&block);
            }
        }
    }

    /// The blocks that are incomplete for `group` somewhere in the area.
    pub(super) fn among(&self, blocks: &[u32], group: u32, area: &Area) -> Vec<u32> {
        let counts = |mark: &Mark| mark.reader == group && mark.area.meets(area);
        let is_incomplete =
            |block: &u32| self.marks.get(block).is_some_and(|marks| marks.iter().any(counts));
        blocks.iter().copied().filter(is_incomplete).collect()
    }
}

/// Removes an area from the `chosen` marks that apply to `reader`.
fn subtract(
    marks: &mut SmallVec<[Mark; 1]>,
    reader: u32,
    area: &Area,
    chosen: impl Fn(&Mark) -> bool,
) {
    let rest = |mark: Mark| -> SmallVec<[Mark; 6]> {
        if mark.reader == reader && chosen(&mark) {
            let left = mark.area.without(area).into_iter();
            left.map(|area| Mark { area, ..mark }).collect()
        } else {
            std::iter::once(mark).collect()
        }
    };
    *marks = std::mem::take(marks).into_iter().flat_map(rest).collect();
}

impl Area {
    fn meets(&self, other: &Self) -> bool {
        overlap(&self.layers, &other.layers)
            && overlap(&self.heads, &other.heads)
            && overlap(&self.tokens, &other.tokens)
    }

    /// Subtracts another area. The result consists of the layers before and after it, of the heads
    /// before and after it within its layers, and of the tokens before and after it within both.
    fn without(&self, other: &Self) -> SmallVec<[Self; 6]> {
        if !self.meets(other) {
            return std::iter::once(self.clone()).collect();
        }
        let Self { layers, heads, tokens } = self;
        let (same_layers, same_heads) =
            (common(layers, &other.layers), common(heads, &other.heads));
        let [layers, heads, tokens] = [
            outside(layers, &other.layers),
            outside(heads, &other.heads),
            outside(tokens, &other.tokens),
        ];
        let of_layers = layers.into_iter().map(|layers| Self { layers, ..self.clone() });
        let of_heads = heads.into_iter().map(|heads| Self {
            layers: same_layers.clone(),
            heads,
            tokens: self.tokens.clone(),
        });
        let of_tokens = tokens.into_iter().map(|tokens| Self {
            layers: same_layers.clone(),
            heads: same_heads.clone(),
            tokens,
        });
        let parts = of_layers.chain(of_heads).chain(of_tokens);
        parts.filter(|part| !part.is_empty()).collect()
    }

    fn is_empty(&self) -> bool {
        self.layers.is_empty() || self.heads.is_empty() || self.tokens.is_empty()
    }
}

/// The numbers that are in both ranges.
fn common(one: &Range<u32>, other: &Range<u32>) -> Range<u32> {
    one.start.max(other.start)..one.end.min(other.end)
}

/// The numbers of a range before and after another one that overlaps it.
fn outside(range: &Range<u32>, other: &Range<u32>) -> [Range<u32>; 2] {
    [range.start..other.start, other.end..range.end]
}

#[cfg(all(test, not(loom)))]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const SIDE: u32 = 4;
    const CELLS: usize = 64;

    fn area() -> impl Strategy<Value = Area> {
        let range = || {
            let ends = (0..SIDE).prop_flat_map(|start| (Just(start), start + 1..=SIDE));
            ends.prop_map(|(start, end)| start..end)
        };
        (range(), range(), range()).prop_map(|(layers, heads, tokens)| Area {
            layers,
            heads,
            tokens,
        })
    }

    /// Each layer, head and token, with its number.
    fn all_cells() -> impl Iterator<Item = (usize, Area)> {
        let cell = |at: u32| {
            let [layer, head, token] = [at / (SIDE * SIDE), at / SIDE % SIDE, at % SIDE];
            Area { layers: layer..layer + 1, heads: head..head + 1, tokens: token..token + 1 }
        };
        (0..CELLS).zip((0..).map(cell))
    }

    proptest! {
        /// Compared with a table of every layer, head and token.
        #[test]
        fn marks_equal_a_table_of_cells(steps in prop::collection::vec((any::<bool>(), area()), 1..12)) {
            let mut incomplete = Incomplete::default();
            let mut cells = [false; CELLS];
            let blocks = Blocks::new(&[7]);
            for (fails, written) in steps {
                if fails {
                    incomplete.add(&blocks, 0, &written);
                } else {
                    incomplete.remove(&blocks, 0, &written);
                }
                for (at, cell) in all_cells() {
                    if written.meets(&cell) {
                        cells[at] = fails;
                    }
                    let found = incomplete.among(&[6, 7, 8], 0, &cell);
                    prop_assert_eq!(found, if cells[at] { vec![7] } else { vec![] });
                }
                prop_assert_eq!(incomplete.is_empty(), !cells.contains(&true));
            }
        }

        /// Three groups, compared with a table by writer, reader, layer, head and token.
        #[test]
        fn marks_of_groups_equal_a_table_of_cells_for_each(
            steps in prop::collection::vec((any::<bool>(), 0_u32..3, area()), 1..12),
        ) {
            let whole = Area { layers: 0..SIDE, heads: 0..SIDE, tokens: 0..SIDE };
            let mut incomplete = Incomplete::of_groups(vec![whole; 3].into());
            let blocks = Blocks::new(&[7]);
            // By writer and reader.
            let mut cells = [[[false; CELLS]; 3]; 3];
            let index = |number: u32| usize::try_from(number).unwrap();
            for (fails, group, written) in steps {
                if fails {
                    incomplete.add(&blocks, group, &written);
                } else {
                    incomplete.remove(&blocks, group, &written);
                }
                let own = index(group);
                for (at, cell) in all_cells() {
                    let is_written = written.meets(&cell);
                    for other in [0, 1, 2] {
                        if fails {
                            cells[own][other][at] |= other != own || is_written;
                        } else if is_written {
                            cells[other][own][at] = false;
                        }
                    }
                }
                if !fails && !cells[own][own].contains(&true) {
                    cells[own] = [[false; CELLS]; 3];
                }
                for (at, cell) in all_cells() {
                    for reader in 0..3_u32 {
                        let expected = cells.iter().any(|of| of[index(reader)][at]);
                        let found = incomplete.among(&[7], reader, &cell);
                        prop_assert_eq!(found, if expected { vec![7] } else { vec![] });
                    }
                }
                let any = cells.iter().flatten().flatten().any(|&cell| cell);
                prop_assert_eq!(incomplete.is_empty(), !any);
            }
        }
    }
}
