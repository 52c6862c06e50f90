//! The pool: size classes over an upstream.
//!
//! # Why it is built this way
//!
//! Allocating and releasing a cached block must take at most 10 ns together on each thread,
//! whatever other threads do. The table was measured on two cores of an AMD EPYC (family 26). It
//! shows ns per pair for the bookkeeping of one magazine alone:
//!
//! | how the owner of a magazine keeps a sweeper out | ns |
//! |---|---|
//! | plain stores, and `membarrier` on the sweeper's side | 1.2 |
//! | one locked exchange a pair (a Chase–Lev deque) | 5.0 |
//! | a locked exchange at each operation | 10.0 |
//! | compare and swap at each operation | 10.4 |
//! | `std::sync::Mutex` | 19.7 |
//!
//! So the pool, not the thread, owns the magazines, and can empty them under pressure. Their
//! threads enter them with plain stores. `docs/decisions/0020-magazines-belong-to-the-pool.md` and
//! the two decisions after it have the figures for the whole pool.
//!
//! [`miss`] serves a request without a cached block, and [`reclaim`] serves a request when the
//! upstream is exhausted.

pub(crate) mod account;
pub(crate) mod block;
mod inspect;
mod miss;
pub(crate) mod reclaim;
pub(crate) mod record;

use std::fmt;
use std::sync::Arc;

use terrane_core::{
    Alignment, Allocate, AllocateError, ByteCount, Label, Limits, RegionRequest, StorageKind,
};

use crate::cache::descriptor::BlockUse;
use crate::cache::membarrier;
use crate::cache::shared_cache::SharedCache;
use crate::cache::thread_index::ThreadExit as _;
use crate::error::{Exhausted, PoolError};
use crate::options::PoolOptions;
use crate::size_class::{ClassTable, SizeClasses};
use crate::snapshot::{PoolSnapshot, ReclaimCounts};
use crate::streams::fence::{FenceSource, StreamId};
use crate::streams::pending::PendingFrees;
use crate::tags::{LiveBytes, Tag};
use block::PoolBlock;
use reclaim::{Callback, Retry, TrimUpstream, Wanted};
use record::{Block, UNPOOLED};

/// A pool of blocks over the memory of `A`.
///
/// Allocating returns an owned [`PoolBlock`], and dropping the block returns it to the pool.
/// Neither takes a lock or writes memory that another thread writes, if the thread's magazine has a
/// block or room for one.
///
/// Cloning returns another handle to the same pool. Dropping the last handle [closes](Self::close)
/// the pool. Blocks may outlive it.
///
/// ```
/// use terrane_core::ByteCount;
/// use terrane_pool::{HeapAllocator, Pool, PoolOptions, SizeClasses};
///
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let options = PoolOptions { classes: SizeClasses::Steps8, ..PoolOptions::default() };
/// let pool = Pool::new(HeapAllocator, options)?;
/// let block = pool.allocate_bytes(ByteCount::new(5000))?;
/// assert_eq!(block.granted(), ByteCount::new(5120));
/// drop(block);
/// assert_eq!(pool.snapshot().cached, ByteCount::new(5120));
/// # Ok(())
/// # }
/// ```
pub struct Pool<A: Allocate> {
    pub(crate) cache: Arc<SharedCache<A::Memory>>,
    pub(crate) source: Arc<Source<A>>,
    pub(crate) options: PoolOptions,
    pub(crate) trim_upstream: Option<Arc<dyn TrimUpstream>>,
    pub(crate) callback: Option<Callback>,
}

/// The part that all handles of a pool share, except the cache. The last handle closes the pool.
pub(crate) struct Source<A: Allocate> {
    cache: Arc<SharedCache<A::Memory>>,
    pub(crate) upstream: A,
    pub(crate) reclaim_counts: ReclaimCounts,
}

impl<A: Allocate> Clone for Pool<A> {
    fn clone(&self) -> Self {
        Self {
            cache: Arc::clone(&self.cache),
            source: Arc::clone(&self.source),
            options: self.options.clone(),
            trim_upstream: self.trim_upstream.clone(),
            callback: self.callback.clone(),
        }
    }
}

