//! Transfers that wait on the device, and others that they must not delay.

use std::num::NonZeroU32;
use std::sync::Arc;
use std::sync::mpsc::{Sender, channel};
use std::thread;
use std::time::{Duration, Instant};

use terrane_core::{BoxedCause, ByteCount};
use terrane_cuda::{CopyPath, DeviceEngine, DeviceEngineOptions, Event, Stream, Timing};
use terrane_layout::LayoutKind;
use terrane_testkit::conformance::EngineFixture;
use terrane_testkit::conformance::copy_engine::{end_of, ordered};
use terrane_testkit::model::Image;
use terrane_testkit::simulated_cuda::{Live, SimulatedCuda};
use terrane_transfer::calibration::{Calibration, Direction};
use terrane_transfer::{
    Checksums, Completion, CopyEngine, CopyJob, Declined, DeviceOrder, Endpoint, Quote, Transfer,
    TransferError, TransferManager, TransferOptions, TransferPlan,
};

use super::fixture::{DEVICE, Fixture, LAYERS_APART, PINNED, config, keep_busy, large_memory};
use crate::needs::{LITTLE, device};

const TIMEOUT: Duration = Duration::from_secs(120);

/// The engine's streams, and twice as many waiting transfers: half of them after a stream, and half
/// after one of its events.
const STREAMS: u32 = 4;
const WAITING: u32 = 2 * STREAMS;

/// Many transfers wait on the device. The engine itself still detects the end of another transfer,
/// and begins transfers whose order is satisfied.
fn check_others_continue(name: &str, path: CopyPath, blocks_each: u32, checksums: bool) {
    let Some(context) = device(name, LITTLE) else { return };
    let Some(driver) = SimulatedCuda::find() else {
        return eprintln!("skipped: {name}: a simulated device needed, whose streams can be held");
    };
    let streams = NonZeroU32::new(STREAMS).unwrap();
    let path = Some(path);
    let options = DeviceEngineOptions { path, streams, ..DeviceEngineOptions::default() };
    let fixture = Fixture::new(&context, options, &[DEVICE, PINNED]);
    // No waiting thread polls.
    let manager = TransferManager::new([fixture.engine()]).with_spin(Duration::ZERO);
    let shape = config((WAITING + 2) * blocks_each, 8, 16);
    let here = fixture.endpoint(DEVICE, shape, LAYERS_APART);
    let there = fixture.endpoint(PINNED, shape, LayoutKind::FullyContiguous);
    let image = Image::scribble(&here, fixture.access(), 5);
    let mut expected = Image::of(&there, fixture.access());
    let ids = |number: u32| (number * blocks_each..(number + 1) * blocks_each).collect::<Vec<_>>();
    let transfer = |number: u32| {
        let transfer = Transfer::new(&here, &there).blocks(&ids(number), &ids(number));
        if checksums { transfer.checksums(Checksums::Compute) } else { transfer }
    };
    // All streams exist and are idle.
    for _ in 0..if checksums { 5 } else { 0 } {
        let all: Vec<_> = (0..WAITING)
            .map(|number| manager.submit(ordered(transfer(number), &here, &there), ()).unwrap())
            .collect();
        all.into_iter().for_each(must_end);
    }
    // The first transfer creates what is created on first use.
    run(&manager, &here, &there, &ids(WAITING + 1));
    let room = large_memory(&context);
    let streams = [(); 2].map(|()| Stream::new(&context).unwrap());
    let [held, reached] = [0, 1].map(|number| driver.hold(streams[number].handle()));
    let [after_held, after_reached] = [0, 1].map(|number| after(&streams[number]));
    keep_busy(&streams[0], &room);
    keep_busy(&streams[1], &room);
    let event = Event::new(&context, Timing::Off).unwrap();
    event.record(&streams[0]).unwrap();
    let after_event = event.order().unwrap();
    let waiting: Vec<_> = (0..WAITING)
        .map(|number| {
            let order = if number % 2 == 0 { &after_held } else { &after_event };
            manager.submit(transfer(number).device_order(order.clone()), ()).unwrap()
        })
        .collect();
    // The event's mark at the submission counts, not its present mark.
    event.record(&streams[1]).unwrap();
    for _ in 0..2 {
        let free = ordered(transfer(WAITING), &here, &there);
        must_end(manager.submit(free, ()).unwrap());
    }
    let next = manager.submit(transfer(WAITING + 1).device_order(after_reached), ()).unwrap();
    drop(reached);
    must_end(next);
    streams[1].synchronize().unwrap();
    assert!(waiting.iter().all(|completion| !completion.has_ended()));
    drop(held);
    waiting.into_iter().for_each(|completion| drop(end_of(completion).result.unwrap()));
    (0..WAITING + 2).for_each(|number| expected.transfer(&image, &ids(number), &ids(number), 0..8));
    Image::of(&there, fixture.access()).assert_equals(&expected, name);
    assert_eq!((context.lost(), context.failed_drops()), (None, 0));
}

