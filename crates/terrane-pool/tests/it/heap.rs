//! Host memory from the global allocator, with a count of live bytes.

use std::alloc::{Layout, alloc_zeroed, dealloc};
use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use terrane_core::{
    Alignment, Allocate, AllocateError, ByteCount, HostAddress, Limits, Location, Memory,
    RegionRequest, StorageKind,
};

use crate::support::comes_true;

/// An upstream of zeroed host memory with a capacity. When the last clone drops, it checks that all
/// memory has been freed.
#[derive(Clone, Debug)]
pub struct Heap {
    capacity: u64,
    live: Arc<Live>,
    audit: Arc<Audit>,
}

/// Checks the live memory when the last handle drops.
#[derive(Debug)]
struct Audit {
    live: Arc<Live>,
    may_leak: AtomicBool,
}

impl Drop for Audit {
    fn drop(&mut self) {
        let is_empty = || self.live.blocks.load(Ordering::Acquire) == 0;
        let leaks = !self.may_leak.load(Ordering::Relaxed) && !comes_true(is_empty);
        assert!(!leaks || std::thread::panicking(), "memory outlived its heap: {:?}", self.live);
    }
}

#[derive(Debug, Default)]
pub struct Live {
    bytes: AtomicU64,
    blocks: AtomicU64,
}

impl Heap {
    pub fn new(capacity: ByteCount) -> Self {
        let live: Arc<Live> = Arc::default();
        let audit = Audit { live: Arc::clone(&live), may_leak: AtomicBool::new(false) };
        Self { capacity: capacity.get(), live, audit: Arc::new(audit) }
    }

    /// Allows live memory when the last handle drops.
    pub fn expect_leaks(&self) {
        self.audit.may_leak.store(true, Ordering::Relaxed);
    }

    pub fn live_blocks(&self) -> u64 {
        self.live.blocks.load(Ordering::Relaxed)
    }
}

// SAFETY: each region is a separate allocation.
unsafe impl Allocate for Heap {
    type Memory = HeapMemory;

    fn kind(&self) -> StorageKind {
        StorageKind::System
    }

    fn limits(&self) -> Limits {
        Limits { granule: Alignment::new(8).unwrap(), ..Limits::NONE }
    }

    fn allocate(&self, request: &RegionRequest) -> Result<HeapMemory, AllocateError> {
        let out_of_memory = |available| AllocateError::OutOfMemory {
            kind: self.kind(),
            requested: request.bytes,
            available: Some(ByteCount::new(available)),
            label: request.label.clone(),
            source: None,
        };
        let length = request
            .bytes
            .align_up(self.limits().granule)
            .ok()
            .filter(|length| length.get() <= self.capacity)
            .ok_or_else(|| out_of_memory(self.capacity))?;
        let alignment = ByteCount::new(request.alignment.get()).to_usize();
        let layout = Layout::from_size_align(length.to_usize(), alignment).unwrap();
        if length.is_zero() {
            return Ok(HeapMemory { base: layout.dangling_ptr(), layout, live: None });
        }
        self.live
            .bytes
            .fetch_update(Ordering::Relaxed, Ordering::Relaxed, |live| {
                live.checked_add(length.get()).filter(|&sum| sum <= self.capacity)
            })
            .map_err(|live| out_of_memory(self.capacity - live))?;
        self.live.blocks.fetch_add(1, Ordering::Relaxed);
        // SAFETY: the layout is not empty.
        let base = NonNull::new(unsafe { alloc_zeroed(layout) }).unwrap();
        Ok(HeapMemory { base, layout, live: Some(Arc::clone(&self.live)) })
    }
}

#[derive(Debug)]
pub struct HeapMemory {
    base: NonNull<u8>,
    layout: Layout,
    live: Option<Arc<Live>>,
}

// SAFETY: the value owns the memory, and exposes the pointer only as an address.
unsafe impl Send for HeapMemory {}
// SAFETY: as for `Send`.
unsafe impl Sync for HeapMemory {}

// SAFETY: zeroed memory of the layout's size, owned until the value drops.
unsafe impl Memory for HeapMemory {
    fn kind(&self) -> StorageKind {
        StorageKind::System
    }
    fn location(&self) -> Location {
        Location::Host(HostAddress::new(self.base))
    }
    fn length(&self) -> ByteCount {
        ByteCount::from_usize(self.layout.size())
    }
    /// The value for memory that is registered in stretches of [`STRETCH`].
    fn copyable_from(&self, offset: ByteCount) -> Option<ByteCount> {
        let left = self.length().checked_sub(offset)?;
        Some(to_end_of_stretch(self.location(), offset).min(left))
    }
}

/// The length of a stretch, by address. No request of a device may cross the end of a stretch.
pub const STRETCH: u64 = 1000;

/// Returns the number of bytes from an offset to the end of its stretch.
pub fn to_end_of_stretch(location: Location, offset: ByteCount) -> ByteCount {
    let Location::Host(address) = location else { return ByteCount::ZERO };
    let at = ByteCount::from_usize(address.as_ptr().addr()).get() + offset.get();
    ByteCount::new(STRETCH - at % STRETCH)
}

impl Drop for HeapMemory {
    fn drop(&mut self) {
        if let Some(live) = &self.live {
            // SAFETY: the memory was allocated with this layout, and is freed once.
            unsafe { dealloc(self.base.as_ptr(), self.layout) };
            live.blocks.fetch_sub(1, Ordering::Release);
            live.bytes
                .fetch_sub(ByteCount::from_usize(self.layout.size()).get(), Ordering::Relaxed);
        }
    }
}
