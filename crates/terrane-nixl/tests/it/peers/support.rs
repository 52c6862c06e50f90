//! Agents with layouts to export.

use terrane_core::AgentName;
use terrane_layout::{ElementFormat, LayoutBuilder, LayoutConfig, LayoutKind, PhysicalLayout};
use terrane_nixl::{Agent, AgentBuilder, BackendConfig};
use terrane_testkit::memory::HeapAllocator;
use terrane_wire::{LayoutDescriptor, RegionDescriptor, WireLimits};

pub const CONTIGUOUS: LayoutKind = LayoutKind::FullyContiguous;

/// 8 blocks of 4 layers, with pieces of 2 KiB.
pub fn config() -> LayoutConfig {
    LayoutConfig::builder()
        .num_blocks(8)
        .num_layers(4)
        .outer_dim(2)
        .page_size(16)
        .inner_dim(64)
        .element(ElementFormat::Width(2))
        .build()
        .unwrap()
}

/// An agent with this backend and a unique name.
pub fn agent_with(backend: &str) -> Agent {
    AgentBuilder::unnamed().backend(BackendConfig::new(backend)).build().unwrap()
}

pub fn agent() -> Agent {
    agent_with("UCX")
}

pub fn named(name: &AgentName) -> Agent {
    AgentBuilder::new(name.clone()).backend(BackendConfig::new("UCX")).build().unwrap()
}

/// A layout in system memory, registered with `agent` in one piece.
pub fn layout(agent: &Agent, kind: LayoutKind) -> PhysicalLayout {
    LayoutBuilder::new(config())
        .kind(kind)
        .allocate(&HeapAllocator::system())
        .register(agent)
        .build()
        .unwrap()
}

/// The description in an export.
pub fn decoded(bytes: &[u8]) -> LayoutDescriptor {
    LayoutDescriptor::decode(bytes, &WireLimits::default()).unwrap()
}

/// The export with other metadata.
pub fn with_metadata(layout: &LayoutDescriptor, metadata: Vec<u8>) -> Vec<u8> {
    let (geometry, regions) = (layout.geometry().clone(), layout.regions().to_vec());
    LayoutDescriptor::new(geometry, layout.storage(), layout.agent().clone(), metadata, regions)
        .unwrap()
        .encode()
        .unwrap()
}

/// The export with its regions moved by this many bytes.
pub fn moved(layout: &LayoutDescriptor, by: u64) -> Vec<u8> {
    let regions = layout
        .regions()
        .iter()
        .map(|region| {
            let (space, address) = (region.space(), region.address() + by);
            let backends = region.backends().iter().cloned();
            RegionDescriptor::new(space, address, region.length(), backends)
        })
        .collect();
    let (geometry, metadata) = (layout.geometry().clone(), layout.metadata().to_vec());
    LayoutDescriptor::new(geometry, layout.storage(), layout.agent().clone(), metadata, regions)
        .unwrap()
        .encode()
        .unwrap()
}
