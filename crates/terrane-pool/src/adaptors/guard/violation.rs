//! What a guard finds.

use terrane_core::{ByteCount, Label, Location, RegionRequest, Span};

use super::canary::Side;

/// Something that a [`Guard`](super::Guard) has found.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum GuardViolation {
    /// The upstream handed out what it had handed out before.
    #[error(
        "the upstream handed out {} bytes at {} for {label}, which overlap the live {} at {} of \
         {existing_label}; its books are broken",
        .new.length.get(), .new.location, .existing.length, .existing.location
    )]
    Overlap {
        /// What it handed out.
        new: Span,
        /// For whom.
        label: Label,
        /// What is live.
        existing: Span,
        /// Whose it is.
        existing_label: Label,
    },
    /// The upstream handed out less, or something else, than it was asked for.
    #[error(
        "the upstream handed out {} bytes of {} memory at {} for {}, which had asked for {} at \
         multiples of {}; it breaks its contract",
        .granted.length.get(), .granted.kind, .granted.location,
        .asked.label, .asked.bytes, .asked.alignment
    )]
    Unfit {
        /// What it handed out, and took back.
        granted: Span,
        /// What it was asked for.
        asked: RegionRequest,
    },
    /// Somebody wrote outside a block.
    #[error(
        "{label}: bytes {side:?} the block of {} at {} were overwritten, the nearest at a \
         distance of {distance}; look for a write out of bounds",
        .block.length, .block.location
    )]
    Overwritten {
        /// The block next to it.
        block: Span,
        /// Whose it is.
        label: Label,
        /// On which side.
        side: Side,
        /// How far from the block the nearest such byte is; 0 for its neighbour.
        distance: usize,
    },
    /// The bytes around a block could not be written or read, so that nobody can say.
    #[error(
        "{label}: the bytes around the block of {} at {} could not be reached, so that writes out \
         of bounds go unseen; the log has the reason",
        .block.length, .block.location
    )]
    Unwatched {
        /// The block.
        block: Span,
        /// Whose it is.
        label: Label,
    },
}

/// A reference to memory that a [`Guard`](super::Guard) does not know, or not any more.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum StaleReference {
    /// Nothing is live there.
    #[error("nothing is live at {location}: use after free, or an address from elsewhere")]
    NotLive {
        /// Where.
        location: Location,
    },
    /// Another block lies there by now.
    #[error(
        "use after free: generation {presented} of the block at {location} has gone, and \
         generation {live} for {label} lies there now"
    )]
    Generation {
        /// Where.
        location: Location,
        /// The generation of the reference.
        presented: u64,
        /// The generation of what is live.
        live: u64,
        /// Whose that is.
        label: Label,
    },
    /// It reaches beyond its block.
    #[error("{length} from {location} on leave the block of {block_length} around it")]
    OutOfBounds {
        /// Where the reference begins.
        location: Location,
        /// How long it is.
        length: ByteCount,
        /// How long the block is.
        block_length: ByteCount,
    },
}