fn after(stream: &Stream) -> DeviceOrder {
    stream.order()
}

fn run(manager: &TransferManager, here: &Endpoint, there: &Endpoint, ids: &[u32]) {
    let transfer = ordered(Transfer::new(here, there), here, there).blocks(ids, ids);
    end_of(manager.submit(transfer, ()).unwrap()).result.unwrap();
}

#[track_caller]
fn must_end(completion: Completion<()>) {
    match completion.wait_until(Instant::now() + TIMEOUT) {
        Ok(outcome) => drop(outcome.result.unwrap()),
        Err(completion) => panic!("delayed by others: {completion:?}"),
    }
}

#[test]
fn small_transfers_that_wait_delay_no_other() {
    check_others_continue("small_transfers_that_wait_delay_no_other", CopyPath::Direct, 1, false);
}

#[test]
fn large_transfers_that_wait_delay_no_other() {
    check_others_continue("large_transfers_that_wait_delay_no_other", CopyPath::Staged, 16, false);
}

/// Their checksums use no streams that transfers without a wait need.
#[test]
fn transfers_with_checksums_that_wait_delay_no_other() {
    let name = "transfers_with_checksums_that_wait_delay_no_other";
    check_others_continue(name, CopyPath::Direct, 1, true);
}

/// All streams but the one of the waiting transfer are in use. Further transfers share these, and
/// not that one.
#[test]
fn no_transfer_shares_a_stream_that_waits() {
    let name = "no_transfer_shares_a_stream_that_waits";
    let Some(context) = device(name, LITTLE) else { return };
    let Some(driver) = SimulatedCuda::find() else {
        return eprintln!("skipped: {name}: a simulated device needed, whose streams can be held");
    };
    // Only one copy, and the staged path.
    let mut calibration = Calibration::built_in();
    let mut cost = *calibration.cost(Direction::ToHost, CopyPath::Direct).unwrap();
    cost.fixed = Duration::from_secs(1);
    for path in [CopyPath::Direct, CopyPath::CopyEach, CopyPath::Batched] {
        calibration.set(Direction::ToHost, path, cost);
    }
    let options = DeviceEngineOptions {
        calibration: Some(calibration),
        streams: NonZeroU32::new(2).unwrap(),
        scratch_bytes: ByteCount::kib(64),
        ..DeviceEngineOptions::default()
    };
    let fixture = Fixture::new(&context, options, &[DEVICE, PINNED]);
    let manager = TransferManager::new([fixture.engine()]).with_spin(Duration::ZERO);
    let shape = config(64, 8, 16);
    let contiguous = fixture.endpoint(DEVICE, shape, LayoutKind::FullyContiguous);
    let here = fixture.endpoint(DEVICE, shape, LAYERS_APART);
    let there = fixture.endpoint(PINNED, shape, LayoutKind::FullyContiguous);
    let room = large_memory(&context);
    let stream = Stream::new(&context).unwrap();
    let held = driver.hold(stream.handle());
    keep_busy(&stream, &room);
    let small = Transfer::new(&contiguous, &there).blocks(&[63], &[63]);
    let waiting = manager.submit(small.device_order(after(&stream)), ()).unwrap();
    // Each of these wants two streams, and the engine has one left.
    let ids: Vec<u32> = (0..63).collect();
    for _ in 0..2 {
        let large = ordered(Transfer::new(&here, &there), &here, &there).blocks(&ids, &ids);
        assert_eq!(manager.explain(&large).unwrap().path(), CopyPath::Staged.name());
        must_end(manager.submit(large, ()).unwrap());
    }
    assert!(!waiting.has_ended());
    drop(held);
    must_end(waiting);
    assert_eq!((context.lost(), context.failed_drops()), (None, 0));
}

