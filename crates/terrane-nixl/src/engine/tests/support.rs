//! What most tests begin with.

use std::sync::{Arc, Mutex};

use terrane_core::{
    AgentName, Allocate, BoxedCause, ByteCount, HostAddress, Location, Memory, PeerId,
    RegistrationRecord, RemoteAddress, RemoteSpace, StorageKind,
};
use terrane_layout::{LayoutBuilder, LayoutConfig, LayoutKind, PhysicalLayout};
use terrane_testkit::memory::HeapAllocator;
use terrane_testkit::pattern::{InProcess, PieceAccess};
use terrane_transfer::{CopyEngine, Endpoint};

use crate::{Agent, AgentBuilder, BackendConfig, NixlEngine, NixlEngineOptions};

/// An agent with UCX and POSIX.
pub fn agent() -> Agent {
    let builder = AgentBuilder::unnamed()
        .telemetry(true)
        .backend(BackendConfig::new("UCX"))
        .backend(BackendConfig::new("POSIX"));
    builder.build().unwrap()
}

/// Two agents, of which the first one knows the second as a peer.
pub struct Pair {
    pub here: Agent,
    pub there: Agent,
    pub peer: PeerId,
    /// Memory of the peer does not go before the pair: what the first agent has been told of an
    /// address holds for as long as it knows the peer.
    kept: Mutex<Vec<Arc<PhysicalLayout>>>,
}

impl Pair {
    pub fn new() -> Self {
        let (here, there) = (agent(), agent());
        let name = here.raw().load_remote_md(&there.raw().get_local_md().unwrap()).unwrap();
        let peer = here.introduce(AgentName::from(name));
        Self { here, there, peer, kept: Mutex::default() }
    }

    pub fn engine(&self, options: NixlEngineOptions) -> Arc<dyn CopyEngine> {
        Arc::new(NixlEngine::new(&self.here, options).unwrap())
    }

    /// Registered with the first agent.
    pub fn local(&self, config: LayoutConfig, kind: LayoutKind) -> Endpoint {
        Endpoint::new(registered(&HeapAllocator::system(), &self.here, config, kind)).unwrap()
    }

    /// Memory of the second agent, as the first one sees it.
    pub fn remote(&self, config: LayoutConfig, kind: LayoutKind) -> Endpoint {
        self.remote_over(registered(&HeapAllocator::system(), &self.there, config, kind))
    }

    pub fn remote_over(&self, layout: PhysicalLayout) -> Endpoint {
        let (config, kind) = (*layout.config(), layout.kind());
        let layout = Arc::new(layout);
        self.kept.lock().unwrap().push(Arc::clone(&layout));
        self.here.raw().load_remote_md(&self.there.raw().get_local_md().unwrap()).unwrap();
        let regions: Vec<_> = (0..layout.regions().len())
            .map(|region| PeerMemory { peer: self.peer, layout: Arc::clone(&layout), region })
            .collect();
        let builder = LayoutBuilder::new(config).kind(kind).adopt_memory(regions);
        Endpoint::new(builder.unregistered().build().unwrap()).unwrap()
    }
}

pub fn registered<A: Allocate>(
    allocator: &A,
    agent: &Agent,
    config: LayoutConfig,
    kind: LayoutKind,
) -> PhysicalLayout {
    LayoutBuilder::new(config).kind(kind).allocate(allocator).register(agent).build().unwrap()
}

/// A region of a layout of this process, as if it were another's.
#[derive(Debug)]
struct PeerMemory {
    peer: PeerId,
    layout: Arc<PhysicalLayout>,
    region: usize,
}

// SAFETY: nobody follows the address but those who know that it is this process's.
unsafe impl Memory for PeerMemory {
    fn kind(&self) -> StorageKind {
        StorageKind::Remote(self.peer)
    }

    fn location(&self) -> Location {
        let address = self.layout.regions()[self.region].location().as_host().unwrap().get();
        Location::Remote(RemoteAddress { peer: self.peer, space: RemoteSpace::Host, address })
    }

    fn length(&self) -> ByteCount {
        self.layout.regions()[self.region].length()
    }

    fn visit_registrations(&self, visit: &mut dyn FnMut(&RegistrationRecord)) {
        self.layout.regions()[self.region].visit_registrations(visit);
    }
}

/// Reaches the memory of peers that are in this process.
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
        // SAFETY: as the caller promised.
        unsafe { InProcess.read(Self::here(at), bytes) }
    }

    unsafe fn write(&self, at: Location, bytes: &[u8]) -> Result<(), BoxedCause> {
        // SAFETY: as the caller promised.
        unsafe { InProcess.write(Self::here(at), bytes) }
    }
}
