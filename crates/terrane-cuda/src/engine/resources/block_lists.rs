//! Device memory for the tables of a job. One kind is a list of block ids, for kernels that copy
//! more pairs than a launch's parameters hold. The other kind is the input and output of the
//! checksum kernels.

use std::sync::{Arc, Mutex, MutexGuard};

use terrane_core::convert::to_u64;
use terrane_core::sync::lock;
use terrane_core::{ByteCount, Memory, RegionRequest, Requirement};

use crate::error::CudaError;
use crate::memory::device::{DeviceAllocator, DeviceMemory};
use crate::memory::pinned::options::PinnedOptions;
use crate::memory::pinned::{PinnedAllocator, PinnedMemory};
use crate::runtime::context::Context;
use crate::runtime::stream::Stream;

/// The memory of dropped lists, for reuse.
#[derive(Debug)]
pub(crate) struct ListPool {
    device: DeviceAllocator,
    /// The driver copies pinned memory asynchronously. With other memory it blocks the caller's
    /// thread until it has read the memory.
    pinned: PinnedAllocator,
    free_memory: Mutex<FreeMemory>,
}

#[derive(Debug, Default)]
struct FreeMemory {
    free: Vec<ListMemory>,
    /// Rooms above the limit, and very large ones. A thread of the engine frees them, because a
    /// free waits for the device.
    surplus: Vec<ListMemory>,
}

/// Pinned memory in which lists are written, and the device memory that they are copied to.
#[derive(Debug)]
struct ListMemory(Box<HostAndDevice>);

/// Boxed, because each transfer moves its lists several times, and few transfers have lists.
#[derive(Debug)]
struct HostAndDevice {
    host: PinnedMemory,
    device: DeviceMemory,
}

/// The minimum bytes of a list memory. They suffice for any transfer that a caller's thread submits.
const LEAST: u64 = 128 << 10;
/// The maximum number of pairs that a caller's thread lists, with two ids of four bytes each.
pub(crate) const MAX_SMALL_PAIRS: u32 = 16 << 10;
/// The number of list memories that are kept: more than there are large kernels at a time.
const MAX_FREE: usize = 8;
/// The bytes of the largest list memory that is kept: lists of half a million pairs, or the tables of the
/// checksums of a hundred thousand. The allocation of a larger one is short beside its transfer.
const LARGEST_FREE: u64 = 4 << 20;

impl ListPool {
    pub(crate) fn new(context: &Context) -> Result<Arc<Self>, CudaError> {
        // These pieces are small, and few are allocated, so the driver's own allocator is fast enough.
        let options = PinnedOptions { registration: Requirement::Off, ..PinnedOptions::default() };
        let pinned = PinnedAllocator::new(context, options)?;
        let device = DeviceAllocator::new(context);
        let pool = Arc::new(Self { device, pinned, free_memory: Mutex::default() });
        // Without memory now, the first transfer that needs list memory allocates it.
        let first = pool.make(ByteCount::ZERO).ok();
        pool.free_memory().free.extend(first);
        Ok(pool)
    }

    /// Room for lists of this size, if some is unused.
    pub(crate) fn take(self: &Arc<Self>, bytes: ByteCount) -> Option<BlockLists> {
        let mut free_memory = self.free_memory();
        let fitting =
            free_memory.free.iter().enumerate().filter(|(_, memory)| memory.bytes() >= bytes);
        let smallest = fitting.min_by_key(|(_, memory)| memory.bytes()).map(|(number, _)| number);
        let memory = smallest.map(|number| free_memory.free.swap_remove(number))?;
        drop(free_memory);
        Some(self.lend(memory))
    }

    /// Like `take`, but allocates memory if none is unused. The allocation is a slow driver call.
    ///
    /// # Errors
    ///
    /// The driver's, if there is no memory.
    pub(crate) fn take_or_allocate(
        self: &Arc<Self>,
        bytes: ByteCount,
    ) -> Result<BlockLists, CudaError> {
        match self.take(bytes) {
            Some(lists) => Ok(lists),
            None => self.make(bytes).map(|memory| self.lend(memory)),
        }
    }

    fn lend(self: &Arc<Self>, memory: ListMemory) -> BlockLists {
        BlockLists { addresses: [0; 2], memory: Some(memory), pool: Arc::clone(self) }
    }

