//! The contract of every source of memory.

pub(crate) mod limits;
pub(crate) mod request;

use crate::BoxedCause;
use crate::allocate::limits::Limits;
use crate::allocate::request::{Label, RegionRequest};
use crate::bytes::alignment::Alignment;
use crate::bytes::byte_count::ByteCount;
use crate::capability::CapabilityMissing;
use crate::location::storage_kind::StorageKind;
use crate::memory::Memory;

#[diagnostic::on_unimplemented(
    message = "`{Self}` does not allocate memory",
    label = "it does not implement `Allocate`",
    note = "allocators are `SystemAllocator` and `DiskAllocator` of `terrane-storage`, the device and pinned allocators of `terrane-cuda`, and pools and adaptors of `terrane-pool`; a reference to one and an `Arc` of one allocate too"
)]
/// A source of memory: a backend, or a pool or adaptor over another source.
///
/// # Requirements on implementations
///
/// - The memory has at least the requested bytes and alignment.
/// - A request of zero bytes succeeds and uses nothing of the backend.
/// - A failed request leaves no mapping, descriptor or reservation behind.
/// - Dropping the memory frees it. The memory may outlive the allocator.
///
/// # Safety
///
/// The implementation must return bytes that belong to the caller alone. Until the memory drops, no
/// other live memory contains these bytes. No clone or location of the memory is kept to access
/// them. Pools, poison and staging tables rely on this to write to the memory. The memory must be
/// of [`kind`](Self::kind).
pub unsafe trait Allocate {
    /// The type of an allocation.
    type Memory: Memory;

    /// The kind of storage that this source allocates.
    fn kind(&self) -> StorageKind;

    /// The limits on requests. Planning reads them once.
    fn limits(&self) -> Limits;

    /// Allocates one region.
    ///
    /// # Errors
    ///
    /// Returns [`AllocateError`] on failure. A failed call changes nothing.
    fn allocate(&self, request: &RegionRequest) -> Result<Self::Memory, AllocateError>;
}

/// Implements all methods of [`Allocate`] for an adaptor by delegation to its upstream, except
/// [`allocate`](Allocate::allocate).
///
/// ```
/// use std::sync::atomic::{AtomicU64, Ordering};
///
/// use terrane_core::{Allocate, AllocateError, RegionRequest, delegate_allocate};
///
/// struct Counted<A> {
///     upstream: A,
///     calls: AtomicU64,
/// }
///
/// // SAFETY: the memory is that of the upstream.
/// unsafe impl<A: Allocate> Allocate for Counted<A> {
///     type Memory = A::Memory;
///
///     delegate_allocate!(self, self.upstream);
///
///     fn allocate(&self, request: &RegionRequest) -> Result<Self::Memory, AllocateError> {
///         self.calls.fetch_add(1, Ordering::Relaxed);
///         self.upstream.allocate(request)
///     }
/// }
/// ```
#[macro_export]
macro_rules! delegate_allocate {
    ($self:ident, $upstream:expr) => {
        fn kind(&$self) -> $crate::StorageKind {
            $crate::Allocate::kind(&$upstream)
        }

        fn limits(&$self) -> $crate::Limits {
            $crate::Allocate::limits(&$upstream)
        }
    };
}

// SAFETY: the pointee allocates, and meets the contract.
unsafe impl<A: Allocate + ?Sized> Allocate for &A {
    type Memory = A::Memory;

    delegate_allocate!(self, **self);

    fn allocate(&self, request: &RegionRequest) -> Result<Self::Memory, AllocateError> {
        (**self).allocate(request)
    }
}

// SAFETY: the pointee allocates, and meets the contract.
unsafe impl<A: Allocate + ?Sized> Allocate for std::sync::Arc<A> {
    type Memory = A::Memory;

    delegate_allocate!(self, **self);

    fn allocate(&self, request: &RegionRequest) -> Result<Self::Memory, AllocateError> {
        (**self).allocate(request)
    }
}

