//! The arguments of the copy kernels, as the kernels read them, and the effect of each kernel. This
//! module needs no device, so that an interpreter can execute a launch.
//!
//! # Entry points
//!
//! Each entry point exists once for every [`CopyWidth`], as `NAME_16`, `NAME_8`, `NAME_4`, `NAME_2`
//! and `NAME_1`. It is launched with any number of one-dimensional blocks of 512 threads, and no
//! dynamic shared memory:
//!
//! - `terrane_grid_copy_WIDTH(GridLaunch, GridSchedule)` copies every cell of the [`GridLaunch`].
//!   [`GridLaunch::for_each_cell`] is the model of it in Rust. The second parameter only splits the
//!   work among the threads.
//! - `terrane_transposed_copy_WIDTH(GridLaunch, TransposeSchedule)` copies the same cells by tiles in
//!   shared memory. Each cell is one word, rows are contiguous at the source, and columns at the
//!   destination.
//! - `terrane_run_copy_WIDTH(RunLaunch, u32)` copies [`RunLaunch::count`] runs, which are contiguous
//!   [`LaunchRun`]s at the address [`RunLaunch::runs`]. The second parameter only splits the work.
//!
//! Both parameters are passed by value. The order in which bytes are copied is undefined, and the
//! width changes no result: it divides every address, stride and length that is used.

use std::mem::offset_of;

use terrane_core::convert::to_u64;

/// The number of block ids that a [`GridLaunch`] carries itself, both ends together.
pub const INLINE_BLOCKS: usize = 256;

/// Nested counts of cells, and their addresses at both ends. The kernel copies `pairs · layers ·
/// outers · rows · columns` cells of [`bytes`](Self::bytes) each.
///
/// The cell (pair, layer, outer, row, column), each index counted from 0, is at one end at
///
/// ```text
/// base + bases[layer] + block(pair) · block_stride + layer · layer_stride + outer · outer_stride
///      + row · row_stride + column · column_stride
/// ```
///
/// `bases[layer]` is 0 without a table, and [`BlockIds`] defines `block(pair)`. Sums and products
/// wrap around, as addresses do.
///
/// Neighbouring threads copy neighbouring bytes of a cell, then the cell of the next column, then
/// the next row. So an end whose columns are adjacent is accessed in the order of its memory. Rows
/// and columns may be exchanged at both ends, to choose that end.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(C)]
pub struct GridLaunch {
    /// Pairs of blocks.
    pub pairs: u32,
    /// Layers of a block.
    pub layers: u32,
    /// Outers of a layer.
    pub outers: u32,
    /// Rows of a piece.
    pub rows: u32,
    /// Columns of a row.
    pub columns: u32,
    /// Padding.
    pub reserved: u32,
    /// The length of a cell in bytes.
    pub bytes: u64,
    /// The source of the cells.
    pub source: LaunchEnd,
    /// The destination of the cells.
    pub destination: LaunchEnd,
    /// The ids of the ends that are [`BlockIds::Inline`].
    pub inline_blocks: [u32; INLINE_BLOCKS],
}

/// One end of a [`GridLaunch`]. Strides are in bytes. The stride of a dimension of one is ignored.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(C)]
pub struct LaunchEnd {
    /// The address of the first cell of block 0. With a table, it is added to each of the table's
    /// addresses.
    pub base: u64,
    /// The address of a table with one `u64` address per layer, in memory that the device reads; 0
    /// for none.
    pub bases: u64,
    /// All addresses of the table combined with bitwise or: its lowest bits give their alignment.
    pub bases_bits: u64,
    /// The address of one `u32` id per pair, in memory that the device reads, with
    /// [`BlockIds::Listed`].
    pub blocks: u64,
    /// The source of the block ids.
    pub block_ids: BlockIds,
    /// The index of pair 0 in [`GridLaunch::inline_blocks`], with [`BlockIds::Inline`].
    pub first_inline: u32,
    /// From a block to the next id.
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

/// The source of an end's block ids.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(u32)]
pub enum BlockIds {
    /// The id is the pair's number. Scratch buffers and packed ends have such ids.
    #[default]
    Identity = 0,
    /// From the list at [`LaunchEnd::blocks`].
    Listed = 1,
    /// From [`GridLaunch::inline_blocks`], starting at [`LaunchEnd::first_inline`].
    Inline = 2,
}

/// One contiguous copy of a [`RunLaunch`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(C)]
pub struct LaunchRun {
    /// The address of the first byte to read.
    pub source: u64,
    /// The address of the first byte to write.
    pub destination: u64,
    /// The length, which may be 0.
    pub bytes: u64,
    /// The number of tiles in the runs before this one; [`RunLaunch::arrange`] sets it.
    pub first_tile: u64,
}

/// A list of runs.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(C)]
pub struct RunLaunch {
    /// The address of the first [`LaunchRun`], in memory that the device reads.
    pub runs: u64,
    /// The number of runs.
    pub count: u32,
    /// The total number of tiles.
    pub tiles: u32,
    /// The number of threads that share a tile, as a power of two.
    pub lanes_log2: u32,
    /// The width in bytes that divides every address and length.
    pub width: u32,
}

impl GridLaunch {
    /// A copy without effect, to be filled in: one cell of no bytes.
    pub const EMPTY: Self = Self {
        pairs: 1,
        layers: 1,
        outers: 1,
        rows: 1,
        columns: 1,
        reserved: 0,
        bytes: 0,
        source: LaunchEnd::AT_ZERO,
        destination: LaunchEnd::AT_ZERO,
        inline_blocks: [0; INLINE_BLOCKS],
    };