/// Such a transfer has only its order to wait for.
#[test]
fn a_transfer_of_no_bytes_takes_no_stream() {
    let name = "a_transfer_of_no_bytes_takes_no_stream";
    let Some(context) = device(name, LITTLE) else { return };
    let Some(driver) = SimulatedCuda::find() else {
        return eprintln!("skipped: {name}: a simulated device needed, whose streams can be held");
    };
    let fixture = Fixture::new(&context, DeviceEngineOptions::default(), &[DEVICE, PINNED]);
    let manager = fixture.manager();
    let shape = config(2, 2, 16);
    let here = fixture.endpoint(DEVICE, shape, LAYERS_APART);
    let there = fixture.endpoint(PINNED, shape, LayoutKind::FullyContiguous);
    let room = large_memory(&context);
    let stream = Stream::new(&context).unwrap();
    let held = driver.hold(stream.handle());
    keep_busy(&stream, &room);
    let before = context.usage().streams;
    let empty = || Transfer::new(&here, &there).blocks(&[], &[]).device_order(after(&stream));
    let waiting: Vec<_> = (0..6).map(|_| manager.submit(empty(), ()).unwrap()).collect();
    assert!(waiting.iter().all(|completion| !completion.has_ended()));
    assert_eq!(context.usage().streams, before);
    drop(held);
    waiting.into_iter().for_each(must_end);
    assert_eq!((context.lost(), context.failed_drops()), (None, 0));
}

/// A transfer that is cancelled before its order is satisfied leaves a stream that waits for that
/// order. The next transfer's order is not put on that stream.
#[test]
fn the_order_of_a_cancelled_transfer_delays_no_other() {
    let name = "the_order_of_a_cancelled_transfer_delays_no_other";
    let Some(context) = device(name, LITTLE) else { return };
    let Some(driver) = SimulatedCuda::find() else {
        return eprintln!("skipped: {name}: a simulated device needed, whose streams can be held");
    };
    let fixture = Fixture::new(&context, DeviceEngineOptions::default(), &[DEVICE, PINNED]);
    let manager = fixture.manager();
    let shape = config(2, 8, 16);
    let here = fixture.endpoint(DEVICE, shape, LAYERS_APART);
    let there = fixture.endpoint(PINNED, shape, LayoutKind::FullyContiguous);
    let room = large_memory(&context);
    let streams = [(); 2].map(|()| Stream::new(&context).unwrap());
    let [never_reached, reached] = [0, 1].map(|number| driver.hold(streams[number].handle()));
    let orders = [0, 1].map(|number| {
        keep_busy(&streams[number], &room);
        let event = Event::new(&context, Timing::Off).unwrap();
        event.record(&streams[number]).unwrap();
        event.order().unwrap()
    });
    // The order of a transfer that waits for another one is put on a stream at its submission.
    let gate = there.hold_for_read(&[0, 1]).unwrap();
    let [cancelled, next] = [0, 1].map(|number| {
        let block = u32::try_from(number).unwrap();
        let transfer = Transfer::new(&here, &there).blocks(&[block], &[block]);
        let transfer = transfer.after_end(&gate.ticket()).device_order(orders[number].clone());
        let completion = manager.submit(transfer, ()).unwrap();
        if number == 0 {
            completion.cancel();
            assert!(completion.has_ended());
        }
        completion
    });
    drop(gate);
    drop(reached);
    must_end(next);
    assert!(matches!(end_of(cancelled).result, Err(TransferError::Cancelled { .. })));
    drop(never_reached);
    assert_eq!((context.lost(), context.failed_drops()), (None, 0));
}

