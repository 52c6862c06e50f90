//! Cuts small blocks out of large regions.

mod table;

use std::mem::ManuallyDrop;
use std::sync::Arc;

use terrane_core::{
    Alignment, Allocate, AllocateError, BoxedCause, ByteCount, CapabilityReport, DeviceAddress,
    Limits, Location, Memory, OwnerProcess, RegionRequest, RegistrationRecord, StorageKind,
};

use super::either::Either;
use super::limit::size_overflow;
use crate::PoolError;
use crate::record::{Account, Held};
use crate::sync::Mutex;
use table::{Stride, Table};

/// The choices of a [`Slabs`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SlabOptions {
    /// The largest block that is cut from a slab. Larger requests go to the upstream as they are.
    /// Default: 64 KiB.
    pub largest_block: ByteCount,
    /// The first slab of a size; it holds one block at least. Each further slab is as long as all
    /// slabs of that size together. Default: 64 KiB.
    pub smallest_slab: ByteCount,
    /// The most bytes of a slab. It holds one block at least. Default: 2 MiB.
    pub largest_slab: ByteCount,
    /// What each block is aligned to, and its length is a multiple of; in files, the alignment of
    /// the upstream if that is stricter. Default: 512 bytes.
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

/// An upstream that is asked for slabs, out of which small blocks are cut.
///
/// Each region of system memory is a mapping, and a process has at most `vm.max_map_count` of them:
/// 65,530 by default. A pool that stands on slabs keeps 1,000,000 blocks of 4 KiB in some 2,000
/// mappings. It also asks the kernel, or a driver, once for many blocks.
///
/// ```
/// use terrane_core::{Allocate as _, ByteCount};
/// use terrane_pool::{Pool, PoolOptions};
/// use terrane_pool::adaptors::{Adapt as _, Simulated, SimulatedOptions, SlabOptions};
///
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let upstream = Simulated::new(SimulatedOptions::default());
/// let pool = Pool::new(upstream.in_slabs(SlabOptions::default()), PoolOptions::default())?;
/// let block = pool.acquire(ByteCount::kib(4))?;
/// assert_eq!(pool.snapshot().held, ByteCount::kib(4));
/// assert_eq!(pool.upstream().usage().held, ByteCount::kib(64));
/// drop(block);
/// pool.clear();
/// assert_eq!(pool.upstream().usage().held, ByteCount::ZERO);
/// # Ok(())
/// # }
/// ```
///
/// A slab holds blocks of one length. The oldest slab with a free block serves a request. A slab
/// goes back to the upstream when its last block drops, whether a pool trims it or a user drops it.
/// One block in use keeps a whole slab: [`usage`](Self::usage) says how many bytes that costs.
/// Where the upstream refuses a slab for want of memory, it is asked for a single block.
///
/// A budget below counts slabs, and a budget above counts blocks. A slab bears the label of the
/// request that it was made for. Its blocks share pages: a registrar that locks pages belongs below
/// this adaptor.
///
/// A lock is held for a few instructions when a block comes or goes; the upstream is called without
/// it. In a process that was forked from its own, it refuses, and keeps what drops.
#[derive(Debug)]
pub struct Slabs<A: Allocate> {
    upstream: A,
    options: SlabOptions,
    shared: Arc<Shared<A::Memory>>,
}

/// What [`Slabs`] hands out: a region of the upstream, or a block of a slab.
pub type SlabMemory<M> = Either<M, SlabBlock<M>>;

/// What a [`Slabs`] has obtained and handed out. Regions that went through it as they are do not
/// count.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct SlabUsage {
    /// The slabs.
    pub slabs: u64,
    /// The bytes of the slabs.
    pub held: ByteCount,
    /// The most bytes that slabs ever had.
    pub peak_held: ByteCount,
    /// The blocks in use.
    pub blocks: u64,
    /// The bytes of the blocks in use. The rest of what is held is free, or the end of a slab that
    /// is too short for a block.
    pub in_use: ByteCount,
}

