//! Tensors in a device's memory.

use std::ffi::c_void;
use std::ptr::{null_mut, without_provenance_mut};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use terrane_core::{Allocate, ByteCount, Location, Memory, Region, RegionRequest};
use terrane_cuda::{
    Context, DeviceAllocator, DeviceEngine, DeviceEngineOptions, PinnedAllocator, PinnedOptions,
    Stream,
};
use terrane_interop::dlpack::ffi::{
    DLDataType, DLDevice, DLManagedTensorVersioned, DLPackVersion, DLTensor,
};
use terrane_interop::dlpack::{
    ConsumerStream, ElementType, ExportError, ImportError, ImportedTensor, Importer, TensorDevice,
    TensorExport, TensorShape,
};
use terrane_interop::tensors::{KvAxisOrder, KvTensors, adopt_kv};
use terrane_layout::{ElementFormat, LayoutBuilder, LayoutConfig};
use terrane_testkit::needs::{LITTLE, Needs};
use terrane_testkit::pattern::Pattern;
use terrane_testkit::simulated_cuda::{Pieces, SimulatedCuda};
use terrane_transfer::{Access, DeviceOrder, Endpoint, Transfer, TransferManager};

use crate::needs::device;

/// The simulated device and its driver. On a real device, prints a skip and returns `None`.
fn simulated(test: &str, needs: Needs) -> Option<(Context, SimulatedCuda)> {
    Some((device(test, needs)?, SimulatedCuda::find_or_skip(test)?))
}

/// Records on drop whether a stream has completed.
struct RecordsIdle {
    stream: Stream,
    had_run: Arc<AtomicBool>,
}

impl Drop for RecordsIdle {
    fn drop(&mut self) {
        self.had_run.store(self.stream.is_idle().unwrap(), Ordering::SeqCst);
    }
}

fn memory(context: &Context, bytes: u64) -> Region {
    let request = RegionRequest::new(ByteCount::new(bytes)).labelled("tensor");
    Region::new(DeviceAllocator::new(context).allocate(&request).unwrap())
}

fn address(region: &Region) -> u64 {
    let Location::Device { address, .. } = region.location() else { panic!("{region:?}") };
    address.get()
}

/// A foreign tensor without a deleter: `bytes` bytes from a device address on.
fn foreign(
    context: &Context,
    address: u64,
    bytes: i64,
    number: i32,
) -> Result<ImportedTensor, ImportError> {
    let mut axes = [bytes];
    let mut tensor = DLManagedTensorVersioned {
        version: DLPackVersion { major: 1, minor: 0 },
        manager_ctx: null_mut::<c_void>(),
        deleter: None,
        flags: 0,
        dl_tensor: DLTensor {
            data: without_provenance_mut(usize::try_from(address).unwrap()),
            device: DLDevice { device_type: 2, device_id: number },
            ndim: 1,
            dtype: DLDataType { code: 1, bits: 8, lanes: 1 },
            shape: axes.as_mut_ptr(),
            strides: null_mut(),
            byte_offset: 0,
        },
    };
    let importer = Importer::new().with_device(context.clone());
    // SAFETY: the structure exists while it is read, and the imported tensor's bytes are not used.
    unsafe { importer.versioned(&raw mut tensor) }
}

#[test]
fn tensors_are_checked_with_the_driver() {
    let Some(context) = device("device::tensors_are_checked_with_the_driver", LITTLE) else {
        return;
    };
    let region = memory(&context, 1 << 16);
    let at = address(&region);
    let good = foreign(&context, at + 256, 4096, 0).unwrap();
    assert_eq!(good.device(), TensorDevice::Cuda(context.device().id));
    assert_eq!(good.memory().unwrap().length(), ByteCount::kib(4));

    let beyond = foreign(&context, at + 256, 1 << 40, 0).unwrap_err();
    assert!(matches!(beyond, ImportError::NotDeviceMemory(_)), "{beyond}");
    let mut host = vec![0_u8; 64];
    let number = u64::try_from(host.as_mut_ptr().expose_provenance()).unwrap();
    let host = foreign(&context, number, 64, 0).unwrap_err();
    assert!(matches!(host, ImportError::NotDeviceMemory(_)), "{host}");
    let other = foreign(&context, at, 64, 7).unwrap_err();
    assert!(matches!(other, ImportError::NoContext { .. }), "{other}");
    drop(good);
    drop(region);
    let gone = foreign(&context, at, 64, 0).unwrap_err();
    assert!(matches!(gone, ImportError::NotDeviceMemory(_)), "{gone}");
}

