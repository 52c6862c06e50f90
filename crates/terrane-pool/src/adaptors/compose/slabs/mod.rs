//! Cuts small blocks out of large regions.

mod table;

use std::fmt;
use std::mem::ManuallyDrop;
use std::sync::Arc;

use terrane_core::{
    Alignment, Allocate, AllocateError, ByteCount, Limits, Location, Memory, OwnerProcess,
    RegionRequest, StorageKind,
};

use super::either::Either;
use crate::error::PoolError;
use crate::pool::account::{Account, Held};
use crate::sync::Mutex;
use table::{SlabTable, Stride};

/// The options of a [`Slabs`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SlabOptions {
    /// The largest block that is cut from a slab. Larger requests go to the upstream unchanged.
    /// Default: 64 KiB.
    pub largest_block: ByteCount,
    /// The bytes of the first slab of a size; it holds at least one block. Each further slab is as
    /// long as all slabs of that size together. Default: 64 KiB.
    pub smallest_slab: ByteCount,
    /// The most bytes of a slab. It holds at least one block. Default: 2 MiB.
    pub largest_slab: ByteCount,
    /// The alignment of each block; its length is a multiple of it. In files, the upstream's
    /// alignment if that is stricter. Default: 512 bytes.
    pub alignment: Alignment,
}

impl Default for SlabOptions {
    fn default() -> Self {
        Self {
            largest_block: ByteCount::kib(64),
            smallest_slab: ByteCount::kib(64),
            largest_slab: ByteCount::mib(2),
            alignment: Alignment::SECTOR,
        }
    }
}

/// An upstream that allocates slabs and cuts small blocks out of them.
///
/// Each region of system memory is a mapping, and a process has at most `vm.max_map_count` of them:
/// 65,530 by default. A pool over slabs keeps 1,000,000 blocks of 4 KiB in about 2,000 mappings. It
/// also calls the kernel, or a driver, once for many blocks.
///
/// ```
/// use terrane_core::{Allocate as _, ByteCount};
/// use terrane_pool::adaptors::{Adapt as _, SlabOptions};
/// use terrane_pool::{HeapAllocator, Pool, PoolOptions};
///
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let pool = Pool::new(HeapAllocator.in_slabs(SlabOptions::default()), PoolOptions::default())?;
/// let block = pool.allocate_bytes(ByteCount::kib(4))?;
/// assert_eq!(pool.snapshot().held, ByteCount::kib(4));
/// assert_eq!(pool.upstream().usage().held, ByteCount::kib(64));
/// drop(block);
/// pool.clear();
/// assert_eq!(pool.upstream().usage().held, ByteCount::ZERO);
/// # Ok(())
/// # }
/// ```
///
/// A slab has blocks of one length. The oldest slab with a free block serves a request. A slab is
/// freed when its last block drops, whether a pool trims the block or a user drops it. One block in
/// use keeps a whole slab: [`usage`](Self::usage) shows the cost in bytes. If the upstream is too
/// exhausted for a slab, the request is repeated for a single block.
///
/// A budget below counts slabs, and a budget above counts blocks. A slab has the label of the
/// request that caused its allocation. Its blocks share pages, so a registrar that locks pages
/// belongs below this adaptor.
///
/// A lock is held for a few instructions when a block is allocated or freed. The upstream is called
/// without the lock. In a forked child process, requests are refused, and dropped blocks are not
/// freed.
#[derive(Debug)]
pub struct Slabs<A: Allocate> {
    upstream: A,
    options: SlabOptions,
    shared: Arc<Shared<A::Memory>>,
}

/// Memory from [`Slabs`]: a region of the upstream, or a block of a slab.
pub type SlabMemory<M> = Either<M, SlabBlock<M>>;

/// The usage of a [`Slabs`]. Regions that it passed through unchanged do not count.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct SlabUsage {
    /// The number of slabs.
    pub slabs: u64,
    /// The bytes of the slabs.
    pub held: ByteCount,
    /// The peak of the bytes of the slabs.
    pub peak_held: ByteCount,
    /// The number of blocks in use.
    pub blocks: u64,
    /// The bytes of the blocks in use. The rest of the slabs is free, or an end that is too short
    /// for a block.
    pub in_use: ByteCount,
}

impl fmt::Display for SlabUsage {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { slabs, held, peak_held, blocks, in_use } = self;
        write!(
            f,
            "{held} held (peak {peak_held}) in {slabs} slabs: {in_use} in {blocks} blocks in use"
        )
    }
}