impl<A: Allocate> Pool<A> {
    /// Creates a pool of blocks that no stream uses.
    ///
    /// # Errors
    ///
    /// [`PoolError`], if the options contradict each other or the upstream.
    pub fn new(upstream: A, options: PoolOptions) -> Result<Self, PoolError> {
        Self::make(upstream, options, None)
    }

    /// Creates a pool whose blocks are used on the streams of `fences`.
    ///
    /// # Errors
    ///
    /// [`PoolError`], if the options contradict each other or the upstream.
    pub fn with_fences(
        upstream: A,
        options: PoolOptions,
        fences: Arc<dyn FenceSource>,
    ) -> Result<Self, PoolError> {
        Self::make(upstream, options, Some(fences))
    }

    fn make(
        upstream: A,
        mut options: PoolOptions,
        fences: Option<Arc<dyn FenceSource>>,
    ) -> Result<Self, PoolError> {
        membarrier::prepare();
        let mut granule = Alignment::BYTE;
        if !matches!(options.classes, SizeClasses::ExactSlab { .. }) {
            // Each block is a region of the upstream, so it has the alignment of a region.
            options.alignment = options.alignment.max(upstream.limits().alignment);
            let bytes = ByteCount::new(upstream.limits().granule.get());
            if bytes <= options.largest_class {
                granule = upstream.limits().granule;
                options.smallest_class = options.smallest_class.max(bytes);
            }
        }
        let table = ClassTable::new(
            options.classes,
            options.smallest_class,
            options.largest_class,
            options.alignment,
        )?
        .rounded_up(granule);
        let blocks = u64::from(table.blocks_per_slab().unwrap_or(1));
        let required = ByteCount::new(table.size(table.len() - 1) * blocks);
        if let Some(largest) = upstream.limits().largest_region
            && largest < required
        {
            return Err(PoolError::UpstreamTooSmall { kind: upstream.kind(), required, largest });
        }
        let pending = fences.map(|fences| PendingFrees::new(fences, options.pending_wait));
        let cache = SharedCache::new(table, &options, pending);
        let reclaim_counts = ReclaimCounts::default();
        let source = Source { cache: Arc::clone(&cache), upstream, reclaim_counts };
        Ok(Self { cache, source: Arc::new(source), options, trim_upstream: None, callback: None })
    }

    /// Makes an exhausted pool trim the reserves of its upstream, before it calls the
    /// [callback](Self::on_exhaustion). Applies to this handle, and to handles cloned from it
    /// later.
    #[must_use]
    pub fn with_upstream_trim(mut self, trim: impl TrimUpstream + 'static) -> Self {
        self.trim_upstream = Some(Arc::new(trim));
        self
    }

    /// Sets the callback that an exhausted pool calls, at most
    /// [`callback_attempts`](PoolOptions::callback_attempts) times a request. The pool holds no
    /// lock during the call, so the callback may release blocks of this pool. Applies to this
    /// handle, and to handles cloned from it later.
    #[must_use]
    pub fn on_exhaustion(
        mut self,
        callback: impl Fn(&Exhausted, ByteCount) -> Retry + Send + Sync + 'static,
    ) -> Self {
        self.callback = Some(Arc::new(callback));
        self
    }

    /// Allocates a block of at least `bytes` bytes, for use by the host.
    ///
    /// # Errors
    ///
    /// [`AllocateError`]: the error of the upstream, if it was exhausted and no step of the reclaim
    /// helped, or [`Closed`](AllocateError::Closed).
    #[inline]
    pub fn allocate_bytes(&self, bytes: ByteCount) -> Result<PoolBlock<A::Memory>, AllocateError> {
        self.allocate_tagged(bytes, Tag::NONE)
    }

