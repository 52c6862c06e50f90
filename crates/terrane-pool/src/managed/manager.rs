//! The manager.

use std::mem::ManuallyDrop;
use std::sync::Arc;
use std::time::Duration;

use bytemuck::Pod;
use terrane_core::convert::to_u64;
use terrane_core::{
    Alignment, Allocate, AllocateError, ByteCount, Label, Location, Memory, RegionRequest, Span,
    delegate_allocate,
};

use super::block::{BlockParts, ErasedManager, TrackedBlock, Uses};
use super::error::ManagedError;
use super::identity::{BlockHandle, BlockIdentity, Lifecycle};
use super::registry::Registry;
use super::slice::TrackedSlice;
use crate::adaptors::accounting::budget::{Budget, OverBudget};
use crate::adaptors::accounting::limit::{Limit, Limited};
use crate::adaptors::accounting::snapshot::{BlockRecord, BlockState, Inspect};
use crate::adaptors::accounting::statistics::{Counted, Counters, Statistics, Window};
use crate::streams::deferred::{DeferredFrees, Marks};
use crate::streams::fence::{FenceSource, StreamId};
use crate::sync::Mutex;

/// The memory of a manager's blocks: the upstream's memory, counted and within the budget.
pub type ManagedMemory<M> = Counted<Limited<M>>;

/// The options of a [`MemoryManager`].
#[derive(Clone, Debug)]
pub struct ManagerOptions {
    /// The source of fences. Without one, no stream may use a block.
    pub fences: Option<Arc<dyn FenceSource>>,
    /// Whether the upstream reuses a freed block only in the order of the stream of its allocation,
    /// like a driver's stream-ordered allocator. If not, the manager waits for that stream like for
    /// any other. A [`Pool`](crate::Pool) does not, because a manager requests blocks from it
    /// without a stream. Default: no.
    pub upstream_is_stream_ordered: bool,
    /// The longest time that a manager waits for streams to pass freed blocks, when it is exhausted
    /// or dropped. Blocks that streams still use after the wait on drop are leaked. Default: 1 s.
    pub pending_wait: Duration,
}

impl Default for ManagerOptions {
    fn default() -> Self {
        let pending_wait = Duration::from_secs(1);
        Self { fences: None, upstream_is_stream_ordered: false, pending_wait }
    }
}

/// Typed and raw allocations of one upstream under a budget, each with an identity.
///
/// It is an [`Allocate`] too, so pools and adaptors can use it as their upstream.
pub struct MemoryManager<A: Allocate> {
    upstream: Statistics<Limit<A>>,
    shared: Arc<Shared<A::Memory>>,
}

/// The state that outlives the manager while blocks exist.
pub(super) struct Shared<M: Memory> {
    registry: Mutex<Registry<BlockParts<M>>>,
    /// Blocks that were dropped while streams may still use them.
    deferred: Option<DeferredFrees<(BlockHandle, BlockParts<M>)>>,
    upstream_is_stream_ordered: bool,
}

impl<A: Allocate> MemoryManager<A> {
    /// Creates a manager of memory of `upstream`, within `budget`.
    #[must_use]
    pub fn new(upstream: A, budget: Budget, options: ManagerOptions) -> Self {
        let ManagerOptions { fences, upstream_is_stream_ordered, pending_wait } = options;
        let shared = Shared {
            registry: Mutex::new(Registry::new()),
            deferred: fences.map(|fences| DeferredFrees::new(fences, pending_wait)),
            upstream_is_stream_ordered,
        };
        let upstream = Statistics::new(Limit::new(upstream, budget), Counters::new());
        Self { upstream, shared: Arc::new(shared) }
    }

    /// Allocates `len` elements of plain data. Zero elements are valid, and cost nothing.
    ///
    /// # Errors
    ///
    /// [`ManagedError::Allocate`] if the memory is refused; [`ManagedError::Size`] if the size in
    /// bytes overflows.
    pub fn allocate_slice<T: Pod>(
        &self,
        len: usize,
    ) -> Result<TrackedSlice<T, A::Memory>, ManagedError> {
        self.allocate_slice_tagged(len, Label::default(), None)
    }

