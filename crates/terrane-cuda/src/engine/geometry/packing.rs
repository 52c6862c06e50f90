//! How blocks are packed, and their contiguous stretches: pure arithmetic.

use std::ops::Range;

use smallvec::SmallVec;
use terrane_core::convert::to_u64;
use terrane_layout::Page;
use terrane_transfer::calibration::Direction;
use terrane_transfer::{CopyGrid, GridEnd, Side, TransferPlan};

use crate::engine::geometry::index;

/// The order in which a transfer's cells are contiguous at one of its ends, whatever the order of
/// the other end. Cells are packed in this order.
///
/// A *unit* is contiguous in every layout: the rows and columns of one piece. A unit is larger if
/// both ends keep more cells together.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Packing {
    pub(crate) order: PackingOrder,
    /// The bytes of a unit.
    pub(crate) unit: u64,
    pub(crate) layers: u32,
    pub(crate) outers: u32,
    /// The number from a block to the block whose part follows its own part; 0 if there is none.
    pub(crate) step: u32,
    /// The pages, if they are packed in the end's own form.
    pub(crate) page: Option<Page>,
}

/// The order of the indices of cells, from the one that changes slowest to the fastest.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum PackingOrder {
    /// Block, layer, outer: each block is contiguous.
    Blocks,
    /// Layer, block, outer: the part of a block in a layer is contiguous.
    Layers,
    /// Layer, outer, block: only units are contiguous.
    Outers,
}

/// A buffer as an end of a grid: strides from its beginning.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct PackedStrides {
    pub(crate) pair: u64,
    pub(crate) layer: u64,
    pub(crate) outer: u64,
    /// The address of the first cell of block 0.
    pub(crate) offset: u64,
}

/// A part of a transfer: some pairs of blocks, and some of their layers.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Chunk {
    pub(crate) pairs: Range<u32>,
    pub(crate) layers: Range<u32>,
}

/// A contiguous stretch of a packed part: its offset in the buffer, its first block, layer and
/// outer at the other end, and its length.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct PackedStretch {
    pub(crate) at: u64,
    pub(crate) block: u32,
    pub(crate) layer: u32,
    pub(crate) outer: u32,
    pub(crate) bytes: u64,
}

impl Packing {
    /// The packing of cells for `end`; `None` if not even its units are contiguous.
    pub(crate) fn of(grid: &CopyGrid, end: &GridEnd) -> Option<Self> {
        let bytes = grid.bytes.get();
        let (rows, columns) = (u64::from(grid.rows), u64::from(grid.columns));
        let unit = rows.checked_mul(columns)?.checked_mul(bytes)?;
        let columns_inside = (columns == 1 || end.column_stride == bytes)
            && (rows == 1 || end.row_stride == bytes * columns);
        let rows_inside = (rows == 1 || end.row_stride == bytes)
            && (columns == 1 || end.column_stride == bytes * rows);
        if unit == 0 || !(columns_inside || rows_inside) {
            return None;
        }
        let (layers, outers) = (u64::from(grid.layers), u64::from(grid.outers));
        let of_layer = unit.checked_mul(outers)?;
        let of_block = of_layer.checked_mul(layers)?;
        let outers_touch = outers == 1 || end.outer_stride == unit;
        let layers_touch =
            layers == 1 || (end.regions_per_layer == 0 && end.layer_stride == of_layer);
        let (order, chunk) = match (outers_touch, layers_touch) {
            (true, true) => (PackingOrder::Blocks, of_block),
            (true, false) => (PackingOrder::Layers, of_layer),
            (false, _) => (PackingOrder::Outers, unit),
        };
        let step = step(chunk, end.block_stride);
        Some(Self { order, unit, layers: grid.layers, outers: grid.outers, step, page: None })
    }

    /// Whole pages of an end that is copied completely. Pages are packed unchanged, whatever their
    /// inner strides.
    pub(crate) fn of_pages(page: &Page) -> Self {
        let (unit, step) = (page.bytes(), step(page.bytes(), page.stride()));
        let order = if page.is_whole() { PackingOrder::Blocks } else { PackingOrder::Outers };
        Self { order, unit, layers: 1, outers: page.parts(), step, page: Some(*page) }
    }