    /// Allocates a block under a tag from [`Pool::tag`](Self::tag).
    ///
    /// # Errors
    ///
    /// As for [`allocate_bytes`](Self::allocate_bytes).
    #[inline]
    pub fn allocate_tagged(
        &self,
        bytes: ByteCount,
        tag: Tag,
    ) -> Result<PoolBlock<A::Memory>, AllocateError> {
        if let Some(class) = self.cache.table.class_of(bytes.get())
            && let Some(block) = self.take(class, tag)
        {
            return Ok(block);
        }
        self.allocate_slowly(&RegionRequest::new(bytes), tag, None)
    }

    /// Allocates a block for work on `stream`. A block that was released on that stream is
    /// available at once, even if its earlier work still runs. When the new block drops, it is
    /// released on the same stream.
    ///
    /// # Errors
    ///
    /// As for [`allocate_bytes`](Self::allocate_bytes).
    pub fn allocate_on(
        &self,
        stream: StreamId,
        request: &RegionRequest,
    ) -> Result<PoolBlock<A::Memory>, AllocateError> {
        let tag = self.cache.tag(&request.label);
        let Some(pending) = &self.cache.pending else {
            return Err(AllocateError::backend(self.kind(), request, PoolError::NoFences));
        };
        let class = self.class_of(request);
        if let Some(class) = class
            && let Some(record) = self.cache.take_on(class, tag, stream)
        {
            return Ok(self.make_block(record, tag).on_stream(stream));
        }
        // A block found here is free for this stream alone. It is always returned to the caller,
        // even if the pool closes meanwhile, and never dropped.
        let open = class.filter(|_| !self.cache.is_closed());
        let block = match open.and_then(|class| pending.take_on(class, stream)) {
            Some(record) => {
                self.cache.count(tag, record.granted, LiveBytes::Added);
                Ok(self.make_block(record, tag))
            }
            None => match class.and_then(|class| self.take(class, tag)) {
                Some(block) => Ok(block),
                None => self.allocate_slowly(request, tag, Some(stream)),
            },
        };
        block.map(|block| block.on_stream(stream))
    }

    /// Returns the tag of a label, to allocate with it without a look-up. The pool distinguishes 62
    /// labels. All further labels share [`Tag::OTHER`].
    pub fn tag(&self, label: &Label) -> Tag {
        self.cache.tag(label)
    }

    /// Frees cached blocks to the upstream until at most `to` bytes are cached. Returns the freed
    /// bytes. Blocks that are released meanwhile may stay cached, and so do free blocks of
    /// a slab that has blocks in use.
    pub fn trim(&self, to: ByteCount) -> ByteCount {
        self.cache.flush_stream_magazines();
        self.reap();
        let freed = ByteCount::new(self.cache.trim(to.get()));
        tracing::debug!(%freed, %to, "trimmed a pool");
        freed
    }

    /// Frees every cached block to the upstream, and with them every block that was released before
    /// the call and not allocated again. Returns the number of bytes freed. Blocks that streams
    /// still use stay pending, and free blocks of a slab that has blocks in use stay cached.
    pub fn clear(&self) -> ByteCount {
        self.trim(ByteCount::ZERO)
    }

    /// Refuses requests from now on, and frees every free block to the upstream. Blocks in use are
    /// freed to the upstream when they are released. Waits at most
    /// [`pending_wait`](PoolOptions::pending_wait) for blocks that streams still use.
    pub fn close(&self) {
        self.cache.close();
    }

    /// Checks the fences of freed blocks, and caches the blocks that streams have finished with.
    /// Never waits. A miss does the same. Blocks that a thread keeps for one stream stay with the
    /// thread; only [`trim`](Self::trim) and exhaustion move them.
    pub fn reap(&self) {
        let Some(pending) = &self.cache.pending else { return };
        if pending.bytes() == 0 {
            return;
        }
        for record in pending.reap() {
            self.cache.keep_freed(record);
        }
    }

    /// Returns the state of the pool, and its counters since its creation.
    pub fn snapshot(&self) -> PoolSnapshot {
        PoolSnapshot::new(&self.cache, &self.source.reclaim_counts)
    }

    /// Returns the upstream.
    pub fn upstream(&self) -> &A {
        &self.source.upstream
    }

