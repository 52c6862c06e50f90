//! The distribution of a copy's work among the warps of the device.
//!
//! A warp has [`TILE_WORDS`] words in flight at once, four for each thread. Tiles are distributed
//! to all warps in turn, whatever their number, so few long cells and many short cells both keep
//! all warps busy. The cells determine the tiles:
//!
//! - cells that fill tiles are cut into separate tiles ([`Split::Cells`]): one address for each end
//!   and tile;
//! - shorter cells of pieces that fill tiles (rows and columns of a token-major page, say) are cut
//!   piece by piece ([`Split::Pieces`]): a thread finds its cell within the piece by two divisions;
//! - shorter cells of shorter pieces are grouped ([`Split::Groups`]), so that a warp serves several
//!   pieces at once.
//!
//! Divisions are multiplications with numbers that are computed here.

use std::mem::offset_of;

use crate::error::CudaError;
use crate::kernels::arguments::{BlockIds, GridLaunch, INLINE_BLOCKS, LaunchEnd};
use crate::kernels::width::CopyWidth;

/// The threads of a block.
pub(crate) const BLOCK_THREADS: u32 = 512;
/// The threads of a warp.
pub(crate) const WARP_THREADS: u32 = 32;
/// The words that each thread has in flight.
const IN_FLIGHT: u32 = 4;
/// The words that a warp has in flight.
pub(super) const TILE_WORDS: u32 = WARP_THREADS * IN_FLIGHT;
/// The words of a group of short cells, unless one cell has more.
const GROUP_WORDS: u32 = 2 * TILE_WORDS;
/// The maximum number of blocks of a launch. It is far more than a device runs at once, and few
/// enough for the kernels to number their threads in 32 bits.
pub(super) const MOST_BLOCKS: u32 = 1 << 16;

/// The unit of work that a warp takes at a time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u32)]
pub(super) enum Split {
    Cells = 0,
    Pieces = 1,
    Groups = 2,
}

/// The second parameter of `terrane_grid_copy`.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub(super) struct GridSchedule {
    split: Split,
    tiles: u32,
    cell_words: u64,
    cells: u32,
    group_cells: u32,
    piece_words: u32,
    /// Tiles of a cell or of a piece; one for groups.
    tiles_per_unit: Divisor,
    words_per_cell: Divisor,
    columns: Divisor,
    rows: Divisor,
    outers: Divisor,
    layers: Divisor,
}

/// A divisor of numbers below 2³¹ that the device applies without a division: the quotient is the
/// high half of the product with `multiplier`, shifted right.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(C)]
pub(crate) struct Divisor {
    value: u32,
    multiplier: u32,
    shift: u32,
}

// copy.cu asserts the same size.
const _: () = assert!(size_of::<GridSchedule>() == 104 && align_of::<GridSchedule>() == 8);
const _: () = assert!(offset_of!(GridSchedule, tiles_per_unit) == 28);
const _: () = assert!(offset_of!(GridSchedule, layers) == 88);