    /// Calls `visit` with the source address, destination address and length of every cell: the
    /// model of the kernel's copy. `read_id` reads a `u32` of a list at an address, and
    /// `read_address` a `u64` of a table.
    ///
    /// An inline id beyond the array counts as 0; [`Kernels::copy`](crate::Kernels::copy) refuses
    /// such a copy.
    pub fn for_each_cell(
        &self,
        mut read_id: impl FnMut(u64) -> u32,
        mut read_address: impl FnMut(u64) -> u64,
        mut visit: impl FnMut(u64, u64, u64),
    ) {
        for pair in 0..self.pairs {
            let blocks = [&self.source, &self.destination].map(|end| match end.block_ids {
                BlockIds::Identity => pair,
                BlockIds::Listed => read_id(element(end.blocks, pair, size_of::<u32>())),
                BlockIds::Inline => end.inline_block(self, pair).unwrap_or(0),
            });
            for layer in 0..self.layers {
                let bases = [&self.source, &self.destination].map(|end| match end.bases {
                    0 => 0,
                    table => read_address(element(table, layer, size_of::<u64>())),
                });
                self.for_each_cell_of_layer(layer, blocks, bases, &mut visit);
            }
        }
    }

    /// The copy of `count` of the pairs, starting at `first`; `None` if there are fewer.
    #[must_use]
    pub fn of_pairs(&self, first: u32, count: u32) -> Option<Self> {
        let end = first.checked_add(count)?;
        if end > self.pairs {
            return None;
        }
        let mut part = Self { pairs: count, ..*self };
        for end in [&mut part.source, &mut part.destination] {
            match end.block_ids {
                BlockIds::Identity => {
                    end.base =
                        end.base.wrapping_add(u64::from(first).wrapping_mul(end.block_stride));
                }
                BlockIds::Listed => end.blocks = element(end.blocks, first, size_of::<u32>()),
                BlockIds::Inline => end.first_inline = end.first_inline.checked_add(first)?,
            }
        }
        Some(part)
    }

    fn for_each_cell_of_layer(
        &self,
        layer: u32,
        [source_block, destination_block]: [u32; 2],
        [source_base, destination_base]: [u64; 2],
        visit: &mut impl FnMut(u64, u64, u64),
    ) {
        for outer in 0..self.outers {
            for row in 0..self.rows {
                for column in 0..self.columns {
                    let inner = [layer, outer, row, column];
                    visit(
                        self.source.place(source_base, source_block, inner),
                        self.destination.place(destination_base, destination_block, inner),
                        self.bytes,
                    );
                }
            }
        }
    }
}

impl LaunchEnd {
    const AT_ZERO: Self = Self {
        base: 0,
        bases: 0,
        bases_bits: 0,
        blocks: 0,
        block_ids: BlockIds::Identity,
        first_inline: 0,
        block_stride: 0,
        layer_stride: 0,
        outer_stride: 0,
        row_stride: 0,
        column_stride: 0,
    };

    /// The id of a pair's block among the inline ids, if it is one of them.
    fn inline_block(&self, grid: &GridLaunch, pair: u32) -> Option<u32> {
        let index = usize::try_from(u64::from(self.first_inline) + u64::from(pair)).ok()?;
        grid.inline_blocks.get(index).copied()
    }

    fn place(&self, base: u64, block: u32, [layer, outer, row, column]: [u32; 4]) -> u64 {
        let steps = [
            (block, self.block_stride),
            (layer, self.layer_stride),
            (outer, self.outer_stride),
            (row, self.row_stride),
            (column, self.column_stride),
        ];
        steps.iter().fold(self.base.wrapping_add(base), |place, (index, stride)| {
            place.wrapping_add(u64::from(*index).wrapping_mul(*stride))
        })
    }
}

/// The address of an element of an array.
fn element(first: u64, index: u32, size: usize) -> u64 {
    let size = to_u64(size);
    first.wrapping_add(u64::from(index).wrapping_mul(size))
}

// copy.cu asserts the same sizes.
const _: () = assert!(size_of::<LaunchEnd>() == 80 && align_of::<LaunchEnd>() == 8);
const _: () = assert!(size_of::<GridLaunch>() == 1216 && align_of::<GridLaunch>() == 8);
const _: () = assert!(offset_of!(GridLaunch, inline_blocks) == 192);
const _: () = assert!(size_of::<LaunchRun>() == 32 && align_of::<LaunchRun>() == 8);
const _: () = assert!(size_of::<RunLaunch>() == 24 && align_of::<RunLaunch>() == 8);

#[cfg(test)]
mod tests {
    use super::*;

