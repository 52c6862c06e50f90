//! Blocks of a device: between two processes by UCX, and to files by GDS or by way of pinned memory.

mod files;
mod memory;
mod relayed;

use terrane_core::{Allocate, ByteCount, Register};
use terrane_layout::{ElementFormat, LayoutBuilder, LayoutConfig, LayoutError, LayoutKind};
use terrane_nixl::{AgentBuilder, BackendConfig};
use terrane_transfer::Endpoint;

use crate::chain;
use crate::needs::Needs;

/// The ends that each test needs.
const SOME: Needs = Needs { device: ByteCount::mib(256), host: ByteCount::mib(256) };

/// As a serving engine has them on the device.
const SEPARATE: LayoutKind = LayoutKind::ALL[2];
const CONTIGUOUS: LayoutKind = LayoutKind::ALL[0];

/// An agent with this backend, which has to accept all that is registered.
fn agent(name: &str, backend: &str) -> AgentBuilder {
    let name = format!("{name}-{}", std::process::id());
    AgentBuilder::new(name).backend(BackendConfig::new(backend).required()).telemetry(true)
}

/// So many blocks of 4 layers of K and V, of 64 KiB each.
fn config(blocks: u32) -> LayoutConfig {
    let shape = LayoutConfig::builder().num_blocks(blocks).num_layers(4).outer_dim(2);
    let shape = shape.page_size(16).inner_dim(2048).element(ElementFormat::Width(2));
    shape.build().unwrap()
}

/// Blocks in this memory, registered.
fn end<A: Allocate>(memory: &A, agent: &impl Register, blocks: u32, kind: LayoutKind) -> Endpoint {
    try_end(memory, agent, blocks, kind).unwrap_or_else(|error| panic!("{}", chain(&error)))
}

/// The same, or why there is none.
fn try_end<A: Allocate>(
    memory: &A,
    agent: &impl Register,
    blocks: u32,
    kind: LayoutKind,
) -> Result<Endpoint, LayoutError> {
    let layout = LayoutBuilder::new(config(blocks)).kind(kind).allocate(memory).register(agent);
    Ok(Endpoint::new(layout.build()?).unwrap())
}