/// Why an allocation failed.
///
/// One type for every source, so that adaptors compose. A pool distinguishes exhaustion
/// ([`is_exhaustion`](Self::is_exhaustion)) from a request that can never succeed.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum AllocateError {
    /// The source has too few bytes left.
    #[error(
        "out of {kind} memory: cannot allocate {requested} for {label}{}; \
         free some, request less, or use another tier",
        .available.map(|bytes| format!(" ({bytes} available)")).unwrap_or_default()
    )]
    OutOfMemory {
        /// The kind of storage that ran out.
        kind: StorageKind,
        /// The requested bytes.
        requested: ByteCount,
        /// The bytes that were available, if the source knows.
        available: Option<ByteCount>,
        /// The purpose of the memory.
        label: Label,
        /// The error of the backend.
        #[source]
        source: Option<BoxedCause>,
    },
    /// A budget would be exceeded.
    #[error(
        "cannot allocate {requested} for {label}: {live} of the budget {budget} of {limit} are in \
         use; free some or raise the limit"
    )]
    OverBudget {
        /// The name of the budget that refused.
        budget: Label,
        /// The requested bytes.
        requested: ByteCount,
        /// The bytes in use under the budget.
        live: ByteCount,
        /// The budget.
        limit: ByteCount,
        /// The purpose of the memory.
        label: Label,
    },
    /// The source cannot allocate a region of this size.
    #[error(
        "cannot allocate {requested} of {kind} memory for {label}: the largest region has {largest}; \
         split the request"
    )]
    TooLarge {
        /// The kind of storage.
        kind: StorageKind,
        /// The requested bytes.
        requested: ByteCount,
        /// The largest region, from the source's [`Limits`].
        largest: ByteCount,
        /// The purpose of the memory.
        label: Label,
    },
    /// The source does not support this alignment.
    #[error(
        "an alignment of {requested} for {label} is not supported by {kind} memory; \
         the maximum is {largest}"
    )]
    TooStrictlyAligned {
        /// The kind of storage.
        kind: StorageKind,
        /// The requested alignment.
        requested: Alignment,
        /// The maximum alignment.
        largest: Alignment,
        /// The purpose of the memory.
        label: Label,
    },
    /// A capability that a policy requires was not granted.
    #[error(
        "cannot allocate {kind} memory for {label}: a required capability is missing; see the cause, or \
         request it as `Preferred`"
    )]
    Capability {
        /// The kind of storage.
        kind: StorageKind,
        /// The purpose of the memory.
        label: Label,
        /// The requirement.
        #[source]
        source: CapabilityMissing,
    },
    /// The source has been closed.
    #[error(
        "cannot allocate {kind} memory for {label}: its source was closed; allocate from another \
         one"
    )]
    Closed {
        /// The kind of storage.
        kind: StorageKind,
        /// The purpose of the memory.
        label: Label,
    },
    /// The backend failed for another reason.
    #[error("cannot allocate {requested} of {kind} memory for {label}; see the cause")]
    Backend {
        /// The kind of storage.
        kind: StorageKind,
        /// The requested bytes.
        requested: ByteCount,
        /// The purpose of the memory.
        label: Label,
        /// The error of the backend.
        #[source]
        source: BoxedCause,
    },
}

impl AllocateError {
    /// Whether the same request could succeed after memory is freed or a budget is raised.
    #[must_use]
    pub const fn is_exhaustion(&self) -> bool {
        matches!(self, Self::OutOfMemory { .. } | Self::OverBudget { .. })
    }

    /// The error of a source that failed for `cause`.
    #[must_use]
    pub fn backend(
        kind: StorageKind,
        request: &RegionRequest,
        cause: impl Into<BoxedCause>,
    ) -> Self {
        let (requested, label) = (request.bytes, request.label.clone());
        Self::Backend { kind, requested, label, source: cause.into() }
    }
}
