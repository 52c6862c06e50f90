//! Columnar buffers on a device, where kernels write the row count.

use std::sync::Arc;

use arrow_schema::{DataType, Field, Schema};
use terrane_arrow::arrays::{Ready, ReleaseOrder, export_device_array, import_device_array};
use terrane_arrow::columns::{
    AccessOrder, CachedRows, ColumnError, ColumnarBuffer, ColumnarOptions, ColumnarPlan, Growth,
    HostOrder, RowCountWidth,
};
use terrane_core::{Allocate, ByteCount, Location, Memory, Region};
use terrane_cuda::{Context, DeviceAllocator, DevicePool, PinnedAllocator, PinnedOptions, Stream};
use terrane_pool::adaptors::{Budget, Limit};
use terrane_pool::{Pool, PoolOptions};
use terrane_testkit::needs::{LITTLE, Needs};

use crate::needs::device;
use crate::support::{read, simulated};

fn plan(capacity: u64, width: RowCountWidth) -> ColumnarPlan {
    let fields = vec![
        Field::new("token", DataType::UInt32, false),
        Field::new("score", DataType::Float64, true),
    ];
    let options = ColumnarOptions {
        row_count: width,
        growth: Growth::Doubling,
        ..ColumnarOptions::default()
    };
    ColumnarPlan::new(Arc::new(Schema::new(fields)), capacity, options).unwrap()
}

/// The address of a region for a device.
fn reached(context: &Context, region: &Region) -> Location {
    let device = context.device().id;
    match region.device_alias() {
        Some(address) => Location::Device { device, address },
        None => region.location(),
    }
}

/// Simulates a kernel: writes values and their count in the stream's order.
fn produce(stream: &Stream, buffer: &mut ColumnarBuffer, rows: u8) {
    let tokens = buffer.columns()[0].buffers()[1].clone().unwrap();
    let tokens = reached(stream.context(), tokens.region().unwrap());
    let length = buffer.row_count().length();
    let count = reached(stream.context(), buffer.row_count());
    let bytes = ByteCount::new(4 * u64::from(rows).min(buffer.capacity()));
    // SAFETY: the buffer lives until the synchronisation of the stream, and no other code uses it.
    unsafe { stream.fill(tokens, rows, bytes) }.unwrap();
    // SAFETY: as above.
    unsafe { stream.fill(count, 0, length) }.unwrap();
    // SAFETY: as above. Devices are little-endian, so the lowest byte is the first.
    unsafe { stream.fill(count, rows, ByteCount::new(1)) }.unwrap();
    buffer.mark_stale();
}

fn check<A: Allocate>(context: &Context, allocator: &A) {
    let stream = Stream::new(context).unwrap();
    for width in [RowCountWidth::U32, RowCountWidth::U64] {
        let plan = plan(100, width);
        let mut buffer = plan.allocate(allocator, &stream).unwrap();
        assert!(buffer.memory().unwrap().length() >= plan.size());
        assert_eq!((buffer.kind(), buffer.rows().unwrap()), (allocator.kind(), 0));
        for rows in [10, 100] {
            produce(&stream, &mut buffer, rows);
            assert_eq!(buffer.cached_rows(), CachedRows::Stale);
            assert!(matches!(buffer.record_batch(), Err(ColumnError::StaleRowCount)));
            // SAFETY: the writer of the count was submitted to this stream.
            assert_eq!(unsafe { buffer.refresh(&stream) }.unwrap(), u64::from(rows));
        }
        produce(&stream, &mut buffer, 101);
        // SAFETY: as above.
        let error = unsafe { buffer.refresh(&stream) }.unwrap_err();
        assert!(matches!(error, ColumnError::OverCapacity { rows: 101, .. }), "{error}");
        produce(&stream, &mut buffer, 99);
        // SAFETY: as above.
        unsafe { buffer.refresh(&stream) }.unwrap();
        // SAFETY: no other code writes the buffer.
        let larger = unsafe { buffer.grown(101, allocator, &stream) }.unwrap();
        drop(buffer);
        assert_eq!((larger.capacity(), larger.rows().unwrap()), (200, 99));
        let tokens = larger.columns()[0].values().unwrap();
        assert_eq!(read(&stream, tokens, 4 * 99), [99; 4 * 99]);
        let batch = larger.record_batch().unwrap();
        let ready = Ready::after(&stream).unwrap();
        // SAFETY: no code writes the batch from then on.
        let array = unsafe { export_device_array(&batch, ready, ReleaseOrder::AtRelease) }.unwrap();
        drop(larger);
        // SAFETY: this crate created the array.
        let back = unsafe { import_device_array(batch.data_type(), array) }.unwrap();
        assert!(back.wait_on(&stream).unwrap().is_same(&batch));
        let tokens = batch.children()[0].values().unwrap();
        assert_eq!(read(&stream, tokens, 4), [99; 4], "the batch keeps the memory");
    }
    assert_eq!(context.lost(), None);
}

