//! Heap memory that acts as any kind of storage that the processor can access.

use std::alloc::{Layout, alloc_zeroed, dealloc};
use std::fmt;
use std::num::NonZero;
use std::ops::{Deref, DerefMut};
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

use terrane_core::{
    Alignment, Allocate, AllocateError, ByteCount, DeviceAddress, DeviceId, HostAddress, Limits,
    Location, Memory, RegionRequest, StorageKind,
};

use crate::device;
use terrane_core::sync::lock;

/// The value that overwrites freed memory.
pub const POISON: u8 = 0xDD;

/// Allocates from the heap, and acts as the given kind of storage.
///
/// - The memory has exactly the requested alignment: it begins at an odd multiple of it. Code that
///   relies on a stricter alignment fails at once.
/// - Its bytes are set to [`POISON`] when they are freed. In [quarantine](Self::with_quarantine)
///   they stay mapped, so that a late write is detected.
/// - Live allocations and bytes are counted.
///
/// Cloning it shares the counters and the capacity.
#[derive(Clone, Debug)]
pub struct HeapAllocator {
    kind: StorageKind,
    limits: Limits,
    shared: Arc<Shared>,
}

#[derive(Debug, Default)]
struct Shared {
    live: AtomicU64,
    live_bytes: AtomicU64,
    allocated: AtomicU64,
    capacity: Mutex<Option<ByteCount>>,
    quarantine: Mutex<Option<Vec<Block>>>,
}

impl HeapAllocator {
    /// Creates an allocator that acts as `kind`.
    ///
    /// # Panics
    ///
    /// If the kind is [`StorageKind::Disk`]: a heap is not a file.
    #[must_use]
    pub fn new(kind: StorageKind) -> Self {
        let plays = kind.is_host() || kind.is_device();
        assert!(plays, "heap memory cannot act as {kind} storage");
        Self { kind, limits: Limits::NONE, shared: Arc::default() }
    }

    /// System memory.
    #[must_use]
    pub fn system() -> Self {
        Self::new(StorageKind::System)
    }

    /// Memory with the kind of pinned memory.
    #[must_use]
    pub fn pinned() -> Self {
        Self::new(StorageKind::Pinned)
    }

    /// Memory of a simulated device. Its addresses are not host addresses, and only
    /// [`device::resolve`] finds its bytes.
    #[must_use]
    pub fn simulated_device(device: u32) -> Self {
        Self::new(StorageKind::Device(DeviceId::new(device)))
    }

    /// The same allocator with these limits, which it meets.
    #[must_use]
    pub fn with_limits(self, limits: Limits) -> Self {
        Self { limits, ..self }
    }

    /// Refuses a request that would exceed this many live bytes.
    #[must_use]
    pub fn with_capacity(self, capacity: ByteCount) -> Self {
        *lock(&self.shared.capacity) = Some(capacity);
        self
    }

    /// Keeps freed memory, poisoned, until the last clone of the allocator and the last of its
    /// memory have dropped.
    #[must_use]
    pub fn with_quarantine(self) -> Self {
        lock(&self.shared.quarantine).get_or_insert_default();
        self
    }

    /// The number of live allocations, including those of zero bytes.
    #[must_use]
    pub fn live(&self) -> u64 {
        self.shared.live.load(Ordering::Acquire)
    }

    /// The number of live bytes.
    #[must_use]
    pub fn live_bytes(&self) -> ByteCount {
        ByteCount::new(self.shared.live_bytes.load(Ordering::Acquire))
    }

    /// The number of allocations so far.
    #[must_use]
    pub fn allocated(&self) -> u64 {
        self.shared.allocated.load(Ordering::Acquire)
    }

    /// Panics if any allocation is live.
    #[track_caller]
    pub fn assert_all_freed(&self) {
        let (live, bytes) = (self.live(), self.live_bytes());
        assert!(live == 0, "{live} allocations of {bytes} of {} memory are leaked", self.kind);
    }

    /// Panics if memory in quarantine was written after it was freed.
    #[track_caller]
    pub fn assert_quarantine_untouched(&self) {
        let quarantine = lock(&self.shared.quarantine);
        let blocks =
            quarantine.as_ref().expect("the allocator has no quarantine; use with_quarantine");
        for (number, block) in blocks.iter().enumerate() {
            let touched = block.bytes().iter().position(|&byte| byte != POISON);
            assert!(touched.is_none(), "freed memory {number} was written at {touched:?}");
        }
    }

    fn refuse(&self, request: &RegionRequest, available: Option<ByteCount>) -> AllocateError {
        AllocateError::OutOfMemory {
            kind: self.kind,
            requested: request.bytes,
            available,
            label: request.label.clone(),
            source: None,
        }
    }