#[derive(Debug)]
struct Shared<M: Memory> {
    owner: OwnerProcess,
    account: Arc<Account>,
    table: Mutex<Table<M>>,
}

impl<A: Allocate> Slabs<A> {
    /// Slabs of `upstream`.
    #[must_use]
    pub fn new(upstream: A, mut options: SlabOptions) -> Self {
        if !upstream.kind().is_host() && !upstream.kind().is_device() {
            // What reads and writes files past the page cache needs it.
            options.alignment = options.alignment.max(upstream.limits().alignment);
        }
        let shared = Shared {
            owner: OwnerProcess::current(),
            account: Arc::new(Account::new()),
            table: Mutex::new(Table::new()),
        };
        Self { upstream, options, shared: Arc::new(shared) }
    }

    /// The upstream.
    #[must_use]
    pub fn upstream(&self) -> &A {
        &self.upstream
    }

    /// The choices that it was made with.
    #[must_use]
    pub fn options(&self) -> &SlabOptions {
        &self.options
    }

    /// What it has obtained and handed out; nothing, in a process that was forked from its own.
    #[must_use]
    pub fn usage(&self) -> SlabUsage {
        if !self.shared.owner.is_current() {
            return SlabUsage::default();
        }
        let table = self.shared.table.lock();
        SlabUsage {
            slabs: table.slabs(),
            held: ByteCount::new(self.shared.account.held()),
            peak_held: ByteCount::new(self.shared.account.peak()),
            blocks: table.blocks(),
            in_use: ByteCount::new(table.bytes()),
        }
    }

    /// How the blocks of a request are cut; `None`, if it goes to the upstream as it is.
    fn stride(&self, request: &RegionRequest) -> Result<Option<Stride>, AllocateError> {
        if request.bytes > self.options.largest_block || request.bytes.is_zero() {
            return Ok(None);
        }
        let alignment = request.alignment.max(self.options.alignment);
        let bytes = request
            .bytes
            .align_up(alignment)
            .map_err(|overflow| size_overflow(self.kind(), request, overflow))?;
        let is_small = bytes <= self.options.largest_block;
        Ok(is_small.then_some(Stride { bytes: bytes.get(), alignment }))
    }

    /// A slab of as many blocks as the upstream gives, and the first of them.
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

    /// How many blocks the next slab has.
    fn blocks_of_next(&self, stride: Stride) -> u64 {
        let held = ByteCount::new(self.shared.table.lock().held(stride));
        let largest = self.upstream.limits().largest_region.unwrap_or(self.options.largest_slab);
        let largest = largest.min(self.options.largest_slab);
        (held.max(self.options.smallest_slab).min(largest).get() / stride.bytes).max(1)
    }

    /// A slab of `count` blocks, if the upstream keeps its promises.
    fn obtain(
        &self,
        stride: Stride,
        count: u64,
        request: &RegionRequest,
    ) -> Result<Slab<A::Memory>, AllocateError> {
        let unit = ByteCount::new(stride.bytes);
        let asked = unit
            .checked_mul("blocks", count)
            .map_err(|overflow| size_overflow(self.kind(), request, overflow))?;
        let slab = RegionRequest {
            alignment: stride.alignment,
            label: request.label.clone(),
            unit,
            ..RegionRequest::new(asked)
        };
        let memory = self.upstream.allocate(&slab)?;
        let (granted, available) = (memory.length(), memory.location().alignment());
        let end = memory.location().checked_add(granted);
        if granted < asked || available < stride.alignment || end.is_none() {
            let alignment = stride.alignment;
            let unfit = PoolError::UnfitUpstream { asked, granted, alignment, available };
            return Err(self.backend_error(request, unfit.into()));
        }
        // The upstream may have rounded up to more blocks than were asked for.
        let blocks = u32::try_from(granted.get() / stride.bytes).unwrap_or(u32::MAX);
        Ok(Slab { memory: Held::new(memory, &self.shared.account), stride, blocks })
    }