#[derive(Debug)]
struct Shared<M: Memory> {
    owner: OwnerProcess,
    account: Arc<Account>,
    table: Mutex<SlabTable<M>>,
}

impl<A: Allocate> Slabs<A> {
    /// Cuts blocks out of slabs of `upstream`.
    #[must_use]
    pub fn new(upstream: A, mut options: SlabOptions) -> Self {
        if !upstream.kind().is_host() && !upstream.kind().is_device() {
            // Reads and writes of files that bypass the page cache need this alignment.
            options.alignment = options.alignment.max(upstream.limits().alignment);
        }
        let shared = Shared {
            owner: OwnerProcess::current(),
            account: Arc::default(),
            table: Mutex::new(SlabTable::new()),
        };
        Self { upstream, options, shared: Arc::new(shared) }
    }

    /// The upstream.
    #[must_use]
    pub fn upstream(&self) -> &A {
        &self.upstream
    }

    /// The options in effect.
    #[must_use]
    pub fn options(&self) -> &SlabOptions {
        &self.options
    }

    /// Returns the usage; zeros in a forked child process.
    #[must_use]
    pub fn usage(&self) -> SlabUsage {
        if !self.shared.owner.is_current() {
            return SlabUsage::default();
        }
        let table = self.shared.table.lock();
        SlabUsage {
            slabs: table.slabs,
            held: ByteCount::new(self.shared.account.held()),
            peak_held: ByteCount::new(self.shared.account.peak()),
            blocks: table.blocks,
            in_use: ByteCount::new(table.bytes),
        }
    }

    /// Returns the stride for a request; `None` if it goes to the upstream unchanged.
    fn stride(&self, request: &RegionRequest) -> Result<Option<Stride>, AllocateError> {
        if request.bytes > self.options.largest_block || request.bytes.is_zero() {
            return Ok(None);
        }
        let alignment = request.alignment.max(self.options.alignment);
        let bytes = request
            .bytes
            .align_up(alignment)
            .map_err(|overflow| AllocateError::backend(self.kind(), request, overflow))?;
        let is_small = bytes <= self.options.largest_block;
        Ok(is_small.then_some(Stride { bytes: bytes.get(), alignment }))
    }

    /// Adds a slab of as many blocks as the upstream allocates, and returns its first block.
    fn slab(
        &self,
        stride: Stride,
        request: &RegionRequest,
    ) -> Result<SlabBlock<A::Memory>, AllocateError> {
        let slab = match self.obtain(stride, self.blocks_of_next(stride), request) {
            Err(refusal) if refusal.is_exhaustion() => self.obtain(stride, 1, request)?,
            result => result?,
        };
        let slab = Arc::new(slab);
        let number = self.shared.table.lock().add(&slab);
        Ok(self.block(slab, number))
    }

    /// Returns the number of blocks of the next slab.
    fn blocks_of_next(&self, stride: Stride) -> u64 {
        let held = ByteCount::new(self.shared.table.lock().held(stride));
        let largest = self.upstream.limits().largest_region.unwrap_or(self.options.largest_slab);
        let largest = largest.min(self.options.largest_slab);
        (held.max(self.options.smallest_slab).min(largest).get() / stride.bytes).max(1)
    }

    /// Allocates a slab of `count` blocks, and checks the memory that the upstream returns.
    fn obtain(
        &self,
        stride: Stride,
        count: u64,
        request: &RegionRequest,
    ) -> Result<Slab<A::Memory>, AllocateError> {
        let unit = ByteCount::new(stride.bytes);
        let requested = unit
            .checked_mul("blocks", count)
            .map_err(|overflow| AllocateError::backend(self.kind(), request, overflow))?;
        let slab = RegionRequest {
            alignment: stride.alignment,
            label: request.label.clone(),
            unit,
            ..RegionRequest::new(requested)
        };
        let memory = self.upstream.allocate(&slab)?;
        let (granted, available) = (memory.length(), memory.location().alignment());
        let end = memory.location().checked_add(granted);
        if granted < requested || available < stride.alignment || end.is_none() {
            let alignment = stride.alignment;
            let unfit = PoolError::UnfitUpstream { requested, granted, alignment, available };
            return Err(AllocateError::backend(self.kind(), request, unfit));
        }
        // The upstream may have rounded up to more blocks than requested.
        let blocks = u32::try_from(granted.get() / stride.bytes).unwrap_or(u32::MAX);
        Ok(Slab { memory: self.shared.account.hold(memory), stride, blocks })
    }

