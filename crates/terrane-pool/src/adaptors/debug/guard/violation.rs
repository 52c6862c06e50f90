//! The violations that a guard finds.

use terrane_core::{ByteCount, Label, Location, RegionRequest, Span};

use super::canary::OverwrittenSide;

/// A violation that a [`Guard`](super::Guard) has found.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum GuardViolation {
    /// The upstream returned memory that overlaps a live block.
    #[error(
        "the upstream returned {} bytes at {} for {label}, which overlap the live {} at {} of \
         {existing_label}; fix the upstream",
        .new.length.get(), .new.location, .existing.length, .existing.location
    )]
    Overlap {
        /// The memory returned.
        new: Span,
        /// The label of the request.
        label: Label,
        /// The live block.
        existing: Span,
        /// The label of the live block.
        existing_label: Label,
    },
    /// The upstream returned less memory than was requested, or memory of another kind or
    /// alignment.
    #[error(
        "the upstream returned {} bytes of {} memory at {} for {}, which requested {} aligned to {}; \
         fix the upstream",
        .granted.length.get(), .granted.kind, .granted.location,
        .requested.label, .requested.bytes, .requested.alignment
    )]
    Unfit {
        /// The memory returned, which was freed.
        granted: Span,
        /// The bytes requested.
        requested: RegionRequest,
    },
    /// A write outside a block.
    #[error(
        "{label}: bytes {side} the block of {} at {} were overwritten, the nearest at a distance of \
         {distance}; look for a write out of bounds",
        .block.length, .block.location
    )]
    Overwritten {
        /// The block next to the write.
        block: Span,
        /// The label of the block.
        label: Label,
        /// The side of the block.
        side: OverwrittenSide,
        /// The distance in bytes from the block to the nearest changed byte. It is 0 for the byte
        /// next to the block.
        distance: usize,
    },
    /// The canaries of a block could not be written or read, so writes out of bounds are not
    /// detected.
    #[error(
        "{label}: the bytes around the block of {} at {} could not be accessed, so writes out of \
         bounds are not detected; the log has the reason",
        .block.length, .block.location
    )]
    Unwatched {
        /// The block.
        block: Span,
        /// The label of the block.
        label: Label,
    },
}

/// A reference to memory that is not live in a [`Guard`](super::Guard).
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum StaleReference {
    /// No block is live there.
    #[error("no block is live at {location}: use after free, or an address of other memory")]
    NotLive {
        /// The location of the reference.
        location: Location,
    },
    /// Another block is live there now.
    #[error(
        "use after free: generation {presented} of the block at {location} was freed, and \
         generation {live} for {label} is there now"
    )]
    Generation {
        /// The location of the reference.
        location: Location,
        /// The generation of the reference.
        presented: u64,
        /// The generation of the live block.
        live: u64,
        /// The label of the live block.
        label: Label,
    },
    /// The reference extends beyond its block.
    #[error("{length} from {location} exceed their block of {block_length}")]
    OutOfBounds {
        /// The start of the reference.
        location: Location,
        /// The length of the reference in bytes.
        length: ByteCount,
        /// The length of the block in bytes.
        block_length: ByteCount,
    },
}