/// PyTorch's expandable segments are one mapping, but other adjacent allocations are not.
#[test]
fn memory_in_pieces_is_one_if_it_was_mapped_as_one() {
    let name = "device::memory_in_pieces_is_one_if_it_was_mapped_as_one";
    terrane_testkit::process::in_child(name, || {
        let Some((context, driver)) = simulated(name, Needs::of_device(ByteCount::mib(8))) else {
            return;
        };
        let bytes = 6 << 20;
        let region = memory(&context, bytes);
        let at = address(&region);
        let tensor = || foreign(&context, at + 256, i64::try_from(bytes).unwrap() - 256, 0);
        assert!(tensor().is_ok());
        driver.in_pieces(at, Pieces::Mapped);
        assert_eq!(tensor().unwrap().memory().unwrap().length().get(), bytes - 256);
        let beyond = foreign(&context, at + 256, i64::try_from(bytes).unwrap(), 0).unwrap_err();
        assert!(matches!(beyond, ImportError::NotDeviceMemory(_)), "{beyond}");
        driver.in_pieces(at, Pieces::Neighbours);
        let neighbours = tensor().unwrap_err();
        assert!(matches!(neighbours, ImportError::NotDeviceMemory(_)), "{neighbours}");
        assert!(foreign(&context, at, 2 << 20, 0).is_ok(), "one of them");
    });
}

#[test]
fn exported_tensors_are_reimported_unchanged() {
    let Some(context) = device("device::exported_tensors_are_reimported_unchanged", LITTLE) else {
        return;
    };
    let before = context.usage().device;
    let region = memory(&context, 1 << 16);
    let shape = TensorShape::compact(ElementType::BF16, &[4, 64]).unwrap();
    // SAFETY: no code uses the bytes.
    let export = unsafe { TensorExport::new(region.clone(), shape) }.unwrap();
    // SAFETY: as above.
    let export = unsafe { export.released_when_done() };
    let importer = Importer::new().with_device(context.clone());
    let pointer = export.into_versioned().unwrap().into_raw();
    // SAFETY: as above, and no other code has the tensor.
    let tensor = unsafe { importer.versioned(pointer.as_ptr()) }.unwrap();
    assert_eq!(tensor.location(), region.location());
    drop(region);
    assert_ne!(context.usage().device, before);
    drop(tensor);
    assert_eq!(context.usage().device, before);
}

/// An engine's cache: one exported tensor for each layer.
fn kv_caches(context: &Context, config: &LayoutConfig) -> Vec<ImportedTensor> {
    let element = ElementType::BF16;
    let sizes = [2, config.num_blocks(), config.page_size(), config.num_heads().unwrap(), 64];
    let sizes = sizes.map(u64::from);
    let importer = Importer::new().with_device(context.clone());
    let tensors = (0..config.num_layers()).map(|_| {
        let shape = TensorShape::compact(element, &sizes).unwrap();
        let region = memory(context, shape.bytes().get());
        // SAFETY: only transfers of this test use the bytes.
        let export = unsafe { TensorExport::new(region, shape) }.unwrap();
        // SAFETY: the transfers keep the tensors.
        let export = unsafe { export.released_when_done() };
        let pointer = export.into_versioned().unwrap().into_raw();
        // SAFETY: as above, and no other code has the tensor.
        unsafe { importer.versioned(pointer.as_ptr()) }.unwrap()
    });
    tensors.collect()
}

