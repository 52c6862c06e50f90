//! The caller's streams are captured into graphs during transfers.

use std::error::Error as _;
use std::ptr;
use std::thread;
use std::time::Duration;

use cudarc::driver::sys;
use terrane_core::ByteCount;
use terrane_cuda::{Context, CopyPath, CudaError, DeviceEngineOptions, Event, Stream, Timing};
use terrane_layout::LayoutKind;
use terrane_testkit::conformance::EngineFixture;
use terrane_testkit::conformance::copy_engine::{end_of, ordered};
use terrane_testkit::model::Image;
use terrane_transfer::{
    DEFAULT_SPIN, DeviceOrder, Endpoint, Transfer, TransferError, TransferManager,
};

use super::fixture::{DEVICE, Fixture, LAYERS_APART, PINNED, config};
use crate::needs::{LITTLE, device_with_kernels as device};

/// A capture in the default mode, which other threads can invalidate.
struct Capture<'a>(&'a Stream);

impl<'a> Capture<'a> {
    fn begin(stream: &'a Stream) -> Self {
        let mode = sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_GLOBAL;
        // SAFETY: the stream is alive.
        let code = unsafe { sys::cuStreamBeginCapture_v2(stream.handle().cast(), mode) };
        assert_eq!(code, sys::CUresult::CUDA_SUCCESS);
        Self(stream)
    }

    /// Ends the capture. Returns the graph, and the driver's code.
    fn finish(self) -> (sys::CUgraph, sys::CUresult) {
        let mut graph = ptr::null_mut();
        // SAFETY: the stream is alive; one handle is written.
        let code = unsafe { sys::cuStreamEndCapture(self.0.handle().cast(), &raw mut graph) };
        (graph, code)
    }

    /// Fails if the capture was invalidated, or if other work became a part of it.
    #[track_caller]
    fn end(self) {
        let (graph, code) = self.finish();
        assert_eq!(code, sys::CUresult::CUDA_SUCCESS, "the capture was invalidated");
        // SAFETY: the graph was created above.
        let code = unsafe { sys::cuGraphDestroy(graph) };
        assert_eq!(code, sys::CUresult::CUDA_SUCCESS);
    }
}

fn bind(context: &Context) {
    let ordinal = usize::try_from(context.device().id.get()).unwrap();
    cudarc::driver::CudaContext::new(ordinal).unwrap().bind_to_thread().unwrap();
}

/// While one thread captures, others submit and wait, by every path, with and without polling, in
/// one part and in many. The capture and the transfers all complete.
#[test]
fn transfers_and_captures_do_not_disturb_each_other() {
    let name = "transfers_and_captures_do_not_disturb_each_other";
    let Some(context) = device(name, LITTLE) else { return };
    bind(&context);
    let captured = Stream::new(&context).unwrap();
    let shape = config(32, 4, 16);
    let ids: Vec<u32> = (0..32).collect();
    let parts = ByteCount::kib(64);
    for path in [CopyPath::Direct, CopyPath::Staged, CopyPath::Batched, CopyPath::CopyEach] {
        let all = DeviceEngineOptions { path: Some(path), ..DeviceEngineOptions::default() };
        let few = DeviceEngineOptions { scratch_bytes: parts, request_bytes: parts, ..all.clone() };
        for (options, spin) in
            [(all.clone(), DEFAULT_SPIN), (all, Duration::ZERO), (few, Duration::ZERO)]
        {
            let fixture = Fixture::new(&context, options, &[DEVICE, PINNED]);
            let manager = TransferManager::new([fixture.engine()]).with_spin(spin);
            let here = fixture.endpoint(DEVICE, shape, LAYERS_APART);
            let there = fixture.endpoint(PINNED, shape, LayoutKind::FullyContiguous);
            let image = Image::scribble(&here, fixture.access(), 1);
            let mut expected = Image::of(&there, fixture.access());
            expected.transfer(&image, &ids, &ids, 0..4);
            let capture = Capture::begin(&captured);
            let submitting = || {
                let transfer = ordered(Transfer::new(&here, &there), &here, &there);
                let completion = manager.submit(transfer.blocks(&ids, &ids), ()).unwrap();
                end_of(completion).result.unwrap();
                let one = ordered(Transfer::new(&there, &here), &there, &here);
                end_of(manager.submit(one.blocks(&[3], &[3]), ()).unwrap()).result.unwrap();
            };
            thread::scope(|scope| drop(scope.spawn(submitting)));
            capture.end();
            Image::of(&there, fixture.access()).assert_equals(&expected, path.name());
        }
    }
    assert_eq!((context.lost(), context.failed_drops()), (None, 0));
}

/// A transfer is not part of a graph, so an order in a capture is refused with an instruction. The
/// refusal does not disturb the capture of a stream. A query of an event in a capture would
/// invalidate it.
#[test]
fn an_order_that_is_captured_is_refused() {
    let name = "an_order_that_is_captured_is_refused";
    let Some(context) = device(name, LITTLE) else { return };
    bind(&context);
    for path in [CopyPath::Direct, CopyPath::Staged] {
        let options = DeviceEngineOptions { path: Some(path), ..DeviceEngineOptions::default() };
        let fixture = Fixture::new(&context, options, &[DEVICE, PINNED]);
        let manager = fixture.manager();
        let shape = config(8, 4, 16);
        let here = fixture.endpoint(DEVICE, shape, LAYERS_APART);
        let there = fixture.endpoint(PINNED, shape, LayoutKind::FullyContiguous);
        Image::scribble(&here, fixture.access(), 1);
        let captured = Stream::new(&context).unwrap();
        let event = Event::new(&context, Timing::Off).unwrap();
        let ids: Vec<u32> = (0..8).collect();
        let submit = |from: &Endpoint, to: &Endpoint, order: DeviceOrder| {
            let transfer = Transfer::new(from, to).blocks(&ids, &ids).device_order(order);
            end_of(manager.submit(transfer, ()).unwrap()).result
        };
        let after_stream = captured.order();
        let refused = |order: DeviceOrder, what: &str| {
            let error = submit(&here, &there, order).unwrap_err();
            assert!(matches!(error, TransferError::Engine { .. }), "{error}");
            let cause = error.source().and_then(|cause| cause.downcast_ref::<CudaError>());
            let is_refused =
                matches!(cause, Some(CudaError::Captured { what: was }) if *was == what);
            assert!(is_refused, "{cause:?}");
        };
        let capture = Capture::begin(&captured);
        refused(after_stream.clone(), "stream");
        capture.end();
        let capture = Capture::begin(&captured);
        event.record(&captured).unwrap();
        refused(event.order().unwrap(), "event");
        let (_, code) = capture.finish();
        assert_eq!(code, sys::CUresult::CUDA_ERROR_STREAM_CAPTURE_INVALIDATED);
        // After the capture, the same stream is a valid order.
        submit(&here, &there, after_stream).unwrap();
        submit(&there, &here, DeviceOrder::AlreadySynchronised).unwrap();
    }
    assert_eq!((context.lost(), context.failed_drops()), (None, 0));
}
