//! Wakers and guards, as foreign code that waits for other layers and transfers.

use std::future::Future;
use std::num::NonZeroU32;
use std::pin::pin;
use std::sync::mpsc::{Sender, channel};
use std::sync::{Arc, Mutex};
use std::task::{Context as TaskContext, Poll, Wake, Waker};
use std::thread::Builder;
use std::time::Duration;

use terrane_core::ByteCount;
use terrane_cuda::{CopyPath, DeviceEngineOptions, Stream};
use terrane_layout::LayoutKind;
use terrane_testkit::conformance::EngineFixture;
use terrane_testkit::conformance::copy_engine::end_of;
use terrane_testkit::model::Image;
use terrane_testkit::simulated_cuda::SimulatedCuda;
use terrane_transfer::{Completion, DeviceOrder, Layers, Transfer, TransferManager};

use super::fixture::{
    DEVICE, Fixture, HeldStream, LAYERS_APART, PINNED, config, keep_busy, large_memory,
};
use crate::needs::{LITTLE, device_with_kernels as device};

const TIMEOUT: Duration = Duration::from_secs(120);

/// A waker that waits for another layer of the same transfer, and reports the result.
struct WaitsForLayer {
    layers: Layers,
    layer: u32,
    told: Mutex<Sender<bool>>,
}

impl Wake for WaitsForLayer {
    fn wake(self: Arc<Self>) {
        let came = self.layers.wait(self.layer).is_ok();
        // The test may have ended.
        let _ = self.told.lock().unwrap().send(came);
    }
}

/// A waker of the first layer waits for the last one. The job ends all the same, whichever thread
/// reports the layers.
#[test]
fn a_waker_of_a_layer_may_wait_for_another() {
    let name = "a_waker_of_a_layer_may_wait_for_another";
    let Some(context) = device(name, LITTLE) else { return };
    for path in [CopyPath::Direct, CopyPath::Batched, CopyPath::Staged] {
        // Each layer is a separate part.
        let options = DeviceEngineOptions {
            path: Some(path),
            scratch_bytes: ByteCount::kib(64),
            request_bytes: ByteCount::kib(64),
            ..DeviceEngineOptions::default()
        };
        let fixture = Fixture::new(&context, options, &[DEVICE, PINNED]);
        let manager = TransferManager::new([fixture.engine()]).with_spin(TIMEOUT);
        let shape = config(8, 6, 16);
        let ids: Vec<u32> = (0..8).collect();
        let here = fixture.endpoint(DEVICE, shape, LAYERS_APART);
        let there = fixture.endpoint(PINNED, shape, LayoutKind::FullyContiguous);
        let image = Image::scribble(&there, fixture.access(), 3);
        let mut expected = Image::of(&here, fixture.access());
        expected.transfer(&image, &ids, &ids, 0..6);
        let held = HeldStream::new(&context);
        let transfer = Transfer::new(&there, &here).blocks(&ids, &ids).device_order(held.order());
        let completion = manager.submit(transfer.layer_by_layer(), ()).unwrap();
        let layers = completion.layers().unwrap();
        let (told, came) = channel();
        let waits = WaitsForLayer { layers: layers.clone(), layer: 5, told: Mutex::new(told) };
        let waker = Waker::from(Arc::new(waits));
        let mut first = pin!(layers.future(0));
        let polled = first.as_mut().poll(&mut TaskContext::from_waker(&waker));
        assert_eq!(polled, Poll::Pending, "the stream that it runs after stands still");
        // A thread polls the transfer, so that a caller's thread reports layers, too.
        let helper = Builder::new().spawn(move || layers.wait(1)).unwrap();
        drop(held);
        assert_eq!(came.recv_timeout(TIMEOUT / 2), Ok(true), "{path}: it never ends");
        helper.join().unwrap().unwrap();
        end_of(completion).result.unwrap();
        Image::of(&here, fixture.access()).assert_equals(&expected, path.name());
    }
    assert_eq!((context.lost(), context.failed_drops()), (None, 0));
}

/// Waits for another transfer when it drops, and reports the result.
struct WaitsForTransfer {
    other: Option<Completion<()>>,
    told: Sender<bool>,
}

impl Drop for WaitsForTransfer {
    fn drop(&mut self) {
        let ended = self.other.take().map(|other| other.wait().result.is_ok());
        // The test may have ended.
        let _ = self.told.send(ended == Some(true));
    }
}

