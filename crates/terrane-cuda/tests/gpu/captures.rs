//! Calls of one thread while another thread captures a stream into a graph.

use std::panic::resume_unwind;
use std::ptr;
use std::thread;
use std::time::Duration;

use cudarc::driver::sys;
use terrane_core::{Allocate, ByteCount, DeviceAddress, Memory, RegionRequest, Requirement};
use terrane_cuda::{
    Context, CudaStreams, DeviceAllocator, DevicePool, Event, Kernels, PinnedAllocator,
    PinnedOptions, Stream, StreamPriority, Timing,
};
use terrane_pool::{FenceSource, StreamSource};
use terrane_testkit::simulated_cuda::SimulatedCuda;

use crate::needs::{LITTLE, device, device_with_kernels};

const TIMEOUT: Duration = Duration::from_secs(60);

/// A capture in the default mode, which other threads can invalidate.
pub struct Capture<'a>(&'a Stream);

impl<'a> Capture<'a> {
    pub fn begin(stream: &'a Stream) -> Self {
        let mode = sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_GLOBAL;
        // SAFETY: the stream is alive.
        let code = unsafe { sys::cuStreamBeginCapture_v2(stream.handle().cast(), mode) };
        assert_eq!(code, sys::CUresult::CUDA_SUCCESS);
        Self(stream)
    }

    /// Ends the capture. Returns the graph, and the driver's code.
    pub fn finish(self) -> (sys::CUgraph, sys::CUresult) {
        let mut graph = ptr::null_mut();
        // SAFETY: the stream is alive; one handle is written.
        let code = unsafe { sys::cuStreamEndCapture(self.0.handle().cast(), &raw mut graph) };
        (graph, code)
    }

    /// Fails if the capture was invalidated, or if other work became a part of it.
    #[track_caller]
    pub fn end(self) {
        let (graph, code) = self.finish();
        assert_eq!(code, sys::CUresult::CUDA_SUCCESS, "the capture was invalidated");
        // SAFETY: the graph was created above.
        let code = unsafe { sys::cuGraphDestroy(graph) };
        assert_eq!(code, sys::CUresult::CUDA_SUCCESS);
    }
}

/// Makes a context current, for calls of the driver by the test itself.
pub fn bind(context: &Context) {
    let ordinal = usize::try_from(context.device().id.get()).unwrap();
    cudarc::driver::CudaContext::new(ordinal).unwrap().bind_to_thread().unwrap();
}

/// Runs `work` on another thread while this thread captures in the default mode. The capture must
/// stay valid.
#[track_caller]
pub fn during_a_capture(context: &Context, work: impl FnOnce() + Send) {
    bind(context);
    let captured = Stream::new(context).unwrap();
    let capture = Capture::begin(&captured);
    let worked = thread::scope(|scope| scope.spawn(work).join());
    // A capture must have ended before a panic drops the stream.
    let (_, code) = capture.finish();
    if let Err(panic) = worked {
        resume_unwind(panic);
    }
    assert_eq!(code, sys::CUresult::CUDA_SUCCESS, "the capture was invalidated");
}

#[test]
fn streams_events_and_fences_answer_during_a_capture() {
    let name = "streams_events_and_fences_answer_during_a_capture";
    let Some(context) = device(name, LITTLE) else { return };
    let memory =
        DeviceAllocator::new(&context).allocate(&RegionRequest::new(ByteCount::kib(64))).unwrap();
    let streams = CudaStreams::with_priority(&context, StreamPriority::Lowest);
    let id = StreamSource::create(&streams).unwrap();
    let stream = streams.get(id).unwrap();
    let fence = FenceSource::create(&streams).unwrap();
    let event = Event::new(&context, Timing::Off).unwrap();
    let busy = || {
        // SAFETY: the memory is alive until the stream has been synchronised.
        unsafe { stream.fill(memory.location(), 1, memory.length()) }.unwrap();
    };
    during_a_capture(&context, || {
        busy();
        stream.synchronize().unwrap();
        assert!(stream.is_idle().unwrap());
    });
    during_a_capture(&context, || {
        busy();
        event.record(&stream).unwrap();
        event.wait().unwrap();
        assert!(event.is_complete().unwrap());
    });
    during_a_capture(&context, || {
        busy();
        fence.record(id).unwrap();
        assert!(fence.wait(TIMEOUT).unwrap());
        assert!(fence.is_complete().unwrap());
    });
    assert_eq!((context.lost(), context.failed_drops()), (None, 0));
}

