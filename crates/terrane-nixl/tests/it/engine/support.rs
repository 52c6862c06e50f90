//! The setup that most tests share.

use std::sync::{Arc, Mutex};

use terrane_core::{Allocate, BoxedCause, HostAddress, Location};
use terrane_layout::{
    BlockDimension, ElementFormat, LayoutBuilder, LayoutConfig, LayoutKind, PhysicalLayout,
};
use terrane_nixl::{
    Agent, AgentBuilder, BackendConfig, NixlEngine, NixlEngineOptions, RemoteLayout,
};
use terrane_testkit::memory::HeapAllocator;
use terrane_testkit::pattern::{InProcess, PieceAccess};
use terrane_transfer::{CopyEngine, Endpoint, TransferManager};

use crate::support::posix;

/// An agent with UCX and POSIX.
pub fn agent() -> Agent {
    let builder =
        AgentBuilder::unnamed().telemetry(true).backend(BackendConfig::new("UCX")).backend(posix());
    builder.build().unwrap()
}

/// Two agents: the first one imports the exports of the second one.
pub struct Pair {
    pub here: Agent,
    pub there: Agent,
    /// The peer's memory lives as long as the pair: the first agent may use an address while it
    /// knows the peer.
    kept: Mutex<Vec<PhysicalLayout>>,
    /// Keeps the peer known.
    _anchor: RemoteLayout,
}

impl Pair {
    pub fn new() -> Self {
        let (here, there) = (agent(), agent());
        let anchor = registered(&HeapAllocator::system(), &there, config(1), CONTIGUOUS);
        let imported = here.import(&there.export(&anchor).unwrap()).unwrap();
        Self { here, there, kept: Mutex::new(vec![anchor]), _anchor: imported }
    }

    pub fn engine(&self, options: NixlEngineOptions) -> Arc<dyn CopyEngine> {
        Arc::new(NixlEngine::new(&self.here, options).unwrap())
    }

    pub fn manager(&self) -> TransferManager {
        TransferManager::new([self.engine(NixlEngineOptions::default())])
    }

    /// Registered with the first agent.
    pub fn local(&self, config: LayoutConfig, kind: LayoutKind) -> Endpoint {
        Endpoint::new(registered(&HeapAllocator::system(), &self.here, config, kind)).unwrap()
    }

    /// Memory of the second agent, imported by the first.
    pub fn remote(&self, config: LayoutConfig, kind: LayoutKind) -> Endpoint {
        let layout = registered(&HeapAllocator::system(), &self.there, config, kind);
        let remote = self.here.import(&self.there.export(&layout).unwrap()).unwrap();
        self.kept.lock().unwrap().push(layout);
        remote.endpoint().clone()
    }
}

pub const CONTIGUOUS: LayoutKind = LayoutKind::FullyContiguous;

/// No two pieces of a block are adjacent.
pub const APART: LayoutKind = LayoutKind::LayerSeparate { block_dimension: BlockDimension::Second };

/// 2 layers, K and V, pieces of 1 KiB.
pub fn config(blocks: u32) -> LayoutConfig {
    let config = LayoutConfig::builder().num_blocks(blocks).num_layers(2).outer_dim(2);
    config.page_size(16).inner_dim(32).element(ElementFormat::Width(2)).build().unwrap()
}

pub fn registered<A: Allocate>(
    allocator: &A,
    agent: &Agent,
    config: LayoutConfig,
    kind: LayoutKind,
) -> PhysicalLayout {
    LayoutBuilder::new(config).kind(kind).allocate(allocator).register(agent).build().unwrap()
}

/// Accesses the memory of peers that are in this process.
pub struct PeersInProcess;

impl PeersInProcess {
    fn here(at: Location) -> Location {
        let Some(remote) = at.as_remote() else { return at };
        let address = usize::try_from(remote.address).unwrap();
        let pointer = std::ptr::with_exposed_provenance_mut::<u8>(address);
        Location::Host(HostAddress::new(std::ptr::NonNull::new(pointer).unwrap()))
    }
}

impl PieceAccess for PeersInProcess {
    unsafe fn read(&self, at: Location, bytes: &mut [u8]) -> Result<(), BoxedCause> {
        // SAFETY: the caller guarantees it.
        unsafe { InProcess.read(Self::here(at), bytes) }
    }

    unsafe fn write(&self, at: Location, bytes: &[u8]) -> Result<(), BoxedCause> {
        // SAFETY: the caller guarantees it.
        unsafe { InProcess.write(Self::here(at), bytes) }
    }
}
