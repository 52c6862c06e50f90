//! Values of a parent in a forked process: their calls return errors, and they can be dropped.

use std::num::NonZeroUsize;
use std::sync::Arc;
use std::task::{Context, Poll, Waker};
use std::time::{Duration, Instant};

use terrane_core::{Allocate, ByteCount, Region, RegionRequest, StorageKind};
use terrane_layout::LayoutBuilder;
use terrane_storage::{
    DiskAllocator, DiskOptions, IoBackend, IoQueueOptions, SystemAllocator, SystemOptions,
};
use terrane_testkit::conformance::copy_engine::end_of;
use terrane_testkit::engine::{SimulatedEngine, SimulatedEngineOptions};
use terrane_testkit::memory::HeapAllocator;
use terrane_testkit::process::{in_child, in_fork};
use terrane_transfer::engines::{
    DiskEngine, DiskEngineOptions, HostEngine, HostEngineOptions, RelayEngine, RelayOptions,
    RelaySlots,
};
use terrane_transfer::{
    Completion, CopyEngine, Declined, DeviceOrder, Endpoint, LayerError, LayerState, Transfer,
    TransferError, TransferManager,
};

use crate::support::*;

fn mapped() -> Endpoint {
    endpoint_in(&SystemAllocator::new(SystemOptions::default()), config(8), CONTIGUOUS)
}

fn host() -> Arc<HostEngine> {
    Arc::new(HostEngine::new(HostEngineOptions::default()).unwrap())
}

/// `None` if the kernel refuses the queue.
fn disk(backend: IoBackend) -> Option<Arc<DiskEngine>> {
    let queue = IoQueueOptions { backend, ..IoQueueOptions::default() };
    let options = DiskEngineOptions { queue, ..DiskEngineOptions::default() };
    DiskEngine::new(&options).ok().map(Arc::new)
}

/// A manager, an engine and its endpoints.
struct Setup {
    manager: TransferManager,
    from: Endpoint,
    to: Endpoint,
    order: Option<DeviceOrder>,
}

impl Setup {
    fn over(
        engines: impl IntoIterator<Item = Arc<dyn CopyEngine>>,
        from: Endpoint,
        to: Endpoint,
    ) -> Self {
        let order = [&from, &to].into_iter().any(|end| end.kind().is_device());
        let order = order.then_some(DeviceOrder::AlreadySynchronised);
        Self { manager: TransferManager::new(engines), from, to, order }
    }

    fn host() -> Self {
        Self::over([host() as _], mapped(), mapped())
    }

    fn disk(engine: Arc<DiskEngine>) -> Self {
        let directory = tempfile::tempdir().unwrap();
        let files = DiskAllocator::new(directory.path(), DiskOptions::default()).unwrap();
        Self::over([engine as _], mapped(), endpoint_in(&files, config(8), CONTIGUOUS))
    }

    /// With the engine of a simulated device and the host engine.
    fn relay() -> Self {
        let serves = |from: StorageKind, to: StorageKind| from.is_device() || to.is_device();
        let options = SimulatedEngineOptions::default().serving(serves);
        let device = Arc::new(SimulatedEngine::new(options));
        let options = RelayOptions::default();
        let relay = RelayEngine::new(device, host(), HeapAllocator::pinned(), &options).unwrap();
        let relay = Arc::new(relay);
        assert_ne!(relay.slots(), RelaySlots::default());
        let source = endpoint_in(&HeapAllocator::simulated_device(0), config(8), CONTIGUOUS);
        Self::over([relay as _], source, mapped())
    }

    /// Swaps two blocks.
    fn transfer(&self, first: u32) -> Transfer {
        let (from, to) = ([first, first + 1], [first + 1, first]);
        let transfer = Transfer::new(&self.from, &self.to).blocks(&from, &to);
        match &self.order {
            Some(order) => transfer.device_order(order.clone()),
            None => transfer,
        }
    }

