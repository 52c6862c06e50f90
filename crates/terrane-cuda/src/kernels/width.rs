//! The width of a copy's memory accesses.

use crate::kernels::arguments::{BlockIds, GridLaunch, LaunchEnd};

/// The number of bytes that a thread of a copy kernel reads and writes at once.
///
/// The width must divide every address that is read or written, and so every stride and length.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[repr(u8)]
pub enum CopyWidth {
    /// One byte, which always works.
    One = 1,
    /// Two bytes.
    Two = 2,
    /// Four bytes.
    Four = 4,
    /// Eight bytes.
    Eight = 8,
    /// Sixteen bytes, the device's maximum.
    Sixteen = 16,
}

impl CopyWidth {
    /// Every width, the narrowest first.
    pub const ALL: [Self; 5] = [Self::One, Self::Two, Self::Four, Self::Eight, Self::Sixteen];

    /// The widest that divides all of these numbers.
    #[must_use]
    pub fn of(numbers: impl IntoIterator<Item = u64>) -> Self {
        // The lowest set bit of all numbers is that of their bitwise or. Without numbers, or with
        // zeros alone, every width divides.
        match numbers.into_iter().fold(0, |bits, number| bits | number).trailing_zeros() {
            0 => Self::One,
            1 => Self::Two,
            2 => Self::Four,
            3 => Self::Eight,
            _ => Self::Sixteen,
        }
    }

    /// The bytes.
    #[must_use]
    pub const fn bytes(self) -> u8 {
        self as u8
    }

    /// The index in [`ALL`](Self::ALL), which is also the logarithm to base 2.
    pub(crate) const fn index(self) -> u32 {
        self.bytes().trailing_zeros()
    }
}

impl GridLaunch {
    /// The widest width that divides every address and length of the copy. It depends only on the
    /// copy itself; tables and lists are not read.
    #[must_use]
    pub fn width(&self) -> CopyWidth {
        let bits = |end: &LaunchEnd| {
            let only_block_zero = end.block_ids == BlockIds::Identity && self.pairs <= 1;
            let used = |is_used: bool, bits: u64| if is_used { bits } else { 0 };
            end.base
                | used(end.bases != 0, end.bases_bits)
                | used(!only_block_zero, end.block_stride)
                | used(self.layers > 1, end.layer_stride)
                | used(self.outers > 1, end.outer_stride)
                | used(self.rows > 1, end.row_stride)
                | used(self.columns > 1, end.column_stride)
        };
        CopyWidth::of([self.bytes | bits(&self.source) | bits(&self.destination)])
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_width_divides_everything() {
        let cases: [(&[u64], u8); 8] = [
            (&[], 16),
            (&[0, 4096], 16),
            (&[16, 48, 1 << 40], 16),
            (&[16, 24], 8),
            (&[600, 4], 4),
            (&[600, 2], 2),
            (&[4096, 6, 4], 2),
            (&[4096, 3], 1),
        ];
        for (numbers, width) in cases {
            assert_eq!(CopyWidth::of(numbers.iter().copied()).bytes(), width, "{numbers:?}");
        }
        for width in CopyWidth::ALL {
            assert_eq!(1 << width.index(), width.bytes());
            assert_eq!(CopyWidth::of([width.bytes().into(), 1 << 20]), width);
        }
    }

    #[test]
    fn only_the_used_numbers_of_a_grid_determine_the_width() {
        let end = LaunchEnd { bases: 8, ..LaunchEnd::default() };
        let aligned = GridLaunch {
            pairs: 2,
            layers: 2,
            outers: 2,
            rows: 2,
            columns: 2,
            bytes: 64,
            source: end,
            destination: end,
            ..GridLaunch::default()
        };
        assert_eq!(aligned.width(), CopyWidth::Sixteen, "the address of a table does not count");
        let numbers: [fn(&mut GridLaunch) -> &mut u64; 8] = [
            |grid| &mut grid.bytes,
            |grid| &mut grid.source.base,
            |grid| &mut grid.destination.bases_bits,
            |grid| &mut grid.source.block_stride,
            |grid| &mut grid.destination.layer_stride,
            |grid| &mut grid.source.outer_stride,
            |grid| &mut grid.destination.row_stride,
            |grid| &mut grid.source.column_stride,
        ];
        for (number, of) in numbers.iter().enumerate() {
            let mut grid = aligned;
            *of(&mut grid) += 4;
            assert_eq!(grid.width(), CopyWidth::Four, "{number}");
        }
        for of in &numbers[3..] {
            let mut grid = GridLaunch { bytes: 64, ..GridLaunch::default() };
            *of(&mut grid) += 1;
            assert_eq!(grid.width(), CopyWidth::Sixteen, "a dimension of one has no stride");
        }
        let mut grid = GridLaunch { bytes: 64, ..GridLaunch::default() };
        grid.source.block_stride = 2;
        grid.source.block_ids = BlockIds::Inline;
        assert_eq!(grid.width(), CopyWidth::Two, "a single block may have any id");
        grid.source.block_ids = BlockIds::Identity;
        grid.source.bases_bits = 1;
        assert_eq!(grid.width(), CopyWidth::Sixteen, "without a table its bits mean nothing");
    }
}
