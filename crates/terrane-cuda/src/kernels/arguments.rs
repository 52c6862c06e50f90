//! The arguments of the copy kernels, as the kernels read them, and the effect of each kernel.
//!
//! # Entry points
//!
//! Each entry point exists once for every [`CopyWidth`], as `NAME_16`, `NAME_8`, `NAME_4`, `NAME_2`
//! and `NAME_1`. It is launched with any number of one-dimensional blocks of 512 threads, and no
//! dynamic shared memory:
//!
//! - `terrane_grid_copy_WIDTH(GridLaunch, GridSchedule)` copies every cell of the [`GridLaunch`]. The
//!   second parameter only splits the work among the threads.
//! - `terrane_transposed_copy_WIDTH(GridLaunch, TransposeSchedule)` copies the same cells by tiles in
//!   shared memory. Each cell is one word, rows are contiguous at the source, and columns at the
//!   destination.
//!
//! Both parameters are passed by value. The order in which bytes are copied is undefined, and the
//! width changes no result: it divides every address, stride and length that is used.

use std::mem::offset_of;

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

impl Default for GridLaunch {
    /// A copy without effect, to be filled in: one cell of no bytes.
    fn default() -> Self {
        Self {
            pairs: 1,
            layers: 1,
            outers: 1,
            rows: 1,
            columns: 1,
            reserved: 0,
            bytes: 0,
            source: LaunchEnd::default(),
            destination: LaunchEnd::default(),
            inline_blocks: [0; INLINE_BLOCKS],
        }
    }
}

// copy.cu asserts the same sizes.
const _: () = assert!(size_of::<LaunchEnd>() == 80 && align_of::<LaunchEnd>() == 8);
const _: () = assert!(size_of::<GridLaunch>() == 1216 && align_of::<GridLaunch>() == 8);
const _: () = assert!(offset_of!(GridLaunch, inline_blocks) == 192);

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
    }
}
