//! The errors of managed memory.

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
    #[error("the size of the elements exceeds 64 bits; request fewer elements")]
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
    /// The block was freed, and another block uses its entry in the table.
    #[error(
        "use after free: block {handle} was freed, and generation {current} uses its entry; \
         drop handles together with their blocks"
    )]
    Stale {
        /// The handle used.
        handle: BlockHandle,
        /// The generation of the block that uses the entry now.
        current: u32,
    },
    /// The handle belongs to no block of this manager, live or freed.
    #[error(
        "{handle} is not a block of this manager; check that it is complete and from this manager"
    )]
    Unknown {
        /// The handle used.
        handle: BlockHandle,
    },
    /// A span extends beyond its block.
    #[error(
        "{} bytes at offset {} exceed block {handle} of {tag}, which has {} bytes; use a range inside it",
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
    /// The block is not exported, or has already been imported.
    #[error("block {handle} has an owner; export it before it is imported")]
    NotExported {
        /// The handle used.
        handle: BlockHandle,
    },
    /// The bytes are not a whole number of elements.
    #[error(
        "{} bytes are not a multiple of an element of {element} bytes; use a whole number of elements",
        .bytes.get()
    )]
    PartialElement {
        /// The number of bytes.
        bytes: ByteCount,
        /// The size of an element. Zero bytes are zero elements, even of size zero.
        element: usize,
    },
    /// The address is not aligned for the elements.
    #[error(
        "{location} is aligned to {available}, and the elements need {needed}; use a range that begins \
         at a multiple of it"
    )]
    Misaligned {
        /// The location of the bytes.
        location: Location,
        /// The alignment of the address.
        available: Alignment,
        /// The alignment required.
        needed: Alignment,
    },
    /// The processor cannot address the memory.
    #[error("the host cannot read {kind} memory; copy it to the host first")]
    NotHost {
        /// The kind.
        kind: StorageKind,
    },
    /// A block was used on a stream, but the manager has no fences.
    #[error("the manager has no fence source; set `ManagerOptions::fences` to use streams")]
    NoFences,
    /// There are more blocks than handles.
    #[error("the manager has as many blocks as it has handles, 2^32; use a second manager")]
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

terrane_core::delegate_error!(CastFailed<S>);