/// One of two completion threads polls the remaining jobs. A guard that it drops waits for another
/// of these jobs: the other thread finishes that one.
#[test]
fn a_guard_may_wait_for_another_transfer() {
    let name = "a_guard_may_wait_for_another_transfer";
    let Some(context) = device(name, LITTLE) else { return };
    let Some(driver) = SimulatedCuda::find() else {
        return eprintln!("skipped: {name}: a simulated device needed, whose streams can be held");
    };
    let completion_threads = NonZeroU32::new(2).unwrap();
    let path = Some(CopyPath::Direct);
    let options =
        DeviceEngineOptions { path, completion_threads, ..DeviceEngineOptions::default() };
    let fixture = Fixture::new(&context, options, &[DEVICE, PINNED]);
    // No waiting thread polls.
    let manager = TransferManager::new([fixture.engine()]).with_spin(Duration::ZERO);
    let shape = config(8, 4, 16);
    let here = fixture.endpoint(DEVICE, shape, LAYERS_APART);
    let there = fixture.endpoint(PINNED, shape, LayoutKind::FullyContiguous);
    let image = Image::scribble(&here, fixture.access(), 3);
    let mut expected = Image::of(&there, fixture.access());
    let ids = [0, 1, 2, 3];
    expected.transfer(&image, &ids, &ids, 0..4);
    let (told, came) = channel();
    let room = large_memory(&context);
    let streams = [(); 3].map(|()| Stream::new(&context).unwrap());
    let [first, second, third] = [0, 1, 2].map(|number| driver.hold(streams[number].handle()));
    streams.iter().for_each(|stream| keep_busy(stream, &room));
    let transfer = |id: usize, number: usize| {
        let order = streams[number].order();
        Transfer::new(&here, &there).blocks(&ids[id..=id], &ids[id..=id]).device_order(order)
    };
    // One thread waits for this transfer; the other thread polls all later ones.
    let one = manager.submit(transfer(0, 0), ()).unwrap();
    let other = manager.submit(transfer(3, 2), ()).unwrap();
    let guard = WaitsForTransfer { other: Some(other), told: told.clone() };
    drop(manager.submit(transfer(1, 1), guard).unwrap());
    let two = manager.submit(transfer(2, 0), ()).unwrap();
    drop(second);
    drop(first);
    end_of(one).result.unwrap();
    end_of(two).result.unwrap();
    drop(third);
    assert_eq!(came.recv_timeout(TIMEOUT), Ok(true), "it never ends");
    Image::of(&there, fixture.access()).assert_equals(&expected, name);
    assert_eq!((context.lost(), context.failed_drops()), (None, 0));
}

/// One thread polls two short transfers. A guard that it drops waits for the second one, which
/// another thread then finishes.
#[test]
fn a_guard_may_wait_for_a_transfer_that_its_thread_polled() {
    let name = "a_guard_may_wait_for_a_transfer_that_its_thread_polled";
    let Some(context) = device(name, LITTLE) else { return };
    let Some(driver) = SimulatedCuda::find() else {
        return eprintln!("skipped: {name}: a simulated device needed, whose streams can be held");
    };
    let completion_threads = NonZeroU32::new(2).unwrap();
    let path = Some(CopyPath::Direct);
    let options =
        DeviceEngineOptions { path, completion_threads, ..DeviceEngineOptions::default() };
    let fixture = Fixture::new(&context, options, &[DEVICE, PINNED]);
    // No waiting thread polls.
    let manager = TransferManager::new([fixture.engine()]).with_spin(Duration::ZERO);
    let shape = config(8, 4, 16);
    let here = fixture.endpoint(DEVICE, shape, LAYERS_APART);
    let there = fixture.endpoint(PINNED, shape, LayoutKind::FullyContiguous);
    Image::scribble(&here, fixture.access(), 3);
    let room = large_memory(&context);
    let [compute, earlier] = [(); 2].map(|()| Stream::new(&context).unwrap());
    // In some rounds, the other thread has already taken the second transfer.
    for _ in 0..20 {
        let [held, held_earlier] = [&compute, &earlier].map(|stream| driver.hold(stream.handle()));
        [&compute, &earlier].into_iter().for_each(|stream| keep_busy(stream, &room));
        let transfer = |id: u32, order: DeviceOrder| {
            Transfer::new(&here, &there).blocks(&[id], &[id]).device_order(order)
        };
        let other = manager.submit(transfer(1, compute.order()), ()).unwrap();
        let (told, came) = channel();
        let guard = WaitsForTransfer { other: Some(other), told };
        // It has not ended, so a thread of the engine drops the guard.
        drop(manager.submit(transfer(0, earlier.order()), guard).unwrap());
        drop(held_earlier);
        drop(held);
        assert_eq!(came.recv_timeout(TIMEOUT), Ok(true), "it never ends");
        compute.synchronize().unwrap();
        earlier.synchronize().unwrap();
    }
    assert_eq!((context.lost(), context.failed_drops()), (None, 0));
}