    /// Transfers in the parent, in a child while several transfers wait, and in the parent again.
    fn check(self) {
        run(&self.manager, self.transfer(0));
        let gate = self.from.hold_for_read(&[7]).unwrap();
        let submit = |first| {
            let transfer = self.transfer(first).after(&gate.ticket()).layer_by_layer();
            Some(self.manager.submit(transfer, first).unwrap())
        };
        let mut all = [0, 2, 4, 6].map(submit);
        let (mut this, mut gate) = (Some(self), Some(gate));
        in_fork(|| {
            let this = this.take().unwrap();
            this.check_child();
            let [waited, watched, polled, dropped] = all.each_mut().map(|it| it.take().unwrap());
            check_lost(waited, watched, polled);
            drop(dropped);
            drop(gate.take());
            drop(this);
        });
        drop(gate);
        all.into_iter().for_each(|it| drop(end_of(it.unwrap()).result.unwrap()));
        let this = this.unwrap();
        run(&this.manager, this.transfer(0));
    }

    /// In a child, the parent's values return errors, and the child's own values work.
    fn check_child(&self) {
        let refused = self.manager.submit(self.transfer(0), "guard").unwrap_err();
        assert_eq!(refused.guard, "guard");
        assert!(matches!(refused.cause, TransferError::Forked(_)), "{:?}", refused.cause);
        assert!(refused.cause.is_refusal());
        let explained = self.manager.explain(&self.transfer(0)).unwrap_err();
        assert!(matches!(explained, TransferError::Forked(_)), "{explained:?}");
        let held = self.from.hold_for_write(&[6]).unwrap_err();
        assert!(matches!(held, TransferError::Forked(_)), "{held:?}");

        let manager = TransferManager::with_default_engines().unwrap();
        let (from, to) = (mapped(), mapped());
        run(&manager, Transfer::new(&from, &to).blocks(&[0], &[1]));
        // The new manager refuses the old endpoints, and the old engines decline the new ones.
        let mixed = refused_by(&manager, self.transfer(0));
        assert!(matches!(mixed, TransferError::Forked(_)), "{mixed:?}");
        let old_engines = TransferManager::new(self.manager.engines().iter().cloned());
        let error = refused_by(&old_engines, Transfer::new(&from, &to).blocks(&[0], &[1]));
        let TransferError::NoEngine { declined, .. } = &error else { panic!("{error:?}") };
        assert!(declined.iter().all(|(_, why)| *why == Declined::Forked), "{error}");
    }
}

#[track_caller]
fn refused_by(manager: &TransferManager, transfer: Transfer) -> TransferError {
    manager.submit(transfer, ()).unwrap_err().cause
}

/// In a child, a wait for a transfer of the parent returns an error at once.
fn check_lost(waited: Completion<u32>, watched: Completion<u32>, polled: Completion<u32>) {
    assert!(waited.has_ended() && waited.ticket().has_ended());
    let layers = waited.layers().unwrap();
    assert_eq!(layers.state(0), Ok(LayerState::Failed));
    assert_eq!(layers.wait(1), Err(LayerError::Failed { layer: 1 }));
    let mut context = Context::from_waker(Waker::noop());
    let mut layer = Box::pin(layers.future(2));
    let failed = Poll::Ready(Err(LayerError::Failed { layer: 2 }));
    assert_eq!(layer.as_mut().poll(&mut context), failed);

    // A transfer that runs after it in the child is not started.
    let manager = TransferManager::new([host() as _]);
    let (from, to) = (mapped(), mapped());
    let after = Transfer::new(&from, &to).blocks(&[0], &[0]).after(&waited.ticket());
    let error = end_of(manager.submit(after, ()).unwrap()).result.unwrap_err();
    assert!(matches!(error, TransferError::PredecessorFailed { .. }), "{error:?}");

    let outcome = waited.wait();
    assert_eq!(outcome.guard, 0);
    let error = outcome.result.unwrap_err();
    assert!(matches!(error, TransferError::LostByFork) && !error.is_refusal());
    let until = Instant::now() + Duration::from_secs(3600);
    assert_eq!(watched.wait_until(until).unwrap().guard, 2);
    let mut future = Box::pin(polled.into_future());
    let Poll::Ready(outcome) = future.as_mut().poll(&mut context) else { panic!("pending") };
    assert_eq!(outcome.guard, 4);
}

