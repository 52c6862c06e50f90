//! Transfers through bounce memory.

mod hops;
mod orphaned;
mod panics;
pub mod rig;
mod steered;

use std::any::Any;
use std::num::NonZeroUsize;
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use terrane_core::{Alignment, ByteCount, StorageKind};
use terrane_layout::{LayoutConfig, LayoutKind};
use terrane_storage::{DiskAllocator, DiskOptions};
use terrane_testkit::conformance::copy_engine::{self, EngineFixture, check_copy_engine};
use terrane_testkit::engine::{SimulatedEngine, SimulatedEngineOptions};
use terrane_testkit::memory::HeapAllocator;
use terrane_transfer::engines::{
    DiskEngine, DiskEngineOptions, HostEngine, HostEngineOptions, RelayEngine, RelayOptions,
};
use terrane_transfer::{CopyEngine, DeviceOrder, Endpoint};

use crate::support::*;

/// The bytes of a block of `shape()`.
pub const BLOCK: u64 = 4 * 2 * PIECE;

/// An engine between devices and pinned memory, like a driver's.
pub fn to_device() -> SimulatedEngineOptions {
    SimulatedEngineOptions::default().named("device").serving(|from, to| {
        (from.is_device() && to == StorageKind::Pinned)
            || (from == StorageKind::Pinned && to.is_device())
    })
}

/// A stand-in for the engine on the other side of the bounce memory.
pub fn to_system() -> SimulatedEngineOptions {
    SimulatedEngineOptions::default().named("system").serving(|from, to| {
        (from == StorageKind::System && to == StorageKind::Pinned)
            || (from == StorageKind::Pinned && to == StorageKind::System)
    })
}

pub fn slots(slots: usize, slot_bytes: u64) -> RelayOptions {
    RelayOptions { slots, slot_bytes: ByteCount::new(slot_bytes) }
}

/// The engine of the other hop.
#[derive(Clone, Copy, PartialEq)]
enum Other {
    Disk,
    Host,
}

struct Relayed {
    other: Other,
    options: RelayOptions,
    device: SimulatedEngineOptions,
    directory: tempfile::TempDir,
    pinned: HeapAllocator,
}

impl Relayed {
    fn new(other: Other, options: RelayOptions) -> Self {
        let directory = tempfile::tempdir().unwrap();
        Self { other, options, device: to_device(), directory, pinned: HeapAllocator::pinned() }
    }
}

impl EngineFixture for Relayed {
    fn engine(&self) -> Arc<dyn CopyEngine> {
        let device = Arc::new(SimulatedEngine::new(self.device.clone()));
        let other: Arc<dyn CopyEngine> = match self.other {
            Other::Disk => Arc::new(DiskEngine::new(&DiskEngineOptions::default()).unwrap()),
            Other::Host => Arc::new(HostEngine::new(HostEngineOptions::default()).unwrap()),
        };
        let relay = RelayEngine::new(device, other, self.pinned.clone(), &self.options);
        Arc::new(relay.unwrap())
    }

    fn ends(&self) -> &[&'static str] {
        match self.other {
            Other::Disk => &["device", "file", "aligned file"],
            Other::Host => &["device", "heap"],
        }
    }

    fn endpoint(&self, end: &str, config: LayoutConfig, kind: LayoutKind) -> Endpoint {
        let files = || DiskAllocator::new(self.directory.path(), DiskOptions::default()).unwrap();
        match end {
            "device" => endpoint_in(&HeapAllocator::simulated_device(0), config, kind),
            "heap" => endpoint_in(&HeapAllocator::system(), config, kind),
            "file" => endpoint_in(&files(), config, kind),
            _ => {
                let aligned = config.with_block_alignment(Alignment::PAGE).unwrap();
                endpoint_in(&files(), aligned, kind)
            }
        }
    }

    fn serves(&self, source: &str, destination: &str) -> bool {
        (source == "device") != (destination == "device")
    }

    fn unserved(&self, config: LayoutConfig) -> Option<Endpoint> {
        Some(endpoint_in(&HeapAllocator::pinned(), config, CONTIGUOUS))
    }

    fn unreached(&self) -> Option<(DeviceOrder, Box<dyn Any>)> {
        Some(unreached())
    }

    fn least_relayouts(&self) -> usize {
        20
    }
}

#[test]
fn device_and_disk_conform() {
    let fixture = Relayed::new(Other::Disk, RelayOptions::default());
    check_copy_engine(&fixture);
    // The last engine dropped on one of its own threads, which exits by itself.
    until(|| fixture.pinned.live() == 0);
}

#[test]
fn device_and_system_conform() {
    check_copy_engine(&Relayed::new(Other::Host, RelayOptions::default()));
}

/// Slots with room for a layer of any of the suite's blocks, but not for every block; a single such
/// slot; and a device that executes its jobs and their runs in any order.
#[test]
fn relays_conform_when_everything_is_scarce() {
    let three = NonZeroUsize::new(3).unwrap();
    for (other, count) in [(Other::Disk, 3), (Other::Host, 1)] {
        let mut fixture = Relayed::new(other, slots(count, 80 << 10));
        fixture.device = to_device().reordering(7).threads(three);
        check_copy_engine(&fixture);
    }
}

/// Slots with room for one layer, for two, for one block, and for a little more, of the suite's odd
/// blocks.
#[test]
fn blocks_larger_than_a_slot_and_of_its_very_size_are_copied() {
    for (other, slot_bytes) in
        [(Other::Host, 210), (Other::Disk, 420), (Other::Host, 630), (Other::Disk, 1300)]
    {
        let fixture = Relayed::new(other, slots(3, slot_bytes));
        copy_engine::bytes_are_exact_and_neighbours_untouched(&fixture);
        copy_engine::reports_match_the_copy(&fixture);
        copy_engine::many_transfers_in_flight_all_succeed(&fixture);
    }
}

/// Waits until other threads make the condition true.
#[track_caller]
pub fn until(condition: impl Fn() -> bool) {
    let begun = Instant::now();
    while !condition() {
        assert!(begun.elapsed() < Duration::from_secs(60), "the condition did not become true");
        thread::yield_now();
    }
}
