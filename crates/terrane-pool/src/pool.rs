//! The pool: size classes over an upstream.
//!
//! # Why it is built this way
//!
//! Acquiring and releasing a cached block must cost at most 10 ns a pair on each thread, whatever
//! other threads do. The table was measured on two cores of an AMD EPYC (family 26). It gives ns
//! per pair for the bookkeeping of one magazine alone:
//!
//! | how the owner of a magazine keeps a sweeper out | ns |
//! |---|---|
//! | plain stores, and `membarrier` on the sweeper's side | 1.2 |
//! | one locked exchange a pair (a Chase–Lev deque) | 5.0 |
//! | a locked exchange at each operation | 10.0 |
//! | compare and swap at each operation | 10.4 |
//! | `std::sync::Mutex` | 19.7 |
//!
//! So the pool owns the magazines, not the thread, and can empty them under pressure. Their threads
//! enter them with plain stores. The decisions, with the figures for the whole pool:
//! `docs/decisions/0020-magazines-belong-to-the-pool.md` and the two after it.

mod fetch;

use std::fmt;
use std::sync::Arc;

use terrane_core::{
    Alignment, Allocate, AllocateError, ByteCount, Label, Limits, RegionRequest, StorageKind,
};

use crate::grant::Use;
use crate::ladder::{Callback, TrimUpstream};
use crate::options::PoolOptions;
use crate::parking::Parking;
use crate::record::{Record, UNPOOLED};
use crate::seat::Home as _;
use crate::size_class::{ClassTable, SizeClasses};
use crate::snapshot::LadderCounts;
use crate::stock::Stock;
use crate::tags::Tag;
use crate::{Exhausted, FenceSource, PoolBlock, PoolError, PoolSnapshot, Retry, StreamId, barrier};

/// A pool of blocks over the memory of `A`.
///
/// Acquiring returns an owned [`PoolBlock`], and dropping the block returns it to the pool. Neither
/// takes a lock or writes memory that another thread writes, if the thread's magazine has a block
/// or room for one. Dropping the pool [closes](Self::close) it. Blocks may outlive it.
///
/// ```
/// use terrane_core::ByteCount;
/// use terrane_pool::{Pool, PoolOptions, SizeClasses};
/// use terrane_pool::adaptors::{Simulated, SimulatedOptions};
///
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let options = PoolOptions { classes: SizeClasses::Steps8, ..PoolOptions::default() };
/// let pool = Pool::new(Simulated::new(SimulatedOptions::default()), options)?;
/// let block = pool.acquire(ByteCount::new(5000))?;
/// assert_eq!(block.granted(), ByteCount::new(5120));
/// drop(block);
/// assert_eq!(pool.snapshot().cached, ByteCount::new(5120));
/// # Ok(())
/// # }
/// ```
pub struct Pool<A: Allocate> {
    pub(crate) stock: Arc<Stock<A::Memory>>,
    pub(crate) upstream: A,
    pub(crate) options: PoolOptions,
    pub(crate) trim_upstream: Option<Box<dyn TrimUpstream>>,
    pub(crate) callback: Option<Callback>,
    pub(crate) ladder: LadderCounts,
}

impl<A: Allocate> Pool<A> {
    /// Makes a pool of blocks that no stream uses.
    ///
    /// # Errors
    ///
    /// [`PoolError`], if the options contradict each other or the upstream.
    pub fn new(upstream: A, options: PoolOptions) -> Result<Self, PoolError> {
        Self::make(upstream, options, None)
    }