    /// The block of this number.
    fn block(
        &self,
        slab: Arc<Slab<A::Memory>>,
        (number, index): (u64, u32),
    ) -> SlabBlock<A::Memory> {
        let offset = ByteCount::new(slab.stride.bytes * u64::from(index));
        let start = slab.memory.memory().location();
        // The end of the slab can be computed, so this can.
        let location = start.checked_add(offset).unwrap_or(start);
        let shared = Arc::clone(&self.shared);
        SlabBlock { location, number, index, slab, shared }
    }

    fn backend_error(&self, request: &RegionRequest, source: BoxedCause) -> AllocateError {
        let (kind, requested, label) = (self.kind(), request.bytes, request.label.clone());
        AllocateError::Backend { kind, requested, label, source }
    }
}

// SAFETY: a region of the upstream is handed on, or cut into blocks that do not overlap and of
// which each has one owner: it is free in the table, or out.
unsafe impl<A: Allocate> Allocate for Slabs<A> {
    type Memory = SlabMemory<A::Memory>;

    fn kind(&self) -> StorageKind {
        self.upstream.kind()
    }

    /// The alignment and the granule are those of blocks; larger requests are served as the
    /// upstream serves them.
    fn limits(&self) -> Limits {
        let (alignment, granule) = (self.options.alignment, self.options.alignment);
        Limits { alignment, granule, largest_region: self.upstream.limits().largest_region }
    }

    fn allocate(&self, request: &RegionRequest) -> Result<Self::Memory, AllocateError> {
        let Some(stride) = self.stride(request)? else {
            return Ok(Either::First(self.upstream.allocate(request)?));
        };
        self.shared.owner.check().map_err(|fork| self.backend_error(request, fork.into()))?;
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
    /// Whether this is another process than the slabs' own. There the table may be in the middle of
    /// a change, and is never dropped.
    fn keep_in_fork(self: &Arc<Self>) -> bool {
        let is_forked = !self.owner.is_current();
        if is_forked {
            // Never dropped: the table goes with the process.
            let _kept = ManuallyDrop::new(Arc::clone(self));
        }
        is_forked
    }
}

/// Memory of the upstream that blocks of one length are cut from.
#[derive(Debug)]
struct Slab<M: Memory> {
    memory: Held<M>,
    stride: Stride,
    blocks: u32,
}

/// A block of a slab. Dropping it makes it free; the last block of a slab gives the slab back.
#[derive(Debug)]
pub struct SlabBlock<M: Memory> {
    location: Location,
    /// That of the slab, among those of its stride.
    number: u64,
    /// The block's place in the slab.
    index: u32,
    slab: Arc<Slab<M>>,
    shared: Arc<Shared<M>>,
}

impl<M: Memory> SlabBlock<M> {
    /// Where in the slab the block begins.
    #[must_use]
    pub fn offset(&self) -> ByteCount {
        ByteCount::new(self.slab.stride.bytes * u64::from(self.index))
    }

    /// The region that the block is a part of.
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
        let empty = self.shared.table.lock().give_back(self.slab.stride, self.number, self.index);
        // The upstream is called without the lock: by this, or by another block that is dropping.
        drop(empty);
    }
}

// SAFETY: the span is a part of the slab's, which is kept alive, does not move and answers always
// the same. The table hands it to one owner at a time.
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

    fn device_alias(&self) -> Option<DeviceAddress> {
        self.slab().device_alias()?.checked_add(self.offset())
    }

    fn copyable_from(&self, offset: ByteCount) -> Option<ByteCount> {
        let within = self.offset().checked_add(offset).ok()?;
        let left = self.length().checked_sub(offset).unwrap_or(ByteCount::ZERO);
        Some(self.slab().copyable_from(within)?.min(left))
    }

    fn capabilities(&self) -> CapabilityReport {
        self.slab().capabilities()
    }

    fn visit_registrations(&self, visit: &mut dyn FnMut(&RegistrationRecord)) {
        self.slab().visit_registrations(visit);
    }
}
