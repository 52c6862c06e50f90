//! The errors of a pool.

use std::sync::Arc;

use terrane_core::{Alignment, AllocateError, ByteCount, Label, StorageKind};

use crate::adaptors::accounting::budget::OverBudget;
use crate::adaptors::accounting::trace::TraceError;
use crate::managed::ManagedError;
use crate::staging::StagingError;
use crate::streams::fence::FenceError;
use crate::streams::stream_pool::StreamError;

/// The error of this crate. Its own variants report a pool that cannot be created, or a block that
/// cannot be used as requested. The errors of all other parts of the crate convert into it.
///
/// Refused memory is an [`AllocateError`](terrane_core::AllocateError). If a pool ran out, its
/// source is an [`Exhausted`].
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum PoolError {
    /// The size classes form no valid range.
    #[error(
        "size classes from {smallest} to {largest} are not supported; the smallest must be a power \
         of two of at least 16 B, and the largest must be between the smallest and 2^48 B"
    )]
    InvalidClassRange {
        /// The smallest class requested.
        smallest: ByteCount,
        /// The largest class requested.
        largest: ByteCount,
    },
    /// The slab's stride or count is invalid.
    #[error(
        "a slab of {count} × {stride} is not supported; the stride must be a multiple of the \
         alignment ({alignment}), the count at least 1, and the product must fit in 64 bits"
    )]
    InvalidSlab {
        /// The length of a block.
        stride: ByteCount,
        /// The number of blocks.
        count: u32,
        /// The alignment of the pool.
        alignment: Alignment,
    },
    /// The upstream cannot allocate a region for a block of the largest class, or for a slab.
    #[error(
        "the largest class needs regions of {required}, and the {kind} upstream allocates at most \
         {largest}; lower the largest class or the blocks of a slab"
    )]
    UpstreamTooSmall {
        /// The kind of storage.
        kind: StorageKind,
        /// The region that the pool would have to request.
        required: ByteCount,
        /// The largest region of the upstream.
        largest: ByteCount,
    },
    /// The upstream returned memory that does not fit the request. The pool freed it.
    #[error(
        "the upstream returned {granted} aligned to {available} for a request of {requested} aligned to \
         {alignment}; fix the upstream, which violates the contract of `Allocate`"
    )]
    UnfitUpstream {
        /// The length requested, in bytes.
        requested: ByteCount,
        /// The length returned, in bytes.
        granted: ByteCount,
        /// The alignment requested.
        alignment: Alignment,
        /// The alignment returned.
        available: Alignment,
    },
    /// An environment variable has an invalid value.
    #[error("{name} has the invalid value {value:?}; see `DebugOptions` for the valid values")]
    InvalidVariable {
        /// The variable.
        name: &'static str,
        /// Its value.
        value: String,
    },
    /// A block was used on a stream, but its pool was made without streams.
    #[error("the pool has no fence source; create it with `Pool::with_fences` to use streams")]
    NoFences,
    /// A fence failed.
    #[error("a fence failed, so the order of streams is unknown; see the cause")]
    Fence {
        /// The operation that failed.
        #[from]
        source: FenceError,
    },
    /// Memory was refused.
    #[error(transparent)]
    Allocate(#[from] AllocateError),
    /// A budget has too little left.
    #[error(transparent)]
    OverBudget(#[from] OverBudget),
    /// Managed memory could not be allocated or used.
    #[error(transparent)]
    Managed(#[from] ManagedError),
    /// Data could not be staged or read back.
    #[error(transparent)]
    Staging(#[from] StagingError),
    /// A stream could not be made.
    #[error(transparent)]
    Stream(#[from] StreamError),
    /// A trace could not be written or read.
    #[error(transparent)]
    Trace(#[from] TraceError),
}

/// The state of a pool that could not serve a request after every step of a reclaim.
#[derive(Clone, Debug, thiserror::Error)]
#[error(
    "the pool holds {held}: {live} live, {cached} cached, {pending} pending on streams; \
     the largest free class is {}; the largest users are {}; \
     free blocks, finish streams, or lower the pool's limits",
    .largest_free.map_or("none".to_owned(), |size| size.to_string()),
    describe(.top_labels)
)]
#[non_exhaustive]
pub struct Exhausted {
    /// Bytes obtained from the upstream and not returned.
    pub held: ByteCount,
    /// Bytes of blocks in use.
    pub live: ByteCount,
    /// Bytes of free blocks kept for the next request.
    pub cached: ByteCount,
    /// Bytes of freed blocks that streams may still be using.
    pub pending: ByteCount,
    /// The largest class with a free block.
    pub largest_free: Option<ByteCount>,
    /// The labels with the most live bytes, the largest first.
    pub top_labels: Vec<(Label, ByteCount)>,
    /// The number of calls of the exhaustion callback.
    pub callback_attempts: u32,
    /// The last error of the upstream.
    #[source]
    pub refusal: Option<Arc<AllocateError>>,
}

fn describe(labels: &[(Label, ByteCount)]) -> String {
    if labels.is_empty() {
        return "not labelled".to_owned();
    }
    let labels: Vec<_> = labels.iter().map(|(label, bytes)| format!("{label} ({bytes})")).collect();
    labels.join(", ")
}
