//! Blocks of a device: between two processes by UCX, and to files by GDS or through pinned memory.

mod files;
mod memory;
mod relayed;

use terrane_core::{Allocate, ByteCount, Register};
use terrane_layout::{ElementFormat, LayoutBuilder, LayoutConfig, LayoutError, LayoutKind};
use terrane_nixl::{AgentBuilder, BackendConfig};
use terrane_transfer::Endpoint;

use crate::chain;
use crate::needs::Needs;

/// The needs of each test.
const SOME: Needs = Needs { device: ByteCount::mib(256), host: ByteCount::mib(256) };

/// The layout of serving engines on a device.
const SEPARATE: LayoutKind = LayoutKind::ALL[2];
const CONTIGUOUS: LayoutKind = LayoutKind::ALL[0];

/// An agent with this backend, which must accept all registrations.
fn agent(name: &str, backend: &str) -> AgentBuilder {
    let name = format!("{name}-{}", std::process::id());
    AgentBuilder::new(name).backend(BackendConfig::new(backend).required()).telemetry(true)
}

/// A number of blocks with 4 layers of K and V, of 64 KiB each.
fn config(blocks: u32) -> LayoutConfig {
    let shape = LayoutConfig::builder().num_blocks(blocks).num_layers(4).outer_dim(2);
    let shape = shape.page_size(16).inner_dim(2048).element(ElementFormat::Width(2));
    shape.build().unwrap()
}

/// Blocks in this memory, registered.
fn end<A: Allocate>(memory: &A, agent: &impl Register, blocks: u32, kind: LayoutKind) -> Endpoint {
    try_end(memory, agent, blocks, kind).unwrap_or_else(|error| panic!("{}", chain(&error)))
}

/// Like `end`, with an error if there is none.
fn try_end<A: Allocate>(
    memory: &A,
    agent: &impl Register,
    blocks: u32,
    kind: LayoutKind,
) -> Result<Endpoint, LayoutError> {
    let layout = LayoutBuilder::new(config(blocks)).kind(kind).allocate(memory).register(agent);
    Ok(Endpoint::new(layout.build()?).unwrap())
}
