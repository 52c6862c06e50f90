//! The manager.

use std::fmt;
use std::mem::ManuallyDrop;
use std::sync::Arc;
use std::time::Duration;

use bytemuck::Pod;
use terrane_core::{
    Alignment, Allocate, AllocateError, ByteCount, Label, Limits, Location, Memory, RegionRequest,
    Span, StorageKind,
};

use super::block::{Identify, Parts, TrackedBlock, Uses};
use super::error::ManagedError;
use super::identity::{BlockHandle, BlockIdentity, Lifecycle};
use super::registry::Registry;
use super::slice::TrackedSlice;
use crate::adaptors::{
    BlockRecord, BlockState, Budget, Counted, Counters, Inspect, Limit, Limited, OverBudget,
    Statistics, Window,
};
use crate::retired::{Marks, Retired};
use crate::sync::Mutex;
use crate::{FenceSource, StreamId};

/// What a manager's blocks are made of: the upstream's memory, counted and within the budget.
pub type ManagedMemory<M> = Counted<Limited<M>>;

/// The choices of a [`MemoryManager`].
#[derive(Clone, Debug)]
pub struct ManagerOptions {
    /// Where fences come from. Without one, no stream may use a block.
    pub fences: Option<Arc<dyn FenceSource>>,
    /// Whether the upstream itself keeps a freed block from others until the stream that it was
    /// allocated on has come past, as a driver's stream-ordered allocator does. A
    /// [`Pool`](crate::Pool) does not for what is asked of it without a stream, as a manager asks.
    /// If not, the manager waits for that stream as for any other. Default: no.
    pub upstream_is_stream_ordered: bool,
    /// How long an exhausted manager, or one that is being dropped, waits for streams to come
    /// past freed blocks. What they still use after that when it drops is leaked.
    /// Default: 1 s.
    pub patience: Duration,
}

impl Default for ManagerOptions {
    fn default() -> Self {
        let patience = Duration::from_secs(1);
        Self { fences: None, upstream_is_stream_ordered: false, patience }
    }
}

/// Typed and raw allocations of one upstream under a budget, each with an identity.
///
/// It is an [`Allocate`] too, so that pools and adaptors stack on it.
pub struct MemoryManager<A: Allocate> {
    upstream: Statistics<Limit<A>>,
    shared: Arc<Shared<A::Memory>>,
}

/// What outlives the manager for as long as there are blocks.
pub(super) struct Shared<M: Memory> {
    registry: Mutex<Registry<Parts<M>>>,
    /// Blocks that were dropped while streams may still use them.
    retired: Option<Retired<(BlockHandle, Parts<M>)>>,
    upstream_is_stream_ordered: bool,
}

impl<A: Allocate> MemoryManager<A> {
    /// A manager of what `upstream` has, within `budget`.
    #[must_use]
    pub fn new(upstream: A, budget: Budget, options: ManagerOptions) -> Self {
        let ManagerOptions { fences, upstream_is_stream_ordered, patience } = options;
        let shared = Shared {
            registry: Mutex::new(Registry::new()),
            retired: fences.map(|fences| Retired::new(fences, patience)),
            upstream_is_stream_ordered,
        };
        let upstream = Statistics::new(Limit::new(upstream, budget), Counters::new());
        Self { upstream, shared: Arc::new(shared) }
    }

    /// `len` elements of plain data. None is legal, and costs nothing.
    ///
    /// # Errors
    ///
    /// [`ManagedError::Allocate`] if they are refused; [`ManagedError::Size`] if they are more
    /// bytes than there can be.
    pub fn alloc<T: Pod>(&self, len: usize) -> Result<TrackedSlice<T, A::Memory>, ManagedError> {
        self.alloc_slice(len, Label::default(), None)
    }