    /// Counts the bytes, unless they exceed the capacity.
    fn reserve(&self, request: &RegionRequest, bytes: ByteCount) -> Result<(), AllocateError> {
        let capacity = lock(&self.shared.capacity);
        let available = capacity
            .map(|capacity| capacity.checked_sub(self.live_bytes()).unwrap_or(ByteCount::ZERO));
        if available.is_some_and(|available| bytes > available) {
            return Err(self.refuse(request, available));
        }
        self.shared.live_bytes.fetch_add(bytes.get(), Ordering::AcqRel);
        Ok(())
    }
}

// SAFETY: each region is a separate allocation.
unsafe impl Allocate for HeapAllocator {
    type Memory = HeapMemory;

    fn kind(&self) -> StorageKind {
        self.kind
    }

    fn limits(&self) -> Limits {
        self.limits
    }

    fn allocate(&self, request: &RegionRequest) -> Result<HeapMemory, AllocateError> {
        if let Some(largest) = self.limits.largest_region.filter(|&most| request.bytes > most) {
            return Err(AllocateError::TooLarge {
                kind: self.kind,
                requested: request.bytes,
                largest,
                label: request.label.clone(),
            });
        }
        let alignment = request.alignment.max(self.limits.alignment);
        let bytes =
            request.bytes.align_up(self.limits.granule).map_err(|_| self.refuse(request, None))?;
        self.reserve(request, bytes)?;
        let Some(block) = Block::new(bytes, alignment) else {
            self.shared.live_bytes.fetch_sub(bytes.get(), Ordering::AcqRel);
            return Err(self.refuse(request, None));
        };
        self.shared.live.fetch_add(1, Ordering::AcqRel);
        self.shared.allocated.fetch_add(1, Ordering::AcqRel);
        let device = match self.kind {
            StorageKind::Device(id) => Some((id, device::map(id, block.begin, bytes, alignment))),
            _ => None,
        };
        Ok(HeapMemory { kind: self.kind, device, block: Some(block), shared: self.shared.clone() })
    }
}

/// Memory from a [`HeapAllocator`].
pub struct HeapMemory {
    kind: StorageKind,
    device: Option<(DeviceId, DeviceAddress)>,
    /// Taken only on drop.
    block: Option<Block>,
    shared: Arc<Shared>,
}

impl HeapMemory {
    fn block(&self) -> &Block {
        self.block.as_ref().expect("the block exists until the memory drops")
    }
}

// SAFETY: the block is allocated and initialised, and does not move until this value drops; all
// methods return its properties. Addresses of a simulated device identify its bytes.
unsafe impl Memory for HeapMemory {
    fn kind(&self) -> StorageKind {
        self.kind
    }

    fn location(&self) -> Location {
        match self.device {
            Some((device, address)) => Location::Device { device, address },
            None => Location::Host(self.block().begin),
        }
    }

    fn length(&self) -> ByteCount {
        self.block().bytes
    }
}

impl Drop for HeapMemory {
    fn drop(&mut self) {
        if let Some((device, address)) = self.device {
            device::unmap(device, address);
        }
        let Some(block) = self.block.take() else { return };
        block.poison();
        self.shared.live_bytes.fetch_sub(block.bytes.get(), Ordering::AcqRel);
        self.shared.live.fetch_sub(1, Ordering::AcqRel);
        if let Some(quarantine) = &mut *lock(&self.shared.quarantine) {
            quarantine.push(block);
        }
    }
}

impl fmt::Debug for HeapMemory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("HeapMemory")
            .field("kind", &self.kind)
            .field("location", &self.location())
            .field("length", &self.length())
            .finish_non_exhaustive()
    }
}

/// A span of the heap.
#[derive(Debug)]
struct Block {
    begin: HostAddress,
    bytes: ByteCount,
    /// The allocation; `None` for no bytes.
    allocation: Option<(NonNull<u8>, Layout)>,
}

// SAFETY: the block owns its span on any thread.
unsafe impl Send for Block {}
// SAFETY: a shared block only returns its location; users of the bytes synchronise themselves.
unsafe impl Sync for Block {}

impl Block {
    /// Zeroed bytes at an odd multiple of `alignment`; `None` if the heap has no such span.
    fn new(bytes: ByteCount, alignment: Alignment) -> Option<Self> {
        let step = usize::try_from(alignment.get()).ok()?;
        if bytes.is_zero() {
            let nowhere = NonNull::without_provenance(NonZero::new(step)?);
            return Some(Self { begin: HostAddress::new::<u8>(nowhere), bytes, allocation: None });
        }
        let layout =
            Layout::from_size_align(bytes.to_usize().checked_add(step)?, step.checked_mul(2)?)
                .ok()?;
        // SAFETY: the size is not zero, because neither addend is.
        let allocated = NonNull::new(unsafe { alloc_zeroed(layout) })?;
        // SAFETY: the allocation is `step` bytes longer than `bytes`.
        let begin = unsafe { allocated.add(step) };
        let begin = HostAddress::new(begin);
        Some(Self { begin, bytes, allocation: Some((allocated, layout)) })
    }

