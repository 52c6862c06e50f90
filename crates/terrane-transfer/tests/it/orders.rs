//! Device orders of transfers that wait for others.

use std::sync::Arc;

use terrane_core::{ByteCount, DeviceId};
use terrane_testkit::conformance::copy_engine::end_of;
use terrane_testkit::device::SimulatedStream;
use terrane_testkit::engine::SimulatedEngine;
use terrane_testkit::memory::HeapAllocator;
use terrane_testkit::pattern::Pattern;
use terrane_transfer::engines::{RelayEngine, RelayOptions};
use terrane_transfer::{
    CopyEngine, Declined, DeviceOrder, Endpoint, Transfer, TransferError, TransferManager,
};

use crate::layers::Keeping;
use crate::relays::{to_device, to_system};
use crate::support::*;

/// From a device to system memory.
fn ends() -> [Endpoint; 2] {
    let source = endpoint_in(&HeapAllocator::simulated_device(0), config(8), OUTER_FIRST);
    Pattern::new(1).fill(&source).unwrap();
    [source, endpoint(config(8), CONTIGUOUS)]
}

/// Directly, and by a relay.
fn engines() -> [(Arc<SimulatedEngine>, Arc<dyn CopyEngine>); 2] {
    let direct = Arc::new(SimulatedEngine::default());
    let device = Arc::new(SimulatedEngine::new(to_device()));
    let system = Arc::new(SimulatedEngine::new(to_system()));
    let options = RelayOptions { slots: 3, slot_bytes: ByteCount::new(8 * PIECE) };
    // The engine of the device is queried second.
    let relay = RelayEngine::new(system, device.clone(), HeapAllocator::pinned(), &options);
    [(direct.clone(), direct as _), (device, Arc::new(relay.unwrap()) as _)]
}

#[test]
fn an_order_of_a_waiting_transfer_is_that_of_its_submission() {
    for (device, engine) in engines() {
        for by_event in [false, true] {
            let [source, destination] = ends();
            let manager = TransferManager::new([engine.clone()]);
            let transfer = |block| Transfer::new(&source, &destination).blocks(&[block], &[block]);
            device.hold();
            let first = transfer(0).device_order(DeviceOrder::AlreadySynchronised);
            let first = manager.submit(first, ()).unwrap();
            let stream = SimulatedStream::new(DeviceId::new(0));
            stream.launch();
            let event = stream.record();
            let order = if by_event { event.order() } else { stream.order() };
            let second = transfer(1).after(&first.ticket()).device_order(order);
            let second = manager.submit(second, ()).unwrap();
            // A third transfer may wait for the second one.
            stream.launch();
            device.release_all();
            end_of(first).result.unwrap();
            assert!(!second.has_ended());
            stream.finish_one();
            end_of(second).result.unwrap();
            let found = Pattern::new(1).verify_blocks(&destination, &[1], &[1], 0..4);
            found.unwrap().assert_clean("in order");
        }
    }
}

#[test]
fn an_order_that_cannot_be_captured_is_refused() {
    let engine = Arc::new(Keeping::default());
    let manager = TransferManager::new([engine.clone() as _]);
    let [source, destination] = ends();
    let transfer = |block| Transfer::new(&source, &destination).blocks(&[block], &[block]);
    let reached = DeviceOrder::AlreadySynchronised;
    let first = manager.submit(transfer(0).device_order(reached.clone()), ()).unwrap();
    let stream = SimulatedStream::new(DeviceId::new(0));
    let later = |order| transfer(1).after(&first.ticket()).device_order(order);
    let cause = refused(&manager, later(stream.order()));
    let TransferError::OrderNotCaptured { engine: "keeping", source: why } = cause else {
        panic!("{cause:?}");
    };
    assert_eq!(why.downcast_ref(), Some(&Declined::DeviceOrder));
    drop(destination.hold_for_write(&[1]).unwrap());
    // Orders that the host has already waited for need no capture.
    let second = manager.submit(later(reached), ()).unwrap();
    engine.take().finish(Ok(()));
    end_of(first).result.unwrap();
    engine.take().finish(Ok(()));
    end_of(second).result.unwrap();
}