#[test]
fn an_engine_s_cache_is_offloaded_and_brought_back() {
    let name = "device::an_engine_s_cache_is_offloaded_and_brought_back";
    // Most of it is for the engine's buffers: up to three of 32 MiB in each direction.
    let needs = Needs::of_device(ByteCount::mib(224)).and_host(ByteCount::mib(64));
    let Some(context) = device(name, needs) else { return };
    let before = context.usage();
    let config = LayoutConfig::builder().num_blocks(8).num_layers(4).outer_dim(2).page_size(16);
    let config = config.inner_dim(128).num_heads(2).element(ElementFormat::Width(2));
    let config = config.build().unwrap();
    let tensors = kv_caches(&context, &config);
    let builder = adopt_kv(&config, &KvAxisOrder::VLLM, KvTensors::Together(&tensors)).unwrap();
    let engine = Endpoint::new(builder.unregistered().build().unwrap()).unwrap();
    drop(tensors);

    let pinned = PinnedAllocator::new(&context, PinnedOptions::default()).unwrap();
    let host = || {
        let builder = LayoutBuilder::new(config).fully_contiguous().allocate(&pinned);
        Endpoint::new(builder.unregistered().build().unwrap()).unwrap()
    };
    let (filled, tier) = (host(), host());
    let copies = DeviceEngine::new(&context, DeviceEngineOptions::default()).unwrap();
    let manager = TransferManager::new([Arc::new(copies) as _]);
    let all: Vec<u32> = (0..config.num_blocks()).collect();
    let turned: Vec<u32> = all.iter().rev().copied().collect();
    let run = |from: &Endpoint, to: &Endpoint, blocks: (&[u32], &[u32])| {
        let transfer = Transfer::new(from, to).blocks(blocks.0, blocks.1);
        let transfer = transfer.device_order(DeviceOrder::AlreadySynchronised);
        manager.submit(transfer, ()).unwrap().wait().result.unwrap();
    };
    let pattern = Pattern::new(6);
    pattern.fill(&filled).unwrap();
    run(&filled, &engine, (&all, &all));
    run(&engine, &tier, (&all, &turned));
    run(&tier, &engine, (&turned, &all));
    let check = host();
    run(&engine, &check, (&all, &all));
    pattern.verify(&check).unwrap().assert_clean("the cache");

    drop((engine, filled, tier, check, manager));
    assert_eq!(context.usage().device, before.device);
}

#[test]
fn memory_is_freed_after_the_consumer_s_stream() {
    let Some(context) = device("device::memory_is_freed_after_the_consumer_s_stream", LITTLE)
    else {
        return;
    };
    let pinned = PinnedAllocator::new(&context, PinnedOptions::default()).unwrap();
    let request = RegionRequest::new(ByteCount::kib(64));
    let (from, to) = (memory(&context, 1 << 16), pinned.allocate(&request).unwrap());
    let stream = Stream::new(&context).unwrap();
    // SAFETY: both live until the synchronisation of the stream, and no other code uses them.
    unsafe { stream.fill(from.location(), 0x5A, ByteCount::kib(64)) }.unwrap();
    let (source, destination) = (from.location(), to.location());
    let shape = TensorShape::compact(ElementType::U8, &[1 << 16]).unwrap();
    // SAFETY: only the consumer's stream uses the bytes.
    let export = unsafe { TensorExport::new(from, shape) }.unwrap();
    // SAFETY: the stream is kept until the borrowed one has dropped, by the end of this function.
    let consumer = unsafe { Stream::borrow(&context, stream.handle(), ()) }.unwrap();
    let tensor = export.released_after(consumer).into_versioned().unwrap();
    // SAFETY: the tensor's memory is released after the stream, and the other memory lives longer.
    unsafe { stream.copy(source, destination, ByteCount::kib(64)) }.unwrap();
    drop(tensor);
    assert!(stream.is_idle().unwrap());
    let Location::Host(address) = destination else { panic!("{destination}") };
    // SAFETY: the copy has completed.
    let bytes = unsafe { std::slice::from_raw_parts(address.as_ptr(), 1 << 16) };
    assert!(bytes.iter().all(|&byte| byte == 0x5A));
}

