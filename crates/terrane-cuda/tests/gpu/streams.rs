//! Streams and events, also as a pool's fences.

use std::num::NonZeroUsize;
use std::ptr::without_provenance_mut;
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use cudarc::driver::CudaContext;
use terrane_core::{Allocate, ByteCount, Location, Memory, RegionRequest};
use terrane_cuda::cudarc::CudarcStream;
use terrane_cuda::{
    Context, CudaError, CudaStreams, DeviceAllocator, DeviceMemory, Event, PinnedAllocator,
    PinnedOptions, Stream, StreamPriority, Timing,
};
use terrane_pool::{FenceSource, StreamId, StreamPool, StreamSource};
use terrane_testkit::pattern::{InProcess, PieceAccess};

use crate::needs::{LITTLE, Needs, device, is_simulated, real_device};

const ROOM: Needs = Needs { device: ByteCount::gib(3), host: ByteCount::mib(64) };

/// Some milliseconds of work. Its last write sets the first byte to `value`.
fn keep_busy(stream: &Stream, memory: &DeviceMemory, value: u8) {
    for round in 0..20_u8 {
        // SAFETY: the memory is alive until the stream has been synchronised, and used in the order
        // of the stream.
        unsafe { stream.fill(memory.location(), round, memory.length()) }.unwrap();
    }
    // SAFETY: as above.
    unsafe { stream.fill(memory.location(), value, memory.length()) }.unwrap();
}

/// Enough memory to keep a device busy. A simulated device is slower, so it needs less.
fn large_memory(context: &Context) -> DeviceMemory {
    let bytes = if is_simulated(context) { ByteCount::mib(2) } else { ByteCount::gib(2) };
    DeviceAllocator::new(context).allocate(&RegionRequest::new(bytes)).unwrap()
}

#[test]
fn an_event_completes_when_the_work_before_it_has_run() {
    let name = "an_event_completes_when_the_work_before_it_has_run";
    let Some(context) = real_device(name, ROOM) else { return };
    let (stream, memory) = (Stream::new(&context).unwrap(), large_memory(&context));
    let event = Event::new(&context, Timing::Off).unwrap();
    assert!(event.is_complete().unwrap(), "not recorded yet");
    // A delayed thread may find the work already complete; then the test tries again.
    let seen_at_work = (0..100).any(|_| {
        stream.synchronize().unwrap();
        keep_busy(&stream, &memory, 1);
        event.record(&stream).unwrap();
        !event.is_complete().unwrap()
            && !stream.is_idle().unwrap()
            && !event.wait_timeout(Duration::ZERO).unwrap()
            && !event.wait_timeout(Duration::from_micros(200)).unwrap()
    });
    assert!(seen_at_work);
    assert!(event.wait_timeout(Duration::from_secs(120)).unwrap());
    assert!(event.wait_timeout(Duration::MAX).unwrap());
    assert!(stream.is_idle().unwrap());
    event.record(&stream).unwrap();
    event.wait().unwrap();
}

#[test]
fn elapsed_times_are_those_of_the_device() {
    let name = "elapsed_times_are_those_of_the_device";
    let Some(context) = real_device(name, ROOM) else { return };
    let (stream, memory) = (Stream::new(&context).unwrap(), large_memory(&context));
    let [before, after] = [Timing::On; 2].map(|timing| Event::new(&context, timing).unwrap());
    assert!(matches!(after.elapsed_since(&before), Err(CudaError::NoTiming)));
    let started = Instant::now();
    before.record(&stream).unwrap();
    keep_busy(&stream, &memory, 1);
    after.record(&stream).unwrap();
    after.wait().unwrap();
    let (by_device, by_host) = (after.elapsed_since(&before).unwrap(), started.elapsed());
    assert!(by_device > Duration::from_millis(1) && by_device <= by_host, "{by_device:?}");
    let untimed = Event::new(&context, Timing::Off).unwrap();
    untimed.record(&stream).unwrap();
    assert!(matches!(untimed.elapsed_since(&before), Err(CudaError::NoTiming)));
}

#[test]
fn one_stream_runs_after_another() {
    let Some(context) = device("one_stream_runs_after_another", ROOM) else { return };
    let memory = large_memory(&context);
    let streams = CudaStreams::new(&context);
    let pool = StreamPool::new(Arc::new(streams.clone()), NonZeroUsize::new(2).unwrap()).unwrap();
    let [first, second] = [pool.any(), pool.any()];
    assert_ne!(first, second);
    let pinned = PinnedAllocator::new(&context, PinnedOptions::default()).unwrap();
    let seen = pinned.allocate(&RegionRequest::new(ByteCount::kib(4))).unwrap();
    let fence = FenceSource::create(&streams).unwrap();
    assert!(fence.is_complete().unwrap());
    let mut seen_at_work = is_simulated(&context);
    for value in 7..107 {
        keep_busy(&streams.get(first).unwrap(), &memory, value);
        fence.record(first).unwrap();
        seen_at_work |= !fence.is_complete().unwrap();
        assert!(fence.delay(second).unwrap());
        let stream = streams.get(second).unwrap();
        // SAFETY: both are alive until the stream has been synchronised, and the writes come
        // before.
        unsafe { stream.copy(memory.location(), seen.location(), ByteCount::kib(4)) }.unwrap();
        stream.synchronize().unwrap();
        let mut bytes = [0; 4096];
        // SAFETY: the copy has run.
        unsafe { InProcess.read(seen.location(), &mut bytes) }.unwrap();
        assert_eq!(bytes, [value; 4096]);
        assert!(fence.wait(Duration::from_secs(120)).unwrap());
        if seen_at_work && value >= 9 {
            break;
        }
    }
    assert!(seen_at_work, "nothing was waited for");
    drop(pool);
    assert!(streams.get(first).is_err(), "destroyed with the pool");
}

