//! Columns and row counts of managed memory as arguments of `cudarc`'s kernels.

use std::sync::Arc;

use arrow_schema::{DataType, Field, Schema};
use cudarc::driver::{CudaContext, CudaFunction, CudaStream, LaunchConfig, PushKernelArg};
use terrane_arrow::columns::{
    CachedRows, Column, ColumnBuffer, ColumnError, ColumnarBuffer, ColumnarOptions, ColumnarPlan,
    RowCountWidth,
};
use terrane_core::{ByteCount, Region};
use terrane_cuda::cudarc::CudarcStream;
use terrane_cuda::{Context, CudaError, CudaStreams, DeviceAllocator, Stream};
use terrane_interop::dlpack::Importer;
use terrane_pool::adaptors::Budget;
use terrane_pool::managed::{ManagedBlock, ManagerOptions, MemoryManager};
use terrane_pool::{Access, Pool, PoolOptions};
use terrane_testkit::needs::LITTLE;
use terrane_testkit::ptx::ADD_ONE;

use crate::needs::device;

struct Setup {
    device: DeviceAllocator,
    manager: MemoryManager<Pool<DeviceAllocator>>,
    theirs: Arc<CudaStream>,
    stream: CudarcStream,
    kernel: CudaFunction,
    order: Stream,
}

impl Setup {
    fn new(context: &Context) -> Self {
        let streams = CudaStreams::new(context);
        let device = DeviceAllocator::new(context);
        let pool = Pool::new(device.clone(), PoolOptions::default()).unwrap();
        let options =
            ManagerOptions { fences: Some(Arc::new(streams.clone())), ..ManagerOptions::default() };
        let manager = MemoryManager::new(pool, Budget::new("device", ByteCount::mib(32)), options);
        let cudarc = CudaContext::new(0).unwrap();
        let theirs = cudarc.new_stream().unwrap();
        let stream = CudarcStream::new(&streams, &theirs).unwrap();
        let kernel = cudarc.load_module(ADD_ONE.into()).unwrap().load_function("add_one").unwrap();
        let order = Stream::new(context).unwrap();
        Self { device, manager, theirs, stream, kernel, order }
    }

    fn buffer(&self) -> ColumnarBuffer {
        let fields = vec![
            Field::new("token", DataType::UInt32, false),
            Field::new("score", DataType::Float64, true),
        ];
        let options =
            ColumnarOptions { row_count: RowCountWidth::U32, ..ColumnarOptions::default() };
        let plan = ColumnarPlan::new(Arc::new(Schema::new(fields)), 1000, options).unwrap();
        plan.allocate(&self.manager, &self.order).unwrap()
    }
}

#[test]
fn columns_and_row_counts_are_arguments_and_name_their_block() {
    let name = "columns_and_row_counts_are_arguments_and_name_their_block";
    let Some(context) = device(name, LITTLE) else { return };
    let setup = Setup::new(&context);
    let Setup { manager, theirs, stream, kernel, .. } = &setup;
    let mut buffer = setup.buffer();
    let handle = buffer.block().unwrap().handle();
    let column = buffer.column("token").unwrap().clone();
    let identity = column.block().unwrap().identity().unwrap();
    assert_eq!((identity.handle, identity.tag.as_str()), (handle, "columns"));
    assert_eq!(identity, manager.identity(handle).unwrap());
    assert_eq!(column.buffers()[1].as_ref().unwrap().block().unwrap().handle(), handle);

    let numbers: Vec<u32> = (0..1000).collect();
    theirs.memcpy_htod(&numbers, &mut column.write_on(stream).unwrap()).unwrap();
    let (values, count) = (column.write_on::<u32>(stream).unwrap(), 1000_u32);
    // SAFETY: the kernel takes a pointer to numbers, and their count.
    unsafe {
        let launch = LaunchConfig::for_num_elems(count);
        theirs.launch_builder(kernel).arg(&values).arg(&count).launch(launch)
    }
    .unwrap();
    assert_eq!(buffer.block().unwrap().uses(), [(stream.id(), Access::Write)]);
    let part = column.slice(10, 5).unwrap();
    let mut seen = vec![0; 5];
    theirs.memcpy_dtoh(&part.read_on::<u32>(stream).unwrap(), &mut seen).unwrap();
    theirs.synchronize().unwrap();
    assert_eq!(seen, [11, 12, 13, 14, 15]);

    for _ in 0..3 {
        let (rows, one) = (buffer.write_rows_on::<u32>(stream).unwrap(), 1_u32);
        // SAFETY: as above, for one number.
        unsafe {
            let launch = LaunchConfig::for_num_elems(one);
            theirs.launch_builder(kernel).arg(&rows).arg(&one).launch(launch)
        }
        .unwrap();
        assert_eq!(buffer.cached_rows(), CachedRows::Stale);
    }
    let mut rows = vec![0];
    theirs.memcpy_dtoh(&buffer.read_rows_on::<u32>(stream).unwrap(), &mut rows).unwrap();
    theirs.synchronize().unwrap();
    assert_eq!(rows, [3]);
    // SAFETY: all writers of the count have completed.
    assert_eq!(unsafe { buffer.refresh(&setup.order) }.unwrap(), 3);

    // The block is freed when the work of the stream has completed.
    drop((buffer, part, column));
    assert_eq!(manager.pending(), 1);
    theirs.synchronize().unwrap();
    assert_eq!((manager.reap(), manager.allocated()), (1, ByteCount::ZERO));
    theirs.context().check_err().expect("the kernel used no freed memory");
}

