//! Resources of transfers whose end the driver never reported: when they are kept and released.

use std::num::NonZeroU32;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::time::{Duration, Instant};

use terrane_core::{Allocate, ForeignMemory, Memory, Region, RegionRequest, Span};
use terrane_cuda::{Context, CopyPath, DeviceAllocator, DeviceEngineOptions, DeviceMemory, Stream};
use terrane_layout::{Geometry, LayoutBuilder, LayoutKind};
use terrane_testkit::conformance::EngineFixture;
use terrane_testkit::conformance::copy_engine::{end_of, ordered};
use terrane_testkit::model::Image;
use terrane_testkit::process::in_child;
use terrane_testkit::simulated_cuda::SimulatedCuda;
use terrane_transfer::{Completion, Endpoint, Transfer, TransferError, TransferManager};

use super::fixture::{
    DEVICE, Fixture, LAYERS_APART, PINNED, config, endpoint, keep_busy, large_memory,
};
use crate::needs::{LITTLE, device_with_kernels as device};

/// `CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED`, which does not tell whether the work has ended.
const UNSUPPORTED: u32 = 900;
const WAITS: [&str; 2] = ["cuEventSynchronize", "cuStreamSynchronize"];
const QUERIES: [&str; 2] = ["cuEventQuery", "cuStreamQuery"];
const TIMEOUT: Duration = Duration::from_secs(120);

struct Setting {
    driver: SimulatedCuda,
    manager: TransferManager,
    /// The ends of transfers beside the orphans.
    others: [Endpoint; 2],
    there: Endpoint,
    _fixture: Fixture,
}

impl Setting {
    /// Waiting threads do not poll, so the engine's threads end all transfers.
    fn new(test: &str, context: &Context, completion_threads: u32) -> Option<Self> {
        let Some(driver) = SimulatedCuda::find() else {
            eprintln!("skipped: {test}: only a simulated device can leave queries unanswered");
            return None;
        };
        let options = DeviceEngineOptions {
            path: Some(CopyPath::Direct),
            completion_threads: NonZeroU32::new(completion_threads).unwrap(),
            ..DeviceEngineOptions::default()
        };
        let fixture = Fixture::new(context, options, &[DEVICE, PINNED]);
        let manager = TransferManager::new([fixture.engine()]).with_spin(Duration::ZERO);
        let shape = config(8, 4, 16);
        let here = fixture.endpoint(DEVICE, shape, LAYERS_APART);
        let pinned = || fixture.endpoint(PINNED, shape, LayoutKind::FullyContiguous);
        let (there, others) = (pinned(), [here, pinned()]);
        Image::scribble(&others[0], fixture.access(), 4);
        let setting = Self { driver, manager, others, there, _fixture: fixture };
        // The engine's memory, streams and events exist from here on.
        must_end(setting.other());
        Some(setting)
    }

    /// A transfer after the stream, whose end the driver does not report.
    fn orphan(&self, compute: &Stream, source: &Endpoint, block: u32) {
        WAITS.iter().for_each(|call| self.driver.refuse(call, UNSUPPORTED));
        let order = compute.order();
        let transfer = Transfer::new(source, &self.there).blocks(&[block], &[block]);
        let completion = self.manager.submit(transfer.device_order(order), ()).unwrap();
        QUERIES.iter().for_each(|call| self.driver.refuse(call, UNSUPPORTED));
        assert!(matches!(end_of(completion).result, Err(TransferError::Engine { .. })));
        self.driver.clear_faults();
    }

    /// A short transfer between other blocks.
    fn other(&self) -> Completion<()> {
        let [from, to] = &self.others;
        let transfer = ordered(Transfer::new(from, to), from, to).blocks(&[5], &[5]);
        self.manager.submit(transfer, ()).unwrap()
    }
}

#[track_caller]
fn must_end(completion: Completion<()>) {
    match completion.wait_until(Instant::now() + TIMEOUT) {
        Ok(outcome) => drop(outcome.result.unwrap()),
        Err(completion) => panic!("delayed by others: {completion:?}"),
    }
}

/// An endpoint in memory of another library, which runs `on_drop` when the memory drops.
fn foreign(memory: &DeviceMemory, on_drop: impl FnOnce() + Send + Sync + 'static) -> Endpoint {
    struct Owner<F: FnOnce()>(Option<F>);
    impl<F: FnOnce()> Drop for Owner<F> {
        fn drop(&mut self) {
            self.0.take().unwrap()();
        }
    }
    let (kind, location, length) = (memory.kind(), memory.location(), memory.length());
    let owner = Owner(Some(on_drop));
    // SAFETY: the caller keeps the memory longer than the endpoint, and uses it through that alone.
    let region = Region::new(unsafe { ForeignMemory::new(Span { kind, location, length }, owner) });
    let builder = LayoutBuilder::new(config(8, 4, 16)).kind(LayoutKind::FullyContiguous);
    Endpoint::new(builder.adopt(vec![region]).unregistered().build().unwrap()).unwrap()
}

