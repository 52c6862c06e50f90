//! Managed memory: types, identities, streams and exhaustion.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::Duration;

use terrane_core::{Allocate, ByteCount, DeviceId, Label, Memory, RegionRequest, StorageKind};
use terrane_pool::adaptors::{BlockState, Budget, Snapshot};
use terrane_pool::managed::{Lifecycle, ManagedError, ManagerOptions, MemoryManager};
use terrane_pool::{Access, StreamId};
use terrane_testkit::fault::{FaultPlan, InjectFaults as _};
use terrane_testkit::simulated::{Simulated, SimulatedOptions, SimulatedStreams};

use crate::conformance::{Fixture, check};
use crate::heap::Heap;

const COMPUTE: StreamId = StreamId::new(1);
const COPY: StreamId = StreamId::new(2);

fn bytes(count: u64) -> ByteCount {
    ByteCount::new(count)
}

fn budget(limit: u64) -> Budget {
    Budget::new("managed", bytes(limit))
}

fn on_heap(limit: u64) -> (MemoryManager<Heap>, Heap) {
    let heap = Heap::new(ByteCount::mib(1));
    (MemoryManager::new(heap.clone(), budget(limit), ManagerOptions::default()), heap)
}

/// A manager of a simulated device with simulated streams.
fn on_device(capacity: u64) -> (MemoryManager<Arc<Simulated>>, Arc<Simulated>, SimulatedStreams) {
    let options = SimulatedOptions { capacity: bytes(capacity), ..SimulatedOptions::default() };
    let device = Arc::new(Simulated::new(options));
    let streams = SimulatedStreams::new(1);
    let options = ManagerOptions {
        fences: Some(Arc::new(streams.clone())),
        pending_wait: Duration::from_millis(20),
        ..ManagerOptions::default()
    };
    let manager = MemoryManager::new(Arc::clone(&device), budget(u64::MAX), options);
    (manager, device, streams)
}

#[test]
fn a_manager_is_an_upstream_like_any_other() {
    check("manager", || {
        let heap = Heap::new(ByteCount::mib(64));
        let source = MemoryManager::new(
            heap.clone(),
            budget(ByteCount::mib(64).get()),
            ManagerOptions::default(),
        );
        Fixture { source, live_blocks: Box::new(move || heap.live_blocks()), is_bounded: true }
    });
}

#[test]
fn accounts_count_what_was_obtained() {
    let (manager, heap) = on_heap(1000);
    let first = manager.allocate_slice::<u8>(5).unwrap();
    assert_eq!(manager.allocated(), bytes(8), "the heap's granule is 8 bytes");
    let window = manager.window();
    let second = manager.allocate_bytes(bytes(100), "kv").unwrap();
    let refused = manager.allocate_slice::<u64>(200).unwrap_err();
    assert!(refused.is_exhaustion(), "{refused}");
    assert_eq!(
        (manager.allocated(), manager.peak(), manager.requests()),
        (bytes(112), bytes(112), 3)
    );
    assert_eq!(manager.remaining(), bytes(888));
    assert!(manager.check(bytes(888)).is_ok());
    let over = manager.check(bytes(889)).unwrap_err();
    assert_eq!((over.requested, over.live, over.limit), (bytes(889), bytes(112), bytes(1000)));
    drop(second);
    manager.reset_peak();
    assert_eq!(manager.peak(), bytes(8));
    assert_eq!((window.totals().peak.bytes, window.totals().failed), (112, 1));
    drop((first, manager));
    assert_eq!(heap.live_blocks(), 0);
}

#[test]
fn zero_bytes_are_a_valid_size() {
    let (manager, heap) = on_heap(0);
    let mut nothing = manager.allocate_slice::<u64>(0).unwrap();
    assert!(nothing.is_empty() && nothing.as_bytes().is_empty());
    // SAFETY: the slice has no elements.
    assert_eq!(unsafe { nothing.host_slice() }.unwrap(), &[0_u64; 0]);
    assert_eq!(manager.allocate_slice::<()>(usize::MAX).unwrap().len(), usize::MAX);
    assert_eq!(heap.live_blocks(), 0);
    assert!(matches!(manager.allocate_slice::<u64>(usize::MAX), Err(ManagedError::Size(_))));
}

#[test]
fn slices_are_reinterpreted_in_both_directions_and_checked() {
    let (manager, _) = on_heap(1000);
    let mut words = manager.allocate_slice::<u32>(6).unwrap();
    // SAFETY: no other code uses the slice.
    unsafe { words.host_slice() }.unwrap().copy_from_slice(&[1, 2, 3, 4, 5, 6]);
    assert_eq!(words.view_as::<u64>().unwrap().len(), 3);
    let mut bytes = words.into_bytes();
    // SAFETY: no other code uses the slice.
    assert_eq!(unsafe { bytes.host_slice() }.unwrap()[4..8], 2_u32.to_ne_bytes());
    let mut words = bytes.try_cast::<u32>().unwrap();
    // SAFETY: no other code uses the slice.
    assert_eq!(unsafe { words.host_slice() }.unwrap(), [1, 2, 3, 4, 5, 6]);

    let failed = words.try_cast::<[u8; 7]>().unwrap_err();
    assert!(matches!(failed.cause, ManagedError::PartialElement { element: 7, .. }), "{failed}");
    assert_eq!(failed.slice.len(), 6);
}

