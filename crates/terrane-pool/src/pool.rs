//! The pool: size classes over an upstream.
//!
//! # Why it is built this way
//!
//! Acquiring and releasing a cached block has to cost less than everything that it saves: at most
//! 10 ns a pair on each thread, whatever other threads do. Measured on two cores of an AMD EPYC
//! (family 26), ns per pair, the bookkeeping of one magazine alone:
//!
//! | how the owner of a magazine keeps a sweeper out | ns |
//! |---|---|
//! | plain stores, and `membarrier` on the sweeper's side | 1.2 |
//! | one locked exchange a pair (a Chase–Lev deque) | 5.0 |
//! | a locked exchange at each operation | 10.0 |
//! | compare and swap at each operation | 10.4 |
//! | `std::sync::Mutex` | 19.7 |
//!
//! So the magazines are the pool's, not the thread's (they can be taken under pressure), and
//! their owners enter them with plain stores. The decisions, with the figures of the whole:
//! `docs/decisions/0020-magazines-behind-an-asymmetric-gate.md` and the two after it.

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
/// Acquiring gives an owned [`PoolBlock`], dropping that gives the block back; neither takes a
/// lock, or writes memory that another thread writes, when the thread's magazine has a block or
/// room for one. Dropping the pool [closes](Self::close) it; blocks may outlive it.
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
    /// A pool of blocks that no stream uses.
    ///
    /// # Errors
    ///
    /// [`PoolError`], if the options contradict themselves or the upstream.
    pub fn new(upstream: A, options: PoolOptions) -> Result<Self, PoolError> {
        Self::make(upstream, options, None)
    }

    /// A pool whose blocks are used on the streams of `fences`.
    ///
    /// # Errors
    ///
    /// [`PoolError`], if the options contradict themselves or the upstream.
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
            // Each block is a region of the upstream's, so it is aligned like one.
            options.alignment = options.alignment.max(upstream.limits().alignment);
            // Less than the granule costs as much of the upstream, and would count as less here.
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

    /// Has the upstream give its own reserves back when the pool is exhausted, before the
    /// [callback](Self::on_exhaustion) is asked.
    #[must_use]
    pub fn with_upstream_trim(mut self, trim: impl TrimUpstream + 'static) -> Self {
        self.trim_upstream = Some(Box::new(trim));
        self
    }

    /// Asks `callback` when the pool is exhausted, at most
    /// [`callback_attempts`](PoolOptions::callback_attempts) times a request. No lock is held
    /// meanwhile, so it may release blocks of this pool.
    #[must_use]
    pub fn on_exhaustion(
        mut self,
        callback: impl Fn(&Exhausted, ByteCount) -> Retry + Send + Sync + 'static,
    ) -> Self {
        self.callback = Some(Box::new(callback));
        self
    }

    /// A block of at least `bytes` bytes, for the host.
    ///
    /// # Errors
    ///
    /// [`AllocateError`]: that of the upstream, after the ladder if it was exhausted, or
    /// [`Closed`](AllocateError::Closed).
    #[inline]
    pub fn acquire(&self, bytes: ByteCount) -> Result<PoolBlock<A::Memory>, AllocateError> {
        self.acquire_tagged(bytes, Tag::NONE)
    }

    /// A block under a label that was looked up [before](Self::tag).
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

    /// A block that work on `stream` uses: one that was released on that stream is ready at once,
    /// whatever the stream is doing. It is released on the same stream when dropped.
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
        // What is taken here is free for this stream alone: it is handed out, whatever happens to
        // the pool meanwhile, and never dropped.
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

    /// The tag of a label, to acquire under it without a look-up. The pool tells 62 labels apart;
    /// later ones share [`Tag::OTHER`].
    pub fn tag(&self, label: &Label) -> Tag {
        self.stock.tag(label)
    }

    /// Gives cached blocks back to the upstream until at most `to` bytes are cached, and answers
    /// how many bytes went. Blocks that are released meanwhile may be kept.
    pub fn trim(&self, to: ByteCount) -> ByteCount {
        self.stock.park_lanes();
        self.reap();
        let freed = ByteCount::new(self.stock.trim(to.get()));
        tracing::debug!(%freed, %to, "trimmed a pool");
        freed
    }

    /// Gives every cached block back to the upstream: whatever was released before the call, and
    /// not acquired again, is gone after it. Blocks that streams still use stay pending.
    pub fn clear(&self) -> ByteCount {
        self.trim(ByteCount::ZERO)
    }

    /// Refuses requests from now on, and gives every free block back to the upstream; blocks in
    /// use go there when they are released. Waits, for
    /// [`pending_wait`](PoolOptions::pending_wait) at most, for blocks that streams still use.
    pub fn close(&self) {
        self.stock.close();
    }

    /// Looks which streams have come far enough, and makes the blocks they have finished with
    /// free for all. Never waits. A miss does the same. What threads keep of a stream for
    /// themselves stays with them; [`trim`](Self::trim) and exhaustion reach that, too.
    pub fn reap(&self) {
        let Some(parking) = &self.stock.parking else { return };
        if parking.bytes() == 0 {
            return;
        }
        for record in parking.reap() {
            self.stock.keep_freed(record);
        }
    }

    /// The state of the pool, and what it has done so far.
    pub fn snapshot(&self) -> PoolSnapshot {
        PoolSnapshot::new(&self.stock, &self.ladder)
    }

    /// Where the memory comes from.
    pub fn upstream(&self) -> &A {
        &self.upstream
    }

    /// The choices that the pool was made with. The alignment is that of the upstream's regions if
    /// they are aligned more strictly, and the smallest class the upstream's granule if that is
    /// larger, but for slabs.
    pub fn options(&self) -> &PoolOptions {
        &self.options
    }

    /// The class that serves a request; `None` if it has to go to the upstream.
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

    /// A block of the thread's magazine.
    #[inline]
    fn take(&self, class: usize, bytes: ByteCount, tag: Tag) -> Option<PoolBlock<A::Memory>> {
        let record = self.stock.take(class, tag)?;
        Some(self.block(record, class, bytes, tag))
    }

    /// A block of a class.
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
            // It is written where it is in no cache, but not read.
            record.asked = bytes.get();
            Use::Plain
        };
        PoolBlock::new(record, self.stock.grant(class, tag, is))
    }

    /// A block of the class that its record says, or of none.
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

// SAFETY: a block is the upstream's, and has one owner at a time: it is out, cached or parked.
unsafe impl<A: Allocate> Allocate for Pool<A> {
    type Memory = PoolBlock<A::Memory>;

    fn kind(&self) -> StorageKind {
        self.upstream.kind()
    }

    /// The upstream's limits: what is not pooled goes there.
    /// Any length is served, and every block is aligned like a pooled one.
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