/// Memory for [`foreign`].
fn foreign_memory(context: &Context) -> DeviceMemory {
    let geometry = Geometry::new(&config(8, 4, 16), LayoutKind::FullyContiguous).unwrap();
    let request = RegionRequest::new(geometry.region_bytes(0));
    DeviceAllocator::new(context).allocate(&request).unwrap()
}

/// With one thread, which polls all tasks in turn and much more often than a thread that waits for
/// one task.
#[test]
fn a_driver_has_seconds_to_answer_however_often_it_is_queried() {
    let name = "engine::orphans::a_driver_has_seconds_to_answer_however_often_it_is_queried";
    in_child(name, || {
        let Some(context) = device(name, LITTLE) else { return };
        let Some(setting) = Setting::new(name, &context, 1) else { return };
        let (compute, room) = (Stream::new(&context).unwrap(), large_memory(&context));
        let source = endpoint(&DeviceAllocator::new(&context), config(8, 4, 16), LAYERS_APART);
        let held = setting.driver.hold(compute.handle());
        keep_busy(&compute, &room);
        let begun = Instant::now();
        setting.orphan(&compute, &source, 0);
        let waited = begun.elapsed();
        drop(held);
        assert!(waited > Duration::from_secs(1), "{waited:?}");
    });
}

/// The memory of an orphan blocks a thread of the engine when it drops. Other transfers end.
#[test]
fn memory_that_blocks_when_it_drops_delays_no_short_transfer() {
    let name = "engine::orphans::memory_that_blocks_when_it_drops_delays_no_short_transfer";
    in_child(name, || {
        let Some(context) = device(name, LITTLE) else { return };
        let Some(setting) = Setting::new(name, &context, 2) else { return };
        let (compute, room) = (Stream::new(&context).unwrap(), large_memory(&context));
        let memory = foreign_memory(&context);
        for block in 0..2 {
            let held = setting.driver.hold(compute.handle());
            keep_busy(&compute, &room);
            let (told, dropping): (Sender<()>, Receiver<()>) = channel();
            let (release, released): (Sender<()>, Receiver<()>) = channel();
            let released = std::sync::Mutex::new(released);
            let source = foreign(&memory, move || {
                told.send(()).unwrap();
                let _ = released.lock().unwrap().recv();
            });
            setting.orphan(&compute, &source, block);
            drop(source);
            drop(held);
            compute.synchronize().unwrap();
            let begun = Instant::now();
            while dropping.try_recv().is_err() {
                assert!(begun.elapsed() < TIMEOUT, "the memory never drops");
                must_end(setting.other());
            }
            (0..4).for_each(|_| must_end(setting.other()));
            drop(release);
        }
    });
}

/// The memory of one orphan panics when it drops. The other orphan, whose work still runs, is kept
/// as before.
#[test]
fn a_panic_while_one_orphan_is_released_leaves_the_others() {
    let name = "engine::orphans::a_panic_while_one_orphan_is_released_leaves_the_others";
    in_child(name, || {
        let Some(context) = device(name, LITTLE) else { return };
        let Some(setting) = Setting::new(name, &context, 1) else { return };
        let room = large_memory(&context);
        let memories = [(); 2].map(|()| foreign_memory(&context));
        let computes = [(); 2].map(|()| Stream::new(&context).unwrap());
        let [first, second] = [0, 1].map(|number| {
            let held = setting.driver.hold(computes[number].handle());
            keep_busy(&computes[number], &room);
            held
        });
        let (told, dropping) = channel();
        let panics = foreign(&memories[0], move || {
            told.send(()).unwrap();
            panic!("memory that panics");
        });
        setting.orphan(&computes[0], &panics, 0);
        let (told, kept) = channel();
        let plain = foreign(&memories[1], move || told.send(()).unwrap());
        setting.orphan(&computes[1], &plain, 1);
        drop((panics, plain));
        drop(first);
        computes[0].synchronize().unwrap();
        let begun = Instant::now();
        while dropping.try_recv().is_err() {
            assert!(begun.elapsed() < TIMEOUT, "the memory never drops");
            must_end(setting.other());
        }
        must_end(setting.other());
        assert!(kept.try_recv().is_err(), "its source is still to be read");
        assert!(setting.there.hold_for_write(&[1]).is_err());
        drop(second);
        let begun = Instant::now();
        while kept.try_recv().is_err() {
            assert!(begun.elapsed() < TIMEOUT, "the other orphan is never released");
            must_end(setting.other());
        }
    });
}