impl GridSchedule {
    /// The schedule of a copy in words of this width, or `None` if there is nothing to copy.
    ///
    /// # Errors
    ///
    /// [`CudaError::InlineBlocks`] if a block id is missing, [`CudaError::TooManyCells`].
    pub(super) fn of(grid: &GridLaunch, width: CopyWidth) -> Result<Option<Self>, CudaError> {
        check_inline_blocks(grid, &grid.source)?;
        check_inline_blocks(grid, &grid.destination)?;
        let counts = [grid.pairs, grid.layers, grid.outers, grid.rows, grid.columns];
        let cell_words = grid.bytes >> width.index();
        if counts.contains(&0) || cell_words == 0 {
            return Ok(None);
        }
        let refused = || CudaError::TooManyCells { counts, bytes: grid.bytes, most: Divisor::MAX };
        let cells = counts.iter().try_fold(1, |cells: u32, &count| cells.checked_mul(count));
        let cells = cells.filter(|&cells| cells <= Divisor::MAX).ok_or_else(refused)?;
        // Rows and columns are factors of the cells.
        let cells_per_piece = grid.rows * grid.columns;
        let piece_words = cell_words
            .checked_mul(cells_per_piece.into())
            .and_then(|words| u32::try_from(words).ok())
            .filter(|&words| words <= Divisor::MAX);

        let in_tiles = |words: u64| words.div_ceil(TILE_WORDS.into());
        let (split, units, tiles_per_unit) = match piece_words {
            _ if fills_tiles(cell_words) => (Split::Cells, cells, in_tiles(cell_words)),
            Some(words) if fills_tiles(words.into()) => {
                (Split::Pieces, cells / cells_per_piece, in_tiles(words.into()))
            }
            _ => (Split::Groups, cells, 1),
        };
        // The number is small: the cell fills no tile. For other cells it is not used.
        let words_per_cell = u32::try_from(cell_words).unwrap_or(Divisor::MAX).min(Divisor::MAX);
        let group_cells = (GROUP_WORDS / words_per_cell).max(1);
        let tiles = match split {
            Split::Groups => Some(u64::from(cells.div_ceil(group_cells))),
            Split::Cells | Split::Pieces => tiles_per_unit.checked_mul(units.into()),
        };
        let bounded =
            |number: u64| u32::try_from(number).ok().filter(|&number| number <= Divisor::MAX);
        Ok(Some(Self {
            split,
            tiles: tiles.and_then(bounded).ok_or_else(refused)?,
            cell_words,
            cells,
            group_cells,
            piece_words: piece_words.unwrap_or(Divisor::MAX),
            tiles_per_unit: Divisor::new(bounded(tiles_per_unit).ok_or_else(refused)?),
            words_per_cell: Divisor::new(words_per_cell),
            columns: Divisor::new(grid.columns),
            rows: Divisor::new(grid.rows),
            outers: Divisor::new(grid.outers),
            layers: Divisor::new(grid.layers),
        }))
    }

    /// The number of blocks to launch, at most `most`, and no more than there is work for.
    pub(super) fn blocks(&self, most: u32) -> u32 {
        most.min(MOST_BLOCKS).min(self.tiles.div_ceil(BLOCK_THREADS / WARP_THREADS))
    }
}

/// Whether at least four fifths of these words' tiles are filled.
fn fills_tiles(words: u64) -> bool {
    let tile = u64::from(TILE_WORDS);
    let idle = (tile - words % tile) % tile;
    idle * 4 <= words
}

fn check_inline_blocks(grid: &GridLaunch, end: &LaunchEnd) -> Result<(), CudaError> {
    let most = INLINE_BLOCKS;
    let last = u64::from(end.first_inline) + u64::from(grid.pairs);
    if end.block_ids == BlockIds::Inline && usize::try_from(last).is_ok_and(|last| last > most) {
        return Err(CudaError::InlineBlocks { first: end.first_inline, pairs: grid.pairs, most });
    }
    Ok(())
}

impl Divisor {
    /// The largest number that it divides, and the largest divisor. A launch has at most this many
    /// cells and tiles.
    pub(crate) const MAX: u32 = (1 << 31) - 1;

