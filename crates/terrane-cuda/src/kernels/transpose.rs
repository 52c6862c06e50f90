//! The schedule of a transposition. It copies single words; rows are contiguous at the source, and
//! columns at the destination.
//!
//! For example, paged attention stores V as `[block, head, element, token]`. Without tiles in
//! shared memory, either the reads or the writes of such a copy access one word per memory sector.

use std::mem::offset_of;

use terrane_transfer::CopyGrid;

use crate::kernels::arguments::GridLaunch;
use crate::kernels::schedule::{Divisor, MOST_BLOCKS};
use crate::kernels::width::CopyWidth;

/// The binary logarithm of the words of a tile, for words of less than 16 bytes.
const TILE_BITS: u32 = 12;
/// The same for words of 16 bytes. copy.cu has as much shared memory.
const WIDE_TILE_BITS: u32 = 11;
/// The binary logarithm of the columns of a tile with at least as many rows: 128 bytes of the
/// shortest usual elements.
const COLUMN_BITS: u32 = 6;
/// The binary logarithm of the minimum number of rows of a tile. copy.cu pads the tile for the
/// maximum number of columns that this permits.
const MIN_ROW_BITS: u32 = 3;

/// The second parameter of `terrane_transposed_copy`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(C)]
pub(super) struct TransposeSchedule {
    tiles: u32,
    /// The logarithm of the rows of a tile.
    row_bits: u32,
    /// The logarithm of the columns of a tile.
    column_bits: u32,
    tiles_per_piece: Divisor,
    tiles_per_row: Divisor,
    outers: Divisor,
    layers: Divisor,
}

// copy.cu asserts the same size.
const _: () = assert!(size_of::<TransposeSchedule>() == 60 && align_of::<TransposeSchedule>() == 4);
const _: () = assert!(offset_of!(TransposeSchedule, tiles_per_piece) == 12);
const _: () = assert!(offset_of!(TransposeSchedule, layers) == 48);

impl TransposeSchedule {
    /// The schedule of a copy in words of this width. `None` if the copy is no transposition. Also
    /// `None` if its pieces do not fill a tile, because idle threads then cost more than the tile
    /// saves.
    pub(super) fn of(grid: &GridLaunch, width: CopyWidth) -> Option<Self> {
        let source = [grid.source.row_stride, grid.source.column_stride];
        let is_transposed = is_transposed(grid.bytes, source, grid.destination.column_stride);
        if !is_transposed || grid.bytes != u64::from(width.bytes()) {
            return None;
        }
        let [row_bits, column_bits] = tile_bits(grid.rows, grid.columns, grid.bytes)?;
        let [down, across] = [(grid.rows, row_bits), (grid.columns, column_bits)]
            .map(|(count, bits)| count.div_ceil(1 << bits));
        let tiles_per_piece = down.checked_mul(across)?;
        let counts = [grid.pairs, grid.layers, grid.outers, tiles_per_piece];
        let tiles = counts.iter().try_fold(1, |tiles: u32, &count| tiles.checked_mul(count))?;
        (1..=Divisor::MAX).contains(&tiles).then(|| Self {
            tiles,
            row_bits,
            column_bits,
            tiles_per_piece: Divisor::new(tiles_per_piece),
            tiles_per_row: Divisor::new(across),
            outers: Divisor::new(grid.outers),
            layers: Divisor::new(grid.layers),
        })
    }

    /// The number of thread blocks to launch: at most `most`, and at most one per tile.
    pub(super) fn blocks(&self, most: u32) -> u32 {
        most.min(MOST_BLOCKS).min(self.tiles)
    }
}

/// Whether tiles copy a grid whose addresses permit words as long as its cells.
#[inline(never)]
pub(crate) fn copies_by_tiles(grid: &CopyGrid) -> bool {
    let bytes = grid.bytes.get();
    let (source, destination) = (&grid.source, &grid.destination);
    is_transposed(bytes, [source.row_stride, source.column_stride], destination.column_stride)
        && matches!(bytes, 1 | 2 | 4 | 8 | 16)
        && tile_bits(grid.rows, grid.columns, bytes).is_some()
}

