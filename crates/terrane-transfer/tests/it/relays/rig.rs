//! A relay between two simulated engines, and both ends of its transfers.

use std::sync::Arc;

use terrane_core::Allocate;
use terrane_testkit::engine::SimulatedEngine;
use terrane_testkit::memory::HeapAllocator;
use terrane_testkit::pattern::Pattern;
use terrane_transfer::engines::{RelayEngine, RelayOptions};
use terrane_transfer::{DeviceOrder, Endpoint, Transfer, TransferManager};

use super::{to_device, to_system};
use crate::support::*;

/// A relay between simulated engines that the test controls.
pub struct Steered {
    /// Drops first: a relay waits for its parts, and a failing test must not wait.
    _release: [ReleaseAll; 2],
    pub device: Arc<SimulatedEngine>,
    pub system: Arc<SimulatedEngine>,
    pub relay: Arc<RelayEngine>,
    pub manager: TransferManager,
    pub source: Endpoint,
    pub destination: Endpoint,
}

/// Its drop lets an engine continue, and ends the copies that hang.
pub struct ReleaseAll(pub Arc<SimulatedEngine>);

impl Drop for ReleaseAll {
    fn drop(&mut self) {
        self.0.release_all();
        self.0.orphan_hung();
    }
}

impl Steered {
    pub fn new(options: &RelayOptions) -> Self {
        Self::over(HeapAllocator::pinned(), options)
    }

    pub fn over(bounce: impl Allocate + Send + Sync + 'static, options: &RelayOptions) -> Self {
        let device = Arc::new(SimulatedEngine::new(to_device()));
        let system = Arc::new(SimulatedEngine::new(to_system()));
        let relay = RelayEngine::new(device.clone(), system.clone(), bounce, options).unwrap();
        let relay = Arc::new(relay);
        let manager = TransferManager::new([relay.clone() as _]);
        let source = endpoint_in(&HeapAllocator::simulated_device(0), config(16), OUTER_FIRST);
        let destination = endpoint(config(16), CONTIGUOUS);
        Pattern::new(1).fill(&source).unwrap();
        let _release = [ReleaseAll(system.clone()), ReleaseAll(device.clone())];
        Self { _release, device, system, relay, manager, source, destination }
    }

    pub fn transfer(&self, from: &[u32], to: &[u32]) -> Transfer {
        Transfer::new(&self.source, &self.destination)
            .blocks(from, to)
            .device_order(DeviceOrder::AlreadySynchronised)
    }
}