    /// The same under a tag, and for work on a stream.
    ///
    /// # Errors
    ///
    /// As for [`alloc`](Self::alloc); [`ManagedError::NoFences`] for a stream where the manager
    /// knows none.
    pub fn alloc_slice<T: Pod>(
        &self,
        len: usize,
        tag: impl Into<Label>,
        stream: Option<StreamId>,
    ) -> Result<TrackedSlice<T, A::Memory>, ManagedError> {
        let size = ByteCount::from_usize(size_of::<T>());
        let bytes = size.checked_mul("elements", ByteCount::from_usize(len).get())?;
        let alignment = Alignment::of(ByteCount::from_usize(align_of::<T>()).get());
        let request = RegionRequest::new(bytes).aligned_to(alignment).labelled(tag);
        TrackedSlice::new(self.alloc_block(&request, stream)?, len)
    }

    /// `bytes` bytes under a tag.
    ///
    /// # Errors
    ///
    /// As for [`alloc`](Self::alloc).
    pub fn alloc_raw(
        &self,
        bytes: ByteCount,
        tag: impl Into<Label>,
    ) -> Result<TrackedBlock<A::Memory>, ManagedError> {
        self.alloc_block(&RegionRequest::new(bytes).labelled(tag), None)
    }

    /// Whatever is asked for, for work on a stream.
    ///
    /// # Errors
    ///
    /// As for [`alloc_slice`](Self::alloc_slice).
    pub fn alloc_block(
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
        let parts = Parts { memory, uses: Uses::new() };
        Ok(TrackedBlock::new(parts, handle, Arc::clone(&self.shared)))
    }

    /// Takes an exported block out of the manager's keeping.
    ///
    /// # Errors
    ///
    /// [`ManagedError::UseAfterFree`] or [`ManagedError::Stale`] for a block that has gone,
    /// [`ManagedError::NotExported`] for one that is in somebody's hands, and
    /// [`ManagedError::Unknown`] for what was never a block.
    pub fn import(&self, handle: BlockHandle) -> Result<TrackedBlock<A::Memory>, ManagedError> {
        let parts = self.shared.registry.lock().import(handle)?;
        Ok(TrackedBlock::new(parts, handle, Arc::clone(&self.shared)))
    }

    /// What has become of a block. A freed one is known until another takes its place.
    ///
    /// # Errors
    ///
    /// [`ManagedError::Stale`] and [`ManagedError::Unknown`].
    pub fn identity(&self, handle: BlockHandle) -> Result<BlockIdentity, ManagedError> {
        self.shared.identity(handle)
    }

    /// Where `length` bytes from `offset` on of a live block are, for whoever has only its handle.
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

    /// Gives back freed blocks that no stream uses any more, and says how many. It never waits,
    /// and is done before an exhausted manager refuses anything.
    pub fn reap(&self) -> usize {
        let Some(retired) = &self.shared.retired else { return 0 };
        retired.reap(|(handle, parts)| self.shared.free(handle, parts))
    }

    /// Freed blocks that some stream may still use.
    #[must_use]
    pub fn pending(&self) -> usize {
        self.shared.retired.as_ref().map_or(0, Retired::len)
    }

    /// The bytes that were obtained and not given back, pending blocks included.
    #[must_use]
    pub fn allocated(&self) -> ByteCount {
        ByteCount::new(self.counters().totals().current.bytes)
    }

    /// The most bytes that were obtained at once, from the beginning or the last
    /// [`reset_peak`](Self::reset_peak).
    #[must_use]
    pub fn peak(&self) -> ByteCount {
        ByteCount::new(self.counters().totals().peak.bytes)
    }

    /// Counts the peak anew from what is allocated.
    pub fn reset_peak(&self) {
        self.counters().reset_peak();
    }

    /// How many requests there were, refused ones included.
    #[must_use]
    pub fn requests(&self) -> u64 {
        let totals = self.counters().totals();
        totals.total.count + totals.failed
    }

    /// The largest request that the budget would grant just now.
    #[must_use]
    pub fn remaining(&self) -> ByteCount {
        self.budget().remaining()
    }

    /// Checks whether the budget would grant `bytes` just now, without asking the upstream.
    ///
    /// # Errors
    ///
    /// [`OverBudget`], with what is live and the limit.
    pub fn check(&self, bytes: ByteCount) -> Result<(), OverBudget> {
        self.budget().check(bytes)
    }

