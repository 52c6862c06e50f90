//! Which parts of which blocks a failed transfer may have written in part.

use std::ops::Range;

use rustc_hash::FxHashMap;
use smallvec::SmallVec;

use super::blocks::Blocks;
use super::meet;

/// Some layers and some heads of a block.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Area {
    pub(super) layers: Range<u32>,
    pub(super) heads: Range<u32>,
}

/// The areas that hold neither what was there before a transfer nor what it was to write.
#[derive(Default)]
pub(super) struct Incomplete {
    /// By block. The areas of a block do not overlap.
    areas: FxHashMap<u32, SmallVec<[Area; 1]>>,
}

impl Incomplete {
    pub(super) fn is_empty(&self) -> bool {
        self.areas.is_empty()
    }

    /// A write of this area failed.
    pub(super) fn add(&mut self, blocks: &Blocks, area: &Area) {
        self.remove(blocks, area);
        for block in blocks.to_vec() {
            let areas = self.areas.entry(block).or_default();
            if !areas.contains(area) {
                areas.push(area.clone());
            }
        }
    }

    /// This area was written.
    pub(super) fn remove(&mut self, blocks: &Blocks, area: &Area) {
        if self.areas.is_empty() {
            return;
        }
        for block in blocks.to_vec() {
            let Some(areas) = self.areas.get_mut(&block) else { continue };
            *areas = areas.iter().flat_map(|old| old.without(area)).collect();
            if areas.is_empty() {
                self.areas.remove(&block);
            }
        }
    }

    /// Those of the blocks that are incomplete somewhere in the area.
    pub(super) fn among(&self, blocks: &[u32], area: &Area) -> Vec<u32> {
        if self.areas.is_empty() {
            return Vec::new();
        }
        let is_incomplete = |block: &u32| {
            self.areas.get(block).is_some_and(|areas| areas.iter().any(|it| it.meets(area)))
        };
        blocks.iter().copied().filter(is_incomplete).collect()
    }
}

impl Area {
    fn meets(&self, other: &Self) -> bool {
        meet(&self.layers, &other.layers) && meet(&self.heads, &other.heads)
    }

    /// What is left of it without another one: the layers before and after that, and of the layers
    /// in between the heads before and after.
    fn without(&self, other: &Self) -> SmallVec<[Self; 4]> {
        if !self.meets(other) {
            return std::iter::once(self.clone()).collect();
        }
        let between =
            self.layers.start.max(other.layers.start)..self.layers.end.min(other.layers.end);
        [
            (self.layers.start..between.start, self.heads.clone()),
            (between.end..self.layers.end, self.heads.clone()),
            (between.clone(), self.heads.start..other.heads.start),
            (between, other.heads.end..self.heads.end),
        ]
        .into_iter()
        .filter(|(layers, heads)| !layers.is_empty() && !heads.is_empty())
        .map(|(layers, heads)| Self { layers, heads })
        .collect()
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const SIDE: u32 = 5;

    fn area() -> impl Strategy<Value = Area> {
        let range = || (0..SIDE).prop_flat_map(|start| (Just(start), start + 1..=SIDE));
        (range(), range()).prop_map(|(layers, heads)| Area {
            layers: layers.0..layers.1,
            heads: heads.0..heads.1,
        })
    }

    proptest! {
        /// Against a table of every layer and head.
        #[test]
        fn as_a_table_of_cells_would(steps in prop::collection::vec((any::<bool>(), area()), 1..12)) {
            let mut incomplete = Incomplete::default();
            let mut cells = [false; 25];
            let blocks = Blocks::new(&[7]);
            for (fails, written) in steps {
                if fails {
                    incomplete.add(&blocks, &written);
                } else {
                    incomplete.remove(&blocks, &written);
                }
                for layer in 0..SIDE {
                    for head in 0..SIDE {
                        let cell = Area { layers: layer..layer + 1, heads: head..head + 1 };
                        let at = usize::try_from(layer * SIDE + head).unwrap();
                        if written.meets(&cell) {
                            cells[at] = fails;
                        }
                        let found = incomplete.among(&[6, 7, 8], &cell);
                        prop_assert_eq!(found, if cells[at] { vec![7] } else { vec![] });
                    }
                }
                prop_assert_eq!(incomplete.is_empty(), !cells.contains(&true));
            }
        }
    }
}