/// A cache on the device, and an export of a block of it.
fn exported(context: &Context) -> (Endpoint, TensorExport) {
    let config = LayoutConfig::builder().num_blocks(4).num_layers(2).outer_dim(2).page_size(4);
    let config = config.inner_dim(16).num_heads(2).element(ElementFormat::Width(2));
    let builder = LayoutBuilder::new(config.build().unwrap()).fully_contiguous();
    let allocator = DeviceAllocator::new(context);
    let builder = builder.allocate(&allocator);
    let end = Endpoint::new(builder.unregistered().build().unwrap()).unwrap();
    let piece = TensorExport::of_piece(&end, (1, 0, 0), ElementType::BF16, Access::Read).unwrap();
    (end, piece)
}

#[test]
fn a_hold_ends_when_the_consumer_s_stream_has_run() {
    let name = "device::a_hold_ends_when_the_consumer_s_stream_has_run";
    terrane_testkit::process::in_child(name, || {
        let Some(context) = device(name, LITTLE) else { return };
        let (end, export) = exported(&context);
        let refused = export.into_versioned().unwrap_err();
        assert!(matches!(refused, ExportError::ReleaseNotStated { .. }), "{refused}");
        drop(end.hold_for_write(&[1]).unwrap());

        let (end, export) = exported(&context);
        let stream = Stream::new(&context).unwrap();
        let named = ConsumerStream::of(&stream);
        // SAFETY: the stream outlives the tensor.
        let consumer = unsafe { named.to_stream(&context, ()) }.unwrap().unwrap();
        let had_run = Arc::new(AtomicBool::new(false));
        // The recording guard drops together with the hold.
        let sees = RecordsIdle { stream: stream.clone(), had_run: Arc::clone(&had_run) };
        let export = export.guarded_by(sees).released_after(consumer);
        let tensor = export.into_versioned().unwrap();
        let scratch = memory(&context, 1 << 20);
        // SAFETY: the memory lives until the synchronisation of the stream, and no other code uses
        // it.
        unsafe { stream.fill(scratch.location(), 1, ByteCount::new(1 << 20)) }.unwrap();
        assert!(end.hold_for_write(&[1]).is_err());
        drop(tensor);
        assert!(had_run.load(Ordering::SeqCst), "the hold ended before the kernel");
        drop(end.hold_for_write(&[1]).unwrap());
        assert_eq!(context.failed_drops(), 0);
    });
}

/// Another stream is captured in the default mode, which forbids waits to all threads.
#[test]
fn memory_is_released_during_a_capture_of_another_stream() {
    let name = "device::memory_is_released_during_a_capture_of_another_stream";
    terrane_testkit::process::in_child(name, || {
        let Some((context, driver)) = simulated(name, LITTLE) else { return };
        let captured = Stream::new(&context).unwrap();
        let (end, export) = exported(&context);
        let tensor = export.released_after(Stream::new(&context).unwrap()).into_versioned();
        let tensor = tensor.unwrap();
        driver.begin_capture(0, captured.handle());
        std::thread::scope(|scope| drop(scope.spawn(move || drop((tensor, end)))));
        assert_eq!(driver.end_capture(captured.handle()), 0, "the capture was invalidated");
        assert_eq!(context.usage().device.bytes, ByteCount::ZERO);
        assert_eq!((context.failed_drops(), context.lost()), (0, None));
    });
}

#[test]
fn memory_is_leaked_if_its_stream_cannot_be_waited_for() {
    let name = "device::memory_is_leaked_if_its_stream_cannot_be_waited_for";
    terrane_testkit::process::in_child(name, || {
        /// The driver's error for a stream that is being captured.
        const STREAM_CAPTURE_UNSUPPORTED: u32 = 900;
        let Some((context, driver)) = simulated(name, LITTLE) else { return };
        let (end, export) = exported(&context);
        let tensor = export.released_after(Stream::new(&context).unwrap()).into_versioned();
        driver.fail("cuStreamSynchronize", 0, STREAM_CAPTURE_UNSUPPORTED);
        drop(tensor.unwrap());
        assert_eq!((context.failed_drops(), context.lost()), (1, None));
        assert!(
            end.hold_for_write(&[1]).is_err(),
            "it is unknown whether the memory is still read"
        );
        drop(end);
        assert_ne!(context.usage().device.bytes, ByteCount::ZERO);
    });
}
