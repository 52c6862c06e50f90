//! Lists of block ids on the device, for kernels that copy more pairs than a launch carries.

use std::sync::{Arc, Mutex, PoisonError};

use terrane_core::{ByteCount, Memory, RegionRequest, Wish};

use crate::context::Context;
use crate::error::CudaError;
use crate::memory::{DeviceAllocator, DeviceMemory, PinnedAllocator, PinnedMemory, PinnedOptions};
use crate::stream::Stream;

/// The memory of lists that have gone.
#[derive(Debug)]
pub(super) struct ListPool {
    device: DeviceAllocator,
    /// What lies in pinned memory is copied without the caller's thread, which the driver holds up
    /// for other memory until it has read it.
    pinned: PinnedAllocator,
    free: Mutex<Vec<Room>>,
}

/// Where lists are written, and where they go.
#[derive(Debug)]
struct Room {
    host: PinnedMemory,
    device: DeviceMemory,
}

/// The least memory that a list gets, so that most fit into another one's.
const LEAST: u64 = 64 << 10;
/// As many are kept: more than there are large kernels at a time.
const MOST_FREE: usize = 8;

impl ListPool {
    pub(super) fn new(context: &Context) -> Result<Arc<Self>, CudaError> {
        // So little memory is the driver's to allocate.
        let options = PinnedOptions { registration: Wish::Off, ..PinnedOptions::default() };
        let pinned = PinnedAllocator::new(context, options)?;
        let device = DeviceAllocator::new(context);
        Ok(Arc::new(Self { device, pinned, free: Mutex::default() }))
    }

    /// Has the blocks of both ends copied to the device's memory, in the order of `reader`.
    ///
    /// # Errors
    ///
    /// The driver's, also if there is no memory.
    pub(super) fn upload(
        self: &Arc<Self>,
        blocks: [&[u32]; 2],
        reader: &Stream,
    ) -> Result<BlockLists, CudaError> {
        let [sources, destinations] = blocks.map(|list| ByteCount::from_usize(size_of_val(list)));
        let bytes = ByteCount::new(sources.get() + destinations.get());
        let room = self.take(bytes)?;
        let first = room.device.address().get();
        let addresses = [first, first + sources.get()];
        let (from, to) = (room.host.location(), room.device.location());
        let device = reader.context().device().id;
        let Some(at) = from.as_host() else { return Err(CudaError::NotReached { device }) };
        let at = at.as_ptr().cast::<u32>();
        let [sources, destinations] = blocks;
        // SAFETY: the memory has room for both lists, is aligned to pages, and is this list's alone:
        // the copy of the one before it has ended with its transfer.
        unsafe { at.copy_from_nonoverlapping(sources.as_ptr(), sources.len()) };
        // SAFETY: it has room for as many and more.
        let behind = unsafe { at.add(sources.len()) };
        // SAFETY: as above.
        unsafe { behind.copy_from_nonoverlapping(destinations.as_ptr(), destinations.len()) };
        // SAFETY: both live until the transfer has ended, which comes after this copy, and are
        // nobody else's.
        unsafe { reader.copy(from, to, bytes) }?;
        Ok(BlockLists { addresses, room: Some(room), pool: Arc::clone(self) })
    }

    fn take(&self, bytes: ByteCount) -> Result<Room, CudaError> {
        let mut free = self.free.lock().unwrap_or_else(PoisonError::into_inner);
        let fits = |room: &Room| room.device.length().min(room.host.length()) >= bytes;
        if let Some(fitting) = free.iter().position(fits) {
            return Ok(free.swap_remove(fitting));
        }
        drop(free);
        let room = ByteCount::new(bytes.get().max(LEAST).next_power_of_two());
        let request = RegionRequest::new(room).labelled("block ids of the copy engine");
        let device = self.device.bring_up(&request)?;
        Ok(Room { host: self.pinned.bring_up(&request)?, device })
    }
}

/// The blocks of a transfer's ends, on the device. It lives until the transfer has ended.
#[derive(Debug)]
pub(super) struct BlockLists {
    /// Of the source's, and of the destination's.
    pub(super) addresses: [u64; 2],
    room: Option<Room>,
    pool: Arc<ListPool>,
}

impl Drop for BlockLists {
    fn drop(&mut self) {
        let mut free = self.pool.free.lock().unwrap_or_else(PoisonError::into_inner);
        if free.len() < MOST_FREE {
            free.extend(self.room.take());
        }
    }
}