    /// Returns the options in effect. The alignment is that of the upstream's regions if that is
    /// stricter. Except for slabs, the smallest class is the upstream's granule if that is larger.
    pub fn options(&self) -> &PoolOptions {
        &self.options
    }

    /// Returns the class that serves a request; `None` if the request is passed to the upstream.
    fn class_of(&self, request: &RegionRequest) -> Option<usize> {
        if request.alignment > self.options.alignment {
            return None;
        }
        self.cache.table.class_of(request.bytes.get())
    }

    #[cold]
    fn allocate_slowly(
        &self,
        request: &RegionRequest,
        tag: Tag,
        stream: Option<StreamId>,
    ) -> Result<PoolBlock<A::Memory>, AllocateError> {
        if self.cache.is_closed() {
            return Err(AllocateError::Closed { kind: self.kind(), label: request.label.clone() });
        }
        let Some(class) = self.class_of(request) else {
            let wanted = Wanted { request, tag, class: None, stream };
            let record = self.or_reclaim(wanted, || self.fetch_one(request))?;
            return Ok(self.make_block(record, tag));
        };
        let wanted = Wanted { request, tag, class: Some(class), stream };
        if let Some(record) = self.cache.take_shared(class, tag) {
            return Ok(self.block(record, class, tag));
        }
        self.cache.count_miss(class);
        if let Some(record) = self.take_pending(wanted) {
            return Ok(self.make_block(record, tag));
        }
        // A freed block returns to its own class. A stream that used a larger block would not look
        // for it there at the next request of this class.
        if stream.is_none()
            && let Some(block) = self.take_larger(class, request.bytes, tag)
        {
            return Ok(block);
        }
        let record = self.or_reclaim(wanted, || self.fetch(class, &request.label))?;
        Ok(self.make_block(record, tag))
    }

    /// Takes a block from the thread's magazine.
    #[inline]
    fn take(&self, class: usize, tag: Tag) -> Option<PoolBlock<A::Memory>> {
        let record = self.cache.take(class, tag)?;
        Some(self.block(record, class, tag))
    }

    /// Creates a block in use from a block of the class.
    #[inline]
    pub(crate) fn block(
        &self,
        record: Block<A::Memory>,
        class: usize,
        tag: Tag,
    ) -> PoolBlock<A::Memory> {
        PoolBlock::new(record, self.cache.descriptor(class, tag, BlockUse::Plain))
    }

    /// Creates a block in use from a block of any class, or of none.
    fn make_block(&self, record: Block<A::Memory>, tag: Tag) -> PoolBlock<A::Memory> {
        let class = record.class;
        if class != UNPOOLED {
            return self.block(record, class, tag);
        }
        PoolBlock::new(record, self.cache.descriptor(class, tag, BlockUse::Listed))
    }
}

// SAFETY: a block is memory of the upstream, and has one owner at a time: it is in use, cached or
// pending.
unsafe impl<A: Allocate> Allocate for Pool<A> {
    type Memory = PoolBlock<A::Memory>;

    fn kind(&self) -> StorageKind {
        self.source.upstream.kind()
    }

    /// The upstream's limits, because requests that are not pooled are passed to it. Any length is
    /// served, and every block is aligned like a pooled one.
    fn limits(&self) -> Limits {
        let largest_region = self.source.upstream.limits().largest_region;
        Limits { alignment: self.options.alignment, granule: Alignment::BYTE, largest_region }
    }

    #[inline]
    fn allocate(&self, request: &RegionRequest) -> Result<Self::Memory, AllocateError> {
        let tag = self.cache.tag(&request.label);
        if let Some(class) = self.class_of(request)
            && let Some(block) = self.take(class, tag)
        {
            return Ok(block);
        }
        self.allocate_slowly(request, tag, None)
    }
}

impl<A: Allocate> Drop for Source<A> {
    fn drop(&mut self) {
        self.cache.close();
    }
}

impl<A: Allocate + fmt::Debug> fmt::Debug for Pool<A> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Pool")
            .field("upstream", &self.source.upstream)
            .field("options", &self.options)
            .finish_non_exhaustive()
    }
}