    /// Makes a pool whose blocks are used on the streams of `fences`.
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
        barrier::prepare();
        if !matches!(options.classes, SizeClasses::ExactSlab { .. }) {
            // Each block is a region of the upstream, so it has the alignment of a region.
            options.alignment = options.alignment.max(upstream.limits().alignment);
            // A smaller block would still cost a granule of the upstream, and would count as less
            // here.
            let granule = ByteCount::new(upstream.limits().granule.get());
            if granule <= options.largest_class {
                options.smallest_class = options.smallest_class.max(granule);
            }
        }
        let table = ClassTable::new(
            options.classes,
            options.smallest_class,
            options.largest_class,
            options.alignment,
        )?;
        let blocks = u64::from(table.blocks_per_slab().unwrap_or(1));
        let required = ByteCount::new(table.size(table.len() - 1) * blocks);
        if let Some(largest) = upstream.limits().largest_region
            && largest < required
        {
            return Err(PoolError::UpstreamTooSmall { kind: upstream.kind(), required, largest });
        }
        let parking = fences.map(|fences| Parking::new(fences, options.pending_wait));
        Ok(Self {
            stock: Stock::new(table, &options, parking),
            upstream,
            options,
            trim_upstream: None,
            callback: None,
            ladder: LadderCounts::default(),
        })
    }

    /// Makes an exhausted pool trim the reserves of its upstream, before it calls the
    /// [callback](Self::on_exhaustion).
    #[must_use]
    pub fn with_upstream_trim(mut self, trim: impl TrimUpstream + 'static) -> Self {
        self.trim_upstream = Some(Box::new(trim));
        self
    }

    /// Sets the callback that an exhausted pool calls, at most
    /// [`callback_attempts`](PoolOptions::callback_attempts) times a request. The pool holds no
    /// lock during the call, so the callback may release blocks of this pool.
    #[must_use]
    pub fn on_exhaustion(
        mut self,
        callback: impl Fn(&Exhausted, ByteCount) -> Retry + Send + Sync + 'static,
    ) -> Self {
        self.callback = Some(Box::new(callback));
        self
    }

    /// Acquires a block of at least `bytes` bytes, for use by the host.
    ///
    /// # Errors
    ///
    /// [`AllocateError`]: the error of the upstream, after the ladder if the upstream was
    /// exhausted, or [`Closed`](AllocateError::Closed).
    #[inline]
    pub fn acquire(&self, bytes: ByteCount) -> Result<PoolBlock<A::Memory>, AllocateError> {
        self.acquire_tagged(bytes, Tag::NONE)
    }

    /// Acquires a block under a tag from [`Pool::tag`](Self::tag).
    ///
    /// # Errors
    ///
    /// As for [`acquire`](Self::acquire).
    #[inline]
    pub fn acquire_tagged(
        &self,
        bytes: ByteCount,
        tag: Tag,
    ) -> Result<PoolBlock<A::Memory>, AllocateError> {
        if let Some(class) = self.stock.table.class_of(bytes.get())
            && let Some(block) = self.take(class, bytes, tag)
        {
            return Ok(block);
        }
        self.acquire_slowly(&RegionRequest::new(bytes), tag, None)
    }

    /// Acquires a block that work on `stream` uses. A block that was released on that stream is
    /// ready at once, whatever the stream is doing. The new block is released on the same stream
    /// when dropped.
    ///
    /// # Errors
    ///
    /// As for [`acquire`](Self::acquire).
    pub fn acquire_on(
        &self,
        stream: StreamId,
        request: &RegionRequest,
    ) -> Result<PoolBlock<A::Memory>, AllocateError> {
        let tag = self.stock.tag(&request.label);
        let Some(parking) = &self.stock.parking else {
            let source = Some(Box::new(PoolError::NoFences) as _);
            return Err(self.backend_error(request, source));
        };
        let class = self.class_of(request);
        if let Some(class) = class
            && let Some(record) = self.stock.take_on(class, tag, stream)
        {
            return Ok(self.hand_out(record, request.bytes, tag).at_home_on(stream));
        }
        // A block taken here is free for this stream alone. It is always handed out, even if the
        // pool closes meanwhile, and never dropped.
        let open = class.filter(|_| !self.stock.is_closed());
        let block = match open.and_then(|class| parking.take_on(class, stream)) {
            Some(record) => {
                self.stock.count(tag, record.granted, true);
                Ok(self.hand_out(record, request.bytes, tag))
            }
            None => match class.and_then(|class| self.take(class, request.bytes, tag)) {
                Some(block) => Ok(block),
                None => self.acquire_slowly(request, tag, Some(stream)),
            },
        };
        block.map(|block| block.at_home_on(stream))
    }

    /// Returns the tag of a label, to acquire under it without a look-up. The pool distinguishes 62
    /// labels. Later ones share [`Tag::OTHER`].
    pub fn tag(&self, label: &Label) -> Tag {
        self.stock.tag(label)
    }

    /// Returns cached blocks to the upstream until at most `to` bytes are cached. Returns the
    /// number of bytes freed. Blocks that are released meanwhile may be kept.
    pub fn trim(&self, to: ByteCount) -> ByteCount {
        self.stock.park_lanes();
        self.reap();
        let freed = ByteCount::new(self.stock.trim(to.get()));
        tracing::debug!(%freed, %to, "trimmed a pool");
        freed
    }

    /// Returns every cached block to the upstream. This includes every block that was released
    /// before the call and not acquired again. Blocks that streams still use stay pending.
    pub fn clear(&self) -> ByteCount {
        self.trim(ByteCount::ZERO)
    }

    /// Refuses requests from now on, and returns every free block to the upstream. Blocks in use go
    /// there when they are released. Waits at most [`pending_wait`](PoolOptions::pending_wait) for
    /// blocks that streams still use.
    pub fn close(&self) {
        self.stock.close();
    }

    /// Checks the fences of freed blocks, and makes the blocks that streams have finished with free
    /// for all. Never waits. A miss does the same. Blocks that a thread keeps for one stream stay
    /// with the thread. Only [`trim`](Self::trim) and exhaustion reach those.
    pub fn reap(&self) {
        let Some(parking) = &self.stock.parking else { return };
        if parking.bytes() == 0 {
            return;
        }
        for record in parking.reap() {
            self.stock.keep_freed(record);
        }
    }

    /// Returns the state of the pool and its counters since it was made.
    pub fn snapshot(&self) -> PoolSnapshot {
        PoolSnapshot::new(&self.stock, &self.ladder)
    }

    /// Returns the upstream.
    pub fn upstream(&self) -> &A {
        &self.upstream
    }

    /// Returns the options in effect. The alignment is that of the upstream's regions if that is
    /// stricter. The smallest class is the upstream's granule if that is larger, except for slabs.
    pub fn options(&self) -> &PoolOptions {
        &self.options
    }

    /// Returns the class that serves a request; `None` if the request goes to the upstream.
    fn class_of(&self, request: &RegionRequest) -> Option<usize> {
        if request.alignment > self.options.alignment {
            return None;
        }
        self.stock.table.class_of(request.bytes.get())
    }

    #[cold]
    fn acquire_slowly(
        &self,
        request: &RegionRequest,
        tag: Tag,
        stream: Option<StreamId>,
    ) -> Result<PoolBlock<A::Memory>, AllocateError> {
        if self.stock.is_closed() {
            return Err(AllocateError::Closed { kind: self.kind(), label: request.label.clone() });
        }
        let Some(class) = self.class_of(request) else {
            let record = self.or_climb(request, tag, None, stream, || self.fetch_one(request))?;
            return Ok(self.hand_out(record, request.bytes, tag));
        };
        if let Some(record) = self.stock.take_shared(class, tag) {
            return Ok(self.block(record, class, request.bytes, tag));
        }
        self.stock.note_miss(class);
        if let Some(record) = self.take_pending(class, tag, stream) {
            return Ok(self.hand_out(record, request.bytes, tag));
        }
        let record =
            self.or_climb(request, tag, Some(class), stream, || self.fetch(class, &request.label))?;
        Ok(self.hand_out(record, request.bytes, tag))
    }

    /// Takes a block from the thread's magazine.
    #[inline]
    fn take(&self, class: usize, bytes: ByteCount, tag: Tag) -> Option<PoolBlock<A::Memory>> {
        let record = self.stock.take(class, tag)?;
        Some(self.block(record, class, bytes, tag))
    }

    /// Acquires a block of a class.
    #[inline]
    fn block(
        &self,
        mut record: Box<Record<A::Memory>>,
        class: usize,
        bytes: ByteCount,
        tag: Tag,
    ) -> PoolBlock<A::Memory> {
        let is = if bytes.get() == self.stock.weight(class) {
            Use::Whole
        } else {
            // The CPU may have this field in no cache. A store does not wait for it, but a load
            // would.
            record.asked = bytes.get();
            Use::Plain
        };
        PoolBlock::new(record, self.stock.grant(class, tag, is))
    }

    /// Makes a block of the class in its record, or of no class.
    fn hand_out(
        &self,
        mut record: Box<Record<A::Memory>>,
        bytes: ByteCount,
        tag: Tag,
    ) -> PoolBlock<A::Memory> {
        let class = record.class;
        if class != UNPOOLED {
            return self.block(record, class, bytes, tag);
        }
        record.asked = bytes.get();
        PoolBlock::new(record, self.stock.grant(class, tag, Use::Apart))
    }
}

