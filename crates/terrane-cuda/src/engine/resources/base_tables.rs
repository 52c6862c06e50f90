//! Lists of regions' base addresses on the device, for kernels whose bases are not at regular
//! distances.

use std::ptr::NonNull;
use std::sync::{Arc, Mutex};

use terrane_core::convert::to_u64;
use terrane_core::sync::lock;
use terrane_core::{ByteCount, DeviceAddress, HostAddress, Location, RegionRequest};

use crate::error::CudaError;
use crate::memory::device::{DeviceAllocator, DeviceMemory};
use crate::runtime::context::Context;
use crate::runtime::event::Event;
use crate::runtime::stream::Stream;

/// The bytes of a base in a list.
pub(crate) const ENTRY_BYTES: u64 = 8;
/// The number of bases that fit into a slot of the common table: more than models have layers.
const SLOT_ENTRIES: usize = 256;
const SLOTS: u32 = 512;

/// The device's lists of bases.
#[derive(Debug)]
pub(crate) struct BaseTables {
    context: Context,
    stream: Stream,
    places: Arc<TableSlots>,
}

/// One allocation with slots for most lists.
#[derive(Debug)]
struct TableSlots {
    /// `None` if there was none when the engine was created.
    memory: Option<DeviceMemory>,
    free: Mutex<Vec<u32>>,
}

/// A list on the device.
#[derive(Debug)]
pub(crate) struct BaseTable {
    pub(crate) address: u64,
    written: Event,
    _place: TableSlot,
}

#[derive(Debug)]
enum TableSlot {
    Common { places: Arc<TableSlots>, number: u32 },
    Own { _memory: DeviceMemory },
}

impl BaseTables {
    /// # Errors
    ///
    /// The errors of creating a stream. Without memory, each list allocates its own.
    pub(crate) fn new(context: &Context) -> Result<Self, CudaError> {
        let stream = Stream::new(context)?;
        let all = ByteCount::new(slot_bytes().get() * u64::from(SLOTS));
        let request = RegionRequest::new(all).labelled("bases of regions");
        let memory = DeviceAllocator::new(context).allocate_memory(&request).ok();
        let numbers = if memory.is_some() { 0..SLOTS } else { 0..0 };
        let places = Arc::new(TableSlots { memory, free: Mutex::new(numbers.rev().collect()) });
        Ok(Self { context: context.clone(), stream, places })
    }

    /// Writes `bases` to the device's memory, without waiting for it.
    pub(crate) fn upload(&self, bases: &[u64]) -> Result<BaseTable, CudaError> {
        let bytes = ByteCount::from_usize(size_of_val(bases));
        let (address, place) = self.place(bases.len(), bytes)?;
        let from = Location::Host(HostAddress::new(NonNull::from(bases).cast::<u64>()));
        let device = self.context.device().id;
        let to = Location::Device { device, address: DeviceAddress::new(address) };
        // SAFETY: the source is pageable, so the driver has read it when the call returns. The slot
        // belongs to this list alone. Its last user has ended, because it held the list.
        unsafe { self.stream.copy(from, to, bytes) }?;
        // If this fails, the next upload to the slot runs after this one.
        let written = Event::queried_after(&self.stream)?;
        Ok(BaseTable { address, written, _place: place })
    }

    fn place(&self, entries: usize, bytes: ByteCount) -> Result<(u64, TableSlot), CudaError> {
        if let Some(memory) = self.places.memory.as_ref().filter(|_| entries <= SLOT_ENTRIES) {
            let number = lock(&self.places.free).pop();
            if let Some(number) = number {
                let address = memory.address().get() + slot_bytes().get() * u64::from(number);
                let places = Arc::clone(&self.places);
                return Ok((address, TableSlot::Common { places, number }));
            }
        }
        let request = RegionRequest::new(bytes).labelled("bases of regions");
        let memory = DeviceAllocator::new(&self.context).allocate_memory(&request)?;
        Ok((memory.address().get(), TableSlot::Own { _memory: memory }))
    }
}

impl TableSlots {
    fn is_of_parent(&self) -> bool {
        self.memory.as_ref().is_some_and(|memory| memory.context().driver().is_of_parent())
    }
}

/// The bytes of a slot.
fn slot_bytes() -> ByteCount {
    ByteCount::new(to_u64(SLOT_ENTRIES) * ENTRY_BYTES)
}

impl BaseTable {
    /// Makes `stream` wait for the list, unless the upload is known to be complete.
    pub(crate) fn ready_for(&self, stream: &Stream) -> Result<(), CudaError> {
        if self.written.is_complete()? { Ok(()) } else { stream.wait_for(&self.written) }
    }
}

impl Drop for TableSlot {
    fn drop(&mut self) {
        if let Self::Common { places, number } = self
            && !places.is_of_parent()
        {
            lock(&places.free).push(*number);
        }
    }
}
