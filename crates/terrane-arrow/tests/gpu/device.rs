//! Device memory that was mapped in pieces, and releases that cannot wait for their stream.

use arrow_schema::DataType;
use terrane_arrow::arrays::{Ready, ReleaseOrder, export_device_array, import_device_array};
use terrane_arrow::columns::Column;
use terrane_core::{Allocate, ByteCount, Location, Memory, Region, RegionRequest};
use terrane_cuda::{Context, DeviceAllocator, Stream};
use terrane_testkit::needs::{LITTLE, Needs};
use terrane_testkit::simulated_cuda::Pieces;

use crate::arrays::foreign;
use crate::support::simulated;

fn memory(context: &Context, bytes: u64) -> Region {
    let request = RegionRequest::new(ByteCount::new(bytes)).labelled("array");
    Region::new(DeviceAllocator::new(context).allocate(&request).unwrap())
}

#[test]
fn an_array_in_pieces_is_taken_if_it_was_mapped_as_one() {
    let name = "device::an_array_in_pieces_is_taken_if_it_was_mapped_as_one";
    terrane_testkit::process::in_child(name, || {
        let Some((context, driver)) = simulated(name, Needs::of_device(ByteCount::mib(8))) else {
            return;
        };
        let stream = Stream::new(&context).unwrap();
        let bytes = 6 << 20;
        let region = memory(&context, bytes);
        let Location::Device { address, .. } = region.location() else { panic!("{region:?}") };
        let array = || {
            let column = Column::new(DataType::Int8, bytes, region.clone()).unwrap();
            let array = foreign(&column, Ready::Now);
            // SAFETY: it obeys the specification.
            unsafe { import_device_array(&DataType::Int8, array) }.unwrap().wait_on(&stream)
        };
        assert!(array().is_ok());
        driver.in_pieces(address.get(), Pieces::Mapped);
        assert!(array().is_ok());
        driver.in_pieces(address.get(), Pieces::Neighbours);
        assert!(array().is_err());
    });
}

#[test]
fn an_array_whose_stream_cannot_be_waited_for_is_kept() {
    let name = "device::an_array_whose_stream_cannot_be_waited_for_is_kept";
    terrane_testkit::process::in_child(name, || {
        /// The driver's error for a stream that is being captured.
        const STREAM_CAPTURE_UNSUPPORTED: u32 = 900;
        let Some((context, driver)) = simulated(name, LITTLE) else { return };
        let column = Column::new(DataType::Int64, 8, memory(&context, 64)).unwrap();
        let done = ReleaseOrder::After(Stream::new(&context).unwrap());
        // SAFETY: no code writes the column.
        let array = unsafe { export_device_array(&column, Ready::Now, done) }.unwrap();
        drop(column);
        driver.fail("cuStreamSynchronize", 0, STREAM_CAPTURE_UNSUPPORTED);
        drop(array);
        assert_eq!((context.failed_drops(), context.lost()), (1, None));
        assert_ne!(context.usage().device.bytes, ByteCount::ZERO);
    });
}
