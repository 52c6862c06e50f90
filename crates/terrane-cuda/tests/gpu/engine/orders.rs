//! Orders of transfers on the device, and work after their layers.

use std::error::Error as _;
use std::sync::Arc;

use terrane_core::{ByteCount, Memory};
use terrane_cuda::{Context, CopyPath, CudaError, DeviceEngineOptions, Event, Stream, Timing};
use terrane_layout::LayoutKind;
use terrane_testkit::conformance::EngineFixture;
use terrane_testkit::conformance::copy_engine::{end_of, ordered};
use terrane_testkit::model::Image;
use terrane_testkit::simulated_cuda::SimulatedCuda;
use terrane_transfer::{DeviceOrder, Endpoint, StreamHandle, Transfer, TransferError};

use super::fixture::{
    APART, DEVICE, Fixture, LAYERS_APART, PEER, PINNED, all_are, config, keep_busy, large_memory,
};
use crate::needs::{LITTLE, Needs, device_with_kernels as device, two_devices};

const ROOM: Needs = Needs { device: ByteCount::mib(512), host: ByteCount::mib(512) };
const ALL: [&str; 3] = [DEVICE, APART, PINNED];
const PATHS: [Option<CopyPath>; 5] = [
    None,
    Some(CopyPath::Direct),
    Some(CopyPath::Staged),
    Some(CopyPath::Batched),
    Some(CopyPath::CopyEach),
];

fn fixture(context: &Context, path: Option<CopyPath>) -> Fixture {
    let options = DeviceEngineOptions { path, ..DeviceEngineOptions::default() };
    Fixture::new(context, options, &ALL)
}

/// Writes every region of an endpoint, after some milliseconds of other work.
fn write_late(stream: &Stream, room: &impl Memory, end: &Endpoint, value: u8) {
    keep_busy(stream, room);
    for region in end.layout().regions() {
        // SAFETY: the endpoint keeps the region alive. No transfer of it is in flight yet.
        unsafe { stream.fill(region.location(), value, region.length()) }.unwrap();
    }
}

#[test]
fn a_transfer_waits_for_the_stream_that_writes_its_source() {
    let name = "a_transfer_waits_for_the_stream_that_writes_its_source";
    let Some(context) = device(name, ROOM) else { return };
    let room = large_memory(&context);
    let compute = Stream::new(&context).unwrap();
    let mut value = 0;
    // One block is submitted at once, all blocks by a submit thread.
    for (path, blocks) in PATHS.into_iter().flat_map(|path| [(path, 1), (path, 64)]) {
        let fixture = fixture(&context, path);
        let manager = fixture.manager();
        let shape = config(blocks, 8, 16);
        let here = fixture.endpoint(DEVICE, shape, LAYERS_APART);
        let there = fixture.endpoint(PINNED, shape, LayoutKind::FullyContiguous);
        let ids: Vec<u32> = (0..blocks).collect();
        for by_event in [false, true] {
            value += 1;
            write_late(&compute, &room, &here, value);
            let event = Event::new(&context, Timing::Off).unwrap();
            event.record(&compute).unwrap();
            let order = if by_event { event.order().unwrap() } else { compute.order() };
            let transfer = Transfer::new(&here, &there).blocks(&ids, &ids).device_order(order);
            end_of(manager.submit(transfer, ()).unwrap()).result.unwrap();
            assert!(all_are(&there, &fixture, value), "{path:?}, {blocks} blocks: too early");
        }
    }
}

/// An order owns its stream or event: the caller drops its own handle before the transfer is
/// submitted. At the transfer's end the stream is destroyed, and the owner of a borrowed stream
/// drops.
#[test]
fn an_order_keeps_a_stream_or_event_that_its_caller_drops() {
    let name = "an_order_keeps_a_stream_or_event_that_its_caller_drops";
    let Some(context) = device(name, ROOM) else { return };
    let fixture = fixture(&context, None);
    let (manager, room, shape) = (fixture.manager(), large_memory(&context), config(4, 8, 16));
    let here = fixture.endpoint(DEVICE, shape, LAYERS_APART);
    let there = fixture.endpoint(PINNED, shape, LayoutKind::FullyContiguous);
    let ids = [0, 1, 2, 3];
    let transfer = |order| Transfer::new(&here, &there).blocks(&ids, &ids).device_order(order);
    let written = |compute: &Stream, value| write_late(compute, &room, &here, value);
    let ends = |order, value| {
        end_of(manager.submit(transfer(order), ()).unwrap()).result.unwrap();
        assert!(all_are(&there, &fixture, value), "too early: {value}");
    };
    // Streams and events of the engine are created by the first transfer.
    let first = transfer(DeviceOrder::AlreadySynchronised);
    end_of(manager.submit(first, ()).unwrap()).result.unwrap();
    let streams = context.usage().streams;

    let compute = Stream::new(&context).unwrap();
    written(&compute, 1);
    let order = compute.order();
    assert_eq!(order, compute.clone().order());
    drop(compute);
    assert_eq!(context.usage().streams, streams + 1);
    ends(order, 1);
    assert_eq!(context.usage().streams, streams);

    let compute = Stream::new(&context).unwrap();
    let event = Event::new(&context, Timing::Off).unwrap();
    assert!(matches!(event.order(), Err(CudaError::NotRecorded)));
    written(&compute, 2);
    event.record(&compute).unwrap();
    let order = event.order().unwrap();
    drop(event);
    ends(order, 2);

    let owner = Arc::new(());
    let handle = compute.handle();
    // SAFETY: `compute` lives longer than this.
    let borrowed = unsafe { Stream::borrow(&context, handle, Arc::clone(&owner)) }.unwrap();
    written(&borrowed, 3);
    let order = borrowed.order();
    drop(borrowed);
    assert_eq!(Arc::strong_count(&owner), 2);
    ends(order, 3);
    assert_eq!(Arc::strong_count(&owner), 1);
}