#[test]
fn numbers_that_name_no_stream_are_refused() {
    let Some(context) = device("numbers_that_name_no_stream_are_refused", LITTLE) else { return };
    let streams = CudaStreams::with_priority(&context, StreamPriority::Highest);
    let fence = FenceSource::create(&streams).unwrap();
    for number in [0, 1, u64::MAX] {
        let error = fence.record(StreamId::new(number)).unwrap_err();
        let cause = error.source.downcast_ref::<CudaError>().unwrap();
        assert!(matches!(cause, CudaError::UnknownStream { .. }), "{cause}");
        assert!(fence.is_complete().is_err(), "it proves nothing now");
        assert!(fence.wait(Duration::ZERO).is_err());
    }
    let stream = StreamSource::create(&streams).unwrap();
    fence.record(stream).unwrap();
    assert!(fence.wait(Duration::from_secs(120)).unwrap());
    streams.destroy(stream);
    assert!(fence.record(stream).is_err(), "a number is not given again");
    assert_ne!(StreamSource::create(&streams).unwrap(), stream);
}

#[test]
fn idle_events_are_reused() {
    let Some(context) = device("idle_events_are_reused", LITTLE) else { return };
    let stream = Stream::new(&context).unwrap();
    let handles: Vec<String> = (0..100)
        .map(|_| {
            let event = Event::new(&context, Timing::Off).unwrap();
            assert!(event.is_complete().unwrap(), "a used one counts as new");
            event.record(&stream).unwrap();
            format!("{event:?}")
        })
        .collect();
    assert!(handles.windows(2).all(|pair| pair[0] == pair[1]), "{handles:?}");
}

#[test]
fn a_stream_refuses_positions_in_files() {
    let Some(context) = device("a_stream_refuses_positions_in_files", LITTLE) else { return };
    let file = terrane_core::FileHandle {
        descriptor: -1,
        direct: None,
        identity: terrane_core::FileIdentity { file_system: 0, inode: 0 },
        durability: terrane_core::Durability::None,
    };
    let at = Location::File(terrane_core::FilePosition { file, offset: ByteCount::ZERO });
    let stream = Stream::new(&context).unwrap();
    // SAFETY: nothing is copied.
    let error = unsafe { stream.copy(at, at, ByteCount::new(1)) }.unwrap_err();
    assert!(matches!(error, CudaError::Unreachable { .. }), "{error}");
}

/// Pools, staging tables and managed memory get streams as [`Stream`]s, or by their numbers.
#[test]
fn the_per_thread_default_stream_orders_no_memory() {
    let name = "the_per_thread_default_stream_orders_no_memory";
    let Some(context) = device(name, LITTLE) else { return };
    // SAFETY: the stream lives as long as the context.
    let borrowed = unsafe { Stream::borrow(&context, without_provenance_mut(2), ()) };
    assert!(matches!(borrowed, Err(CudaError::PerThreadStream)), "{borrowed:?}");
    let theirs = CudaContext::new(0).unwrap();
    let streams = CudaStreams::new(&context);
    let numbered = CudarcStream::new(&streams, &theirs.per_thread_stream());
    assert!(matches!(numbered, Err(CudaError::PerThreadStream)), "{numbered:?}");
    // The legacy default stream is the same stream on all threads.
    CudarcStream::new(&streams, &theirs.default_stream()).unwrap();
}

#[test]
fn events_order_the_default_stream_of_the_calling_thread() {
    let name = "events_order_the_default_stream_of_the_calling_thread";
    let Some(context) = device(name, LITTLE) else { return };
    let driver = terrane_testkit::simulated_cuda::SimulatedCuda::find();
    let slow = Stream::new(&context).unwrap();
    let held = driver.as_ref().map(|driver| driver.hold(slow.handle()));
    let new = || Event::new(&context, Timing::Off).unwrap();
    let [before, behind] = [new(), new()];
    let memory =
        DeviceAllocator::new(&context).allocate(&RegionRequest::new(ByteCount::kib(4))).unwrap();
    // SAFETY: the memory lives until the stream has been synchronised.
    unsafe { slow.fill(memory.location(), 1, memory.length()) }.unwrap();
    before.record(&slow).unwrap();
    before.delay_thread_stream(&context).unwrap();
    behind.record_on_thread_stream().unwrap();
    let of_another = thread::scope(|scope| {
        let asked = scope.spawn(|| {
            let event = new();
            event.record_on_thread_stream().unwrap();
            event.wait_timeout(Duration::from_secs(120)).unwrap()
        });
        asked.join().unwrap()
    });
    assert!(of_another, "nothing is on the stream of another thread");
    if held.is_some() {
        assert!(!behind.is_complete().unwrap(), "it is behind what is held");
    }
    drop(held);
    behind.wait().unwrap();
    assert!(before.is_complete().unwrap());
    slow.synchronize().unwrap();
}