    /// The part of a grid to launch for a part of this packing.
    pub(crate) fn of_grid(&self, chunk: &Chunk, grid: &CopyGrid) -> Chunk {
        let layers = if self.page.is_some() { 0..grid.layers } else { chunk.layers.clone() };
        Chunk { pairs: chunk.pairs.clone(), layers }
    }

    /// The same for layers that are packed one after the other.
    pub(crate) fn by_layers(self, end: &GridEnd) -> Self {
        match self.order {
            PackingOrder::Blocks => {
                let step = step(self.of_layer(), end.block_stride);
                Self { order: PackingOrder::Layers, step, ..self }
            }
            PackingOrder::Layers | PackingOrder::Outers => self,
        }
    }

    /// The chunks of a kernel that packs nothing: in the order of blocks, or of layers.
    pub(crate) fn unpacked(grids: &[CopyGrid], layer_by_layer: bool) -> Self {
        let layers = grids.first().map_or(1, |grid| grid.layers);
        // At most the bytes of a block.
        let of_layer = |grid: &CopyGrid| grid.block_bytes() / u64::from(layers.max(1));
        let unit = grids.iter().map(of_layer).sum();
        let order = if layer_by_layer { PackingOrder::Layers } else { PackingOrder::Blocks };
        Self { order, unit, layers, outers: 1, step: 0, page: None }
    }

    /// The bytes of one layer of one block: the smallest copy.
    pub(crate) fn of_layer(&self) -> u64 {
        self.unit * u64::from(self.outers)
    }

    /// The bytes of a part.
    pub(crate) fn bytes(&self, chunk: &Chunk) -> u64 {
        self.of_layer() * count(&chunk.layers) * count(&chunk.pairs)
    }

    /// The locations of a part's cells in the buffer.
    pub(crate) fn strides(&self, chunk: &Chunk, end: &GridEnd) -> PackedStrides {
        let (pairs, layers) = (count(&chunk.pairs), count(&chunk.layers));
        let (unit, of_layer) = (self.unit, self.of_layer());
        if let Some(page) = self.page {
            // In the buffer, one part of all pairs is followed by the next part of all pairs.
            let begin = end.offset - page.offset();
            let chunk = begin.checked_div(page.part_stride()).unwrap_or(0);
            let offset = begin - chunk * page.part_stride() + chunk * unit * pairs;
            // Only the loop over sections advances from part to part.
            let is_over_parts = !page.is_whole() && end.outer_stride >= page.part_stride();
            let outer = if is_over_parts { unit * pairs } else { end.outer_stride };
            return PackedStrides { pair: unit, layer: end.layer_stride, outer, offset };
        }
        let (pair, layer, outer) = match self.order {
            PackingOrder::Blocks => (of_layer * layers, of_layer, unit),
            PackingOrder::Layers => (of_layer, of_layer * pairs, unit),
            PackingOrder::Outers => (unit, of_layer * pairs, unit * pairs),
        };
        PackedStrides { pair, layer, outer, offset: 0 }
    }

    /// Calls `each` with the stretches of a part, in the order of the buffer. `blocks` are the
    /// blocks of the packed end, for all pairs of the transfer.
    pub(crate) fn stretches(
        &self,
        chunk: &Chunk,
        blocks: &[u32],
        mut each: impl FnMut(PackedStretch),
    ) {
        let ids = blocks.get(index(chunk.pairs.start)..index(chunk.pairs.end)).unwrap_or_default();
        let mut at = 0;
        let (layers, outers, bytes) = match self.order {
            PackingOrder::Blocks => (
                chunk.layers.start..chunk.layers.start + 1,
                1,
                self.of_layer() * count(&chunk.layers),
            ),
            PackingOrder::Layers => (chunk.layers.clone(), 1, self.of_layer()),
            PackingOrder::Outers => (chunk.layers.clone(), self.outers, self.unit),
        };
        // A part with some layers of a block contains no other block.
        let joins = self.step != 0
            && (self.order != PackingOrder::Blocks
                || count(&chunk.layers) == u64::from(self.layers));
        for layer in layers {
            for outer in 0..outers {
                let mut rest = ids;
                while let Some((&block, others)) = rest.split_first() {
                    let neighbours = if joins { neighbours(block, others, self.step) } else { 0 };
                    let bytes = bytes * (to_u64(neighbours) + 1);
                    each(PackedStretch { at, block, layer, outer, bytes });
                    at += bytes;
                    rest = others.get(neighbours..).unwrap_or_default();
                }
            }
        }
    }

