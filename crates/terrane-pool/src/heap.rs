//! Host memory of the global allocator.

use std::alloc::{Layout, alloc_zeroed, dealloc};
use std::ptr::NonNull;

use terrane_core::convert::to_usize;
use terrane_core::{
    Allocate, AllocateError, ByteCount, HostAddress, Limits, Location, Memory, RegionRequest,
    StorageKind,
};

/// Allocates zeroed host memory from the global allocator (`malloc`, by default).
///
/// It suits small blocks, tests and programs without other memory. For large regions, huge pages or
/// NUMA placement, use the system allocator of `terrane-storage`.
///
/// ```
/// use terrane_core::{Allocate, ByteCount, Memory, RegionRequest};
/// use terrane_pool::HeapAllocator;
///
/// let memory = HeapAllocator.allocate(&RegionRequest::new(ByteCount::kib(4)))?;
/// assert_eq!(memory.length(), ByteCount::kib(4));
/// # Ok::<(), terrane_core::AllocateError>(())
/// ```
#[derive(Clone, Copy, Debug, Default)]
pub struct HeapAllocator;

/// Memory from [`HeapAllocator`].
#[derive(Debug)]
pub struct HeapMemory {
    start: NonNull<u8>,
    layout: Layout,
}

// SAFETY: each region is a separate allocation.
unsafe impl Allocate for HeapAllocator {
    type Memory = HeapMemory;

    fn kind(&self) -> StorageKind {
        StorageKind::System
    }

    fn limits(&self) -> Limits {
        Limits::NONE
    }

    fn allocate(&self, request: &RegionRequest) -> Result<HeapMemory, AllocateError> {
        let refused = || AllocateError::OutOfMemory {
            kind: self.kind(),
            requested: request.bytes,
            available: None,
            label: request.label.clone(),
            source: None,
        };
        let alignment = to_usize(request.alignment.get());
        let layout = Layout::from_size_align(request.bytes.to_usize(), alignment);
        let layout = layout.map_err(|_| refused())?;
        if layout.size() == 0 {
            return Ok(HeapMemory { start: layout.dangling_ptr(), layout });
        }
        // SAFETY: the layout is not empty.
        let start = unsafe { alloc_zeroed(layout) };
        let start = NonNull::new(start).ok_or_else(refused)?;
        Ok(HeapMemory { start, layout })
    }
}

// SAFETY: the value owns the memory, and exposes the pointer only as an address.
unsafe impl Send for HeapMemory {}

// SAFETY: as for `Send`. Users of the address synchronise their accesses.
unsafe impl Sync for HeapMemory {}

// SAFETY: the span is zeroed memory of the layout's size. It does not move, and the value owns it
// until it drops.
unsafe impl Memory for HeapMemory {
    fn kind(&self) -> StorageKind {
        StorageKind::System
    }

    fn location(&self) -> Location {
        Location::Host(HostAddress::new(self.start))
    }

    fn length(&self) -> ByteCount {
        ByteCount::from_usize(self.layout.size())
    }
}

impl Drop for HeapMemory {
    fn drop(&mut self) {
        if self.layout.size() > 0 {
            // SAFETY: the memory was allocated with this layout, and is freed once.
            unsafe { dealloc(self.start.as_ptr(), self.layout) };
        }
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;
    use terrane_core::Alignment;

    #[test]
    fn memory_is_as_long_and_as_aligned_as_requested() {
        for alignment in [Alignment::BYTE, Alignment::PAGE, Alignment::HUGE_PAGE] {
            for bytes in [0, 1, 4097] {
                let request = RegionRequest::new(ByteCount::new(bytes)).aligned_to(alignment);
                let memory = HeapAllocator.allocate(&request).unwrap();
                assert_eq!(memory.length(), request.bytes);
                assert!(memory.location().alignment() >= alignment);
            }
        }
    }

    #[test]
    fn a_request_beyond_the_address_space_is_refused() {
        let request = RegionRequest::new(ByteCount::new(u64::MAX)).labelled("too large");
        assert!(HeapAllocator.allocate(&request).unwrap_err().is_exhaustion());
    }
}