#[test]
fn a_column_that_was_a_tensor_names_the_same_block() {
    let name = "a_column_that_was_a_tensor_names_the_same_block";
    let Some(context) = device(name, LITTLE) else { return };
    let setup = Setup::new(&context);
    let slice = setup.manager.allocate_slice::<u32>(100).unwrap();
    let handle = slice.block().handle();
    let column = Column::new(DataType::UInt32, 100, Region::new(slice.into_block())).unwrap();
    // SAFETY: no code writes the column.
    let export = unsafe { column.to_tensor() }.unwrap();
    // SAFETY: nothing is submitted for the tensor.
    let export = unsafe { export.released_when_done() };
    let tensor = export.into_versioned().unwrap().into_raw();
    let importer = Importer::new().with_device(context.clone());
    // SAFETY: the tensor was created above, and is passed on once.
    let tensor = unsafe { importer.versioned(tensor.as_ptr()) }.unwrap();
    let back = Column::from_tensor(&tensor).unwrap();
    assert_eq!(back.block().map(ManagedBlock::handle), Some(handle));
    let reads = back.read_on::<u32>(&setup.stream).unwrap();
    assert!(!format!("{reads:?}").is_empty());
    assert_eq!(column.block().unwrap().uses(), [(setup.stream.id(), Access::Read)]);
    let error = back.write_on::<u32>(&setup.stream).unwrap_err();
    assert!(matches!(error, ColumnError::ReadOnly { .. }), "{error}");
}

#[test]
fn invalid_kernel_arguments_are_refused() {
    use terrane_core::{Allocate, RegionRequest};

    let name = "invalid_kernel_arguments_are_refused";
    let Some(context) = device(name, LITTLE) else { return };
    let setup = Setup::new(&context);
    let stream = &setup.stream;
    let mut buffer = setup.buffer();
    let wrong = |error: ColumnError| matches!(error, ColumnError::WrongElement { .. });
    assert!(wrong(buffer.write_rows_on::<u64>(stream).unwrap_err()));
    assert_eq!(buffer.cached_rows(), CachedRows::Known(0), "nothing was submitted");
    assert!(wrong(buffer.read_rows_on::<u8>(stream).unwrap_err()));
    assert!(wrong(buffer.columns()[0].read_on::<u64>(stream).unwrap_err()));
    assert!(wrong(buffer.record_batch().unwrap().read_on::<u32>(stream).unwrap_err()));

    let request = RegionRequest::new(ByteCount::new(400));
    let region = Region::new(setup.device.allocate(&request).unwrap());
    let column = Column::new(DataType::UInt32, 100, region.clone()).unwrap();
    assert!(column.block().is_none() && ColumnBuffer::from(region.clone()).block().is_none());
    let error = column.read_on::<u32>(stream).unwrap_err();
    assert!(matches!(error, ColumnError::Cuda(CudaError::Unmanaged { .. })), "{error}");
    // A caller that keeps the memory alive may use it. SAFETY: nothing is submitted.
    let argument = unsafe { stream.read_unmanaged::<u32>(&region, ByteCount::new(4), 99) }.unwrap();
    assert!(!format!("{argument:?}").is_empty());
    for (offset, len) in [(4, 100), (u64::MAX, 1), (0, usize::MAX)] {
        // SAFETY: as above.
        let error = unsafe { stream.read_unmanaged::<u32>(&region, ByteCount::new(offset), len) };
        let error = error.unwrap_err();
        assert!(matches!(error, CudaError::View(_) | CudaError::Managed { .. }), "{error}");
    }
    // SAFETY: as above.
    let error = unsafe { stream.read_unmanaged::<u32>(&region, ByteCount::new(2), 1) };
    assert!(matches!(error.unwrap_err(), CudaError::Managed { .. }));
}
