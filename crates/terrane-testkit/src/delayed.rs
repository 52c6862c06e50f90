//! An upstream that gets freed memory back late.

use std::any::Any;
use std::collections::VecDeque;
use std::fmt;
use std::sync::{Arc, Mutex};

use terrane_core::{
    Allocate, AllocateError, ByteCount, CapabilityReport, DeviceAddress, Location, Memory,
    RegionRequest, RegistrationRecord, StorageKind, delegate_allocate,
};

use terrane_core::sync::lock;

/// An upstream that gets each freed block back only after a number of later blocks have been freed.
/// It behaves like the memory of a busy device.
///
/// This detects code that reads freed memory, or relies on its immediate return. Delayed blocks are
/// freed when the adaptor and the last of its blocks have dropped.
#[derive(Debug)]
pub struct Delayed<A: Allocate> {
    upstream: A,
    held: Arc<DelayedBlock<A::Memory>>,
}

struct DelayedBlock<M> {
    delay: usize,
    queue: Mutex<VecDeque<M>>,
}

impl<A: Allocate> Delayed<A> {
    /// Delays each freed block of `upstream` until `delay` more have been freed.
    #[must_use]
    pub fn new(upstream: A, delay: usize) -> Self {
        let queue = Mutex::new(VecDeque::new());
        Self { upstream, held: Arc::new(DelayedBlock { delay, queue }) }
    }

    /// Frees every delayed block, and returns their number.
    pub fn release(&self) -> usize {
        let released = std::mem::take(&mut *lock(&self.held.queue));
        released.len()
    }
}

// SAFETY: the memory is the upstream's, which returns it to no other caller.
unsafe impl<A: Allocate> Allocate for Delayed<A> {
    type Memory = DelayedMemory<A::Memory>;

    delegate_allocate!(self, self.upstream);

    fn allocate(&self, request: &RegionRequest) -> Result<Self::Memory, AllocateError> {
        let memory = self.upstream.allocate(request)?;
        let held = Arc::clone(&self.held);
        let length = memory.length();
        let (kind, location) = (memory.kind(), memory.location());
        Ok(DelayedMemory { memory: Some(memory), kind, location, length, held })
    }
}

/// Memory from [`Delayed`].
pub struct DelayedMemory<M: Memory> {
    /// Taken only on drop.
    memory: Option<M>,
    kind: StorageKind,
    location: Location,
    length: ByteCount,
    held: Arc<DelayedBlock<M>>,
}

impl<M: Memory> Drop for DelayedMemory<M> {
    fn drop(&mut self) {
        let mut queue = lock(&self.held.queue);
        queue.extend(self.memory.take());
        let due = if queue.len() > self.held.delay { queue.pop_front() } else { None };
        // Freeing may take long, or call this adaptor again.
        drop(queue);
        drop(due);
    }
}

// SAFETY: the results are those of the memory, saved when it was allocated, and they never change.
// The memory is kept at least as long as `self`.
unsafe impl<M: Memory> Memory for DelayedMemory<M> {
    fn kind(&self) -> StorageKind {
        self.kind
    }

    fn location(&self) -> Location {
        self.location
    }

    fn length(&self) -> ByteCount {
        self.length
    }

    fn device_alias(&self) -> Option<DeviceAddress> {
        self.memory.as_ref().and_then(Memory::device_alias)
    }

    fn copyable_from(&self, offset: ByteCount) -> Option<ByteCount> {
        self.memory.as_ref()?.copyable_from(offset)
    }

    fn capabilities(&self) -> CapabilityReport {
        self.memory.as_ref().map(Memory::capabilities).unwrap_or_default()
    }

    fn visit_registrations(&self, visit: &mut dyn FnMut(&RegistrationRecord)) {
        if let Some(memory) = &self.memory {
            memory.visit_registrations(visit);
        }
    }

    fn managed_block(&self) -> Option<&(dyn Any + Send + Sync)> {
        self.memory.as_ref()?.managed_block()
    }
}

impl<M: Memory> fmt::Debug for DelayedMemory<M> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.memory.fmt(f)
    }
}

impl<M> fmt::Debug for DelayedBlock<M> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("DelayedBlock").field("delay", &self.delay).finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::simulated::{Simulated, SimulatedOptions};

    #[test]
    fn all_memory_is_freed_late() {
        let device = Arc::new(Simulated::new(SimulatedOptions::default()));
        let source = Delayed::new(Arc::clone(&device), 2);
        let request = RegionRequest::new(ByteCount::new(8));
        let blocks = [(); 4].map(|()| source.allocate(&request).unwrap());
        drop(blocks);
        assert_eq!(device.usage().live_blocks, 2);
        assert_eq!(source.release(), 2);
        let last = source.allocate(&request).unwrap();
        drop(source);
        drop(last);
        assert_eq!(device.usage().live_blocks, 0);
    }
}
