//! The testkit's own backends pass the conformance suites.

use std::any::Any;
use std::num::NonZeroUsize;
use std::sync::Arc;
use std::time::Duration;

use terrane_core::{
    Alignment, Allocate, ByteCount, DeviceId, Limits, Region, RegionRequest, StorageKind,
};
use terrane_layout::{LayoutBuilder, LayoutConfig, LayoutKind};
use terrane_testkit::conformance::{
    AllocatorFixture, EngineFixture, RegistrarFixture, check_allocator, check_copy_engine,
    check_registrar, registrar,
};
use terrane_testkit::device::SimulatedStream;
use terrane_testkit::engine::{SimulatedEngine, SimulatedEngineOptions};
use terrane_testkit::fault::{FaultPlan, Faulty};
use terrane_testkit::memory::HeapAllocator;
use terrane_testkit::recorder::{Journal, RecordedMemory, RecordingAllocator, RecordingRegistrar};
use terrane_transfer::{CopyEngine, DeviceOrder, Endpoint};

struct Heap(fn() -> HeapAllocator);

impl AllocatorFixture for Heap {
    type Allocator = HeapAllocator;

    fn allocator(&self) -> HeapAllocator {
        (self.0)()
    }

    fn live(&self, allocator: &HeapAllocator) -> Option<u64> {
        Some(allocator.live())
    }
}

#[test]
fn heap_allocators_conform() {
    check_allocator(&Heap(HeapAllocator::system));
    check_allocator(&Heap(HeapAllocator::pinned));
    check_allocator(&Heap(|| HeapAllocator::simulated_device(1)));
    check_allocator(&Heap(|| HeapAllocator::system().with_quarantine()));
    check_allocator(&Heap(|| {
        HeapAllocator::system().with_limits(Limits {
            alignment: Alignment::PAGE,
            granule: Alignment::SECTOR,
            largest_region: Some(ByteCount::mib(4)),
        })
    }));
}

/// The adaptors that record, and that inject no failures.
struct Adapted;

impl AllocatorFixture for Adapted {
    type Allocator = Faulty<RecordingAllocator<HeapAllocator>>;

    fn allocator(&self) -> Self::Allocator {
        let recording = RecordingAllocator::new(HeapAllocator::system(), &Journal::new());
        Faulty::new(recording, FaultPlan::new())
    }

    fn live(&self, allocator: &Self::Allocator) -> Option<u64> {
        Some(allocator.inner().inner().live())
    }
}

#[test]
fn adaptors_conform() {
    check_allocator(&Adapted);
}

struct Simulated(SimulatedEngineOptions);

/// A stream whose work ends when this drops.
struct Held(SimulatedStream);

impl Drop for Held {
    fn drop(&mut self) {
        self.0.finish_one();
    }
}

impl EngineFixture for Simulated {
    fn engine(&self) -> Arc<dyn CopyEngine> {
        Arc::new(SimulatedEngine::new(self.0.clone()))
    }

    fn ends(&self) -> &[&'static str] {
        &["host", "device"]
    }

    fn endpoint(&self, end: &str, config: LayoutConfig, kind: LayoutKind) -> Endpoint {
        let kind_of_storage = match end {
            "host" => StorageKind::System,
            _ => StorageKind::Device(Default::default()),
        };
        let allocator = HeapAllocator::new(kind_of_storage);
        let builder = LayoutBuilder::new(config).kind(kind).allocate(&allocator);
        Endpoint::new(builder.unregistered().build().unwrap()).unwrap()
    }

    /// By default, the engine copies between all kinds.
    fn unserved(&self, _: LayoutConfig) -> Option<Endpoint> {
        None
    }

    fn unreached(&self) -> Option<(DeviceOrder, Box<dyn Any>)> {
        let stream = SimulatedStream::new(DeviceId::default());
        stream.launch();
        Some((stream.order(), Box::new(Held(stream))))
    }

    fn least_relayouts(&self) -> usize {
        40
    }
}

#[test]
fn the_simulated_engine_conforms() {
    check_copy_engine(&Simulated(SimulatedEngineOptions::default()));
}

#[test]
fn the_simulated_engine_conforms_out_of_order() {
    let three = NonZeroUsize::new(3).unwrap();
    let options = SimulatedEngineOptions::default().reordering(9).threads(three);
    check_copy_engine(&Simulated(options.delaying(Duration::from_micros(5))));
}

/// The recording registrar, with recorded memory.
struct Recording(Journal);

impl RegistrarFixture for Recording {
    type Registrar = RecordingRegistrar;
    type Memory = RecordedMemory<terrane_testkit::memory::HeapMemory>;

    fn registrar(&self) -> RecordingRegistrar {
        RecordingRegistrar::new("agent", &self.0)
            .with_backends([("HOST", StorageKind::is_host as fn(StorageKind) -> bool)])
    }

    fn memory(&self, _: &RecordingRegistrar) -> Self::Memory {
        let allocator = RecordingAllocator::new(HeapAllocator::system(), &self.0);
        allocator.allocate(&RegionRequest::new(ByteCount::kib(8))).expect("memory")
    }

    fn foreign(&self) -> Option<Region> {
        let allocator = HeapAllocator::simulated_device(0);
        let request = RegionRequest::new(ByteCount::kib(8));
        Some(Region::new(allocator.allocate(&request).expect("memory")))
    }

    fn probe(&self, _: &RecordingRegistrar) -> registrar::Probe {
        let journal = self.0.clone();
        Arc::new(move |span| journal.is_registered(span))
    }
}

#[test]
fn recording_registrars_conform() {
    check_registrar(&Recording(Journal::new()));
}