#[test]
fn a_misaligned_reinterpretation_is_refused() {
    // Simulated addresses have no alignment.
    let (manager, ..) = on_device(1000);
    let _odd = manager.allocate_slice::<u8>(1).unwrap();
    let bytes = manager.allocate_slice::<u8>(8).unwrap();
    let failed = bytes.try_cast::<u64>().unwrap_err();
    assert!(matches!(failed.cause, ManagedError::Misaligned { .. }), "{failed}");
    let mut aligned = manager.allocate_slice::<u64>(1).unwrap();
    assert_eq!(aligned.location().alignment().get() % 8, 0);
    // SAFETY: a device's memory is never borrowed.
    let error = unsafe { aligned.host_slice() }.unwrap_err();
    assert!(matches!(error, ManagedError::NotHost { .. }), "{error}");
}

#[test]
fn identities_change_their_state_and_stale_ones_are_refused() {
    let (manager, device, streams) = on_device(1 << 20);
    let block = manager
        .allocate_block(&RegionRequest::new(bytes(64)).labelled("kv"), Some(COMPUTE))
        .unwrap();
    let handle = block.handle();
    let identity = block.identity().unwrap();
    assert_eq!((identity.state, identity.stream), (Lifecycle::Live, Some(COMPUTE)));
    assert_eq!((identity.device(), identity.tag.as_str()), (device_of(&device), "kv"));
    assert_eq!(manager.locate(handle, bytes(60), bytes(4)).unwrap().alignment().get(), 4);
    let error = manager.locate(handle, bytes(60), bytes(5)).unwrap_err();
    assert!(matches!(error, ManagedError::OutOfBounds { .. }), "{error}");

    streams.submit(COMPUTE, || {});
    drop(block);
    assert_eq!(manager.identity(handle).unwrap().state, Lifecycle::PendingFree);
    assert!(manager.locate(handle, bytes(0), bytes(1)).unwrap_err().is_use_after_free());
    let snapshot = Snapshot::of(&[&manager]);
    assert_eq!(snapshot.blocks[0].state, BlockState::Pending);
    assert_eq!(snapshot.blocks[0].tag, Label::from("kv"));
    assert_eq!((manager.reap(), manager.allocated()), (0, bytes(64)));

    streams.run_all();
    assert_eq!((manager.reap(), manager.allocated()), (1, bytes(0)));
    assert_eq!(manager.identity(handle).unwrap().state, Lifecycle::Freed);
    assert!(manager.locate(handle, bytes(0), bytes(1)).unwrap_err().is_use_after_free());
    let _successor = manager.allocate_bytes(bytes(1), "").unwrap();
    let stale = manager.identity(handle).unwrap_err();
    assert!(matches!(stale, ManagedError::Stale { current: 2, .. }), "{stale}");
}

fn device_of(device: &Arc<Simulated>) -> Option<DeviceId> {
    match device.kind() {
        StorageKind::Device(id) => Some(id),
        _ => None,
    }
}

#[test]
fn one_use_is_kept_for_each_stream_and_all_are_waited_for() {
    let (manager, device, streams) = on_device(1 << 20);
    let block = manager.allocate_bytes(bytes(8), "").unwrap();
    for _ in 0..1000 {
        block.record_use(COMPUTE, Access::Read).unwrap();
        block.record_use(COPY, Access::Write).unwrap();
        block.record_use(COPY, Access::Read).unwrap();
    }
    assert_eq!(block.uses(), [(COMPUTE, Access::Read), (COPY, Access::Write)]);
    streams.submit(COMPUTE, || {});
    streams.submit(COPY, || {});
    drop(block);
    assert_eq!(streams.fences_created(), 2);
    assert!(streams.step(COMPUTE));
    assert_eq!(manager.reap(), 0);
    assert!(streams.step(COPY));
    assert_eq!(manager.reap(), 1);
    assert_eq!(device.usage().live_blocks, 0);

    let (without, _) = on_heap(8);
    let block = without.allocate_bytes(bytes(8), "").unwrap();
    assert!(matches!(block.record_use(COPY, Access::Read), Err(ManagedError::NoFences)));
    assert!(matches!(
        without.allocate_slice_tagged::<u8>(1, "", Some(COPY)),
        Err(ManagedError::NoFences)
    ));
}

#[test]
fn a_fitting_block_that_is_pending_is_waited_for_before_anything_is_refused() {
    let (manager, _, streams) = on_device(64);
    let request = RegionRequest::new(bytes(64));
    let block = manager.allocate_block(&request, Some(COMPUTE)).unwrap();
    streams.submit(COMPUTE, || {});
    drop(block);
    // The stream does not run, so the request is refused after the wait.
    assert!(manager.allocate_block(&request, None).unwrap_err().is_exhaustion());
    streams.set_runs_on_wait(true);
    assert!(manager.allocate_block(&request, None).is_ok());
}