/// The logarithms of the rows and columns of a tile, for words of this many bytes. `None` if the
/// pieces do not fill a tile.
fn tile_bits(rows: u32, columns: u32, bytes: u64) -> Option<[u32; 2]> {
    let most =
        if bytes == u64::from(CopyWidth::Sixteen.bytes()) { WIDE_TILE_BITS } else { TILE_BITS };
    let (rows, columns) = (bits(rows), bits(columns));
    let row_bits = rows.min(most - columns.min(COLUMN_BITS));
    let column_bits = columns.min(most - row_bits);
    (row_bits >= MIN_ROW_BITS && row_bits + column_bits >= most).then_some([row_bits, column_bits])
}

/// Whether consecutive rows are adjacent at the source, and consecutive columns at the destination.
fn is_transposed(bytes: u64, source: [u64; 2], destination_column: u64) -> bool {
    source[0] == bytes && destination_column == bytes && source[1] != bytes
}

/// The logarithm of the smallest power of two that is at least `count`.
fn bits(count: u32) -> u32 {
    u32::BITS - count.saturating_sub(1).leading_zeros()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::kernels::arguments::LaunchEnd;

    /// One piece of a token-major source and an element-major destination.
    fn transposed(rows: u32, columns: u32, bytes: u64) -> GridLaunch {
        let end = |row_stride, column_stride| LaunchEnd {
            row_stride,
            column_stride,
            ..LaunchEnd::default()
        };
        GridLaunch {
            pairs: 3,
            rows,
            columns,
            bytes,
            source: end(bytes, u64::from(rows) * bytes),
            destination: end(u64::from(columns) * bytes, bytes),
            ..GridLaunch::default()
        }
    }

    fn tile(rows: u32, columns: u32, width: CopyWidth) -> Option<(u32, u32, u32)> {
        let grid = transposed(rows, columns, width.bytes().into());
        let schedule = TransposeSchedule::of(&grid, width)?;
        Some((schedule.row_bits, schedule.column_bits, schedule.tiles))
    }

    #[test]
    fn tiles_are_as_long_as_the_shorter_axis_allows() {
        // 16 tokens of 8 heads of 128 elements, in both directions.
        assert_eq!(tile(1024, 16, CopyWidth::Two), Some((8, 4, 3 * 4)));
        assert_eq!(tile(16, 1024, CopyWidth::Two), Some((4, 8, 3 * 4)));
        assert_eq!(tile(1000, 1000, CopyWidth::One), Some((6, 6, 3 * 16 * 16)));
        assert_eq!(tile(300, 20, CopyWidth::Eight), Some((7, 5, 3 * 3)));
        assert_eq!(tile(128, 16, CopyWidth::Sixteen), Some((7, 4, 3)));
    }

    #[test]
    fn copies_that_fill_no_tile_are_not_transposed() {
        assert_eq!(tile(64, 16, CopyWidth::Eight), None);
        assert_eq!(tile(4, 4096, CopyWidth::Two), None, "too few rows for the padding");
        let mut plain = transposed(1024, 16, 2);
        plain.source.row_stride = 4;
        assert_eq!(TransposeSchedule::of(&plain, CopyWidth::Two), None);
        let long = transposed(1024, 16, 4);
        assert_eq!(TransposeSchedule::of(&long, CopyWidth::Two), None, "cells of two words");
        let mut many = transposed(1024, 16, 2);
        (many.pairs, many.layers) = (1 << 20, 1 << 20);
        assert_eq!(TransposeSchedule::of(&many, CopyWidth::Two), None);
        many.pairs = 0;
        assert_eq!(TransposeSchedule::of(&many, CopyWidth::Two), None);
    }
}
