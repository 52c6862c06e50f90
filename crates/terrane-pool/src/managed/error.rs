//! What can go wrong with managed memory.

use std::fmt;

use terrane_core::{
    Alignment, AllocateError, ByteCount, Label, Location, SizeOverflow, StorageKind,
};

use super::identity::{BlockHandle, Lifecycle};

/// Why managed memory could not be had or used.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ManagedError {
    /// The memory was refused.
    #[error(transparent)]
    Allocate(#[from] AllocateError),
    /// So many elements are more bytes than there can be.
    #[error("the allocation is too large")]
    Size(#[from] SizeOverflow),
    /// The block has gone.
    #[error("use after free: block {handle} of {tag} is {state}; its owner has dropped it")]
    UseAfterFree {
        /// What was presented.
        handle: BlockHandle,
        /// Whose it was.
        tag: Label,
        /// What has become of it.
        state: Lifecycle,
    },
    /// The block has gone, and another has its place in the table.
    #[error(
        "use after free: block {handle} has gone, and generation {current} has its place; \
         whoever presents it kept it too long"
    )]
    Stale {
        /// What was presented.
        handle: BlockHandle,
        /// The generation that has its place.
        current: u32,
    },
    /// No block ever had this handle.
    #[error("{handle} is no block of this manager; was it truncated, or from another one?")]
    Unknown {
        /// What was presented.
        handle: BlockHandle,
    },
    /// A span leaves its block.
    #[error(
        "{} bytes at offset {} leave block {handle} of {tag}, which has {}",
        .length.get(), .offset.get(), .block_length.get()
    )]
    OutOfBounds {
        /// The block.
        handle: BlockHandle,
        /// Whose it is.
        tag: Label,
        /// Where the span begins in it.
        offset: ByteCount,
        /// How long the span is.
        length: ByteCount,
        /// How long the block is.
        block_length: ByteCount,
    },
    /// A block that was not exported, or was imported already.
    #[error("block {handle} is live, and in somebody's hands: it was not exported")]
    NotExported {
        /// What was presented.
        handle: BlockHandle,
    },
    /// Bytes that are no whole number of elements.
    #[error("{} bytes are no whole number of elements of {element} bytes", .bytes.get())]
    PartialElement {
        /// The bytes.
        bytes: ByteCount,
        /// The size of an element; nothing can be cut into elements of no bytes.
        element: usize,
    },
    /// An address that is not aligned for the elements.
    #[error("{location} is aligned to {available}, and the elements need {needed}")]
    Misaligned {
        /// Where the bytes are.
        location: Location,
        /// What the address is a multiple of.
        available: Alignment,
        /// What it would have to be a multiple of.
        needed: Alignment,
    },
    /// Memory that the processor cannot address.
    #[error("{kind} memory cannot be read here; copy it to the host first")]
    NotHost {
        /// The kind.
        kind: StorageKind,
    },
    /// A use on a stream where the manager has no fences to wait for it.
    #[error("the manager knows no streams; give it a fence source in its options")]
    NoFences,
    /// More blocks than handles.
    #[error("the manager has no handle left for another block; use a second one")]
    TooManyBlocks,
}

impl ManagedError {
    /// Whether freeing memory, or raising a budget, could make the same request succeed.
    #[must_use]
    pub fn is_exhaustion(&self) -> bool {
        matches!(self, Self::Allocate(error) if error.is_exhaustion())
    }

    /// Whether something was used that has gone.
    #[must_use]
    pub fn is_use_after_free(&self) -> bool {
        matches!(self, Self::UseAfterFree { .. } | Self::Stale { .. })
    }
}

/// A reinterpretation that failed: the slice, as it was, and the cause.
#[derive(Debug)]
pub struct CastFailed<S> {
    /// The slice.
    pub slice: S,
    /// Why it is none of the other type.
    pub cause: ManagedError,
}

impl<S> fmt::Display for CastFailed<S> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(&self.cause, f)
    }
}

impl<S: fmt::Debug> std::error::Error for CastFailed<S> {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        self.cause.source()
    }
}
