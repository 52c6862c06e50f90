//! Managed memory as an argument of `cudarc`'s kernels and copies, without leaks.

use std::sync::Arc;

use cudarc::driver::{CudaContext, CudaFunction, CudaStream, LaunchConfig, PushKernelArg};
use terrane_core::{ByteCount, Memory};
use terrane_cuda::cudarc::CudarcStream;
use terrane_cuda::{
    Context, CudaError, CudaStreams, DeviceAllocator, PinnedAllocator, PinnedOptions,
};
use terrane_pool::adaptors::Budget;
use terrane_pool::managed::{ManagerOptions, MemoryManager};
use terrane_pool::{Access, Pool, PoolOptions};
use terrane_storage::{SystemAllocator, SystemOptions};
use terrane_testkit::ptx::ADD_ONE;

use crate::needs::{LITTLE, device};

struct Setup {
    context: Context,
    streams: CudaStreams,
    theirs: Arc<CudaContext>,
    manager: MemoryManager<Pool<DeviceAllocator>>,
}

impl Setup {
    fn new(context: Context) -> Self {
        let streams = CudaStreams::new(&context);
        let pool = Pool::new(DeviceAllocator::new(&context), PoolOptions::default()).unwrap();
        let options =
            ManagerOptions { fences: Some(Arc::new(streams.clone())), ..ManagerOptions::default() };
        let manager = MemoryManager::new(pool, Budget::new("device", ByteCount::mib(32)), options);
        Self { context, streams, theirs: CudaContext::new(0).unwrap(), manager }
    }

    fn stream(&self) -> (Arc<CudaStream>, CudarcStream) {
        let theirs = self.theirs.new_stream().unwrap();
        let ours = CudarcStream::new(&self.streams, &theirs).unwrap();
        (theirs, ours)
    }

    fn kernel(&self) -> CudaFunction {
        self.theirs.load_module(ADD_ONE.into()).unwrap().load_function("add_one").unwrap()
    }
}

#[test]
fn a_cudarc_kernel_adds_to_a_tracked_slice() {
    let name = "a_cudarc_kernel_adds_to_a_tracked_slice";
    let Some(context) = device(name, LITTLE) else { return };
    let setup = Setup::new(context);
    let (theirs, stream) = setup.stream();
    let kernel = setup.kernel();
    let numbers: Vec<u32> = (0..5000).collect();
    let mut slice =
        setup.manager.allocate_slice_tagged::<u32>(5000, "numbers", Some(stream.id())).unwrap();
    theirs.memcpy_htod(&numbers, &mut stream.write(&mut slice).unwrap()).unwrap();
    for _ in 0..3 {
        let (argument, count) = (stream.write(&mut slice).unwrap(), 5000_u32);
        // SAFETY: the kernel takes a pointer to numbers, and their count.
        unsafe {
            theirs
                .launch_builder(&kernel)
                .arg(&argument)
                .arg(&count)
                .launch(LaunchConfig::for_num_elems(count))
        }
        .unwrap();
    }
    assert_eq!(slice.block().uses(), [(stream.id(), Access::Write)]);
    let mut seen = vec![0; 5000];
    theirs.memcpy_dtoh(&stream.read(&slice).unwrap(), &mut seen).unwrap();
    theirs.synchronize().unwrap();
    assert!(
        seen.iter().zip(&numbers).all(|(seen, number)| *seen == number + 3),
        "{:?}",
        &seen[..4]
    );
    setup.theirs.check_err().expect("nothing was left for the next caller");
}

#[test]
fn ten_thousand_arguments_create_no_event_and_leave_no_reference() {
    let name = "ten_thousand_arguments_create_no_event_and_leave_no_reference";
    let Some(context) = device(name, LITTLE) else { return };
    let setup = Setup::new(context);
    let (theirs, stream) = setup.stream();
    let kernel = setup.kernel();
    let round = || {
        let mut slice = setup.manager.allocate_slice::<u32>(256).unwrap();
        let (argument, count) = (stream.write(&mut slice).unwrap(), 256_u32);
        // SAFETY: the kernel takes a pointer to numbers, and their count.
        unsafe {
            theirs
                .launch_builder(&kernel)
                .arg(&argument)
                .arg(&count)
                .launch(LaunchConfig::for_num_elems(count))
        }
        .unwrap();
        drop(slice);
        theirs.synchronize().unwrap();
        setup.manager.reap();
    };
    round();
    let references = Arc::strong_count(&theirs);
    let before = setup.context.usage();
    for _ in 0..10_000 {
        round();
    }
    assert_eq!(setup.context.usage(), before, "no event, no reference, no memory");
    assert_eq!(Arc::strong_count(&theirs), references);
    assert_eq!((setup.manager.pending(), setup.manager.allocated()), (0, ByteCount::ZERO));

    // Only the stream's owners still have references to it.
    let id = stream.id();
    drop(setup.streams.remove(id));
    drop(stream);
    assert_eq!(Arc::strong_count(&theirs), 1);
    setup.theirs.check_err().expect("nothing was left for the next caller");
}

