//! The caller's streams are captured into graphs during transfers.

use std::error::Error as _;
use std::sync::Arc;
use std::thread;
use std::time::Duration;

use cudarc::driver::sys;
use terrane_core::ByteCount;
use terrane_cuda::{
    CopyPath, CudaError, DeviceEngine, DeviceEngineOptions, Event, PinnedAllocator, PinnedOptions,
    Stream, Timing,
};
use terrane_layout::LayoutKind;
use terrane_storage::{SystemAllocator, SystemOptions};
use terrane_testkit::conformance::EngineFixture;
use terrane_testkit::conformance::copy_engine::{end_of, ordered};
use terrane_testkit::model::Image;
use terrane_testkit::simulated_cuda::SimulatedCuda;
use terrane_transfer::engines::{HostEngine, HostEngineOptions, RelayEngine, RelayOptions};
use terrane_transfer::{
    CopyEngine, DEFAULT_SPIN, DeviceOrder, Endpoint, Transfer, TransferError, TransferManager,
};

use super::fixture::{DEVICE, Fixture, LAYERS_APART, PINNED, config, endpoint};
use crate::captures::{Capture, bind, during_a_capture};
use crate::needs::{LITTLE, device_with_kernels as device};

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

/// A relay allocates another slot during a transfer, on a thread of its own. It needs two slots,
/// because the device has not begun the copy of the first.
#[test]
fn a_relay_allocates_slots_during_a_capture() {
    let name = "a_relay_allocates_slots_during_a_capture";
    let Some(context) = device(name, LITTLE) else { return };
    let shape = config(32, 4, 16);
    let options = DeviceEngineOptions::default();
    let fixture = Fixture::new(&context, options.clone(), &[DEVICE]);
    let cuda = Arc::new(DeviceEngine::new(&context, options).unwrap());
    let host = Arc::new(HostEngine::new(HostEngineOptions::default()).unwrap());
    let pinned = PinnedAllocator::new(&context, PinnedOptions::default()).unwrap();
    let slots = RelayOptions { slots: 2, slot_bytes: ByteCount::kib(64) };
    let relay = Arc::new(RelayEngine::new(cuda, host, pinned, &slots).unwrap());
    let manager = TransferManager::new([relay.clone() as Arc<dyn CopyEngine>]);
    let here = fixture.endpoint(DEVICE, shape, LAYERS_APART);
    let system = SystemAllocator::new(SystemOptions::default());
    let there = endpoint(&system, shape, LayoutKind::FullyContiguous);
    let image = Image::scribble(&here, fixture.access(), 1);
    let ids: Vec<u32> = (0..32).collect();
    let mut expected = Image::of(&there, fixture.access());
    expected.transfer(&image, &ids, &ids, 0..4);
    during_a_capture(&context, || {
        let transfer = ordered(Transfer::new(&here, &there), &here, &there);
        end_of(manager.submit(transfer.blocks(&ids, &ids), ()).unwrap()).result.unwrap();
    });
    let slots = relay.slots();
    assert_eq!((slots.held, slots.refused), (2, 0), "{slots}");
    Image::of(&there, fixture.access()).assert_equals(&expected, "relay");
    drop((manager, relay, fixture));
    assert_eq!((context.lost(), context.failed_drops()), (None, 0));
}

/// Changing the thread's mode costs two calls a submit, on every path and with an order.
#[test]
fn a_submit_changes_the_capture_mode_once() {
    let name = "a_submit_changes_the_capture_mode_once";
    let Some(context) = device(name, LITTLE) else { return };
    let Some(driver) = SimulatedCuda::find_or_skip(name) else { return };
    let exchanges = || driver.calls(Some("cuThreadExchangeStreamCaptureMode"));
    let shape = config(8, 4, 16);
    let ids: Vec<u32> = (0..8).collect();
    for path in [CopyPath::Direct, CopyPath::Staged, CopyPath::Batched, CopyPath::CopyEach] {
        let options = DeviceEngineOptions { path: Some(path), ..DeviceEngineOptions::default() };
        let fixture = Fixture::new(&context, options, &[DEVICE, PINNED]);
        let manager = fixture.manager();
        let here = fixture.endpoint(DEVICE, shape, LAYERS_APART);
        let there = fixture.endpoint(PINNED, shape, LayoutKind::FullyContiguous);
        Image::scribble(&here, fixture.access(), 1);
        let stream = Stream::new(&context).unwrap();
        for order in [DeviceOrder::AlreadySynchronised, stream.order()] {
            // The first submit finds out how the device reaches both ends.
            for is_first in [true, false] {
                let transfer = Transfer::new(&here, &there).blocks(&ids, &ids);
                let transfer = transfer.device_order(order.clone());
                let before = exchanges();
                let completion = manager.submit(transfer, ()).unwrap();
                let after = exchanges();
                end_of(completion).result.unwrap();
                assert!(is_first || after - before == 2, "{}: {}", path.name(), after - before);
            }
        }
    }
    assert_eq!((context.lost(), context.failed_drops()), (None, 0));
}