    /// The number of stretches of the whole transfer, in one chunk and with sorted blocks. `blocks`
    /// are the ids of the packed side. For blocks in chunks, it is an estimate.
    pub(crate) fn count_stretches(&self, blocks: &[u32], side: Side) -> u64 {
        let breaks = match (self.step, side) {
            (0, _) => blocks.len(),
            // A plan has its destination blocks in ascending order.
            (_, Side::Destination) => count_sorted_rows(blocks),
            (_, Side::Source) => count_rows(blocks),
        };
        let breaks = to_u64(breaks);
        match self.order {
            PackingOrder::Blocks => breaks,
            PackingOrder::Layers => breaks * u64::from(self.layers),
            PackingOrder::Outers => breaks * u64::from(self.layers) * u64::from(self.outers),
        }
    }
}

/// The number from a block to the one that begins at its end, if a block has `bytes` bytes, and
/// `stride` bytes are from a number to the next; 0 if there is none.
fn step(bytes: u64, stride: u64) -> u32 {
    let step = bytes.checked_div(stride).filter(|step| step * stride == bytes);
    step.and_then(|step| u32::try_from(step).ok()).unwrap_or(0)
}

/// The number of blocks that follow `block` one after the other.
fn neighbours(block: u32, others: &[u32], step: u32) -> usize {
    let next = (1..).map(|distance: u32| block.checked_add(distance.checked_mul(step)?));
    others.iter().zip(next).take_while(|(other, next)| Some(**other) == *next).count()
}

/// The number of stretches of adjacent blocks, for blocks in any order.
fn count_rows(blocks: &[u32]) -> usize {
    if blocks.is_sorted() { count_sorted_rows(blocks) } else { count_unsorted_rows(blocks) }
}

/// The same for blocks in ascending order.
fn count_sorted_rows(blocks: &[u32]) -> usize {
    // Without a branch for each element, the compiler vectorises the comparison.
    let next = blocks.get(1..).unwrap_or_default();
    let joined = blocks.iter().zip(next).filter(|(a, b)| a.wrapping_add(1) == **b).count();
    blocks.len() - joined
}

/// The number of stretches of adjacent blocks.
#[inline(never)]
fn count_unsorted_rows(blocks: &[u32]) -> usize {
    // A bit for each block is faster than sorting them.
    // The combined bits of all numbers bound the largest one, and the compiler vectorises them.
    let words = index(blocks.iter().fold(0, |bits, block| bits | block) / 64 + 1);
    let mut bits = SmallVec::<[u64; 64]>::from_elem(0, words);
    let bits = bits.as_mut_slice();
    for &block in blocks {
        if let Some(word) = bits.get_mut(index(block / 64)) {
            *word |= 1 << (block % 64);
        }
    }
    let mut before = 0;
    let mut rows = 0;
    for &word in &*bits {
        rows += index((word & !(word << 1 | before)).count_ones());
        before = word >> 63;
    }
    rows
}

fn count(range: &Range<u32>) -> u64 {
    u64::from(range.end.saturating_sub(range.start))
}