#[test]
fn a_slice_that_changes_streams_is_used_in_order() {
    let name = "a_slice_that_changes_streams_is_used_in_order";
    let Some(context) = device(name, LITTLE) else { return };
    let setup = Setup::new(context);
    let [(first, writes), (second, reads)] = [(); 2].map(|()| setup.stream());
    let mut slice = setup.manager.allocate_slice::<u8>(4 << 20).unwrap();
    let mut other = setup.manager.allocate_slice::<u8>(4 << 20).unwrap();
    let ours = setup.streams.get(writes.id()).unwrap();
    for round in 0..20_u8 {
        let (at, length) = (slice.location(), slice.bytes());
        let _written = writes.write(&mut slice).unwrap();
        for value in [!round, round] {
            // SAFETY: the slice is alive, and its use on this stream is recorded.
            unsafe { ours.fill(at, value, length) }.unwrap();
        }
        // On another stream: after the fills, by an event of the context.
        let from = reads.read(&slice).unwrap();
        second.memcpy_dtod(&from, &mut reads.write(&mut other).unwrap()).unwrap();
        let mut seen = vec![!round; 4 << 20];
        second.memcpy_dtoh(&reads.read(&other).unwrap(), &mut seen).unwrap();
        second.synchronize().unwrap();
        assert!(seen.iter().all(|&byte| byte == round), "round {round}: {:?}", &seen[..4]);
    }
    // A stream that was not named is synchronised.
    let mut seen = vec![0; 4 << 20];
    first.memcpy_dtoh(&reads.read(&other).unwrap(), &mut seen).unwrap();
    assert!(seen.iter().all(|&byte| byte == 19));
    let created = setup.context.usage().events_created;
    assert!(created <= 4, "{created} events for 60 changes of streams");
    setup.theirs.check_err().expect("nothing was left for the next caller");
}

#[test]
fn memory_that_a_device_cannot_access_is_refused() {
    let name = "memory_that_a_device_cannot_access_is_refused";
    let Some(context) = device(name, LITTLE) else { return };
    let setup = Setup::new(context);
    let (_theirs, stream) = setup.stream();
    let budget = || Budget::new("host", ByteCount::mib(1));
    let fences = || ManagerOptions {
        fences: Some(Arc::new(setup.streams.clone())),
        ..ManagerOptions::default()
    };
    let system = SystemAllocator::new(SystemOptions::default());
    let of_system =
        MemoryManager::new(system, budget(), fences()).allocate_slice::<u8>(64).unwrap();
    let error = stream.read(&of_system).unwrap_err();
    assert!(matches!(error, CudaError::Unreachable { .. }), "{error}");

    // Pinned memory is accessed by its alias.
    let pinned = PinnedAllocator::new(&setup.context, PinnedOptions::default()).unwrap();
    let of_pinned =
        MemoryManager::new(pinned, budget(), fences()).allocate_slice::<u8>(64).unwrap();
    let alias = of_pinned.block().device_alias().unwrap();
    let argument = stream.read(&of_pinned).unwrap();
    assert!(format!("{argument:?}").contains(&format!("{:#x}", alias.get())), "{argument:?}");

    let device = DeviceAllocator::new(&setup.context);
    let without = MemoryManager::new(device.clone(), budget(), ManagerOptions::default());
    let slice = without.allocate_slice::<u8>(64).unwrap();
    let error = stream.read(&slice).unwrap_err();
    assert!(matches!(error, CudaError::Managed { .. }), "{error}");

    // Streams of another registry have other numbers.
    let elsewhere = CudaStreams::new(&setup.context);
    let stranger = CudarcStream::new(&elsewhere, stream.stream()).unwrap();
    assert_ne!(stranger.id(), stream.id());
    let error = elsewhere.get(stream.id()).unwrap_err();
    assert!(matches!(error, CudaError::UnknownStream { .. }), "{error}");
}
