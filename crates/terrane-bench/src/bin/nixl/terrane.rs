//! Two agents of Terrane, and layouts that are registered with them.

use std::sync::Arc;

use anyhow::Result;
use terrane_core::ByteCount;
use terrane_layout::{ElementFormat, LayoutBuilder, LayoutConfig, LayoutKind, PhysicalLayout};
use terrane_nixl::{Agent, AgentBuilder, BackendConfig, NixlEngine, NixlEngineOptions};
use terrane_storage::{SystemAllocator, SystemOptions};
use terrane_transfer::{CopyEngine, Endpoint, Transfer, TransferManager};

use crate::agents::Agents;
use crate::bindings::UCX;

/// Both ends of Terrane's transfers, and the engine between them.
pub struct Ends {
    pub local: Endpoint,
    pub remote: Endpoint,
    manager: TransferManager,
    // The layout of the remote end's memory.
    pub target: PhysicalLayout,
}

/// The direction of a transfer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Way {
    Write,
    Read,
}

impl Way {
    pub const ALL: [Self; 2] = [Self::Write, Self::Read];

    pub const fn name(self) -> &'static str {
        match self {
            Self::Write => "write",
            Self::Read => "read",
        }
    }
}

/// Creates an agent with one backend.
pub fn agent(name: &str, backend: &str, agents: Agents) -> Result<Agent> {
    let builder = AgentBuilder::new(name).progress_thread(agents.progress.0);
    Ok(builder.backend(BackendConfig::new(backend)).build()?)
}

/// Creates the agents of both ends.
pub fn pair(agents: Agents) -> Result<[Agent; 2]> {
    Ok([agent("terrane-local", UCX, agents)?, agent("terrane-remote", UCX, agents.answering())?])
}

/// A layout of blocks with one piece each.
pub fn pieces(blocks: u32, piece: ByteCount) -> Result<LayoutConfig> {
    const TOKENS: u32 = 16;
    let inner = u32::try_from(piece.get() / u64::from(TOKENS) / 2)?;
    Ok(LayoutConfig::builder()
        .num_blocks(blocks)
        .num_layers(1)
        .outer_dim(1)
        .page_size(TOKENS)
        .inner_dim(inner)
        .element(ElementFormat::Width(2))
        .build()?)
}

/// Allocates a layout of system memory and registers it with the agent.
pub fn layout(agent: &Agent, config: LayoutConfig, kind: LayoutKind) -> Result<PhysicalLayout> {
    let memory = SystemAllocator::new(SystemOptions::default());
    Ok(LayoutBuilder::new(config).kind(kind).allocate(&memory).register(agent).build()?)
}

impl Ends {
    /// Allocates memory for these blocks at both agents. The first agent imports the layout of the
    /// second.
    pub fn new(config: LayoutConfig, [here, there]: [Agent; 2]) -> Result<Self> {
        let kind = LayoutKind::FullyContiguous;
        let (local, target) = (layout(&here, config, kind)?, layout(&there, config, kind)?);
        let remote = here.import(&there.export(&target)?)?.endpoint().clone();
        let engine = NixlEngine::new(&here, NixlEngineOptions::default())?;
        let manager = TransferManager::new([Arc::new(engine) as Arc<dyn CopyEngine>]);
        Ok(Self { local: Endpoint::new(local)?, remote, manager, target })
    }

    /// Copies blocks and returns the number of descriptors.
    pub fn transfer(&self, way: Way, local: &[u32], remote: &[u32]) -> Result<u64> {
        let transfer = match way {
            Way::Write => Transfer::new(&self.local, &self.remote).blocks(local, remote),
            Way::Read => Transfer::new(&self.remote, &self.local).blocks(remote, local),
        };
        let outcome = self.manager.submit(transfer, ()).map_err(|refused| refused.cause)?.wait();
        Ok(outcome.result?.explanation.runs)
    }
}
