//! The violations that a guard finds.

use terrane_core::{Label, RegionRequest, Span};

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
