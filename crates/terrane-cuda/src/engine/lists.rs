//! Lists of block ids on the device, for kernels that copy more pairs than a launch carries.

use std::ptr::NonNull;
use std::sync::{Arc, Mutex, PoisonError};

use terrane_core::{ByteCount, DeviceAddress, HostAddress, Location, Memory, RegionRequest};

use crate::context::Context;
use crate::error::CudaError;
use crate::event::{Event, Timing};
use crate::memory::{DeviceAllocator, DeviceMemory};
use crate::stream::Stream;

/// Where lists are written, and the memory of those that have gone.
#[derive(Debug)]
pub(super) struct ListPool {
    context: Context,
    /// Of its own: nothing that a caller's stream does holds a list up.
    stream: Stream,
    free: Mutex<Vec<DeviceMemory>>,
}

/// The least memory that a list gets, so that most fit into another one's.
const LEAST: u64 = 64 << 10;
/// As many are kept: more than there are large kernels at a time.
const MOST_FREE: usize = 8;

impl ListPool {
    pub(super) fn new(context: &Context) -> Result<Arc<Self>, CudaError> {
        let (stream, free) = (Stream::new(context)?, Mutex::default());
        Ok(Arc::new(Self { context: context.clone(), stream, free }))
    }

    /// Has the blocks of both ends written to the device's memory, and makes `reader` wait for it.
    ///
    /// # Errors
    ///
    /// The driver's, also if there is no memory.
    pub(super) fn upload(
        self: &Arc<Self>,
        blocks: [&[u32]; 2],
        reader: &Stream,
    ) -> Result<BlockLists, CudaError> {
        let [sources, destinations] = blocks;
        let both: Vec<u32> = sources.iter().chain(destinations).copied().collect();
        let bytes = ByteCount::from_usize(size_of_val(both.as_slice()));
        let memory = self.take(bytes)?;
        let first = memory.address().get();
        let addresses = [first, first + ByteCount::from_usize(size_of_val(sources)).get()];
        let written = Event::new(&self.context, Timing::Off)?;
        let from = HostAddress::new(NonNull::from(both.as_slice()).cast::<u8>());
        let device = self.context.device().id;
        let to = Location::Device { device, address: DeviceAddress::new(first) };
        // SAFETY: the source is pageable, so that the driver has read it when the call returns; the
        // memory is this list's alone, and what read the one before has ended.
        unsafe { self.stream.copy(Location::Host(from), to, bytes) }?;
        written.record(&self.stream)?;
        reader.wait_for(&written)?;
        Ok(BlockLists { addresses, memory: Some(memory), pool: Arc::clone(self) })
    }

    fn take(&self, bytes: ByteCount) -> Result<DeviceMemory, CudaError> {
        let mut free = self.free.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(fitting) = free.iter().position(|memory| memory.length() >= bytes) {
            return Ok(free.swap_remove(fitting));
        }
        drop(free);
        let room = ByteCount::new(bytes.get().max(LEAST).next_power_of_two());
        let request = RegionRequest::new(room).labelled("block ids of the copy engine");
        DeviceAllocator::new(&self.context).bring_up(&request)
    }
}

/// The blocks of a transfer's ends, on the device. It lives until the transfer has ended.
#[derive(Debug)]
pub(super) struct BlockLists {
    /// Of the source's, and of the destination's.
    pub(super) addresses: [u64; 2],
    memory: Option<DeviceMemory>,
    pool: Arc<ListPool>,
}

impl Drop for BlockLists {
    fn drop(&mut self) {
        let mut free = self.pool.free.lock().unwrap_or_else(PoisonError::into_inner);
        if free.len() < MOST_FREE {
            free.extend(self.memory.take());
        }
    }
}
