//! The parameter of the checksum kernels, as the kernels read it.
//!
//! `terrane_block_sums_WIDTH(SumLaunch)` adds the checksums of blocks to [`SumLaunch::sums`]. It is
//! launched with any number of blocks of 512 threads. The checksum is the linear part of the
//! CRC-64: the bytes as a polynomial, times x⁶⁴, modulo the polynomial of CRC-64/NVME. The host
//! adds the part that depends only on the length.
//!
//! A warp *folds* a segment of a block, 512 bytes at a time: two polynomials for each lane. Each
//! step multiplies the polynomials by the power of x for 512 bytes, and adds the next 512 bytes.
//! After the last step, the warp multiplies each lane's polynomials by the power of x behind them,
//! and adds them. Then it multiplies the sum by the power of x behind the segment.

use std::mem::offset_of;
use std::sync::LazyLock;

use bytemuck::Zeroable;
use terrane_core::checksum::Crc64Shift;

use crate::kernels::schedule::Divisor;

/// The maximum number of sections of a block, which is the maximum of geometries.
pub(crate) const MOST_SECTIONS: usize = 16;
/// The maximum number of nested loops over the units of a piece.
pub(crate) const MOST_LEVELS: usize = 6;
/// The bytes that a warp folds in one step.
pub(crate) const ROW_BYTES: u64 = 512;
/// The bytes that a lane folds in one step.
const VECTOR_BYTES: u64 = 16;

/// The polynomial 1: bit 63 is its coefficient.
pub(crate) const ONE: u64 = 1 << 63;

/// Blocks of a layout, and the addresses of their bytes. Words have the width of the kernel. A
/// word's number is its index in the canonical order of its block.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub(crate) struct SumLaunch {
    /// The address of one `u64` for each pair, which the kernel adds to.
    pub(crate) sums: u64,
    /// The address of one address for each pair and section: its first word in layer 0.
    pub(crate) places: u64,
    /// The address of one distance for each section and layer: from layer 0 to that layer.
    pub(crate) layer_places: u64,
    /// The address of one `u64` for each segment of a block: the power of x behind it, times x⁶⁴.
    pub(crate) factors: u64,
    /// The first pair of this launch.
    pub(crate) first_pair: u32,
    /// The segments of all pairs of this launch.
    pub(crate) units: u32,
    /// The words of a block.
    pub(crate) block_words: u32,
    /// The words of all sections with layers.
    pub(crate) layered_words: u32,
    /// The words of a segment: whole rows. The first segment of a block may have fewer.
    pub(crate) segment_words: u32,
    /// The sections.
    pub(crate) sections: u32,
    /// The sections with layers, which come first.
    pub(crate) layered_sections: u32,
    /// The entries of each section in `layer_places`.
    pub(crate) layers: u32,
    /// The segments of a block.
    pub(crate) segments: Divisor,
    /// The words of a layer.
    pub(crate) layer_words: Divisor,
    /// The products of each power of x below 64, the highest first, with that of a row.
    pub(crate) fold: [u64; 64],
    /// The powers of x behind the two polynomials of each lane.
    pub(crate) lanes: [u64; 64],
    /// The sections in canonical order.
    pub(crate) section: [SumSection; MOST_SECTIONS],
}

/// A section of a block. Word `n` of a piece is in unit `n / unit_words`, whose offset is the sum
/// over the levels.
#[derive(Clone, Copy, Debug, Default)]
#[repr(C)]
pub(crate) struct SumSection {
    /// The words of the sections before it, in a layer or among the sections without layers.
    pub(crate) first_word: u32,
    /// The number of levels.
    pub(crate) levels: u32,
    /// The words of a unit, which are adjacent.
    pub(crate) unit_words: Divisor,
    pub(crate) reserved: u32,
    /// The levels, the innermost first.
    pub(crate) level: [SumLevel; MOST_LEVELS],
}

/// A loop over units. For a number `n`, this level uses `(n + first) % count`, and passes the
/// quotient to the next level.
#[derive(Clone, Copy, Debug, Default)]
#[repr(C)]
pub(crate) struct SumLevel {
    pub(crate) count: Divisor,
    pub(crate) first: u32,
    /// In bytes.
    pub(crate) stride: u64,
}

// block_sums.cu asserts the same sizes.
const _: () = assert!(size_of::<SumLevel>() == 24 && align_of::<SumLevel>() == 8);
const _: () = assert!(size_of::<SumSection>() == 168 && align_of::<SumSection>() == 8);
const _: () = assert!(size_of::<SumLaunch>() == 3800 && align_of::<SumLaunch>() == 8);
const _: () = assert!(offset_of!(SumLaunch, fold) == 88);

/// The constants of all launches.
static POWERS: LazyLock<([u64; 64], [u64; 64])> = LazyLock::new(|| {
    let of_row = Crc64Shift::of(ROW_BYTES);
    let mut powers = ([0; 64], [0; 64]);
    for (bit, power) in (0_u32..).zip(&mut powers.0) {
        *power = of_row.apply(1 << bit);
    }
    let half = VECTOR_BYTES / 2;
    for (before, power) in (1..).zip(&mut powers.1) {
        *power = Crc64Shift::of(ROW_BYTES - before * half).apply(ONE);
    }
    powers
});

// SAFETY: all fields are integers, or arrays and structures of integers.
unsafe impl Zeroable for SumLaunch {}

impl SumLaunch {
    /// A launch without blocks and sections.
    pub(crate) fn empty() -> Self {
        let (fold, lanes) = *POWERS;
        Self { fold, lanes, ..Zeroable::zeroed() }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_lanes_are_half_a_vector_apart() {
        let (fold, lanes) = *POWERS;
        assert_eq!(lanes[63], ONE, "nothing is behind the last one");
        let half = Crc64Shift::of(8);
        assert!(lanes.windows(2).all(|pair| pair[0] == half.apply(pair[1])));
        assert_eq!(fold[63], Crc64Shift::of(512).apply(ONE));
        assert_eq!(half.apply(fold[63]), Crc64Shift::of(520).apply(ONE));
    }
}
