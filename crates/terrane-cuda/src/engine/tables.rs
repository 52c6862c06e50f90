//! Lists of regions' bases on the device, for kernels where they are not at regular distances.

use std::ptr::NonNull;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};

use terrane_core::{ByteCount, DeviceAddress, HostAddress, Location, RegionRequest};

use crate::context::Context;
use crate::error::CudaError;
use crate::event::{Event, Timing};
use crate::memory::{DeviceAllocator, DeviceMemory};
use crate::stream::Stream;

/// The bytes of a base in a list.
pub(super) const ENTRY_BYTES: u64 = 8;
/// How many bases fit into a place of the common table: more than models have layers.
const PLACE_ENTRIES: usize = 256;
const PLACES: u32 = 512;

/// The device's lists of bases.
#[derive(Debug)]
pub(super) struct Tables {
    context: Context,
    stream: Stream,
    places: Arc<Places>,
}

/// One allocation that most lists have a place in.
#[derive(Debug)]
struct Places {
    memory: OnceLock<DeviceMemory>,
    free: Mutex<Vec<u32>>,
}

/// A list on the device.
#[derive(Debug)]
pub(super) struct Table {
    pub(super) address: u64,
    written: Event,
    is_written: AtomicBool,
    _place: TablePlace,
}

#[derive(Debug)]
enum TablePlace {
    Common { places: Arc<Places>, number: u32 },
    Own { _memory: DeviceMemory },
}

impl Tables {
    pub(super) fn new(context: &Context) -> Result<Self, CudaError> {
        let free = Mutex::new((0..PLACES).rev().collect());
        let places = Arc::new(Places { memory: OnceLock::new(), free });
        Ok(Self { context: context.clone(), stream: Stream::new(context)?, places })
    }

    /// Has `bases` written to the device's memory, without waiting for it.
    pub(super) fn upload(&self, bases: &[u64]) -> Result<Table, CudaError> {
        let bytes = ByteCount::from_usize(size_of_val(bases));
        let (address, place) = self.place(bases.len(), bytes)?;
        let written = Event::new(&self.context, Timing::Off)?;
        let from = Location::Host(HostAddress::new(NonNull::from(bases).cast::<u64>()));
        let device = self.context.device().id;
        let to = Location::Device { device, address: DeviceAddress::new(address) };
        // Dropped on the way out, the place is given back.
        let table = Table { address, written, is_written: AtomicBool::new(false), _place: place };
        // SAFETY: the source is pageable, so that the driver has read it when the call returns;
        // the place is this list's alone, and its last user has ended, as it held the list.
        unsafe { self.stream.copy(from, to, bytes) }?;
        table.written.record(&self.stream)?;
        Ok(table)
    }

    fn place(&self, entries: usize, bytes: ByteCount) -> Result<(u64, TablePlace), CudaError> {
        let allocate = |bytes: ByteCount| {
            let request = RegionRequest::new(bytes).labelled("bases of regions");
            DeviceAllocator::new(&self.context).bring_up(&request)
        };
        let place_bytes = ByteCount::from_usize(PLACE_ENTRIES).get() * ENTRY_BYTES;
        if entries <= PLACE_ENTRIES {
            let mut free = self.places.free.lock().unwrap_or_else(PoisonError::into_inner);
            if let Some(&number) = free.last() {
                let memory = match self.places.memory.get() {
                    Some(memory) => memory,
                    None => {
                        let all = ByteCount::new(place_bytes * u64::from(PLACES));
                        let memory = allocate(all)?;
                        self.places.memory.get_or_init(|| memory)
                    }
                };
                let address = memory.address().get() + place_bytes * u64::from(number);
                free.pop();
                let places = Arc::clone(&self.places);
                return Ok((address, TablePlace::Common { places, number }));
            }
        }
        let memory = allocate(bytes)?;
        Ok((memory.address().get(), TablePlace::Own { _memory: memory }))
    }
}

impl Table {
    /// Has `stream` wait for the list, if it is not known to be there.
    pub(super) fn ready_for(&self, stream: &Stream) -> Result<(), CudaError> {
        if self.is_written.load(Ordering::Acquire) {
            return Ok(());
        }
        if self.written.is_complete()? {
            self.is_written.store(true, Ordering::Release);
            return Ok(());
        }
        stream.wait_for(&self.written)
    }
}

impl Drop for TablePlace {
    fn drop(&mut self) {
        if let Self::Common { places, number } = self {
            places.free.lock().unwrap_or_else(PoisonError::into_inner).push(*number);
        }
    }
}