// SAFETY: a block is memory of the upstream, and has one owner at a time: it is in use, cached or
// parked.
unsafe impl<A: Allocate> Allocate for Pool<A> {
    type Memory = PoolBlock<A::Memory>;

    fn kind(&self) -> StorageKind {
        self.upstream.kind()
    }

    /// The upstream's limits, because requests that are not pooled go there. Any length is served,
    /// and every block is aligned like a pooled one.
    fn limits(&self) -> Limits {
        let largest_region = self.upstream.limits().largest_region;
        Limits { alignment: self.options.alignment, granule: Alignment::BYTE, largest_region }
    }

    #[inline]
    fn allocate(&self, request: &RegionRequest) -> Result<Self::Memory, AllocateError> {
        let tag = self.stock.tag(&request.label);
        if let Some(class) = self.class_of(request)
            && let Some(block) = self.take(class, request.bytes, tag)
        {
            return Ok(block);
        }
        self.acquire_slowly(request, tag, None)
    }
}

impl<A: Allocate> Drop for Pool<A> {
    fn drop(&mut self) {
        self.close();
    }
}

impl<A: Allocate + fmt::Debug> fmt::Debug for Pool<A> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Pool")
            .field("upstream", &self.upstream)
            .field("options", &self.options)
            .finish_non_exhaustive()
    }
}