/// A cancellation after the last bytes were submitted has no effect, and the outcome shows that.
#[test]
fn a_transfer_that_is_submitted_to_its_end_cannot_be_cancelled() {
    let name = "a_transfer_that_is_submitted_to_its_end_cannot_be_cancelled";
    let Some(context) = crate::needs::device_with_kernels(name, LITTLE) else { return };
    let options =
        DeviceEngineOptions { path: Some(CopyPath::Staged), ..DeviceEngineOptions::default() };
    let fixture = Fixture::new(&context, options, &[DEVICE, PINNED]);
    let manager = fixture.manager();
    let shape = config(2, 2, 16);
    let here = fixture.endpoint(DEVICE, shape, LAYERS_APART);
    let there = fixture.endpoint(PINNED, shape, LayoutKind::FullyContiguous);
    for number in 0..32 {
        let transfer = ordered(Transfer::new(&here, &there), &here, &there);
        let transfer = transfer.blocks(&[0, 1], &[0, 1]).layer_by_layer();
        let completion = manager.submit(transfer, ()).unwrap();
        // All work is on the device by now, but the engine's thread has not seen its end. The first
        // transfer allocates the buffers on that thread.
        if number > 0 {
            completion.cancel();
        }
        end_of(completion).result.unwrap();
    }
}

/// An engine that reports its drop.
#[derive(Debug)]
struct ReportsDrop {
    engine: DeviceEngine,
    _told: Sender<()>,
}

// SAFETY: the inner engine copies, and its guarantees apply.
unsafe impl CopyEngine for ReportsDrop {
    fn name(&self) -> &'static str {
        self.engine.name()
    }

    fn quote(&self, plan: &TransferPlan, options: &TransferOptions) -> Result<Quote, Declined> {
        self.engine.quote(plan, options)
    }

    fn capture_order(&self, order: &DeviceOrder) -> Result<DeviceOrder, BoxedCause> {
        self.engine.capture_order(order)
    }

    fn submit(&self, job: CopyJob) {
        self.engine.submit(job);
    }
}

/// If an engine drops on one of its own threads, its kernels stay loaded for its submitted work.
#[test]
fn kernels_stay_for_as_long_as_they_run() {
    let name = "kernels_stay_for_as_long_as_they_run";
    let Some(context) = device(name, LITTLE) else { return };
    let Some(driver) = SimulatedCuda::find() else {
        return eprintln!("skipped: {name}: a simulated device needed, whose streams can be held");
    };
    let options =
        DeviceEngineOptions { path: Some(CopyPath::Direct), ..DeviceEngineOptions::default() };
    let fixture = Fixture::new(&context, DeviceEngineOptions::default(), &[DEVICE, PINNED]);
    let shape = config(2, 8, 16);
    let here = fixture.endpoint(DEVICE, shape, LAYERS_APART);
    let there = fixture.endpoint(PINNED, shape, LayoutKind::FullyContiguous);
    let before = driver.count(Live::Modules);
    let (told, dropped) = channel();
    let engine = ReportsDrop { engine: DeviceEngine::new(&context, options).unwrap(), _told: told };
    let engine: Arc<dyn CopyEngine> = Arc::new(engine);
    // No waiting thread polls, so the first transfer ends on a thread of the engine.
    let manager = TransferManager::new([engine]).with_spin(Duration::ZERO);
    let [begun, stream] = [(); 2].map(|()| Stream::new(&context).unwrap());
    let [not_begun, held] = [&begun, &stream].map(|stream| driver.hold(stream.handle()));
    let room = large_memory(&context);
    keep_busy(&begun, &room);
    keep_busy(&stream, &room);
    let writer = here.hold_for_write(&[0]).unwrap();
    let first = Transfer::new(&here, &there).blocks(&[0], &[0]).device_order(after(&begun));
    let first = manager.submit(first.after(&writer.ticket()), ()).unwrap();
    let second = Transfer::new(&here, &there).blocks(&[1], &[1]).device_order(after(&stream));
    let second = manager.submit(second.after(&first.ticket()), ()).unwrap();
    drop(manager);
    drop(writer);
    // Not before this thread has dropped the engine.
    drop(not_begun);
    assert!(dropped.recv().is_err(), "the engine drops after the second submission");
    for _ in 0..200 {
        assert!(
            driver.count(Live::Modules) > before,
            "the kernels were unloaded before they had run"
        );
        thread::yield_now();
        thread::sleep(Duration::from_micros(100));
    }
    assert!(!second.has_ended());
    drop(held);
    for completion in [first, second] {
        end_of(completion).result.unwrap();
    }
    assert_eq!((context.lost(), context.failed_drops()), (None, 0));
}