    /// Creates the block with this number.
    fn block(
        &self,
        slab: Arc<Slab<A::Memory>>,
        (number, index): (u64, u32),
    ) -> SlabBlock<A::Memory> {
        let offset = ByteCount::new(slab.stride.bytes * u64::from(index));
        let start = slab.memory.memory().location();
        // `obtain` checked that the address of the slab's end does not overflow, so this address
        // does not either.
        let location = start.checked_add(offset).unwrap_or(start);
        let shared = Arc::clone(&self.shared);
        SlabBlock { location, number, index, slab, shared }
    }
}

// SAFETY: a region of the upstream is either returned whole, or cut into blocks that do not
// overlap. Each block has one owner: the table while it is free, or the caller while it is in use.
unsafe impl<A: Allocate> Allocate for Slabs<A> {
    type Memory = SlabMemory<A::Memory>;

    fn kind(&self) -> StorageKind {
        self.upstream.kind()
    }

    /// The alignment and the granule are the values for blocks. The upstream serves larger requests
    /// with its own values.
    fn limits(&self) -> Limits {
        let (alignment, granule) = (self.options.alignment, self.options.alignment);
        Limits { alignment, granule, largest_region: self.upstream.limits().largest_region }
    }

    fn allocate(&self, request: &RegionRequest) -> Result<Self::Memory, AllocateError> {
        let Some(stride) = self.stride(request)? else {
            return Ok(Either::First(self.upstream.allocate(request)?));
        };
        let forked = |fork| AllocateError::backend(self.kind(), request, fork);
        self.shared.owner.check().map_err(forked)?;
        let free = self.shared.table.lock().take(stride);
        match free {
            Some((slab, place)) => Ok(Either::Second(self.block(slab, place))),
            None => Ok(Either::Second(self.slab(stride, request)?)),
        }
    }
}

impl<A: Allocate> Drop for Slabs<A> {
    fn drop(&mut self) {
        self.shared.keep_in_fork();
    }
}

impl<M: Memory> Shared<M> {
    /// Returns whether this process was forked from the slabs' process. In a child, the table may
    /// be in the middle of a change, so it is never dropped.
    fn keep_in_fork(self: &Arc<Self>) -> bool {
        let is_forked = !self.owner.is_current();
        if is_forked {
            // Never dropped: the table ends with the process.
            let _kept = ManuallyDrop::new(Arc::clone(self));
        }
        is_forked
    }
}

/// Memory of the upstream that is cut into blocks of one length.
#[derive(Debug)]
struct Slab<M: Memory> {
    memory: Held<M>,
    stride: Stride,
    blocks: u32,
}

/// A block of a slab. Dropping it frees the block. Dropping the last block of a slab frees the
/// slab.
#[derive(Debug)]
pub struct SlabBlock<M: Memory> {
    location: Location,
    /// The number of the slab among all slabs of its stride.
    number: u64,
    /// The block's index in the slab.
    index: u32,
    slab: Arc<Slab<M>>,
    shared: Arc<Shared<M>>,
}

impl<M: Memory> SlabBlock<M> {
    /// Returns the offset of the block in the slab.
    #[must_use]
    pub fn offset(&self) -> ByteCount {
        ByteCount::new(self.slab.stride.bytes * u64::from(self.index))
    }

    /// Returns the region that the block is a part of.
    #[must_use]
    pub fn slab(&self) -> &M {
        self.slab.memory.memory()
    }
}

impl<M: Memory> Drop for SlabBlock<M> {
    fn drop(&mut self) {
        if self.shared.keep_in_fork() {
            return;
        }
        let empty = self.shared.table.lock().free(self.slab.stride, self.number, self.index);
        // The upstream is called without the lock, by this block or by another that is dropping.
        drop(empty);
    }
}

// SAFETY: the span is a part of the slab's span. The slab is kept alive, does not move, and always
// returns the same values. The table returns the block to one owner at a time.
unsafe impl<M: Memory> Memory for SlabBlock<M> {
    fn kind(&self) -> StorageKind {
        self.slab().kind()
    }

    fn location(&self) -> Location {
        self.location
    }

    fn length(&self) -> ByteCount {
        ByteCount::new(self.slab.stride.bytes)
    }

    terrane_core::delegate_part!(self, *self.slab(), self.offset());
}
