//! The errors of managed memory.

use std::fmt;

use terrane_core::{
    Alignment, AllocateError, ByteCount, Label, Location, SizeOverflow, StorageKind,
};

use super::identity::{BlockHandle, Lifecycle};

/// The error of managed memory that could not be allocated or used.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ManagedError {
    /// The memory was refused.
    #[error(transparent)]
    Allocate(#[from] AllocateError),
    /// The size of the elements in bytes overflows.
    #[error("the allocation is too large")]
    Size(#[from] SizeOverflow),
    /// The block was dropped or freed.
    #[error("use after free: block {handle} of {tag} is {state}; its owner has dropped it")]
    UseAfterFree {
        /// The handle used.
        handle: BlockHandle,
        /// The label of the block.
        tag: Label,
        /// The state of the block.
        state: Lifecycle,
    },
    /// The block was freed, and another block has its place in the table.
    #[error(
        "use after free: block {handle} has gone, and generation {current} has its place; \
         whoever presents it kept it too long"
    )]
    Stale {
        /// The handle used.
        handle: BlockHandle,
        /// The generation of the block that has the place now.
        current: u32,
    },
    /// No block ever had this handle.
    #[error("{handle} is no block of this manager; was it truncated, or from another one?")]
    Unknown {
        /// The handle used.
        handle: BlockHandle,
    },
    /// A span extends beyond its block.
    #[error(
        "{} bytes at offset {} leave block {handle} of {tag}, which has {}",
        .length.get(), .offset.get(), .block_length.get()
    )]
    OutOfBounds {
        /// The block.
        handle: BlockHandle,
        /// The label of the block.
        tag: Label,
        /// The offset of the span in the block.
        offset: ByteCount,
        /// The length of the span in bytes.
        length: ByteCount,
        /// The length of the block in bytes.
        block_length: ByteCount,
    },
    /// The block is not exported, or was already imported.
    #[error("block {handle} is live, and in somebody's hands: it was not exported")]
    NotExported {
        /// The handle used.
        handle: BlockHandle,
    },
    /// The bytes are not a whole number of elements.
    #[error("{} bytes are no whole number of elements of {element} bytes", .bytes.get())]
    PartialElement {
        /// The number of bytes.
        bytes: ByteCount,
        /// The size of an element. No bytes divide into elements of size zero.
        element: usize,
    },
    /// The address is not aligned for the elements.
    #[error("{location} is aligned to {available}, and the elements need {needed}")]
    Misaligned {
        /// The location of the bytes.
        location: Location,
        /// The alignment of the address.
        available: Alignment,
        /// The alignment required.
        needed: Alignment,
    },
    /// The processor cannot address the memory.
    #[error("{kind} memory cannot be read here; copy it to the host first")]
    NotHost {
        /// The kind.
        kind: StorageKind,
    },
    /// A block was used on a stream, but the manager has no fences.
    #[error("the manager knows no streams; give it a fence source in its options")]
    NoFences,
    /// There are more blocks than handles.
    #[error("the manager has no handle left for another block; use a second one")]
    TooManyBlocks,
}

impl ManagedError {
    /// Returns whether freeing memory, or raising a budget, could make the same request succeed.
    #[must_use]
    pub fn is_exhaustion(&self) -> bool {
        matches!(self, Self::Allocate(error) if error.is_exhaustion())
    }

    /// Returns whether the handle of a freed block was used.
    #[must_use]
    pub fn is_use_after_free(&self) -> bool {
        matches!(self, Self::UseAfterFree { .. } | Self::Stale { .. })
    }
}

/// The error of a reinterpretation: the unchanged slice, and the cause.
#[derive(Debug)]
pub struct CastFailed<S> {
    /// The slice.
    pub slice: S,
    /// The cause.
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