    /// The names of a struct's fields in copy.cu, in their order.
    fn fields_in_source(name: &str) -> Vec<&'static str> {
        let source = include_str!("copy.cu");
        let body = source.split_once(&format!("struct {name} {{\n")).unwrap().1;
        let body = body.split_once("};").unwrap().0;
        let field = |line: &'static str| {
            let name = line.trim().trim_end_matches(';').rsplit_once(' ').unwrap().1;
            name.split('[').next().unwrap()
        };
        body.lines().map(field).collect()
    }

    macro_rules! in_order {
        ($name:ident, $source:literal: $($field:ident),*) => {
            let ours = [$((offset_of!($name, $field), stringify!($field))),*];
            assert!(ours.is_sorted(), "{ours:?}");
            assert_eq!(ours.map(|(_, name)| name), fields_in_source($source)[..]);
        };
    }

    #[test]
    fn the_fields_are_in_the_order_of_the_cuda_source() {
        in_order!(LaunchEnd, "CopyEnd": base, bases, bases_bits, blocks, block_ids, first_inline,
            block_stride, layer_stride, outer_stride, row_stride, column_stride);
        in_order!(GridLaunch, "GridCopy": pairs, layers, outers, rows, columns, reserved, bytes,
            source, destination, inline_blocks);
        in_order!(LaunchRun, "CopyRun": source, destination, bytes, first_tile);
        in_order!(RunLaunch, "RunCopy": runs, count, tiles, lanes_log2, width);
    }

    /// Three blocks of two layers of two outers of 2 · 3 cells: from scattered blocks with one
    /// region per layer to packed blocks.
    fn sample() -> GridLaunch {
        let mut grid = GridLaunch {
            pairs: 3,
            layers: 2,
            outers: 2,
            rows: 2,
            columns: 3,
            bytes: 4,
            source: LaunchEnd {
                base: 16,
                bases: 1000,
                block_ids: BlockIds::Inline,
                first_inline: 5,
                block_stride: 48,
                outer_stride: 24,
                row_stride: 12,
                column_stride: 4,
                ..LaunchEnd::default()
            },
            destination: LaunchEnd {
                base: 5000,
                block_stride: 96,
                layer_stride: 48,
                outer_stride: 24,
                row_stride: 4,
                column_stride: 8,
                ..LaunchEnd::default()
            },
            ..GridLaunch::EMPTY
        };
        grid.inline_blocks[5..8].copy_from_slice(&[7, 0, 2]);
        grid
    }

    fn cells(grid: &GridLaunch) -> Vec<(u64, u64, u64)> {
        let mut cells = Vec::new();
        let address = |at| match at {
            1000 => 10_000,
            1008 => 20_000,
            _ => panic!("{at} is not in the table"),
        };
        let id = |at| u32::try_from(at).unwrap();
        grid.for_each_cell(id, address, |from, to, bytes| cells.push((from, to, bytes)));
        cells
    }

    #[test]
    fn addresses_of_cells_follow_strides_bases_and_ids() {
        let cells = cells(&sample());
        assert_eq!(cells.len(), 3 * 2 * 2 * 2 * 3);
        assert_eq!(cells[0], (10_016 + 7 * 48, 5000, 4));
        assert_eq!(cells[1], (10_016 + 7 * 48 + 4, 5008, 4));
        assert_eq!(cells[3], (10_016 + 7 * 48 + 12, 5004, 4));
        assert_eq!(cells[6], (10_016 + 7 * 48 + 24, 5024, 4));
        assert_eq!(cells[12], (20_016 + 7 * 48, 5048, 4));
        assert_eq!(cells[71], (20_016 + 2 * 48 + 24 + 12 + 8, 5000 + 192 + 48 + 24 + 4 + 16, 4));
    }

    #[test]
    fn copies_of_all_parts_of_the_pairs_are_the_whole_copy() {
        let mut grid = sample();
        let whole = cells(&grid);
        let parts = [(0, 1), (1, 0), (1, 2)];
        let part = |(first, count)| cells(&grid.of_pairs(first, count).unwrap());
        assert_eq!(parts.map(part).concat(), whole);
        assert_eq!(grid.of_pairs(2, 2), None);
        assert_eq!(grid.of_pairs(u32::MAX, 2), None);
        grid.source.block_ids = BlockIds::Listed;
        grid.source.blocks = 40;
        assert_eq!(cells(&grid)[24].0, 10_016 + 44 * 48);
        assert_eq!(cells(&grid.of_pairs(1, 1).unwrap())[..], cells(&grid)[24..48]);
    }
}