/// The packing of a transfer for one of its ends, if it can be staged.
///
/// If a block is packed whole, no layer of it arrives before the others. So a layer-by-layer
/// transfer is packed by layers.
pub(crate) fn packing_for(
    plan: &TransferPlan,
    grids: &[CopyGrid],
    side: Side,
    layer_by_layer: bool,
) -> Option<Packing> {
    let single = match grids {
        [grid] => Packing::of(grid, grid.end(side)).map(|packing| {
            if layer_by_layer { packing.by_layers(grid.end(side)) } else { packing }
        }),
        _ => None,
    };
    if single.is_some_and(|packing| packing.order == PackingOrder::Blocks) {
        return single;
    }
    let bytes: u64 = grids.iter().map(CopyGrid::block_bytes).sum();
    // A matching number of bytes means that everything in a page is copied, because no byte is
    // copied twice.
    let is_whole = |page: &&Page| bytes == page.bytes() * u64::from(page.parts());
    let page = plan.end(side).layout().geometry().pages().filter(is_whole);
    match page.filter(|_| !layer_by_layer) {
        Some(page) => Some(Packing::of_pages(page)),
        None => single,
    }
}

/// The side whose order the staging buffers have: the host's.
pub(crate) fn staged_side(direction: Direction) -> Side {
    match direction {
        Direction::ToHost => Side::Destination,
        _ => Side::Source,
    }
}

/// Whether whole blocks are contiguous at both ends. Each run then consists of whole blocks, in the
/// order of the plan.
pub(crate) fn runs_are_blocks(grids: &[CopyGrid]) -> bool {
    matches!(grids, [grid] if grid.block_bytes() == grid.bytes.get())
}

#[cfg(test)]
pub(crate) mod tests {
    use terrane_core::ByteCount;

    use super::*;

    pub(crate) const KIB: u64 = 1024;

    pub(crate) fn end(block: u64, layer: u64, outer: u64, regions_per_layer: u32) -> GridEnd {
        GridEnd {
            first_region: 0,
            regions_per_layer,
            offset: 0,
            block_stride: block,
            layer_stride: layer,
            outer_stride: outer,
            row_stride: 0,
            column_stride: 0,
        }
    }

    fn grid(layers: u32, outers: u32, bytes: u64, end: GridEnd) -> CopyGrid {
        let bytes = ByteCount::new(bytes);
        CopyGrid { layers, outers, rows: 1, columns: 1, bytes, source: end, destination: end }
    }

    pub(crate) fn packing(layers: u32, outers: u32, bytes: u64, end: GridEnd) -> Packing {
        Packing::of(&grid(layers, outers, bytes, end), &end).unwrap()
    }

    #[test]
    fn the_order_is_that_of_the_strides() {
        let blocks = packing(4, 2, 8, end(64, 16, 8, 0));
        assert_eq!((blocks.order, blocks.step), (PackingOrder::Blocks, 1));
        assert_eq!(packing(4, 2, 8, end(128, 16, 8, 0)).step, 0, "padded blocks do not touch");
        let layers = packing(4, 2, 8, end(16, 0, 8, 1));
        assert_eq!((layers.order, layers.step), (PackingOrder::Layers, 1));
        let outers = packing(4, 2, 8, end(8, 0, 800, 1));
        assert_eq!((outers.order, outers.step), (PackingOrder::Outers, 1));
        let mut strided = grid(4, 2, 8, end(64, 16, 8, 0));
        strided.rows = 2;
        strided.source.row_stride = 24;
        assert_eq!(Packing::of(&strided, &strided.source), None);
    }

    #[test]
    fn neighbours_are_one_stretch() {
        let packing = packing(4, 2, 8, end(64, 16, 8, 0));
        let blocks = [3, 4, 5, 9, 1, 2];
        let mut found = Vec::new();
        packing.stretches(&Chunk { pairs: 1..6, layers: 0..4 }, &blocks, |s| {
            found.push((s.block, s.bytes))
        });
        assert_eq!(found, [(4, 128), (9, 64), (1, 128)]);
        assert_eq!(packing.count_stretches(&blocks, Side::Source), 2, "sorted, two rows");
        let sorted = [1, 2, 3, 4, 5, 9];
        assert_eq!(packing.count_stretches(&sorted, Side::Destination), 2);
        assert_eq!(packing.count_stretches(&[62, 0, 63, 64, 130, 65], Side::Source), 3);
        found.clear();
        packing.stretches(&Chunk { pairs: 0..2, layers: 1..3 }, &blocks, |s| {
            found.push((s.block, s.bytes))
        });
        assert_eq!(found, [(3, 32), (4, 32)], "parts of blocks do not touch");
    }
}
