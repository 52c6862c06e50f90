//! Agents with layouts to export.

use terrane_layout::{ElementFormat, LayoutBuilder, LayoutConfig, LayoutKind, PhysicalLayout};
use terrane_nixl::{Agent, AgentBuilder, BackendConfig};
use terrane_testkit::memory::HeapAllocator;

/// 8 blocks of 4 layers, 2 KiB a piece.
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

/// An agent with UCX, of a name of its own.
pub fn agent() -> Agent {
    AgentBuilder::unnamed().backend(BackendConfig::new("UCX")).build().unwrap()
}

pub fn named(name: &str) -> Agent {
    AgentBuilder::new(name).backend(BackendConfig::new("UCX")).build().unwrap()
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
