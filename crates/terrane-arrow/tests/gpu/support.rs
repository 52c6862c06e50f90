//! A simulated driver, and device memory with known bytes.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use terrane_arrow::columns::AccessOrder;
use terrane_core::{Alignment, Allocate, ByteCount, Location, Memory, Region, RegionRequest};
use terrane_cuda::{Context, DeviceAllocator, Stream};
use terrane_testkit::needs::Needs;
use terrane_testkit::simulated_cuda::SimulatedCuda;

use crate::needs::device;

/// The simulated device and its driver. On a real device, prints a skip and returns `None`.
pub fn simulated(test: &str, needs: Needs) -> Option<(Context, SimulatedCuda)> {
    Some((device(test, needs)?, SimulatedCuda::find_or_skip(test)?))
}

/// Device memory with these bytes.
pub fn filled(context: &Context, stream: &Stream, bytes: &[u8]) -> Region {
    let request = RegionRequest::new(ByteCount::from_usize(bytes.len()));
    let request = request.aligned_to(Alignment::of(64));
    let region = Region::new(DeviceAllocator::new(context).allocate(&request).unwrap());
    // SAFETY: the memory is new, and no other code uses it.
    unsafe { AccessOrder::write(stream, bytes, region.location()) }.unwrap();
    region
}

/// Reads device memory at a location, after the work that was submitted to the stream.
pub fn read(stream: &Stream, from: Location, bytes: usize) -> Vec<u8> {
    let mut read = vec![0; bytes];
    // SAFETY: the tests read memory that they have allocated, after its writers.
    unsafe { AccessOrder::read(stream, from, &mut read) }.unwrap();
    read
}

/// Records on drop whether a stream has completed.
pub struct RecordsIdle {
    pub stream: Stream,
    pub had_run: Arc<AtomicBool>,
}

impl Drop for RecordsIdle {
    fn drop(&mut self) {
        self.had_run.store(self.stream.is_idle().unwrap(), Ordering::SeqCst);
    }
}
