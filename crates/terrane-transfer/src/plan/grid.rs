//! Descriptions of a transfer by strides, for engines that compute addresses and read no list of
//! runs.

use std::sync::Arc;

use terrane_core::ByteCount;
use terrane_layout::AxisSteps;

use super::TransferPlan;
use super::loops::BlockLoops;
use super::nest::{Loop, LoopAxis, LoopNest, distance_of};
use super::run::Distance;
use crate::side::{Ends, Side};

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
/// where `block(pair)` is the pair's number of [`TransferPlan::grid_blocks`] at that end. All cells
/// are within the regions.
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
    /// From a block to the block with the next number.
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
    /// of [`grid_blocks`](Self::grid_blocks). Each grid covers all layers of the transfer.
    ///
    /// `None` if too many grids are needed: blocks or layers are at uneven distances, or in several
    /// regions.
    #[must_use]
    pub fn grids(&self) -> Option<&Arc<[CopyGrid]>> {
        Some(&self.grids_with_numbers()?.grids)
    }

    fn grids_with_numbers(&self) -> Option<&Grids> {
        self.loops.grids.get_or_init(|| self.loops.make_grids()).as_ref()
    }

    /// The blocks of one end as numbers for the [grids](Self::grids), in the order of the pairs.
    ///
    /// The numbers are the ids of the blocks. Blocks in chunks have other numbers, because chunks
    /// and the blocks in a chunk have different strides.
    #[must_use]
    pub fn grid_blocks(&self, side: Side) -> &[u32] {
        let numbers = self.grids_with_numbers().and_then(|grids| *grids.numbers.get(side));
        match numbers {
            None => self.blocks(side),
            Some(_) => self
                .buffers
                .chunked_blocks
                .get_or_init(|| {
                    let of_end = |side| self.numbered(side, self.blocks(side).to_vec());
                    Ends { source: of_end(Side::Source), destination: of_end(Side::Destination) }
                })
                .get(side),
        }
    }

    /// Whether the numbers of [`grid_blocks`](Self::grid_blocks) are not the ids at one end at least.
    #[must_use]
    pub fn has_chunked_blocks(&self) -> bool {
        self.grids_with_numbers().is_some_and(|Grids { numbers, .. }| *numbers != Ends::default())
    }

    /// These blocks of one end, as numbers for the [grids](Self::grids).
    #[must_use]
    pub fn numbered(&self, side: Side, mut blocks: Vec<u32>) -> Vec<u32> {
        if let Some(numbers) = self.grids_with_numbers().and_then(|grids| *grids.numbers.get(side))
        {
            blocks.iter_mut().for_each(|block| *block = numbers.of(*block));
        }
        blocks
    }
}

/// The grids of a pair of endpoints.
#[derive(Debug)]
pub(super) struct Grids {
    grids: Arc<[CopyGrid]>,
    /// The numbers of blocks in chunks; `None` if the ids are the numbers.
    numbers: Ends<Option<ChunkedNumbers>>,
}

/// Numbers of blocks in chunks, such that one stride reaches all of them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct ChunkedNumbers {
    blocks_per_chunk: u32,
    of_chunk: u32,
    of_block: u32,
    /// The bytes from a number to the next.
    stride: u64,
}

impl ChunkedNumbers {
    /// `None` if a number exceeds 32 bits.
    fn new(steps: &AxisSteps) -> Option<Self> {
        let (chunks, blocks) = (steps.outer(), steps.inner());
        let stride = greatest_common_divisor(chunks.stride, blocks.stride);
        let number = |bytes: u64| u32::try_from(bytes.checked_div(stride)?).ok();
        let (of_chunk, of_block) = (number(chunks.stride)?, number(blocks.stride)?);
        let last = u64::from(chunks.count - 1) * u64::from(of_chunk)
            + u64::from(blocks.count - 1) * u64::from(of_block);
        u32::try_from(last).ok()?;
        Some(Self { blocks_per_chunk: blocks.count, of_chunk, of_block, stride })
    }

    fn of(&self, block: u32) -> u32 {
        let (chunk, within) = (block / self.blocks_per_chunk, block % self.blocks_per_chunk);
        chunk * self.of_chunk + within * self.of_block
    }
}

/// The numbers of blocks at one end, if they are in chunks. `None` if no list of numbers serves all
/// nests.
fn chunked_numbers(nests: &[LoopNest], side: Side) -> Option<Option<ChunkedNumbers>> {
    let mut steps = nests.iter().map(|nest| nest.block.get(side));
    if steps.clone().all(|steps| steps.outer().count == 1) {
        return Some(None);
    }
    let first = steps.next()?;
    let is_alike = first.regions() == 0 && steps.all(|steps| steps == first);
    is_alike.then(|| ChunkedNumbers::new(first)).flatten().map(Some)
}

fn greatest_common_divisor(mut a: u64, mut b: u64) -> u64 {
    while b != 0 {
        (a, b) = (b, a % b);
    }
    a
}

impl BlockLoops {
    fn make_grids(&self) -> Option<Grids> {
        let [group] = self.groups.as_slice() else { return None };
        let numbers = Ends {
            source: chunked_numbers(&group.nests, Side::Source)?,
            destination: chunked_numbers(&group.nests, Side::Destination)?,
        };
        let mut grids = Vec::with_capacity(group.nests.len());
        for nest in &group.nests {
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
                grids.push(grid(nest, &distance_of(apart.iter(), index), &inside, &numbers)?);
            }
        }
        Some(Grids { grids: grids.into(), numbers })
    }
}

/// One grid of a nest, with its first cell moved by `at`.
fn grid(
    nest: &LoopNest,
    at: &Distance,
    loops: &[Loop],
    numbers: &Ends<Option<ChunkedNumbers>>,
) -> Option<CopyGrid> {
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
            block_stride: numbers.get(side).map_or(steps.inner().stride, |numbers| numbers.stride),
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
