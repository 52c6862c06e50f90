//! A simulated driver, and memory of the device with known bytes.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use terrane_arrow::columns::AccessOrder;
use terrane_core::{Alignment, Allocate, ByteCount, Location, Memory, Region, RegionRequest};
use terrane_cuda::{Context, DeviceAllocator, Stream};
use terrane_testkit::simulated_cuda::SimulatedCuda;

use crate::needs::{Needs, device};

/// The device and its driver, or `None` after having said that it is not simulated.
pub fn simulated(test: &str, needs: Needs) -> Option<(Context, SimulatedCuda)> {
    let context = device(test, needs)?;
    let driver = SimulatedCuda::find();
    if driver.is_none() {
        eprintln!("skipped: {test}: a simulated device needed, this one is real");
    }
    Some((context, driver?))
}

/// Memory of the device that holds these bytes.
pub fn filled(context: &Context, stream: &Stream, bytes: &[u8]) -> Region {
    let request = RegionRequest::new(ByteCount::from_usize(bytes.len()));
    let request = request.aligned_to(Alignment::of(64));
    let region = Region::new(DeviceAllocator::new(context).allocate(&request).unwrap());
    // SAFETY: the memory is new, and no other code's.
    unsafe { AccessOrder::write(stream, bytes, region.location()) }.unwrap();
    region
}

/// The bytes of the device from a place on, after what the stream was given.
pub fn read(stream: &Stream, from: Location, bytes: usize) -> Vec<u8> {
    let mut read = vec![0; bytes];
    // SAFETY: the tests read what they have allocated, and have ordered its writers.
    unsafe { AccessOrder::read(stream, from, &mut read) }.unwrap();
    read
}

/// Notes, when it drops, whether a stream had run by then.
pub struct Sees {
    pub stream: Stream,
    pub had_run: Arc<AtomicBool>,
}

impl Drop for Sees {
    fn drop(&mut self) {
        self.had_run.store(self.stream.is_idle().unwrap(), Ordering::SeqCst);
    }
}
