//! Relays between engines that panic.

use std::error::Error;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::thread;

use terrane_core::ByteCount;
use terrane_testkit::conformance::copy_engine::end_of;
use terrane_testkit::device::SimulatedStream;
use terrane_testkit::engine::{Fault, SimulatedEngine};
use terrane_testkit::memory::HeapAllocator;
use terrane_testkit::pattern::Pattern;
use terrane_transfer::engines::RelayEngine;
use terrane_transfer::{
    Completion, CopyEngine, CopyJob, Declined, DeviceOrder, Endpoint, Quote, Report, Transfer,
    TransferError, TransferManager, TransferOptions, TransferPlan,
};

use super::{BLOCK, slots, to_device, to_system, until};
use crate::support::*;

/// Panics on request.
#[derive(Debug)]
struct Panicking {
    inner: SimulatedEngine,
    /// The number of quotes until one panics; zero for none.
    quotes: AtomicUsize,
    /// Whether the relay's thread panics at its next query of the name.
    at_name: AtomicBool,
}

impl Panicking {
    fn new(inner: SimulatedEngine) -> Arc<Self> {
        Arc::new(Self { inner, quotes: AtomicUsize::new(0), at_name: AtomicBool::new(false) })
    }
}

// SAFETY: the inner engine executes the jobs.
unsafe impl CopyEngine for Panicking {
    fn name(&self) -> &'static str {
        let by_relay = thread::current().name() == Some("terrane-relay");
        assert!(!(by_relay && self.at_name.swap(false, Ordering::SeqCst)), "told to panic");
        self.inner.name()
    }

    fn quote(&self, plan: &TransferPlan, options: &TransferOptions) -> Result<Quote, Declined> {
        let left = |left: usize| left.checked_sub(1);
        let left = self.quotes.fetch_update(Ordering::SeqCst, Ordering::SeqCst, left);
        assert_ne!(left, Ok(1), "told to panic");
        self.inner.quote(plan, options)
    }

    fn submit(&self, job: CopyJob) {
        self.inner.submit(job);
    }
}

struct Rig {
    device: Arc<Panicking>,
    system: Arc<Panicking>,
    relay: Arc<RelayEngine>,
    manager: TransferManager,
    source: Endpoint,
    destination: Endpoint,
}

impl Rig {
    /// Creates a rig whose second hops are held back.
    fn new() -> Self {
        let device = Panicking::new(SimulatedEngine::new(to_device()));
        let system = Panicking::new(SimulatedEngine::new(to_system()));
        let (bounce, options) = (HeapAllocator::pinned(), slots(4, BLOCK));
        let relay = RelayEngine::new(device.clone(), system.clone(), bounce, &options).unwrap();
        let relay = Arc::new(relay);
        let manager = TransferManager::new([relay.clone() as _]);
        let source = endpoint_in(&HeapAllocator::simulated_device(0), config(16), OUTER_FIRST);
        let destination = endpoint(config(16), CONTIGUOUS);
        Pattern::new(1).fill(&source).unwrap();
        system.inner.hold();
        Self { device, system, relay, manager, source, destination }
    }

    fn submit(&self, blocks: &[u32], order: DeviceOrder) -> Completion<()> {
        let transfer = Transfer::new(&self.source, &self.destination).blocks(blocks, blocks);
        self.manager.submit(transfer.device_order(order), ()).unwrap()
    }

    /// Copies all blocks through all slots, and checks the bytes.
    fn assert_whole(&self) {
        self.system.inner.release_all();
        let all: Vec<u32> = (0..16).collect();
        end_of(self.submit(&all, DeviceOrder::AlreadySynchronised)).result.unwrap();
        let found = Pattern::new(1).verify_blocks(&self.destination, &all, &all, 0..4);
        found.unwrap().assert_clean("all");
        // Every slot has been returned.
        let idle = ByteCount::from_usize(self.relay.slots().held - 1);
        assert_eq!(self.relay.trim(), ByteCount::new(idle.get() * BLOCK));
    }
}

#[track_caller]
fn assert_stopped(result: Result<Report, TransferError>) {
    let error = result.unwrap_err();
    let TransferError::Engine { engine: "relay", .. } = error else { panic!("{error:?}") };
    let cause = error.source().and_then(|cause| cause.downcast_ref::<TransferError>());
    assert!(matches!(cause, Some(TransferError::EngineStopped)), "{error:?}");
}

#[test]
fn a_quote_that_panics_fails_its_transfer_and_no_other() {
    for ordered in [false, true] {
        let rig = Rig::new();
        let other = rig.submit(&[9, 10], DeviceOrder::AlreadySynchronised);
        until(|| rig.system.inner.queued() == 2);
        let stream = SimulatedStream::new(Default::default());
        stream.launch();
        let order = if ordered { stream.order() } else { DeviceOrder::AlreadySynchronised };
        // The first quote is the manager's. The second is that of the first part: the order, or the
        // chunk.
        rig.device.quotes.store(2, Ordering::SeqCst);
        assert_stopped(end_of(rig.submit(&[1], order)).result);
        assert!(!other.has_ended());
        rig.system.inner.release_all();
        end_of(other).result.unwrap();
        stream.finish_one();
        rig.assert_whole();
    }
}

#[test]
fn after_a_panic_of_the_relay_transfers_fail_once_no_part_is_in_flight() {
    let rig = Rig::new();
    let failing = rig.submit(&[0, 1], DeviceOrder::AlreadySynchronised);
    until(|| rig.system.inner.queued() == 2);
    // Another transfer has both hops before it, and one begins at the end.
    let begun = rig.submit(&[2], DeviceOrder::AlreadySynchronised);
    until(|| rig.device.inner.ended() == 3);
    rig.system.inner.fail_next(Fault::Engine);
    rig.system.at_name.store(true, Ordering::SeqCst);
    rig.system.inner.release(1);
    until(|| !rig.system.at_name.load(Ordering::SeqCst));
    let next = rig.submit(&[9], DeviceOrder::AlreadySynchronised);
    assert!(!failing.has_ended(), "a chunk is still in flight to the destination");
    assert!(rig.destination.hold_for_write(&[0]).is_err());
    rig.system.inner.release_all();
    assert_stopped(end_of(failing).result);
    assert_stopped(end_of(begun).result);
    end_of(next).result.unwrap();
    rig.assert_whole();
}