#[test]
fn columnar_buffers_stand_over_device_memory_and_pools_and_budgets() {
    let name = "columnar_buffers_stand_over_device_memory_and_pools_and_budgets";
    let needs = Needs::of_device(ByteCount::mib(64)).and_host(ByteCount::mib(4)).and_pools();
    let Some(context) = device(name, needs) else { return };
    let device = DeviceAllocator::new(&context);
    check(&context, &device);
    check(&context, &DevicePool::new(&context, ByteCount::mib(16)).unwrap());
    // The device must have enough memory for a block of the largest class.
    let options = PoolOptions { largest_class: ByteCount::mib(16), ..PoolOptions::default() };
    check(&context, &Pool::new(device.clone(), options).unwrap());
    let budget = Budget::new("columns", ByteCount::mib(1));
    check(&context, &Limit::new(device, budget.clone()));
    assert_eq!(budget.live(), ByteCount::ZERO);
    check(&context, &PinnedAllocator::new(&context, PinnedOptions::default()).unwrap());
}

#[test]
fn the_estimate_is_the_allocated_size_on_the_device() {
    let name = "the_estimate_is_the_allocated_size_on_the_device";
    let Some(context) = device(name, LITTLE) else { return };
    let (stream, allocator) = (Stream::new(&context).unwrap(), DeviceAllocator::new(&context));
    for capacity in [0, 1, 63, 64, 65, 10_000] {
        let plan = plan(capacity, RowCountWidth::U64);
        let before = context.usage().device;
        let buffer = plan.allocate(&allocator, &stream).unwrap();
        let held = context.usage().device;
        let more = held.bytes.checked_sub(before.bytes).unwrap();
        assert_eq!(more, plan.size(), "{capacity}");
        assert_eq!(plan.size_under(allocator.limits()).unwrap(), plan.size());
        drop(buffer);
        assert_eq!(context.usage().device, before);
    }
}

#[test]
fn a_device_is_out_of_the_hosts_reach() {
    let Some(context) = device("a_device_is_out_of_the_hosts_reach", LITTLE) else { return };
    let before = context.usage().device;
    let plan = plan(10, RowCountWidth::U64);
    let error = plan.allocate(&DeviceAllocator::new(&context), &HostOrder).unwrap_err();
    assert!(matches!(error, ColumnError::Unreachable { .. }), "{error}");
    assert_eq!(context.usage().device, before);
}

#[test]
fn a_count_is_read_behind_the_kernel_that_writes_it() {
    let name = "buffers::a_count_is_read_behind_the_kernel_that_writes_it";
    terrane_testkit::process::in_child(name, || {
        let Some((context, driver)) = simulated(name, LITTLE) else { return };
        let stream = Stream::new(&context).unwrap();
        let plan = plan(100, RowCountWidth::U32);
        let mut buffer = plan.allocate(&DeviceAllocator::new(&context), &stream).unwrap();
        let held = driver.hold(stream.handle());
        produce(&stream, &mut buffer, 42);
        std::thread::scope(|scope| {
            let (reader, stream) = (&mut buffer, &stream);
            // SAFETY: the writer of the count was submitted to this stream.
            let read = move || unsafe { reader.refresh(stream) }.unwrap();
            let thread = std::thread::Builder::new().name("reader".into());
            let thread = thread.spawn_scoped(scope, read).unwrap();
            for _ in 0..100 {
                assert!(!stream.is_idle().unwrap(), "the kernel has not run");
            }
            drop(held);
            assert_eq!(thread.join().unwrap(), 42);
        });
    });
}

