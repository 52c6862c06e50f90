//! What can go wrong with a pool.

use std::sync::Arc;

use terrane_core::{Alignment, AllocateError, ByteCount, Label, StorageKind};

use crate::adaptors::{OverBudget, TraceError};
use crate::managed::ManagedError;
use crate::staging::StagingError;
use crate::{FenceError, StreamError};

/// The error of this crate: a pool that cannot be made, a block that cannot be used that way, or
/// the error of another part of the crate, all of which convert into this one.
///
/// Refused memory is an [`AllocateError`](terrane_core::AllocateError); where a pool ran out, its
/// source is an [`Exhausted`].
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum PoolError {
    /// The size classes span no range.
    #[error(
        "size classes from {smallest} to {largest} cannot be had: \
         the smallest is a power of two from 16 B on, the largest no smaller, and at most 2^48 B"
    )]
    InvalidClassRange {
        /// The smallest class asked for.
        smallest: ByteCount,
        /// The largest class asked for.
        largest: ByteCount,
    },
    /// The slab is no slab.
    #[error(
        "a slab of {count} × {stride} cannot be had: the stride is a multiple of the \
         alignment ({alignment}), there is at least one block, and the product fits in 64 bits"
    )]
    InvalidSlab {
        /// The length of a block.
        stride: ByteCount,
        /// The number of blocks.
        count: u32,
        /// The alignment of the pool.
        alignment: Alignment,
    },
    /// The upstream cannot serve blocks like these.
    #[error(
        "the upstream of {kind} memory has no regions of {required}, which the largest class \
         needs, only up to {largest}; lower the largest class or the blocks of a slab"
    )]
    UpstreamTooSmall {
        /// The kind of storage.
        kind: StorageKind,
        /// What the pool would have to ask for.
        required: ByteCount,
        /// The largest region of the upstream.
        largest: ByteCount,
    },
    /// The upstream gave memory that does not hold what was asked for. It was given back.
    #[error(
        "the upstream gave {granted} at a multiple of {available} for {asked} at one of \
         {alignment}; it breaks the contract of `Allocate`, and cannot be pooled"
    )]
    UnfitUpstream {
        /// What was asked for.
        asked: ByteCount,
        /// What it gave.
        granted: ByteCount,
        /// The alignment that was asked for.
        alignment: Alignment,
        /// The alignment of what it gave.
        available: Alignment,
    },
    /// An environment variable whose value means nothing.
    #[error("{name} is set to {value:?}, which means nothing; see `DebugOptions` for what does")]
    InvalidVariable {
        /// The variable.
        name: &'static str,
        /// Its value.
        value: String,
    },
    /// A block was used on a stream, and its pool knows no streams.
    #[error("the pool knows no streams; make it `with_fences` to use its blocks on one")]
    NoFences,
    /// A fence failed.
    #[error("the order of streams could not be kept")]
    Fence {
        /// What failed.
        #[from]
        source: FenceError,
    },
    /// A typed view that does not fit its block.
    #[error(
        "{count} elements of {element} bytes aligned to {alignment} do not fit a block of {asked} \
         at a multiple of {available}; ask the pool for more, or for that alignment"
    )]
    ViewDoesNotFit {
        /// How many elements.
        count: usize,
        /// The size of one in bytes.
        element: usize,
        /// The alignment that an element needs.
        alignment: usize,
        /// How many bytes were asked for when the block was acquired.
        asked: ByteCount,
        /// The alignment that the block has.
        available: Alignment,
    },
    /// Memory was refused.
    #[error(transparent)]
    Allocate(#[from] AllocateError),
    /// A budget has too little left.
    #[error(transparent)]
    OverBudget(#[from] OverBudget),
    /// Managed memory could not be had or used.
    #[error(transparent)]
    Managed(#[from] ManagedError),
    /// Something could not be staged or read back.
    #[error(transparent)]
    Staging(#[from] StagingError),
    /// A stream could not be made.
    #[error(transparent)]
    Stream(#[from] StreamError),
    /// A trace could not be written, read or replayed.
    #[error(transparent)]
    Trace(#[from] TraceError),
}

/// The state of a pool that could not serve a request after all it tried.
#[derive(Clone, Debug, thiserror::Error)]
#[error(
    "the pool holds {held}: {live} live, {cached} cached, {pending} pending behind streams; \
     the largest free class is {}; the most is held by {}; \
     free blocks, finish streams, or lower the pool's caps",
    .largest_free.map_or("none".to_owned(), |size| size.to_string()),
    describe(.top_labels)
)]
#[non_exhaustive]
pub struct Exhausted {
    /// The bytes obtained from the upstream and not given back.
    pub held: ByteCount,
    /// The bytes of blocks in use.
    pub live: ByteCount,
    /// The bytes of free blocks kept for the next request.
    pub cached: ByteCount,
    /// The bytes of freed blocks that streams may still be using.
    pub pending: ByteCount,
    /// The largest class with a free block.
    pub largest_free: Option<ByteCount>,
    /// The labels with the most live bytes, the largest first.
    pub top_labels: Vec<(Label, ByteCount)>,
    /// How many times the caller's callback was asked.
    pub callback_attempts: u32,
    /// What the upstream said last.
    #[source]
    pub refusal: Option<Arc<AllocateError>>,
}

fn describe(labels: &[(Label, ByteCount)]) -> String {
    if labels.is_empty() {
        return "nothing that was labelled".to_owned();
    }
    let labels: Vec<_> = labels.iter().map(|(label, bytes)| format!("{label} ({bytes})")).collect();
    labels.join(", ")
}
