//! The contract of everything that hands out memory.

use crate::{
    Alignment, BoxedCause, ByteCount, CapabilityMissing, Label, Limits, Memory, RegionRequest,
    StorageKind,
};

/// A source of memory: a backend, or a pool or adaptor over another source.
///
/// # What an implementor owes
///
/// - The memory has at least the bytes and the alignment asked for.
/// - A request of zero bytes succeeds and costs the backend nothing.
/// - A refused request leaves nothing behind: no mapping, no descriptor, no reservation.
/// - Dropping the memory gives it back. It may outlive the allocator.
///
/// # Safety
///
/// Whoever implements this promises that the bytes of what it hands out are the caller's alone:
/// until the memory drops, no other memory that is alive has them, and nobody keeps a clone or a
/// location of it to use them by. Pools, poison and staging tables write to what they were given
/// on the strength of this. And the memory is of [`kind`](Self::kind).
pub unsafe trait Allocate {
    /// What an allocation is.
    type Memory: Memory;

    /// The kind of storage that comes from here.
    fn kind(&self) -> StorageKind;

    /// What this source demands of requests, asked once, before planning.
    fn limits(&self) -> Limits;

    /// Allocates one region.
    ///
    /// # Errors
    ///
    /// [`AllocateError`], after which nothing has changed.
    fn allocate(&self, request: &RegionRequest) -> Result<Self::Memory, AllocateError>;
}

// SAFETY: it is the pointee that allocates.
unsafe impl<A: Allocate + ?Sized> Allocate for &A {
    type Memory = A::Memory;

    fn kind(&self) -> StorageKind {
        (**self).kind()
    }
    fn limits(&self) -> Limits {
        (**self).limits()
    }
    fn allocate(&self, request: &RegionRequest) -> Result<Self::Memory, AllocateError> {
        (**self).allocate(request)
    }
}

// SAFETY: it is the pointee that allocates.
unsafe impl<A: Allocate + ?Sized> Allocate for std::sync::Arc<A> {
    type Memory = A::Memory;

    fn kind(&self) -> StorageKind {
        (**self).kind()
    }
    fn limits(&self) -> Limits {
        (**self).limits()
    }
    fn allocate(&self, request: &RegionRequest) -> Result<Self::Memory, AllocateError> {
        (**self).allocate(request)
    }
}

/// Why memory was refused.
///
/// One type for every source, so that adaptors compose and a pool can tell exhaustion
/// ([`is_exhaustion`](Self::is_exhaustion)) from a request that can never succeed.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum AllocateError {
    /// The source has no such amount left.
    #[error(
        "out of {kind} memory: {requested} for {label} could not be had{}; \
         free some, ask for less, or spill to another tier",
        .available.map(|bytes| format!(" ({bytes} available)")).unwrap_or_default()
    )]
    OutOfMemory {
        /// The kind of storage that ran out.
        kind: StorageKind,
        /// The bytes asked for.
        requested: ByteCount,
        /// The bytes that were available, where the source knows.
        available: Option<ByteCount>,
        /// What they were for.
        label: Label,
        /// What the backend said.
        #[source]
        source: Option<BoxedCause>,
    },
    /// A budget would be exceeded.
    #[error(
        "the budget of {limit} refuses {requested} for {label}: {live} are live; \
         free some or raise the limit"
    )]
    OverBudget {
        /// The bytes asked for.
        requested: ByteCount,
        /// The bytes in use under the budget.
        live: ByteCount,
        /// The budget.
        limit: ByteCount,
        /// What they were for.
        label: Label,
    },
    /// No region of this size can ever be had here.
    #[error(
        "{requested} for {label} exceeds the largest region of {kind} memory, {largest}; split it"
    )]
    TooLarge {
        /// The kind of storage.
        kind: StorageKind,
        /// The bytes asked for.
        requested: ByteCount,
        /// The largest region, from the source's [`Limits`].
        largest: ByteCount,
        /// What they were for.
        label: Label,
    },
    /// No region can be aligned that strictly here.
    #[error("an alignment of {requested} for {label} exceeds what {kind} memory offers, {largest}")]
    TooStrictlyAligned {
        /// The kind of storage.
        kind: StorageKind,
        /// The alignment asked for.
        requested: Alignment,
        /// The strictest that can be had.
        largest: Alignment,
        /// What it was for.
        label: Label,
    },
    /// Something that a policy requires was not granted.
    #[error("{kind} memory for {label} was given back, as a requirement was not met")]
    Capability {
        /// The kind of storage.
        kind: StorageKind,
        /// What it was for.
        label: Label,
        /// The requirement.
        #[source]
        source: CapabilityMissing,
    },
    /// The source has been closed.
    #[error("{kind} memory for {label} was refused: its source has been closed")]
    Closed {
        /// The kind of storage.
        kind: StorageKind,
        /// What it was for.
        label: Label,
    },
    /// The backend failed for another reason.
    #[error("allocating {requested} of {kind} memory for {label} failed")]
    Backend {
        /// The kind of storage.
        kind: StorageKind,
        /// The bytes asked for.
        requested: ByteCount,
        /// What they were for.
        label: Label,
        /// What the backend said.
        #[source]
        source: BoxedCause,
    },
}

impl AllocateError {
    /// Whether freeing memory, or raising a budget, could make the same request succeed.
    #[must_use]
    pub const fn is_exhaustion(&self) -> bool {
        matches!(self, Self::OutOfMemory { .. } | Self::OverBudget { .. })
    }
}
