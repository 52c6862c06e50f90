//! Descriptions of a transfer by strides, for engines that compute addresses and read no list of
//! runs.

use std::sync::Arc;

use terrane_core::ByteCount;

use super::TransferPlan;
use super::loops::BlockLoops;
use super::nest::{Loop, LoopAxis, LoopNest, distance_of};
use super::run::Distance;
use crate::side::Side;

/// A part of a plan as nested counts, with the strides of both ends.
///
/// For every pair of blocks of the plan, `layers · outers · rows · columns` cells of
/// [`bytes`](Self::bytes) each are copied. A cell is contiguous at both ends and as long as both
/// geometries allow. Neighbouring blocks are not joined.
///
/// The cell (pair, layer, outer, row, column), each index counted from 0, is at one end in region
/// `first_region + layer · regions_per_layer`, at
///
/// ```text
/// offset + block(pair) · block_stride + layer · layer_stride + outer · outer_stride
///        + row · row_stride + column · column_stride
/// ```
///
/// where `block(pair)` is the id of that end's block. All cells are within the regions.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CopyGrid {
    /// Layers that are separate at one end at least. It is 1 if whole blocks are contiguous at both
    /// ends, unless the transfer is [layer-by-layer](crate::Transfer::layer_by_layer).
    pub layers: u32,
    /// Iterations of the outermost loop within a layer: sections, in most plans.
    pub outers: u32,
    /// Iterations of the next loop: tokens or heads, in most plans that break pieces up.
    pub rows: u32,
    /// Iterations of the innermost loop.
    pub columns: u32,
    /// The length of a cell.
    pub bytes: ByteCount,
    /// The source of the cells.
    pub source: GridEnd,
    /// The destination of the cells.
    pub destination: GridEnd,
}

/// One end of a [`CopyGrid`]. Strides are in bytes. A dimension with one item has a meaningless
/// stride.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct GridEnd {
    /// The region of the first layer.
    pub first_region: u32,
    /// Regions from a layer to the next; 0 if all layers share one.
    pub regions_per_layer: u32,
    /// The offset of the first cell of block 0 in its region, in bytes.
    pub offset: u64,
    /// From a block to the block with the next id.
    pub block_stride: u64,
    /// From a layer to the next.
    pub layer_stride: u64,
    /// From an outer to the next.
    pub outer_stride: u64,
    /// From a row to the next.
    pub row_stride: u64,
    /// From a column to the next.
    pub column_stride: u64,
}

/// The maximum number of loops within a layer of a grid.
const LOOPS: usize = 3;

/// The maximum number of grids of a plan. Engines launch one copy for each.
const MOST_GRIDS: u64 = 64;

impl CopyGrid {
    /// One end.
    #[must_use]
    pub const fn end(&self, side: Side) -> &GridEnd {
        match side {
            Side::Source => &self.source,
            Side::Destination => &self.destination,
        }
    }

    /// The bytes of one pair of blocks.
    #[must_use]
    pub fn block_bytes(&self) -> u64 {
        let counts = [self.layers, self.outers, self.rows, self.columns];
        counts.iter().map(|&count| u64::from(count)).product::<u64>() * self.bytes.get()
    }
}

impl TransferPlan {
    /// Returns the same copies as strides, for engines that compute addresses. The blocks are those
    /// of [`source_blocks`](Self::source_blocks) and
    /// [`destination_blocks`](Self::destination_blocks). Each grid covers all layers of the
    /// transfer.
    ///
    /// `None` if too many grids are needed: blocks or layers are at uneven distances, or in several
    /// regions.
    #[must_use]
    pub fn grids(&self) -> Option<Arc<[CopyGrid]>> {
        self.loops.grids.get_or_init(|| self.loops.make_grids()).clone()
    }
}

impl BlockLoops {
    fn make_grids(&self) -> Option<Arc<[CopyGrid]>> {
        let [group] = self.groups.as_slice() else { return None };
        let mut grids = Vec::with_capacity(group.nests.len());
        for nest in &group.nests {
            if nest.block.as_ref().into_iter().any(|steps| steps.outer().count > 1) {
                return None;
            }
            let mut loops: Vec<Loop> = Vec::with_capacity(8);
            let outer = nest.outer.iter().filter(|level| level.over != LoopAxis::Layers);
            loops.extend(outer.chain(&nest.inner));
            // Loops over regions, and the outermost of too many loops, become separate grids.
            let is_over_regions = |level: &Loop| level.step.0.into_iter().any(|at| at.region != 0);
            let (mut apart, mut inside): (Vec<Loop>, Vec<Loop>) =
                loops.into_iter().partition(is_over_regions);
            let too_many = inside.len().saturating_sub(LOOPS);
            apart.extend(inside.drain(..too_many));
            let count: u64 = apart.iter().map(|level| level.count).product();
            if count > MOST_GRIDS {
                return None;
            }
            for index in 0..count {
                grids.push(grid(nest, &distance_of(apart.iter(), index), &inside)?);
            }
        }
        Some(grids.into())
    }
}

/// One grid of a nest, with its first cell moved by `at`.
fn grid(nest: &LoopNest, at: &Distance, loops: &[Loop]) -> Option<CopyGrid> {
    let layers = nest.outer_over(LoopAxis::Layers);
    // Sections are the outer loop, if there is one.
    let (outer, rows) = match loops {
        [outer, rows @ ..] if outer.over == LoopAxis::Sections || rows.len() == 2 => {
            (Some(outer), rows)
        }
        rows => (None, rows),
    };
    let (row, column) = (rows.first(), rows.get(1));
    let count =
        |level: Option<&Loop>| level.map_or(Some(1), |level| u32::try_from(level.count).ok());
    let stride =
        |level: Option<&Loop>, side| level.map_or(0, |level| level.step.0.get(side).offset);
    let end = |side| {
        let (base, by, steps) = (nest.base.get(side), at.0.get(side), nest.block.get(side));
        let layer = layers.map(|level| level.step.0.get(side));
        GridEnd {
            first_region: base.region.wrapping_add(by.region),
            regions_per_layer: layer.map_or(0, |at| at.region),
            offset: base.offset.wrapping_add(by.offset),
            block_stride: steps.inner().stride,
            layer_stride: layer.map_or(0, |at| at.offset),
            outer_stride: stride(outer, side),
            row_stride: stride(row, side),
            column_stride: stride(column, side),
        }
    };
    Some(CopyGrid {
        layers: count(layers)?,
        outers: count(outer)?,
        rows: count(row)?,
        columns: count(column)?,
        bytes: ByteCount::new(nest.unit),
        source: end(Side::Source),
        destination: end(Side::Destination),
    })
}