#[test]
fn memory_is_allocated_and_freed_during_a_capture() {
    let Some(context) = device("memory_is_allocated_and_freed_during_a_capture", LITTLE) else {
        return;
    };
    let request = RegionRequest::new(ByteCount::mib(2));
    let registration = |registration| {
        let options = PinnedOptions {
            registration,
            background_step: ByteCount::mib(1),
            ..PinnedOptions::default()
        };
        PinnedAllocator::new(&context, options).unwrap()
    };
    let on_device = DeviceAllocator::new(&context);
    let registered = registration(Requirement::Required);
    let by_driver = registration(Requirement::Off);
    // Memory of before the capture is freed during it.
    let (device, pinned, host) = (
        on_device.allocate(&request).unwrap(),
        registered.allocate(&request).unwrap(),
        by_driver.allocate(&request).unwrap(),
    );
    during_a_capture(&context, || drop(device));
    during_a_capture(&context, || drop(pinned));
    during_a_capture(&context, || drop(host));
    during_a_capture(&context, || drop(on_device.allocate(&request).unwrap()));
    during_a_capture(&context, || drop(registered.allocate(&request).unwrap()));
    during_a_capture(&context, || drop(by_driver.allocate(&request).unwrap()));
    during_a_capture(&context, || {
        let (memory, bring_up) = registered.allocate_in_background(&request).unwrap();
        assert!(bring_up.wait_for(request.bytes, TIMEOUT).unwrap());
        drop(memory);
    });
    during_a_capture(&context, || {
        let pool = DevicePool::new(&context, ByteCount::ZERO).unwrap();
        drop(pool.allocate(&request).unwrap());
        pool.trim(ByteCount::ZERO).unwrap();
    });
    let usage = context.usage();
    assert_eq!((usage.device.count, usage.registered.count, usage.host.count), (0, 0, 0));
    assert_eq!((context.lost(), context.failed_drops()), (None, 0));
}

#[test]
fn kernels_are_loaded_during_a_capture() {
    let name = "kernels_are_loaded_during_a_capture";
    let Some(context) = device_with_kernels(name, LITTLE) else { return };
    during_a_capture(&context, || drop(Kernels::load(&context).unwrap()));
    assert_eq!((context.lost(), context.failed_drops()), (None, 0));
}

/// The capturing thread itself may free memory and wait for other streams. A query of the captured
/// stream is refused.
#[test]
fn a_captured_stream_is_refused_and_others_are_not() {
    let Some(context) = device("a_captured_stream_is_refused_and_others_are_not", LITTLE) else {
        return;
    };
    bind(&context);
    let [captured, other] = [(); 2].map(|()| Stream::new(&context).unwrap());
    let memory =
        DeviceAllocator::new(&context).allocate(&RegionRequest::new(ByteCount::mib(1))).unwrap();
    let capture = Capture::begin(&captured);
    drop(memory);
    let waited = other.synchronize();
    capture.end();
    waited.unwrap();
    for ask in [Stream::synchronize, |stream: &Stream| stream.is_idle().map(drop)] {
        let capture = Capture::begin(&captured);
        let error = ask(&captured).unwrap_err();
        let (_, code) = capture.finish();
        assert!(error.code().is_some_and(|code| code.is_of_capture()), "{error}");
        assert_eq!(code, sys::CUresult::CUDA_ERROR_STREAM_CAPTURE_INVALIDATED);
    }
    assert_eq!((context.lost(), context.failed_drops()), (None, 0));
}

/// The thread's own mode is unchanged after each call, also after an error.
#[test]
fn calls_restore_the_mode_of_the_thread() {
    let Some(context) = device("calls_restore_the_mode_of_the_thread", LITTLE) else { return };
    bind(&context);
    let exchange = |mode| {
        let mut mode = mode;
        // SAFETY: one number is read and written.
        let code = unsafe { sys::cuThreadExchangeStreamCaptureMode(&raw mut mode) };
        assert_eq!(code, sys::CUresult::CUDA_SUCCESS);
        mode
    };
    let global = sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_GLOBAL;
    let local = sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL;
    let relaxed = sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_RELAXED;
    let stream = Stream::new(&context).unwrap();
    for mode in [global, local, relaxed] {
        exchange(mode);
        stream.synchronize().unwrap();
        assert_eq!(exchange(mode), mode);
        let nowhere = DeviceAddress::new(4096);
        assert!(context.device_span(nowhere, ByteCount::new(1)).is_err());
        assert_eq!(exchange(mode), mode);
    }
    exchange(global);
    if let Some(driver) = SimulatedCuda::find() {
        let function = Some("cuThreadExchangeStreamCaptureMode");
        let before = driver.calls(function);
        stream.synchronize().unwrap();
        assert_eq!(driver.calls(function) - before, 2, "one call to enter, one to leave");
    }
}
