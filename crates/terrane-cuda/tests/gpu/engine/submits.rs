//! A submission does not wait for the device, and its copies run after streams of the caller.

use std::thread;
use std::time::{Duration, Instant};

use terrane_core::{ByteCount, Memory};
use terrane_cuda::{Context, CopyPath, DeviceEngineOptions, Event, Stream, Timing};
use terrane_layout::{LayoutConfig, LayoutKind};
use terrane_testkit::conformance::EngineFixture;
use terrane_testkit::conformance::copy_engine::{end_of, ordered};
use terrane_testkit::model::Image;
use terrane_testkit::simulated_cuda::SimulatedCuda;
use terrane_transfer::{DeviceOrder, Endpoint, LayerState, Transfer};

use super::fixture::{APART, DEVICE, Fixture, LAYERS_APART, PINNED, all_are, config};
use crate::needs::{Needs, device_with_kernels as device};

/// The time after which a submission must find existing resources.
const TIMEOUT: Duration = Duration::from_secs(120);

const ROOM: Needs = Needs { device: ByteCount::mib(512), host: ByteCount::mib(512) };

fn fixture(context: &Context, path: Option<CopyPath>) -> Fixture {
    let options = DeviceEngineOptions { path, ..DeviceEngineOptions::default() };
    Fixture::new(context, options, &[DEVICE, APART, PINNED])
}

/// Submits a fill of all bytes of a device's endpoint.
fn fill(stream: &Stream, end: &Endpoint, value: u8) {
    for region in end.layout().regions() {
        // SAFETY: the endpoint keeps the region alive, and all other uses are ordered after this.
        unsafe { stream.fill(region.location(), value, region.length()) }.unwrap();
    }
}

/// All streams that a transfer runs after are blocked. Small and large submissions by every path
/// still return, and nothing is copied early.
#[test]
fn a_submission_does_not_wait_for_the_device() {
    let name = "a_submission_does_not_wait_for_the_device";
    let Some(context) = device(name, ROOM) else { return };
    let Some(driver) = SimulatedCuda::find() else {
        return eprintln!("skipped: {name}: a stream of a real device cannot be blocked");
    };
    let compute = Stream::new(&context).unwrap();
    let mut value = 0;
    for path in [None].into_iter().chain(CopyPath::ALL.map(Some)) {
        let fixture = fixture(&context, path);
        let manager = fixture.manager();
        for (blocks, to_device) in [(1, false), (64, false), (1, true), (64, true)] {
            value += 1;
            let shape = config(blocks, 4, 16);
            let ids: Vec<u32> = (0..blocks).collect();
            let within = matches!(path, Some(CopyPath::Relayout));
            if path == Some(CopyPath::Peer) {
                continue;
            }
            let here = fixture.endpoint(APART, shape, LAYERS_APART);
            let other = if within { DEVICE } else { PINNED };
            let there = fixture.endpoint(other, shape, LayoutKind::FullyContiguous);
            let (from, to) = if to_device { (&there, &here) } else { (&here, &there) };
            Image::scribble(from, fixture.access(), 3);
            let before = Image::of(to, fixture.access());
            let event = Event::new(&context, Timing::Off).unwrap();

            let held = driver.hold(compute.handle());
            // Writes the source of the transfer, or overwrites its result.
            fill(&compute, &here, value);
            event.record(&compute).unwrap();
            let order = if blocks == 1 { event.order().unwrap() } else { compute.order() };
            let transfer = Transfer::new(from, to).blocks(&ids, &ids).device_order(order);
            let completion = manager.submit(transfer.layer_by_layer(), "guard").unwrap();
            let layers = completion.layers().unwrap();
            for _ in 0..20 {
                driver.step(8);
                assert!(!completion.has_ended(), "{path:?}: it has to wait for the stream");
                assert!(layers.range().all(|layer| !layers.is_done(layer)), "{path:?}");
            }
            drop(held);
            let outcome = end_of(completion);
            assert_eq!(outcome.guard, "guard");
            let report = outcome.result.unwrap();
            assert!(layers.range().all(|layer| layers.state(layer) == Ok(LayerState::Done)));
            if to_device {
                let mut expected = before;
                expected.transfer(&Image::of(from, fixture.access()), &ids, &ids, 0..4);
                let what = report.explanation.path();
                Image::of(to, fixture.access()).assert_equals(&expected, &what);
            } else {
                assert!(all_are(to, &fixture, value), "{path:?}, {blocks} blocks: too early");
            }
        }
    }
    assert_eq!((context.lost(), context.failed_drops()), (None, 0));
}