#[test]
fn a_child_gets_an_error_from_its_parents_host_engine() {
    in_child("forks::a_child_gets_an_error_from_its_parents_host_engine", || Setup::host().check());
}

#[test]
fn a_child_gets_an_error_from_its_parents_disk_engine_on_io_uring() {
    in_child(
        "forks::a_child_gets_an_error_from_its_parents_disk_engine_on_io_uring",
        || match disk(IoBackend::IoUring) {
            Some(engine) => Setup::disk(engine).check(),
            None => eprintln!("skipped: the disk engine on io_uring: the kernel refuses io_uring"),
        },
    );
}

#[test]
fn a_child_gets_an_error_from_its_parents_disk_engine_on_threads() {
    in_child("forks::a_child_gets_an_error_from_its_parents_disk_engine_on_threads", || {
        Setup::disk(disk(IoBackend::Threads).unwrap()).check();
    });
}

#[test]
fn a_child_gets_an_error_from_its_parents_relay() {
    in_child("forks::a_child_gets_an_error_from_its_parents_relay", || Setup::relay().check());
}

/// Forks at arbitrary moments, so that the engines' threads hold locks.
#[test]
fn a_child_waits_for_no_lock_that_a_thread_of_its_parent_held() {
    in_child("forks::a_child_waits_for_no_lock_that_a_thread_of_its_parent_held", || {
        let threads = NonZeroUsize::new(2).unwrap();
        let options = HostEngineOptions { threads, ..HostEngineOptions::default() };
        let engine = Arc::new(HostEngine::new(options).unwrap());
        let mut setup = Some(Setup::over([engine as _], mapped(), mapped()));
        for _ in 0..100 {
            let submit = |it: &Setup| it.manager.submit(it.transfer(0), ()).unwrap();
            let mut submitted = setup.as_ref().map(submit);
            in_fork(|| {
                let outcome = submitted.take().unwrap().wait();
                assert!(matches!(outcome.result, Err(TransferError::LostByFork)));
                drop(setup.take());
            });
            end_of(submitted.unwrap()).result.unwrap();
        }
    });
}

/// The parent's endpoints transfer nothing in the child, so their bytes are free there.
#[test]
fn a_child_creates_endpoints_of_inherited_memory() {
    in_child("forks::a_child_creates_endpoints_of_inherited_memory", || {
        let bytes = RegionRequest::new(config(8).total_bytes());
        let system = SystemAllocator::new(SystemOptions::default());
        let region = Region::new(system.allocate(&bytes).unwrap());
        let layout = || {
            let builder = LayoutBuilder::new(config(8)).fully_contiguous();
            builder.adopt([region.clone()]).unregistered().build().unwrap()
        };
        let mut parents = Some(Endpoint::new(layout()).unwrap());
        assert!(Endpoint::new(layout()).is_err());
        in_fork(|| {
            let childs = Endpoint::new(layout()).unwrap();
            assert!(Endpoint::new(layout()).is_err());
            drop(parents.take());
            assert!(
                Endpoint::new(layout()).is_err(),
                "the child's claim was released with the parent's"
            );
            drop(childs);
            Endpoint::new(layout()).unwrap();
        });
        drop(parents);
        Endpoint::new(layout()).unwrap();
    });
}

#[test]
fn a_relay_of_the_parent_has_no_slots_in_a_child() {
    in_child("forks::a_relay_of_the_parent_has_no_slots_in_a_child", || {
        let engines = [host(), host()];
        let [first, second] = engines;
        let options = RelayOptions::default();
        let relay = RelayEngine::new(first, second, HeapAllocator::pinned(), &options).unwrap();
        let mut relay = Some(relay);
        in_fork(|| {
            let relay = relay.take().unwrap();
            assert_eq!((relay.slots(), relay.trim()), (RelaySlots::default(), ByteCount::ZERO));
        });
    });
}