#[test]
fn an_error_of_the_driver_leaves_the_cached_count_stale() {
    let name = "buffers::an_error_of_the_driver_leaves_the_cached_count_stale";
    terrane_testkit::process::in_child(name, || {
        let Some((context, driver)) = simulated(name, LITTLE) else { return };
        let stream = Stream::new(&context).unwrap();
        let plan = plan(100, RowCountWidth::U64);
        let mut buffer = plan.allocate(&DeviceAllocator::new(&context), &stream).unwrap();
        driver.fail("cuMemcpyAsync", 0, 1);
        // SAFETY: no code writes the count.
        let error = unsafe { buffer.refresh(&stream) }.unwrap_err();
        assert!(matches!(error, ColumnError::Cuda(_)), "{error}");
        assert_eq!(buffer.cached_rows(), CachedRows::Stale);
        driver.fail("cuMemcpyAsync", 0, 1);
        // SAFETY: no other code uses the buffer.
        assert!(unsafe { buffer.set_rows(5, &stream) }.is_err());
        assert_eq!(buffer.cached_rows(), CachedRows::Stale);
        // SAFETY: as above.
        unsafe { AccessOrder::write(&stream, &[3], buffer.row_count().location()) }.unwrap();
        // SAFETY: as above.
        assert_eq!(unsafe { buffer.refresh(&stream) }.unwrap(), 3);
    });
}

/// If the driver refuses to wait for a copy, both of its ends stay allocated.
#[test]
fn memory_is_kept_if_the_end_of_its_copy_is_unknown() {
    /// `CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED`.
    const CAPTURING: u32 = 900;
    let name = "buffers::memory_is_kept_if_the_end_of_its_copy_is_unknown";
    terrane_testkit::process::in_child(name, || {
        let Some((context, driver)) = simulated(name, LITTLE) else { return };
        let stream = Stream::new(&context).unwrap();
        let allocator = DeviceAllocator::new(&context);
        let plan = plan(100, RowCountWidth::U64);
        let live = || context.usage().device.count;
        let new = || plan.allocate(&allocator, &stream).unwrap();
        let is_unknown = |error: &ColumnError| matches!(error, ColumnError::EndUnknown(_));

        let mut buffer = new();
        driver.fail("cuStreamSynchronize", 0, CAPTURING);
        // SAFETY: no code writes the count.
        let error = unsafe { buffer.refresh(&stream) }.unwrap_err();
        assert!(is_unknown(&error), "{error}");
        assert_eq!(buffer.cached_rows(), CachedRows::Stale);
        drop(buffer);
        assert_eq!((live(), context.failed_drops()), (1, 1));

        driver.fail("cuStreamSynchronize", 0, CAPTURING);
        let error = plan.allocate(&allocator, &stream).unwrap_err();
        assert!(is_unknown(&error), "{error}");
        assert_eq!((live(), context.failed_drops()), (2, 2));

        // The first wait is for the row count of the larger buffer, the next for its columns, and
        // the last for the copied row count.
        for (kept, waits) in [(4, 1), (6, 4)] {
            let buffer = new();
            driver.fail("cuStreamSynchronize", waits, CAPTURING);
            // SAFETY: no code writes the buffer.
            let error = unsafe { buffer.grown(101, &allocator, &stream) }.unwrap_err();
            assert!(is_unknown(&error), "{error}");
            drop(buffer);
            assert_eq!(live(), kept);
        }
        assert_eq!((driver.clear_faults(), context.lost()), (0, None));
    });
}