/// Two threads write separate blocks on one stream, and then transfer them after that stream.
#[test]
fn two_threads_move_what_they_wrote_on_one_stream() {
    let name = "two_threads_move_what_they_wrote_on_one_stream";
    let Some(context) = device(name, ROOM) else { return };
    let compute = Stream::new(&context).unwrap();
    for path in [None, Some(CopyPath::Staged), Some(CopyPath::Direct), Some(CopyPath::CopyEach)] {
        let fixture = fixture(&context, path);
        let manager = fixture.manager();
        let shape: LayoutConfig = config(24, 4, 16);
        let ids: Vec<u32> = (0..24).collect();
        let ends: Vec<_> = (0..2)
            .map(|_| {
                let here = fixture.endpoint(APART, shape, LAYERS_APART);
                (here, fixture.endpoint(PINNED, shape, LayoutKind::FullyContiguous))
            })
            .collect();
        thread::scope(|scope| {
            for (number, (here, there)) in (0_u8..).zip(&ends) {
                let (compute, manager, ids) = (&compute, &manager, &ids);
                scope.spawn(move || {
                    for round in 0..6 {
                        let value = 2 * round + number + 1;
                        fill(compute, here, value);
                        let order = compute.order();
                        let transfer = Transfer::new(here, there).blocks(ids, ids);
                        let transfer = transfer.device_order(order);
                        end_of(manager.submit(transfer, ()).unwrap()).result.unwrap();
                    }
                });
            }
        });
        for ((_, there), value) in ends.iter().zip([11, 12]) {
            assert!(all_are(there, &fixture, value), "{path:?}");
        }
    }
    assert_eq!((context.lost(), context.failed_drops()), (None, 0));
}

/// A stream runs after one layer of a transfer that itself waits. No thread blocks, and the bytes
/// have arrived when the stream reaches them.
#[test]
fn a_borrowed_stream_runs_after_single_layers() {
    let name = "a_borrowed_stream_runs_after_single_layers";
    let Some(context) = device(name, ROOM) else { return };
    let theirs = cudarc::driver::CudaContext::new(0).unwrap().new_stream().unwrap();
    let handle = theirs.cu_stream().cast();
    // SAFETY: the stream is alive for as long as its owner.
    let user = unsafe { Stream::borrow(&context, handle, theirs) }.unwrap();
    for path in [None, Some(CopyPath::Direct), Some(CopyPath::Staged), Some(CopyPath::Batched)] {
        let fixture = fixture(&context, path);
        let manager = fixture.manager();
        let shape = config(48, 6, 16);
        let ids: Vec<u32> = (0..48).collect();
        let there = fixture.endpoint(PINNED, shape, LAYERS_APART);
        let here = fixture.endpoint(APART, shape, LAYERS_APART);
        let copy = fixture.endpoint(DEVICE, shape, LAYERS_APART);
        let image = Image::scribble(&there, fixture.access(), 6);
        let mut expected = Image::of(&copy, fixture.access());
        expected.transfer(&image, &ids, &ids, 1..6);
        let transfer = Transfer::new(&there, &here).blocks(&ids, &ids).layers(1..6);
        let transfer = transfer.device_order(DeviceOrder::AlreadySynchronised).layer_by_layer();
        let completion = manager.submit(transfer, ()).unwrap();
        let layers = completion.layers().unwrap();
        for (layer, (from, to)) in
            (0..).zip(here.layout().regions().iter().zip(copy.layout().regions())).skip(1)
        {
            user.wait_for_layers(&layers, layer).unwrap();
            // SAFETY: the layer has arrived when the stream reaches this. Both ends live until the
            // stream has been synchronised.
            unsafe { user.copy(from.location(), to.location(), to.length()) }.unwrap();
        }
        let error = user.wait_for_layers(&layers, 0).unwrap_err();
        assert!(matches!(error, terrane_cuda::CudaError::Layer(_)), "{error}");
        user.synchronize().unwrap();
        Image::of(&copy, fixture.access()).assert_equals(&expected, &format!("{path:?}"));
        end_of(completion).result.unwrap();
    }
}

