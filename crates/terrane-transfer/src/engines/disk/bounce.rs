//! Aligned bounce buffers.

use terrane_core::convert::{to_u64, to_usize};
use terrane_core::{
    Allocate, AllocateError, ByteCount, HostAddress, Location, Memory, RegionRequest,
};
use terrane_storage::{IoBuffer, IoMemory, SystemAllocator, SystemMemory, SystemOptions};

/// The largest buffer. With larger buffers, the disk idles longer at the start and the end of a
/// copy. The processor's cache also evicts their data before the second use.
const LARGEST: ByteCount = ByteCount::mib(1);

/// The number of buffers beyond the depth of the queue. A disk can complete all requests at once. It
/// then reads or writes these buffers during the copy of the first completed one.
const SPARE: usize = 2;

/// Some buffers of one size, allocated when the first is requested.
#[derive(Debug)]
pub(super) struct BounceBuffers {
    size: ByteCount,
    count: usize,
    /// Dropped before the memory is freed.
    io_memory: Option<IoMemory>,
    memory: Option<SystemMemory>,
    free: Vec<BounceBuffer>,
}

/// A buffer that is in use until it is returned.
#[derive(Debug)]
pub(super) struct BounceBuffer(HostAddress);

impl BounceBuffer {
    /// The address `offset` bytes into the buffer.
    pub(super) fn at(&self, offset: u64) -> Option<HostAddress> {
        self.0.checked_add(ByteCount::new(offset))
    }
}

impl BounceBuffers {
    /// Creates buffers for requests of `request` bytes: enough for `count` of these requests, at
    /// most [`SPARE`] more than `depth`, and at least one.
    pub(super) fn new(request: ByteCount, count: usize, depth: usize) -> Self {
        let size = request.min(LARGEST);
        let parts = request.get().div_ceil(size.get().max(1));
        let count = count.saturating_mul(to_usize(parts)).min(depth + SPARE).max(1);
        Self { size, count, io_memory: None, memory: None, free: Vec::new() }
    }

    /// The bytes of each buffer.
    pub(super) const fn size(&self) -> ByteCount {
        self.size
    }

    /// The memory of all buffers, if it was allocated.
    pub(super) const fn io_memory(&self) -> Option<&IoMemory> {
        self.io_memory.as_ref()
    }

    /// Returns a buffer; `None` if all are in use.
    ///
    /// # Errors
    ///
    /// [`AllocateError`] if the memory of the buffers cannot be allocated. The next call tries
    /// again.
    pub(super) fn take(&mut self) -> Result<Option<BounceBuffer>, AllocateError> {
        if self.memory.is_none() {
            self.allocate()?;
        }
        Ok(self.free.pop())
    }

    pub(super) fn give_back(&mut self, buffer: BounceBuffer) {
        self.free.push(buffer);
    }

    fn allocate(&mut self) -> Result<(), AllocateError> {
        let count = to_u64(self.count);
        let too_large = |error| AllocateError::Backend {
            kind: terrane_core::StorageKind::System,
            requested: self.size,
            label: "bounce buffers".into(),
            source: Box::new(error),
        };
        let bytes = self.size.checked_mul("bounce buffers", count).map_err(too_large)?;
        let request =
            RegionRequest::new(bytes).aligned_to(super::route::REQUESTS).labelled("bounce buffers");
        let memory = SystemAllocator::new(SystemOptions::default()).allocate(&request)?;
        if let Location::Host(base) = memory.location() {
            // SAFETY: `memory` keeps its pages until it drops, which is after this value.
            let memory = unsafe { IoMemory::new(IoBuffer { address: base, length: bytes }) };
            self.io_memory = Some(memory);
            let offsets = (0..count).map(|index| ByteCount::new(self.size.get() * index));
            self.free.extend(offsets.filter_map(|at| base.checked_add(at)).map(BounceBuffer));
        }
        self.memory = Some(memory);
        Ok(())
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    #[test]
    fn two_buffers_are_free_while_all_requests_are_in_flight() {
        let (request, depth) = (ByteCount::kib(4), 3);
        let mut buffers = BounceBuffers::new(request, 16, depth);
        let mut taken = || buffers.take().unwrap().is_some();
        assert!((0..depth + 2).all(|_| taken()));
        assert!(!taken());
    }

    #[test]
    fn a_long_request_uses_several_buffers() {
        let buffers = BounceBuffers::new(ByteCount::mib(4), 2, 32);
        assert_eq!((buffers.size(), buffers.count), (LARGEST, 8));
    }
}
