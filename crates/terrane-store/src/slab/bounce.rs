//! Bounce buffers.

use terrane_core::{Alignment, Allocate, AllocateError, ByteCount, HostAddress, RegionRequest};
use terrane_storage::{SystemAllocator, SystemMemory, SystemOptions};

/// The size of a large buffer. A request of unaligned memory has at most this many bytes.
pub(super) const LARGE: ByteCount = ByteCount::mib(1);

/// The granules of a small buffer: enough for the pages that a few buffers share.
const SMALL_GRANULES: u64 = 4;

/// How many large buffers are allocated at once: two huge pages.
const LARGE_AT_ONCE: u64 = 4;

/// How many small buffers are allocated at once.
const SMALL_AT_ONCE: u64 = 32;

/// Buffers of two sizes. They are allocated as they are needed and kept: at most one for each request
/// in flight.
pub(super) struct BounceBuffers {
    small: Pool,
    large: Pool,
}

struct Pool {
    size: u64,
    alignment: Alignment,
    at_once: u64,
    free: Vec<HostAddress>,
    memory: Vec<SystemMemory>,
}

/// A buffer until it is returned.
#[derive(Debug)]
pub(super) struct BounceBuffer {
    pub(super) address: HostAddress,
    is_large: bool,
}

impl BounceBuffers {
    pub(super) fn new(granule: Alignment) -> Self {
        let pool = |size, at_once| Pool {
            size,
            alignment: granule,
            at_once,
            free: Vec::new(),
            memory: Vec::new(),
        };
        Self {
            small: pool(granule.get() * SMALL_GRANULES, SMALL_AT_ONCE),
            large: pool(LARGE.get().max(granule.get()), LARGE_AT_ONCE),
        }
    }

    /// The most bytes of a buffer.
    pub(super) const fn largest(&self) -> u64 {
        self.large.size
    }

    /// A buffer for `bytes` bytes, at most [`largest`](Self::largest).
    pub(super) fn take(&mut self, bytes: u64) -> Result<BounceBuffer, AllocateError> {
        let is_large = bytes > self.small.size;
        let pool = if is_large { &mut self.large } else { &mut self.small };
        let address = pool.take()?;
        Ok(BounceBuffer { address, is_large })
    }

    pub(super) fn give_back(&mut self, buffer: BounceBuffer) {
        let pool = if buffer.is_large { &mut self.large } else { &mut self.small };
        pool.free.push(buffer.address);
    }
}

impl Pool {
    fn take(&mut self) -> Result<HostAddress, AllocateError> {
        if let Some(address) = self.free.pop() {
            return Ok(address);
        }
        let bytes = ByteCount::new(self.size * self.at_once);
        let request =
            RegionRequest::new(bytes).aligned_to(self.alignment).labelled("bounce buffers");
        let memory = SystemAllocator::new(SystemOptions::default()).allocate(&request)?;
        let first = memory.address();
        let others = (1..self.at_once).rev().map(|index| ByteCount::new(index * self.size));
        self.free.extend(others.filter_map(|offset| first.checked_add(offset)));
        self.memory.push(memory);
        Ok(first)
    }
}
