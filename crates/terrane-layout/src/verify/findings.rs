//! The results of a check of a layout.

use std::fmt;

use terrane_core::{ByteCount, Position};

/// A span of memory that may contain pieces: a region.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Extent {
    /// Its start.
    pub place: Position,
    /// Its length.
    pub length: ByteCount,
}

/// The indices of a contiguous stretch: a whole (block, layer, section) in most layouts.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct PieceIndex {
    /// The block.
    pub block: u32,
    /// The layer.
    pub layer: u32,
    /// The section.
    pub section: u32,
    /// The stretch within this block, layer and section. 0 if the rows there are contiguous.
    pub stretch: u32,
}

impl fmt::Display for PieceIndex {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { block, layer, section, stretch } = self;
        write!(f, "block {block}, layer {layer}, section {section}")?;
        if *stretch == 0 { Ok(()) } else { write!(f, ", stretch {stretch}") }
    }
}

/// The result of a successful check.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct VerifyReport {
    /// The number of pieces, none of which overlap.
    pub pieces: u64,
    /// Bytes between pieces. In a layout from a config, all are padding of the block alignment.
    pub padding: ByteCount,
    /// Bytes of the regions after their last pieces.
    pub tail: ByteCount,
}

/// A fault of a layout.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Violation {
    /// The number of regions does not match the geometry.
    #[error("the geometry has {expected} regions, and {actual} were passed; pass one for each")]
    RegionCount {
        /// The regions of the geometry.
        expected: u32,
        /// The number of regions that were passed.
        actual: usize,
    },
    /// The lengths of the regions together do not fit in 64 bits.
    #[error("the regions together are longer than 2^64 − 1 bytes; pass shorter ones")]
    RegionsTooLong,
    /// Two regions share bytes.
    #[error("regions {first} and {second} overlap; pass disjoint ones")]
    RegionsOverlap {
        /// One of them.
        first: u32,
        /// The other.
        second: u32,
    },
    /// A piece has no location.
    #[error("the piece of {piece} has no location")]
    Unmapped {
        /// The piece.
        piece: PieceIndex,
    },
    /// A piece is not within one region.
    #[error("the piece of {piece}, at {:#x} of {:?}, is not within a region", .place.start, .place.space)]
    OutOfBounds {
        /// The piece.
        piece: PieceIndex,
        /// Its start.
        place: Position,
    },
    /// Two pieces share bytes.
    #[error("the pieces of {first} and of {second} overlap")]
    Overlap {
        /// The piece that begins first.
        first: PieceIndex,
        /// The other piece.
        second: PieceIndex,
    },
    /// Bytes within a region belong to no piece and are not padding.
    #[error(
        "region {region} has a hole of {} bytes before the piece of {next}; padding is at most {} \
         bytes",
        .bytes.get(), .largest_padding.get()
    )]
    Hole {
        /// The region.
        region: u32,
        /// The piece after the hole.
        next: PieceIndex,
        /// The length of the hole.
        bytes: ByteCount,
        /// The most bytes of padding.
        largest_padding: ByteCount,
    },
}