    /// Like [`allocate_slice`](Self::allocate_slice), with a tag, and for work on a stream.
    ///
    /// # Errors
    ///
    /// As for [`allocate_slice`](Self::allocate_slice); [`ManagedError::NoFences`] for a stream if
    /// the manager has no fences.
    pub fn allocate_slice_tagged<T: Pod>(
        &self,
        len: usize,
        tag: impl Into<Label>,
        stream: Option<StreamId>,
    ) -> Result<TrackedSlice<T, A::Memory>, ManagedError> {
        let size = ByteCount::from_usize(size_of::<T>());
        let bytes = size.checked_mul("elements", to_u64(len))?;
        let alignment = Alignment::of(to_u64(align_of::<T>()));
        let request = RegionRequest::new(bytes).aligned_to(alignment).labelled(tag);
        TrackedSlice::new(self.allocate_block(&request, stream)?, len)
    }

    /// Allocates `bytes` bytes under a tag.
    ///
    /// # Errors
    ///
    /// As for [`allocate_slice`](Self::allocate_slice).
    pub fn allocate_bytes(
        &self,
        bytes: ByteCount,
        tag: impl Into<Label>,
    ) -> Result<TrackedBlock<A::Memory>, ManagedError> {
        self.allocate_block(&RegionRequest::new(bytes).labelled(tag), None)
    }

    /// Allocates any request, for work on a stream.
    ///
    /// # Errors
    ///
    /// As for [`allocate_slice_tagged`](Self::allocate_slice_tagged).
    pub fn allocate_block(
        &self,
        request: &RegionRequest,
        stream: Option<StreamId>,
    ) -> Result<TrackedBlock<A::Memory>, ManagedError> {
        if stream.is_some() && !self.shared.knows_streams() {
            return Err(ManagedError::NoFences);
        }
        let memory = self.obtain(request)?;
        let span = Span::of(&memory);
        let handle = self.shared.registry.lock().enter(span, request, stream)?;
        let parts = BlockParts { memory, uses: Uses::new() };
        Ok(TrackedBlock::new(parts, handle, Arc::clone(&self.shared)))
    }

    /// Moves an exported block out of the manager.
    ///
    /// # Errors
    ///
    /// [`ManagedError::UseAfterFree`] or [`ManagedError::Stale`] for a freed block,
    /// [`ManagedError::NotExported`] for a block that has an owner, and [`ManagedError::Unknown`]
    /// for a number that was never a block.
    pub fn import(&self, handle: BlockHandle) -> Result<TrackedBlock<A::Memory>, ManagedError> {
        let parts = self.shared.registry.lock().import(handle)?;
        Ok(TrackedBlock::new(parts, handle, Arc::clone(&self.shared)))
    }

    /// Returns the identity of a block. The identity of a freed block is available until another
    /// block uses its entry.
    ///
    /// # Errors
    ///
    /// [`ManagedError::Stale`] and [`ManagedError::Unknown`].
    pub fn identity(&self, handle: BlockHandle) -> Result<BlockIdentity, ManagedError> {
        self.shared.identity(handle)
    }

    /// Returns the location of `length` bytes at `offset` in a live block, from its handle.
    ///
    /// # Errors
    ///
    /// [`ManagedError::UseAfterFree`], [`ManagedError::Stale`], [`ManagedError::OutOfBounds`] or
    /// [`ManagedError::Unknown`].
    pub fn locate(
        &self,
        handle: BlockHandle,
        offset: ByteCount,
        length: ByteCount,
    ) -> Result<Location, ManagedError> {
        self.shared.registry.lock().access(handle, offset, length)
    }

    /// Frees dropped blocks that no stream uses any more, and returns their number. Never waits. An
    /// exhausted manager calls this before it refuses a request.
    pub fn reap(&self) -> usize {
        let Some(deferred) = &self.shared.deferred else { return 0 };
        deferred.reap(|(handle, parts)| self.shared.free(handle, parts))
    }

    /// Returns the number of dropped blocks that some stream may still use.
    #[must_use]
    pub fn pending(&self) -> usize {
        self.shared.deferred.as_ref().map_or(0, DeferredFrees::len)
    }

    /// Returns the bytes obtained and not yet freed, pending blocks included.
    #[must_use]
    pub fn allocated(&self) -> ByteCount {
        ByteCount::new(self.counters().totals().current.bytes)
    }

    /// Returns the most bytes allocated at once, since the manager was created or since the last
    /// [`reset_peak`](Self::reset_peak).
    #[must_use]
    pub fn peak(&self) -> ByteCount {
        ByteCount::new(self.counters().totals().peak.bytes)
    }

    /// Resets the peak to the bytes that are allocated now.
    pub fn reset_peak(&self) {
        self.counters().reset_peak();
    }

    /// Returns the number of requests, refused ones included.
    #[must_use]
    pub fn requests(&self) -> u64 {
        let totals = self.counters().totals();
        totals.total.count + totals.failed
    }