    fn make(&self, bytes: ByteCount) -> Result<ListMemory, CudaError> {
        let memory = ByteCount::new(bytes.get().max(LEAST).next_power_of_two());
        let request =
            RegionRequest::new(memory).labelled("block ids and checksum tables of the copy engine");
        let device = self.device.allocate_memory(&request)?;
        let host = self.pinned.allocate_memory(&request)?;
        Ok(ListMemory(Box::new(HostAndDevice { host, device })))
    }

    /// Takes memory back. If there is too much, the smallest is removed, because a larger one can
    /// replace it. A very large one is not kept.
    fn keep(&self, memory: ListMemory) {
        let mut free_memory = self.free_memory();
        if memory.bytes().get() > LARGEST_FREE {
            return free_memory.surplus.push(memory);
        }
        free_memory.free.push(memory);
        if free_memory.free.len() > MAX_FREE {
            let all = free_memory.free.iter().enumerate();
            if let Some((smallest, _)) = all.min_by_key(|(_, memory)| memory.bytes()) {
                let surplus = free_memory.free.swap_remove(smallest);
                free_memory.surplus.push(surplus);
            }
        }
    }

    /// Frees the excess memory. Only for threads that may wait for the device.
    pub(crate) fn free_surplus(&self) {
        let surplus = std::mem::take(&mut self.free_memory().surplus);
        // Without the lock.
        drop(surplus);
    }

    fn free_memory(&self) -> MutexGuard<'_, FreeMemory> {
        lock(&self.free_memory)
    }
}

/// The bytes of both ends' lists.
pub(crate) fn list_bytes(blocks: [&[u32]; 2]) -> ByteCount {
    let [sources, destinations] = blocks.map(size_of_val);
    ByteCount::from_usize(sources + destinations)
}

impl ListMemory {
    fn bytes(&self) -> ByteCount {
        self.0.device.length().min(self.0.host.length())
    }
}

/// The blocks of a transfer's ends, on the device. It lives until the transfer has ended.
#[derive(Debug)]
pub(crate) struct BlockLists {
    /// The ids of the source's blocks, and of the destination's.
    pub(crate) addresses: [u64; 2],
    memory: Option<ListMemory>,
    pool: Arc<ListPool>,
}

impl BlockLists {
    /// The memory of the lists, which other tables of a job use too.
    pub(crate) fn memory(&self) -> Option<(&PinnedMemory, &DeviceMemory)> {
        self.memory.as_ref().map(|ListMemory(memory)| (&memory.host, &memory.device))
    }

    /// Copies the block ids of both ends to the device's memory, in the order of `reader`. The
    /// lists have [room](list_bytes) for them.
    ///
    /// # Errors
    ///
    /// The driver's.
    pub(crate) fn fill(&mut self, blocks: [&[u32]; 2], reader: &Stream) -> Result<(), CudaError> {
        let device = reader.context().device().id;
        let Some(ListMemory(memory)) = &self.memory else {
            return Err(CudaError::NotReached { device });
        };
        let (from, to) = (memory.host.location(), memory.device.location());
        let Some(at) = from.as_host() else { return Err(CudaError::NotReached { device }) };
        let at = at.as_ptr().cast::<u32>();
        let [sources, destinations] = blocks;
        // SAFETY: the memory has room for both lists, is aligned to pages, and belongs to this list
        // alone. The copy of the previous list ended with its transfer.
        unsafe { at.copy_from_nonoverlapping(sources.as_ptr(), sources.len()) };
        // SAFETY: it has room for at least this many.
        let behind = unsafe { at.add(sources.len()) };
        // SAFETY: as above.
        unsafe { behind.copy_from_nonoverlapping(destinations.as_ptr(), destinations.len()) };
        // SAFETY: both live until the transfer has ended, which is after this copy, and nothing
        // else uses them.
        unsafe { reader.copy(from, to, list_bytes(blocks)) }?;
        let first = memory.device.address().get();
        self.addresses = [first, first + to_u64(size_of_val(sources))];
        Ok(())
    }
}

impl Drop for BlockLists {
    fn drop(&mut self) {
        let Some(memory) = self.memory.take() else { return };
        if !memory.0.device.context().driver().is_of_parent() {
            self.pool.keep(memory);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_room_holds_the_lists_of_a_small_transfer() {
        let list = vec![0_u32; usize::try_from(MAX_SMALL_PAIRS).unwrap()];
        assert_eq!(list_bytes([&list, &list]), ByteCount::new(LEAST));
    }
}
