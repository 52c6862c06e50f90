//! A simulated engine follows its options.

use std::sync::Arc;
use std::thread;
use std::time::Duration;

use terrane_core::{ByteCount, StorageKind};
use terrane_layout::{ElementFormat, LayoutBuilder, LayoutConfig, LayoutKind};
use terrane_testkit::conformance::copy_engine::end_of;
use terrane_testkit::device::SimulatedStream;
use terrane_testkit::engine::{Fault, SimulatedEngine};
use terrane_testkit::memory::HeapAllocator;
use terrane_testkit::pattern::Pattern;
use terrane_transfer::{DeviceOrder, Endpoint, Transfer, TransferError, TransferManager};

fn endpoint(kind: StorageKind) -> Endpoint {
    let config = LayoutConfig::builder()
        .num_blocks(4)
        .num_layers(2)
        .outer_dim(2)
        .page_size(4)
        .inner_dim(16)
        .element(ElementFormat::Width(2))
        .build()
        .unwrap();
    let allocator = HeapAllocator::new(kind);
    let layout = LayoutBuilder::new(config).kind(LayoutKind::ALL[2]).allocate(&allocator);
    Endpoint::new(layout.unregistered().build().unwrap()).unwrap()
}

struct Rig {
    engine: Arc<SimulatedEngine>,
    manager: TransferManager,
    source: Endpoint,
    destination: Endpoint,
}

fn rig() -> Rig {
    let engine = Arc::new(SimulatedEngine::default());
    let manager = TransferManager::new([engine.clone() as _]);
    let device = StorageKind::Device(Default::default());
    Rig { engine, manager, source: endpoint(device), destination: endpoint(StorageKind::System) }
}

impl Rig {
    fn transfer(&self) -> Transfer {
        Transfer::new(&self.source, &self.destination)
            .blocks(&[0, 2], &[1, 3])
            .device_order(DeviceOrder::AlreadySynchronised)
    }
}

#[test]
fn held_jobs_stay_in_flight_until_they_are_released() {
    let rig = rig();
    rig.engine.hold();
    let first = rig.manager.submit(rig.transfer(), 1).unwrap();
    let other = Transfer::new(&rig.source, &rig.destination).blocks(&[1], &[0]);
    let order = DeviceOrder::AlreadySynchronised;
    let second = rig.manager.submit(other.device_order(order), 2).unwrap();
    rig.engine.wait_until_idle();
    assert_eq!((rig.engine.queued(), rig.engine.ended()), (2, 0));
    assert!(!first.has_ended());
    rig.engine.release(1);
    assert!(end_of(first).result.is_ok());
    rig.engine.wait_until_idle();
    assert_eq!((rig.engine.queued(), rig.engine.ended()), (1, 1));
    assert!(!second.has_ended());
    rig.engine.release_all();
    assert!(end_of(second).result.is_ok());
}

#[test]
fn a_failing_copy_fails_at_its_run_after_earlier_runs() {
    let rig = rig();
    Pattern::new(1).fill(&rig.source).unwrap();
    rig.engine.fail_next(Fault::ShortCopy { after_runs: 3 });
    let completion = rig.manager.submit(rig.transfer(), ()).unwrap();
    let ticket = completion.ticket();
    let error = end_of(completion).result.unwrap_err();
    let TransferError::Copy { bytes, .. } = error else { panic!("{error:?}") };
    assert_eq!(bytes, ByteCount::new(128));
    assert!(ticket.has_ended());
    // Blocks that a transfer left incomplete may be read after they were written again.
    drop(rig.destination.hold_for_write(&[1, 3]).unwrap());
    let found = Pattern::new(1).verify_blocks(&rig.destination, &[1, 3], &[0, 2], 0..2).unwrap();
    // Three and a half of 8 runs of 128 bytes were copied; one byte in 256 is correct by chance.
    assert!((550..=576).contains(&found.mismatches), "{found}");
    assert!(end_of(rig.manager.submit(rig.transfer(), ()).unwrap()).result.is_ok());
}

#[test]
fn engine_faults_and_dropped_jobs_end_with_their_errors() {
    let rig = rig();
    rig.engine.fail_next(Fault::Engine);
    rig.engine.fail_next(Fault::DropJob);
    let next = || end_of(rig.manager.submit(rig.transfer(), ()).unwrap()).result;
    assert!(matches!(next(), Err(TransferError::Engine { engine: "simulated", .. })));
    assert!(matches!(next(), Err(TransferError::EngineStopped)));
    assert!(next().is_ok());
}

#[test]
fn a_transfer_after_a_stream_copies_what_the_stream_wrote() {
    let rig = rig();
    let stream = SimulatedStream::new(Default::default());
    stream.launch();
    let ordered = rig.transfer().device_order(stream.order());
    let completion = rig.manager.submit(ordered, ()).unwrap();
    thread::sleep(Duration::from_millis(5));
    assert!(!completion.has_ended(), "the stream's work has not ended");
    stream.finish_one();
    assert!(end_of(completion).result.is_ok());
}

#[test]
fn jobs_that_are_held_back_end_with_an_error_when_the_engine_drops() {
    let Rig { engine, manager, source, destination } = rig();
    engine.hold();
    let transfer = Transfer::new(&source, &destination).blocks(&[0], &[0]);
    let order = DeviceOrder::AlreadySynchronised;
    let completion = manager.submit(transfer.device_order(order), ()).unwrap();
    drop(manager);
    drop(engine);
    assert!(matches!(end_of(completion).result, Err(TransferError::EngineStopped)));
}