    /// `value` is at least 1.
    #[inline(never)]
    pub(crate) fn new(value: u32) -> Self {
        if value <= 1 {
            return Self { value, multiplier: 0, shift: 0 };
        }
        // With p = 31 + ceil(log2 value) the rounded-up quotient of 2^p exceeds the exact one by
        // less than 1. A product with a number below 2³¹ is then off by less than 2³¹ / 2^p. That
        // is at most 1 / value: too little to reach the next whole number.
        let power = 63 - (value - 1).leading_zeros();
        let multiplier = (1_u64 << power).div_ceil(u64::from(value));
        Self {
            value,
            // At most 2^32 - 1: value is more than half of 2^(power - 31).
            multiplier: u32::try_from(multiplier).unwrap_or(u32::MAX),
            shift: power - 32,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn divisors_divide() {
        let divisors = (1..2000).chain([
            4095,
            4096,
            4097,
            1 << 20,
            (1 << 30) + 1,
            Divisor::MAX - 1,
            Divisor::MAX,
        ]);
        for value in divisors {
            let divisor = Divisor::new(value);
            assert_eq!(divisor.value, value);
            let multiples =
                [1, 2, 3, 1000, Divisor::MAX / value].map(|by| value.saturating_mul(by));
            let near = multiples.into_iter().flat_map(|at| [at - 1, at, at.saturating_add(1)]);
            for number in near
                .chain([0, 1, Divisor::MAX - 1, Divisor::MAX])
                .filter(|&number| number <= Divisor::MAX)
            {
                let product = u64::from(number) * u64::from(divisor.multiplier);
                let by_product = u32::try_from(product >> 32).unwrap() >> divisor.shift;
                let quotient = if value == 1 { number } else { by_product };
                assert_eq!(quotient, number / value, "{number} / {value}");
            }
        }
    }

    fn grid(counts: [u32; 5], bytes: u64) -> GridLaunch {
        let [pairs, layers, outers, rows, columns] = counts;
        GridLaunch { pairs, layers, outers, rows, columns, bytes, ..GridLaunch::default() }
    }

    fn split(counts: [u32; 5], bytes: u64) -> (Split, u32) {
        let schedule = GridSchedule::of(&grid(counts, bytes), CopyWidth::Sixteen);
        let schedule = schedule.unwrap().unwrap();
        (schedule.split, schedule.tiles)
    }

    #[test]
    fn cells_are_cut_or_grouped_by_their_length() {
        assert_eq!(split([64, 92, 2, 1, 1], 2048), (Split::Cells, 64 * 92 * 2));
        assert_eq!(split([1, 61, 1, 1, 1], 18_432), (Split::Cells, 61 * 9));
        assert_eq!(split([1, 1, 1, 1, 1], 2 << 20), (Split::Cells, 1024));
        // Token-major to head-major: 16 tokens of 8 heads of 256 bytes, 16 tiles a piece.
        assert_eq!(split([10, 32, 2, 16, 8], 256), (Split::Pieces, 10 * 32 * 2 * 16));
        assert_eq!(split([10, 32, 2, 16, 8], 64), (Split::Pieces, 10 * 32 * 2 * 4));
        // Four cells of 64 words make a group; three of 85.
        assert_eq!(split([10, 32, 2, 1, 1], 1024), (Split::Groups, 160));
        assert_eq!(split([10, 1, 1, 1, 1], 85 * 16), (Split::Groups, 4));
        assert_eq!(split([10, 1, 1, 1, 1], 400 * 16), (Split::Groups, 10));
    }

    #[test]
    fn launches_are_no_larger_than_their_work() {
        let schedule = GridSchedule::of(&grid([1, 1, 1, 1, 1], 2 << 20), CopyWidth::Sixteen);
        let schedule = schedule.unwrap().unwrap();
        assert_eq!([1, 24, 64, 1000].map(|most| schedule.blocks(most)), [1, 24, 64, 64]);
        let schedule = GridSchedule::of(&grid([1; 5], 1 << 41), CopyWidth::Sixteen);
        assert_eq!(schedule.unwrap().unwrap().blocks(u32::MAX), MOST_BLOCKS);
    }

    #[test]
    fn a_copy_of_no_bytes_has_no_schedule() {
        for (counts, bytes) in [([0, 1, 1, 1, 1], 16), ([1, 1, 1, 1, 0], 16), ([1; 5], 0)] {
            let schedule = GridSchedule::of(&grid(counts, bytes), CopyWidth::Sixteen);
            assert!(schedule.unwrap().is_none(), "{counts:?} {bytes}");
        }
        let counts = [u32::MAX, u32::MAX, u32::MAX, u32::MAX, 0];
        assert!(GridSchedule::of(&grid(counts, 16), CopyWidth::Sixteen).unwrap().is_none());
    }

    #[test]
    fn cells_that_one_launch_cannot_count_are_refused() {
        let refused = |counts, bytes, width| {
            let error = GridSchedule::of(&grid(counts, bytes), width).unwrap_err();
            assert!(matches!(error, CudaError::TooManyCells { .. }), "{error}");
        };
        refused([u32::MAX; 5], u64::MAX, CopyWidth::One);
        refused([1 << 31, 1, 1, 1, 1], 1, CopyWidth::One);
        refused([1; 5], u64::MAX, CopyWidth::One);
        refused([1 << 20, 1 << 11, 1, 1, 1], 64, CopyWidth::Sixteen);
        // 2 TiB in one cell, and 120 GiB in cells of 64 bytes, are counted.
        assert_eq!(split([1; 5], 1 << 41), (Split::Cells, 1 << 30));
        assert_eq!(split([30 << 10, 64, 1, 64, 16], 64).0, Split::Pieces);
        let mut inline = grid([256, 1, 1, 1, 1], 16);
        inline.destination.block_ids = BlockIds::Inline;
        assert!(GridSchedule::of(&inline, CopyWidth::One).is_ok());
        inline.destination.first_inline = 1;
        let error = GridSchedule::of(&inline, CopyWidth::One).unwrap_err();
        assert!(matches!(error, CudaError::InlineBlocks { first: 1, pairs: 256, .. }), "{error}");
    }
}