/// The driver calls of a submission of 16 blocks on the caller's thread: a launch and an event. The
/// staged path adds a copy, and in parts an event between two streams. Nothing blocks. A satisfied
/// order costs three queries for a stream, and one for an event.
#[test]
fn a_submission_makes_few_driver_calls() {
    let name = "a_submission_makes_few_driver_calls";
    let Some(context) = device(name, ROOM) else { return };
    let Some(driver) = SimulatedCuda::find() else {
        return eprintln!("skipped: {name}: the calls of a real driver are not counted");
    };
    // An idle stream, and a complete event.
    let (idle, event) =
        (Stream::new(&context).unwrap(), Event::new(&context, Timing::Off).unwrap());
    event.record(&idle).unwrap();
    idle.synchronize().unwrap();
    let after_stream = idle.order();
    let after_event = event.order().unwrap();
    let shape = config(32, 4, 16);
    let [from_ids, to_ids] = [0..16, 16..32].map(|ids| ids.rev().collect::<Vec<u32>>());
    let few = DeviceEngineOptions::default();
    // The transfer is in parts, which a submit thread submits. The caller's thread submits the
    // first part, before that thread wakes.
    let parts = DeviceEngineOptions { scratch_bytes: ByteCount::kib(64), ..few.clone() };
    for (path, options, least, most) in [
        (CopyPath::Direct, few.clone(), 2, 2),
        (CopyPath::Staged, few.clone(), 3, 3),
        (CopyPath::Staged, parts, 3, 5),
        (CopyPath::Batched, few.clone(), 0, 0),
        (CopyPath::Relayout, few, 2, 2),
    ] {
        let options = DeviceEngineOptions { path: Some(path), ..options };
        let fixture = Fixture::new(&context, options, &[DEVICE, APART, PINNED]);
        let manager = fixture.manager();
        let here = fixture.endpoint(DEVICE, shape, LAYERS_APART);
        let other = if path == CopyPath::Relayout { DEVICE } else { PINNED };
        let there = fixture.endpoint(other, shape, LayoutKind::FullyContiguous);
        let order = DeviceOrder::AlreadySynchronised;
        for (from, to, order, more) in [
            (&here, &there, &order, 0),
            (&there, &here, &order, 0),
            (&here, &there, &after_stream, 3),
            (&there, &here, &after_event, 1),
        ] {
            let (least, most) = (least + more, most + more);
            let submit = || {
                let before = calls(&driver);
                let transfer = Transfer::new(from, to).device_order(order.clone());
                let transfer = transfer.blocks(&from_ids, &to_ids);
                let completion = manager.submit(transfer, ()).unwrap();
                let made = calls(&driver) - before;
                end_of(completion).result.unwrap();
                made
            };
            // The first submissions create buffers, streams and events. Later ones do so while
            // those of earlier jobs have not returned yet from the thread that saw their end.
            let begun = Instant::now();
            let mut made = submit();
            while !(least..=most).contains(&made) {
                assert!(begun.elapsed() < TIMEOUT, "{path}: {made} calls, again and again");
                thread::yield_now();
                made = submit();
            }
        }
    }
}