#[test]
fn pending_blocks_do_not_pile_up_where_nothing_is_exhausted() {
    let (manager, device, streams) = on_device(1 << 30);
    for _ in 0..1000 {
        let block = manager.allocate_slice_tagged::<u8>(64, "", Some(COMPUTE)).unwrap();
        streams.submit(COMPUTE, || {});
        drop(block);
        streams.run_all();
    }
    assert!(device.usage().peak_bytes <= bytes(3 * 64), "{:?}", device.usage());
}

#[test]
fn a_stream_ordered_upstream_gets_blocks_back_at_once() {
    let device = Arc::new(Simulated::new(SimulatedOptions::default()));
    let streams = SimulatedStreams::new(1);
    let options = ManagerOptions {
        fences: Some(Arc::new(streams.clone())),
        upstream_is_stream_ordered: true,
        pending_wait: Duration::ZERO,
    };
    let manager = MemoryManager::new(Arc::clone(&device), budget(u64::MAX), options);
    streams.submit(COMPUTE, || {});
    drop(manager.allocate_slice_tagged::<u8>(64, "", Some(COMPUTE)).unwrap());
    assert_eq!((manager.pending(), device.usage().live_blocks), (0, 0));
    let shared = manager.allocate_slice_tagged::<u8>(64, "", Some(COMPUTE)).unwrap();
    streams.submit(COPY, || {});
    shared.block().record_use(COPY, Access::Read).unwrap();
    drop(shared);
    assert_eq!(manager.pending(), 1, "a block waits for another stream");
    assert!(streams.step(COPY));
    assert_eq!(manager.reap(), 1);
}

#[test]
fn exported_blocks_are_imported_once() {
    let (manager, heap) = on_heap(1000);
    let handle = manager.allocate_bytes(bytes(16), "ffi").unwrap().export();
    let handle = terrane_pool::managed::BlockHandle::from_raw(handle.to_raw());
    assert_eq!(manager.identity(handle).unwrap().state, Lifecycle::Live);
    let block = manager.import(handle).unwrap();
    let twice = manager.import(handle).unwrap_err();
    assert!(matches!(twice, ManagedError::NotExported { .. }), "{twice}");
    drop(block);
    assert!(manager.import(handle).unwrap_err().is_use_after_free());

    let _forgotten = manager.allocate_bytes(bytes(16), "ffi").unwrap().export();
    let outlives = manager.allocate_bytes(bytes(16), "").unwrap();
    drop(manager);
    assert_eq!(outlives.length(), bytes(16));
    drop(outlives);
    assert_eq!(heap.live_blocks(), 0, "the manager frees exported blocks");
}

#[test]
fn faults_leave_the_accounts_as_they_were() {
    let heap = Heap::new(ByteCount::mib(1));
    let upstream = heap.clone().failing(FaultPlan::new().fail_every(2));
    let manager = MemoryManager::new(upstream, budget(1 << 20), ManagerOptions::default());
    let blocks: Vec<_> = (0..20).filter_map(|_| manager.allocate_slice::<u64>(4).ok()).collect();
    assert_eq!((blocks.len(), manager.allocated()), (10, bytes(320)));
    assert_eq!(manager.budget().live(), bytes(320));
    drop((blocks, manager));
    assert_eq!(heap.live_blocks(), 0);
}

#[test]
fn threads_and_streams_leave_nothing_behind() {
    let (manager, device, streams) = on_device(1 << 20);
    let done = AtomicBool::new(false);
    thread::scope(|scope| {
        let runner = scope.spawn(|| {
            while !done.load(Ordering::Relaxed) {
                streams.run_all();
                thread::yield_now();
            }
        });
        let workers: Vec<_> = (0..3_u64)
            .map(|worker| {
                let (manager, streams) = (&manager, &streams);
                scope.spawn(move || {
                    let mut kept = Vec::new();
                    for round in 0..300_u64 {
                        let stream = [COMPUTE, COPY][usize::from(round % 3 == 0)];
                        let request = RegionRequest::new(bytes(1 + (round * 37 + worker) % 500));
                        let block = manager.allocate_block(&request, Some(stream)).unwrap();
                        streams.submit(stream, || {});
                        block.record_use(COPY, Access::Read).unwrap();
                        if round % 7 == 0 {
                            kept.push(block.export());
                        }
                        if round % 11 == 0
                            && let Some(handle) = kept.pop()
                        {
                            drop(manager.import(handle).unwrap());
                            assert!(manager.import(handle).unwrap_err().is_use_after_free());
                        }
                        if round % 13 == 0 {
                            manager.reap();
                        }
                    }
                    kept.into_iter().for_each(|handle| drop(manager.import(handle).unwrap()));
                })
            })
            .collect();
        workers.into_iter().for_each(|worker| worker.join().unwrap());
        done.store(true, Ordering::Relaxed);
        runner.join().unwrap();
    });
    streams.run_all();
    manager.reap();
    assert_eq!((manager.pending(), manager.allocated()), (0, bytes(0)));
    assert_eq!((manager.budget().live(), device.usage().live_blocks), (bytes(0), 0));
    assert_eq!(manager.requests(), device.usage().allocations);
}