#[test]
fn a_transfer_that_waits_delays_no_other() {
    let name = "a_transfer_that_waits_delays_no_other";
    let Some(context) = device(name, ROOM) else { return };
    let fixture = fixture(&context, Some(CopyPath::Staged));
    let manager = fixture.manager();
    let shape = config(64, 8, 16);
    let end = |name, kind| fixture.endpoint(name, shape, kind);
    let [held_here, here] = [(); 2].map(|()| end(DEVICE, LAYERS_APART));
    let [held_there, there] = [(); 2].map(|()| end(PINNED, LayoutKind::FullyContiguous));
    Image::scribble(&here, fixture.access(), 1);
    let ids: Vec<u32> = (0..64).collect();
    let room = large_memory(&context);
    let compute = Stream::new(&context).unwrap();
    write_late(&compute, &room, &held_here, 9);
    let after_compute = compute.order();
    let held = Transfer::new(&held_here, &held_there).blocks(&ids, &ids);
    let held = manager.submit(held.device_order(after_compute), ()).unwrap();
    let other = ordered(Transfer::new(&here, &there), &here, &there).blocks(&ids, &ids);
    end_of(manager.submit(other, ()).unwrap()).result.unwrap();
    end_of(held).result.unwrap();
    assert!(all_are(&held_there, &fixture, 9));
}

/// While the transfer waits for another one, the event is recorded again on an idle stream, where
/// it completes at once.
#[test]
fn a_waiting_transfer_keeps_the_events_mark_of_its_submission() {
    let name = "a_waiting_transfer_keeps_the_events_mark_of_its_submission";
    let Some(context) = device(name, ROOM) else { return };
    let room = large_memory(&context);
    let [before, compute, idle] = [(); 3].map(|()| Stream::new(&context).unwrap());
    for (round, blocks) in [(1, 1), (2, 64), (3, 1), (4, 64)] {
        let fixture = fixture(&context, None);
        let manager = fixture.manager();
        let shape = config(blocks + 1, 8, 16);
        let here = fixture.endpoint(DEVICE, shape, LAYERS_APART);
        let there = fixture.endpoint(PINNED, shape, LayoutKind::FullyContiguous);
        let others = [
            fixture.endpoint(DEVICE, shape, LAYERS_APART),
            fixture.endpoint(PINNED, shape, LayoutKind::FullyContiguous),
        ];
        let ids: Vec<u32> = (0..=blocks).collect();
        keep_busy(&before, &room);
        let after_before = before.order();
        let first = Transfer::new(&others[0], &others[1]).blocks(&[0], &[0]);
        let first = manager.submit(first.device_order(after_before), ()).unwrap();
        keep_busy(&compute, &room);
        write_late(&compute, &room, &here, round);
        let event = Event::new(&context, Timing::Off).unwrap();
        event.record(&compute).unwrap();
        let orders = [event.order().unwrap(), compute.order()];
        let order = orders[usize::from(round > 2)].clone();
        let second = Transfer::new(&here, &there).blocks(&ids, &ids).after(&first.ticket());
        let second = manager.submit(second.device_order(order), ()).unwrap();
        event.record(&idle).unwrap();
        end_of(first).result.unwrap();
        end_of(second).result.unwrap();
        assert!(all_are(&there, &fixture, round), "{blocks} blocks: too early");
    }
}