/// The end of a transfer in parts also frees the buffers of its earlier parts, so the next one need
/// not ask the driver about them.
#[test]
fn the_buffers_of_an_ended_transfer_are_not_queried() {
    let name = "the_buffers_of_an_ended_transfer_are_not_queried";
    let Some(context) = device(name, ROOM) else { return };
    let Some(driver) = SimulatedCuda::find() else {
        return eprintln!("skipped: {name}: the calls of a real driver are not counted");
    };
    let options = DeviceEngineOptions {
        path: Some(CopyPath::Staged),
        scratch_bytes: ByteCount::kib(64),
        ..DeviceEngineOptions::default()
    };
    let fixture = Fixture::new(&context, options, &[DEVICE, APART, PINNED]);
    let manager = fixture.manager();
    let (shape, ids) = (config(32, 4, 16), (0..16).collect::<Vec<u32>>());
    let here = fixture.endpoint(DEVICE, shape, LAYERS_APART);
    let there = fixture.endpoint(PINNED, shape, LayoutKind::FullyContiguous);
    for (from, to) in [(&here, &there), (&there, &here)] {
        for _ in 0..20 {
            let transfer = ordered(Transfer::new(from, to), from, to).blocks(&ids, &ids);
            let before = driver.calls(Some("cuEventQuery"));
            let completion = manager.submit(transfer, ()).unwrap();
            assert_eq!(driver.calls(Some("cuEventQuery")), before);
            end_of(completion).result.unwrap();
        }
    }
}

/// The number of this thread's driver calls. Queries and settings of the thread itself (its current
/// context, its capture mode) do not count. Creating an event does not count either: whether an
/// idle one exists depends on a thread of the engine.
fn calls(driver: &SimulatedCuda) -> u64 {
    let others = [
        "cuCtxGetCurrent",
        "cuCtxPushCurrent_v2",
        "cuCtxPopCurrent_v2",
        "cuThreadExchangeStreamCaptureMode",
        "cuEventCreate",
    ];
    driver.calls(None) - others.iter().map(|name| driver.calls(Some(name))).sum::<u64>()
}

/// Layers of 4 MiB travel one by one, by every path. With one event for all of them, compute on the
/// first layer would wait for the last one.
#[test]
fn each_layer_of_four_mebibytes_has_its_own_event() {
    let name = "each_layer_of_four_mebibytes_has_its_own_event";
    let Some(context) = device(name, ROOM) else { return };
    let Some(driver) = SimulatedCuda::find() else {
        return eprintln!("skipped: {name}: the work of a real device cannot be held back");
    };
    for path in [None, Some(CopyPath::Direct), Some(CopyPath::Staged), Some(CopyPath::CopyEach)]
        .into_iter()
        .chain([Some(CopyPath::Batched)])
    {
        let fixture = fixture(&context, path);
        let manager = fixture.manager();
        let shape = config(16, 3, 512);
        let ids: Vec<u32> = (0..16).collect();
        let there = fixture.endpoint(PINNED, shape, LayoutKind::FullyContiguous);
        let here = fixture.endpoint(APART, shape, LAYERS_APART);
        let bytes = here.layout().geometry().block_bytes().get() * 16 / 3;
        assert!(bytes >= 4 << 20, "{bytes}");
        let transfer = Transfer::new(&there, &here).blocks(&ids, &ids).layer_by_layer();
        let transfer = transfer.device_order(DeviceOrder::AlreadySynchronised);
        let held = driver.limit(0);
        let completion = manager.submit(transfer, ()).unwrap();
        let layers = completion.layers().unwrap();
        let [first, second] = [0, 1].map(|layer| layers.event(layer).unwrap());
        drop(held);
        assert!(first.is_some() && second.is_some() && first != second, "{path:?}");
        end_of(completion).result.unwrap();
    }
}
