//! What a check of a layout finds.

use std::fmt;

use terrane_core::{ByteCount, Position};

/// A span of memory that pieces may lie in: a region.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Extent {
    /// Where it begins.
    pub place: Position,
    /// How long it is.
    pub length: ByteCount,
}

/// The indices of a contiguous stretch: a whole (block, layer, section) in most layouts.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Piece {
    /// The block.
    pub block: u32,
    /// The layer.
    pub layer: u32,
    /// The section.
    pub section: u32,
    /// The stretch within this block, layer and section. 0 if the rows there are contiguous.
    pub stretch: u32,
}

impl fmt::Display for Piece {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { block, layer, section, stretch } = self;
        write!(f, "block {block}, layer {layer}, section {section}")?;
        if *stretch == 0 { Ok(()) } else { write!(f, ", stretch {stretch}") }
    }
}

/// What a check that passed has seen.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct VerifyReport {
    /// The pieces, each of which has a place of its own.
    pub pieces: u64,
    /// Bytes between pieces, all of them padding of the block alignment.
    pub padding: ByteCount,
    /// Bytes of the regions after their last pieces.
    pub tail: ByteCount,
}

/// What is wrong with a layout.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Violation {
    /// The number of regions is not that of the geometry.
    #[error("the geometry has {expected} regions, and {actual} were given")]
    RegionCount {
        /// The regions of the geometry.
        expected: u32,
        /// The regions given.
        actual: usize,
    },
    /// The lengths of the regions together do not fit in 64 bits.
    #[error("the regions together are longer than 64 bits can say")]
    RegionsTooLong,
    /// Two regions share bytes.
    #[error("regions {first} and {second} overlap")]
    RegionsOverlap {
        /// One of them.
        first: u32,
        /// The other.
        second: u32,
    },
    /// A piece has no place.
    #[error("the piece of {piece} has no place")]
    Unmapped {
        /// The piece.
        piece: Piece,
    },
    /// A piece does not lie within one region.
    #[error("the piece of {piece}, at {:#x} of {:?}, is not within a region", .place.start, .place.space)]
    OutOfBounds {
        /// The piece.
        piece: Piece,
        /// Where it begins.
        place: Position,
    },
    /// Two pieces share bytes.
    #[error("the pieces of {first} and of {second} overlap")]
    Overlap {
        /// The one that begins first.
        first: Piece,
        /// The other.
        second: Piece,
    },
    /// Bytes within a region belong to no piece and are no padding.
    #[error(
        "region {region} has a hole of {} bytes before the piece of {next}; padding is at most {} \
         bytes",
        .bytes.get(), .largest_padding.get()
    )]
    Hole {
        /// The region.
        region: u32,
        /// The piece after the hole.
        next: Piece,
        /// The length of the hole.
        bytes: ByteCount,
        /// What padding can come to at most.
        largest_padding: ByteCount,
    },
}