#[test]
fn layers_can_be_used_while_others_travel() {
    let name = "layers_can_be_used_while_others_travel";
    let Some(context) = device(name, ROOM) else { return };
    for path in [None, Some(CopyPath::Direct), Some(CopyPath::Batched), Some(CopyPath::CopyEach)] {
        let fixture = fixture(&context, path);
        let manager = fixture.manager();
        let shape = config(64, 8, 16);
        let there = fixture.endpoint(PINNED, shape, LayoutKind::FullyContiguous);
        let here = fixture.endpoint(APART, shape, LAYERS_APART);
        let copy = fixture.endpoint(DEVICE, shape, LAYERS_APART);
        let image = Image::scribble(&there, fixture.access(), 5);
        let mut expected = Image::of(&copy, fixture.access());
        let ids: Vec<u32> = (0..64).collect();
        expected.transfer(&image, &ids, &ids, 0..8);
        let transfer = ordered(Transfer::new(&there, &here), &there, &here).blocks(&ids, &ids);
        let completion = manager.submit(transfer.layer_by_layer(), ()).unwrap();
        let layers = completion.layers().unwrap();
        let user = Stream::new(&context).unwrap();
        for (layer, (from, to)) in
            (0..8).zip(here.layout().regions().iter().zip(copy.layout().regions()))
        {
            if let Some(event) = layers.event(layer).unwrap() {
                let raw = usize::try_from(event.raw()).unwrap();
                let raw = std::ptr::with_exposed_provenance_mut(raw);
                // SAFETY: the layers keep the event alive.
                unsafe { user.wait_for_handle(raw) }.unwrap();
            }
            // SAFETY: the layer has arrived when the stream reaches this. Both ends live until the
            // stream has been synchronised.
            unsafe { user.copy(from.location(), to.location(), to.length()) }.unwrap();
        }
        user.synchronize().unwrap();
        end_of(completion).result.unwrap();
        Image::of(&copy, fixture.access()).assert_equals(&expected, &format!("{path:?}"));
    }
}

/// An order that the driver refuses ends the transfer with the driver's reason.
#[test]
fn an_order_of_another_context_is_refused() {
    let name = "an_order_of_another_context_is_refused";
    let Some(context) = device(name, ROOM) else { return };
    let fixture = fixture(&context, None);
    let manager = fixture.manager();
    let shape = config(4, 2, 16);
    let here = fixture.endpoint(DEVICE, shape, LAYERS_APART);
    let there = fixture.endpoint(PINNED, shape, LayoutKind::FullyContiguous);
    let other = terrane_core::DeviceId::new(context.device().id.get() + 77);
    // SAFETY: the order belongs to a device outside the transfer, so it is refused before the
    // handle is used.
    let handle = unsafe { StreamHandle::from_raw(other, 0, Arc::new(())) };
    let transfer = Transfer::new(&here, &there).blocks(&[0], &[0]);
    let transfer = transfer.device_order(DeviceOrder::AfterStream(handle));
    let rejected = manager.submit(transfer, ()).unwrap_err();
    assert!(matches!(rejected.cause, TransferError::NoEngine { .. }), "{rejected}");
}

/// The context of another device is retained once, not for each transfer that runs after one of
/// that device's streams.
#[test]
fn the_context_of_another_device_is_retained_once() {
    let name = "the_context_of_another_device_is_retained_once";
    let Some([context, peer]) = two_devices(name, ROOM) else { return };
    let Some(driver) = SimulatedCuda::find() else {
        return eprintln!("skipped: {name}: the calls of a real driver are not counted");
    };
    let fixture = Fixture::new(&context, DeviceEngineOptions::default(), &[DEVICE, PEER]);
    let fixture = fixture.beside(peer.clone());
    let manager = fixture.manager();
    let shape = config(4, 2, 16);
    let here = fixture.endpoint(DEVICE, shape, LAYERS_APART);
    let there = fixture.endpoint(PEER, shape, LAYERS_APART);
    let theirs = Stream::new(&peer).unwrap();
    let retained = || driver.calls(Some("cuDevicePrimaryCtxRetain"));
    let submit = || {
        let transfer = Transfer::new(&there, &here).blocks(&[0, 1], &[0, 1]);
        let transfer = transfer.device_order(theirs.order());
        end_of(manager.submit(transfer, ()).unwrap()).result.unwrap();
    };
    submit();
    let before = retained();
    (0..5).for_each(|_| submit());
    assert_eq!(retained(), before);
}

#[test]
fn an_order_after_the_per_thread_default_stream_is_refused() {
    let name = "an_order_after_the_per_thread_default_stream_is_refused";
    let Some(context) = device(name, LITTLE) else { return };
    let fixture = fixture(&context, None);
    let (manager, shape) = (fixture.manager(), config(2, 4, 16));
    let here = fixture.endpoint(DEVICE, shape, LAYERS_APART);
    let there = fixture.endpoint(PINNED, shape, LayoutKind::FullyContiguous);
    Image::scribble(&here, fixture.access(), 1);
    // SAFETY: default streams live as long as the context.
    let handle = unsafe { StreamHandle::from_raw(context.device().id, 2, Arc::new(())) };
    let order = DeviceOrder::AfterStream(handle);
    let transfer = Transfer::new(&here, &there).blocks(&[0], &[1]).device_order(order);
    let error = end_of(manager.submit(transfer, ()).unwrap()).result.unwrap_err();
    let cause = error.source().and_then(|cause| cause.downcast_ref::<CudaError>());
    assert!(matches!(cause, Some(CudaError::PerThreadStream)), "{error}: {cause:?}");
}