    fn poison(&self) {
        if self.allocation.is_some() {
            // SAFETY: the span belongs to this block, and its memory has been dropped.
            unsafe { self.begin.as_ptr().write_bytes(POISON, self.bytes.to_usize()) };
            // Volatile, because the bytes are freed next and the compiler could remove the writes.
            std::hint::black_box(self.begin.as_ptr());
        }
    }

    fn bytes(&self) -> &[u8] {
        if self.allocation.is_none() {
            return &[];
        }
        // SAFETY: called only for blocks in quarantine, whose bytes are initialised and no longer
        // written by correct code; this function looks for incorrect code.
        unsafe { std::slice::from_raw_parts(self.begin.as_ptr(), self.bytes.to_usize()) }
    }
}

impl Drop for Block {
    fn drop(&mut self) {
        if let Some((allocated, layout)) = self.allocation {
            // SAFETY: allocated with this layout, and freed once.
            unsafe { dealloc(allocated.as_ptr(), layout) };
        }
    }
}

/// Bytes from any allocator of host memory, for code that needs a slice.
#[derive(Debug)]
pub struct FilledMemory<M> {
    /// It is not handed out, so that no other code uses the bytes.
    _memory: M,
    address: HostAddress,
    length: usize,
}

impl<M: Memory> FilledMemory<M> {
    /// Allocates so many bytes, and writes `value` to each.
    ///
    /// # Errors
    ///
    /// That of the allocator.
    ///
    /// # Panics
    ///
    /// If the memory has no host address.
    pub fn new<A>(allocator: &A, bytes: ByteCount, value: u8) -> Result<Self, AllocateError>
    where
        A: Allocate<Memory = M>,
    {
        let memory = allocator.allocate(&RegionRequest::new(bytes))?;
        let address = memory.location().as_host().expect("host memory");
        let length = bytes.to_usize();
        // SAFETY: the allocator returned at least so many bytes, which no other code uses.
        unsafe { address.as_ptr().write_bytes(value, length) };
        Ok(Self { _memory: memory, address, length })
    }
}

impl<M> Deref for FilledMemory<M> {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        // SAFETY: `new` has written all of these bytes, and the memory keeps them in their place.
        unsafe { std::slice::from_raw_parts(self.address.as_ptr(), self.length) }
    }
}

impl<M> DerefMut for FilledMemory<M> {
    fn deref_mut(&mut self) -> &mut [u8] {
        // SAFETY: as above, and the exclusive bytes are borrowed mutably.
        unsafe { std::slice::from_raw_parts_mut(self.address.as_ptr(), self.length) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn filled_memory_is_a_slice() {
        let heap = HeapAllocator::system();
        let mut memory = FilledMemory::new(&heap, ByteCount::new(1000), 7).unwrap();
        memory[999] = 8;
        assert_eq!(memory.iter().map(|&byte| u32::from(byte)).sum::<u32>(), 999 * 7 + 8);
        drop(memory);
        assert_eq!(heap.live(), 0);
    }

    #[test]
    fn memory_has_exactly_the_requested_alignment() {
        for allocator in [HeapAllocator::system(), HeapAllocator::simulated_device(7)] {
            for exponent in 0..=21 {
                let alignment = Alignment::new(1 << exponent).expect("a power of two");
                let request = RegionRequest::new(ByteCount::new(100)).aligned_to(alignment);
                let memory = allocator.allocate(&request).expect("memory");
                assert_eq!(memory.location().alignment(), alignment);
            }
            allocator.assert_all_freed();
        }
    }

    #[test]
    fn a_write_after_free_is_found_in_quarantine() {
        let allocator = HeapAllocator::system().with_quarantine();
        let memory = allocator.allocate(&RegionRequest::new(ByteCount::new(64))).expect("memory");
        let begin = memory.location().as_host().expect("host memory");
        drop(memory);
        allocator.assert_quarantine_untouched();
        // SAFETY: in quarantine the bytes are still allocated.
        unsafe { begin.as_ptr().write(1) };
        let check = std::panic::AssertUnwindSafe(|| allocator.assert_quarantine_untouched());
        assert!(std::panic::catch_unwind(check).is_err());
    }

    #[test]
    fn capacity_and_limits_refuse_and_leave_nothing() {
        let largest = ByteCount::new(1000);
        let limits = Limits { largest_region: Some(largest), ..Limits::NONE };
        let allocator =
            HeapAllocator::system().with_limits(limits).with_capacity(ByteCount::new(150));
        let ask = |bytes| allocator.allocate(&RegionRequest::new(ByteCount::new(bytes)));
        assert!(matches!(ask(1001), Err(AllocateError::TooLarge { .. })));
        let first = ask(100).expect("memory");
        let refused = ask(100).expect_err("out of memory");
        assert!(refused.is_exhaustion(), "{refused}");
        drop(first);
        assert!(ask(100).is_ok());
        allocator.assert_all_freed();
    }
}