    /// Opens a measurement window.
    #[must_use]
    pub fn window(&self) -> Window {
        self.counters().window()
    }

    /// The budget.
    #[must_use]
    pub fn budget(&self) -> &Budget {
        self.upstream.upstream().budget()
    }

    fn counters(&self) -> &Counters {
        self.upstream.counters()
    }

    fn obtain(&self, request: &RegionRequest) -> Result<ManagedMemory<A::Memory>, AllocateError> {
        let allocate = || self.upstream.allocate(request);
        match &self.shared.retired {
            Some(retired) => retired.allocate_or_reclaim(allocate, |(handle, parts)| {
                self.shared.free(handle, parts);
            }),
            None => allocate(),
        }
    }
}

// SAFETY: the block is the upstream's, and goes to one caller.
unsafe impl<A: Allocate> Allocate for MemoryManager<A> {
    type Memory = TrackedBlock<A::Memory>;

    fn kind(&self) -> StorageKind {
        self.upstream.kind()
    }

    fn limits(&self) -> Limits {
        self.upstream.limits()
    }

    fn allocate(&self, request: &RegionRequest) -> Result<Self::Memory, AllocateError> {
        self.alloc_block(request, None).map_err(|error| match error {
            ManagedError::Allocate(error) => error,
            other => AllocateError::Backend {
                kind: self.kind(),
                requested: request.bytes,
                label: request.label.clone(),
                source: Box::new(other),
            },
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
                asked: identity.asked,
                tag: identity.tag,
                state,
                sequence: 0,
            });
        }
    }
}

impl<A: Allocate> fmt::Debug for MemoryManager<A> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("MemoryManager")
            .field("kind", &self.upstream.kind())
            .field("budget", self.budget())
            .field("allocated", &self.allocated())
            .field("pending", &self.pending())
            .finish_non_exhaustive()
    }
}

impl<M: Memory> Shared<M> {
    pub(super) fn knows_streams(&self) -> bool {
        self.retired.is_some()
    }

    pub(super) fn identity(&self, handle: BlockHandle) -> Result<BlockIdentity, ManagedError> {
        self.registry.lock().identity(handle).cloned()
    }

    pub(super) fn export(&self, handle: BlockHandle, parts: Parts<M>) {
        self.registry.lock().export(handle, parts);
    }

    /// Frees a block, or keeps it until the streams that use it have come past this point.
    pub(super) fn give_back(&self, handle: BlockHandle, parts: Parts<M>) {
        let mut streams = parts.uses.streams();
        if !self.upstream_is_stream_ordered
            && let Ok(BlockIdentity { stream: Some(home), .. }) = self.identity(handle)
            && !streams.contains(&home)
        {
            streams.push(home);
        }
        match &self.retired {
            Some(retired) if !streams.is_empty() => {
                self.registry.lock().set_pending(handle);
                // Should a fence panic, the block is leaked.
                let parts = ManuallyDrop::new(parts);
                let marks = Marks::new(retired.fences(), streams);
                retired.keep(marks, (handle, ManuallyDrop::into_inner(parts)));
            }
            _ => self.free(handle, parts),
        }
    }

    /// No handle says that a block is live whose memory has gone.
    fn free(&self, handle: BlockHandle, parts: Parts<M>) {
        self.registry.lock().set_freed(handle);
        drop(parts);
    }
}

impl<M: Memory> Identify for Shared<M> {
    fn knows_streams(&self) -> bool {
        self.retired.is_some()
    }

    fn identity(&self, handle: BlockHandle) -> Option<BlockIdentity> {
        Self::identity(self, handle).ok()
    }
}

impl<M: Memory> Drop for Shared<M> {
    fn drop(&mut self) {
        // Exported blocks that nobody took out again: no handle reaches them any more.
        let exported: Vec<_> = self.registry.lock().drain_exported().collect();
        for (handle, parts) in exported {
            self.give_back(handle, parts);
        }
    }
}