    /// Returns the largest request that the budget would grant now.
    #[must_use]
    pub fn remaining(&self) -> ByteCount {
        self.budget().remaining()
    }

    /// Checks whether the budget would grant `bytes` now, without a request to the upstream.
    ///
    /// # Errors
    ///
    /// [`OverBudget`], with the live bytes and the limit.
    pub fn check(&self, bytes: ByteCount) -> Result<(), OverBudget> {
        self.budget().check(bytes)
    }

    /// Opens a measurement window.
    #[must_use]
    pub fn window(&self) -> Window {
        self.counters().window()
    }

    /// Returns the budget.
    #[must_use]
    pub fn budget(&self) -> &Budget {
        self.upstream.upstream().budget()
    }

    fn counters(&self) -> &Counters {
        self.upstream.counters()
    }

    fn obtain(&self, request: &RegionRequest) -> Result<ManagedMemory<A::Memory>, AllocateError> {
        let allocate = || self.upstream.allocate(request);
        match &self.shared.deferred {
            Some(deferred) => deferred.allocate_or_reclaim(allocate, |(handle, parts)| {
                self.shared.free(handle, parts);
            }),
            None => allocate(),
        }
    }
}

// SAFETY: the block is memory of the upstream, and is returned to one caller.
unsafe impl<A: Allocate> Allocate for MemoryManager<A> {
    type Memory = TrackedBlock<A::Memory>;

    delegate_allocate!(self, self.upstream);

    fn allocate(&self, request: &RegionRequest) -> Result<Self::Memory, AllocateError> {
        self.allocate_block(request, None).map_err(|error| match error {
            ManagedError::Allocate(error) => error,
            other => AllocateError::backend(self.kind(), request, other),
        })
    }
}

impl<A: Allocate> Inspect for MemoryManager<A> {
    fn inspect(&self, visit: &mut dyn FnMut(BlockRecord)) {
        let identities: Vec<_> = self.shared.registry.lock().identities().cloned().collect();
        for identity in identities {
            let BlockIdentity { kind, location, length, .. } = identity;
            let state = match identity.state {
                Lifecycle::Live => BlockState::Live,
                Lifecycle::PendingFree => BlockState::Pending,
                Lifecycle::Freed => continue,
            };
            visit(BlockRecord {
                span: Span { kind, location, length },
                requested: identity.requested,
                tag: identity.tag,
                state,
                sequence: 0,
            });
        }
    }
}

terrane_core::debug_fields!(MemoryManager<A: Allocate>, |it| { kind: it.upstream.kind(),
    budget: it.budget(),
    allocated: it.allocated(),
    pending: it.pending() });

impl<M: Memory> Shared<M> {
    pub(super) fn identity(&self, handle: BlockHandle) -> Result<BlockIdentity, ManagedError> {
        self.registry.lock().identity(handle).cloned()
    }

    pub(super) fn export(&self, handle: BlockHandle, parts: BlockParts<M>) {
        self.registry.lock().export(handle, parts);
    }

    /// Frees a block, or keeps it until the streams that use it have passed this point.
    pub(super) fn release(&self, handle: BlockHandle, parts: BlockParts<M>) {
        let mut streams = parts.uses.streams();
        if !self.upstream_is_stream_ordered
            && let Ok(BlockIdentity { stream: Some(home), .. }) = self.identity(handle)
            && !streams.contains(&home)
        {
            streams.push(home);
        }
        match &self.deferred {
            Some(deferred) if !streams.is_empty() => {
                self.registry.lock().set_pending(handle);
                // If a fence panics, the block is leaked.
                let parts = ManuallyDrop::new(parts);
                let marks = Marks::new(deferred.fences(), streams);
                deferred.keep(marks, (handle, ManuallyDrop::into_inner(parts)));
            }
            _ => self.free(handle, parts),
        }
    }

    /// Marks the block as freed first, so that no handle to freed memory is live.
    fn free(&self, handle: BlockHandle, parts: BlockParts<M>) {
        self.registry.lock().set_freed(handle);
        drop(parts);
    }
}

impl<M: Memory> ErasedManager for Shared<M> {
    fn knows_streams(&self) -> bool {
        self.deferred.is_some()
    }

    fn identity(&self, handle: BlockHandle) -> Option<BlockIdentity> {
        Self::identity(self, handle).ok()
    }
}

impl<M: Memory> Drop for Shared<M> {
    fn drop(&mut self) {
        // Exported blocks that were never imported. Their handles are useless without the manager.
        let exported: Vec<_> = self.registry.lock().drain_exported().collect();
        for (handle, parts) in exported {
            self.release(handle, parts);
        }
    }
}
