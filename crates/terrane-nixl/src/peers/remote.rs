//! Layouts in the memory of peers.

use std::fmt;
use std::sync::Arc;

use terrane_core::{
    AgentName, BackendName, BackendOutcome, ByteCount, Location, Memory, PeerId,
    RegistrationRecord, RemoteAddress, RemoteSpace, Span, StorageKind,
};
use terrane_layout::{Geometry, LayoutBuilder, LayoutError, LayoutFingerprint};
use terrane_transfer::Endpoint;
use terrane_wire::{GeometryMismatch, LayoutDescriptor, RegionDescriptor};

use super::table::Lease;

/// A layout in a peer's memory, which can be one end of transfers, and nothing else: nothing here
/// can follow its addresses.
///
/// Cloning it shares it. The peer stays known for as long as a clone, an endpoint or a transfer of
/// it lives; see [`Agent::forget`](crate::Agent::forget) for ending that sooner.
///
/// # Whom an import trusts
///
/// An import believes nothing that it can check: the frame, its checksum and its version; every
/// count and length, against limits; the strides, proved to be nested, with their fingerprint; that regions
/// are disjoint and end within their address space; the form of NIXL's metadata; that the metadata
/// is of the agent that the description names, and gives access to every region through a backend
/// that both agents have. What the backend itself needs, which is UCX's address of the peer and its
/// keys of memory, is handed to the backend as it came: only UCX can read it, and UCX does not
/// defend itself against somebody who forges it. Nor does a checksum, which anybody can compute.
///
/// So take exports from peers that you trust with your process, over a channel that tells you who
/// they are.
#[derive(Clone)]
pub struct RemoteLayout {
    endpoint: Endpoint,
    peer: PeerId,
    described: Arc<LayoutDescriptor>,
}

impl RemoteLayout {
    pub(super) fn new(
        peer: PeerId,
        lease: Lease,
        described: &Arc<LayoutDescriptor>,
        usable: &[BackendName],
    ) -> Result<Self, LayoutError> {
        let described = Arc::clone(described);
        let lease = Arc::new(lease);
        let memory = described.regions().iter().map(|region| RemoteMemory {
            at: RemoteAddress { peer, space: region.space(), address: region.address() },
            length: region.length(),
            record: RegistrationRecord {
                agent: described.agent().clone(),
                span: Span {
                    kind: StorageKind::Remote(peer),
                    location: Location::Remote(RemoteAddress {
                        peer,
                        space: region.space(),
                        address: region.address(),
                    }),
                    length: region.length(),
                },
                backends: region
                    .backends()
                    .iter()
                    .filter(|backend| usable.contains(backend))
                    .map(|backend| BackendOutcome { backend: backend.clone(), refusal: None })
                    .collect(),
            },
            _lease: Arc::clone(&lease),
        });
        let layout = LayoutBuilder::from_geometry(described.geometry().clone())
            .adopt_memory(memory)
            .unregistered()
            .build()?;
        // SAFETY: endpoints over a peer's memory are made by `Agent::import` alone, and it makes none
        // over bytes that another one has: neither the same agent's, as long as that lives
        // (`LoadedPeer::overlap`), nor another agent's of this process (the claim in the lease), but
        // for endpoints of a peer that has ended, with which no transfer is in flight or begins. If the
        // bytes are memory of this process, exported by one of its agents, whoever exported them
        // agrees with the peer upon who uses which block when (`Agent::export`). The memory is no
        // file's that this process opens.
        let endpoint = unsafe { Endpoint::sharing(layout) };
        Ok(Self { endpoint, peer, described })
    }

    pub(super) fn from_parts(
        endpoint: Endpoint,
        peer: PeerId,
        described: Arc<LayoutDescriptor>,
    ) -> Self {
        Self { endpoint, peer, described }
    }

    /// The layout as an end of transfers.
    #[must_use]
    pub fn endpoint(&self) -> &Endpoint {
        &self.endpoint
    }

    /// Whose it is, as this process counts peers.
    #[must_use]
    pub const fn peer(&self) -> PeerId {
        self.peer
    }

    /// The name of the agent whose it is.
    #[must_use]
    pub fn agent(&self) -> &AgentName {
        self.described.agent()
    }

    /// The sections and their strides.
    #[must_use]
    pub fn geometry(&self) -> &Geometry {
        self.described.geometry()
    }

    /// The fingerprint of the geometry.
    #[must_use]
    pub fn fingerprint(&self) -> LayoutFingerprint {
        self.described.fingerprint()
    }

    /// What the layout is in, over there.
    #[must_use]
    pub fn storage(&self) -> StorageKind {
        self.described.storage()
    }

    /// The regions, as the peer describes them.
    #[must_use]
    pub fn regions(&self) -> &[RegionDescriptor] {
        self.described.regions()
    }

    /// Checks that each element lies where one of `geometry` lies.
    ///
    /// # Errors
    ///
    /// [`GeometryMismatch`] names the first difference, and both values.
    pub fn expect(&self, geometry: &Geometry) -> Result<(), GeometryMismatch> {
        self.described.expect(geometry)
    }

    /// Checks that whole blocks can be moved between the layout and one of `geometry`, whatever their
    /// strides are. Each transfer checks the same; this checks before there is one.
    ///
    /// # Errors
    ///
    /// [`GeometryMismatch`] names the first difference, and both values.
    pub fn expect_shape(&self, geometry: &Geometry) -> Result<(), GeometryMismatch> {
        self.described.expect_shape(geometry)
    }

    pub(super) fn described(&self) -> &Arc<LayoutDescriptor> {
        &self.described
    }
}

impl fmt::Debug for RemoteLayout {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("RemoteLayout")
            .field("peer", &self.peer)
            .field("agent", self.agent())
            .field("geometry", &self.geometry().label())
            .field("storage", &self.storage())
            .field("fingerprint", &self.fingerprint())
            .finish_non_exhaustive()
    }
}

/// A region of a peer.
struct RemoteMemory {
    at: RemoteAddress,
    length: ByteCount,
    /// What the peer says of its registration, with the backends by which this agent reaches it.
    record: RegistrationRecord,
    _lease: Arc<Lease>,
}

// SAFETY: every answer is a constant. That the peer has registered the span is the peer's word, of
// which the metadata that NIXL has loaded is the proof; nothing in this process follows the
// address.
unsafe impl Memory for RemoteMemory {
    fn kind(&self) -> StorageKind {
        StorageKind::Remote(self.at.peer)
    }

    fn location(&self) -> Location {
        Location::Remote(self.at)
    }

    fn length(&self) -> ByteCount {
        self.length
    }

    fn visit_registrations(&self, visit: &mut dyn FnMut(&RegistrationRecord)) {
        visit(&self.record);
    }
}

impl fmt::Debug for RemoteMemory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("RemoteMemory")
            .field("at", &self.at)
            .field("length", &self.length)
            .finish_non_exhaustive()
    }
}

/// A peer's space as NIXL counts devices: the ordinal of a device, the number of a file, 0 for the host.
pub(super) fn device_of(space: RemoteSpace) -> Option<(crate::MemoryType, u64)> {
    Some(match space {
        RemoteSpace::Host => (crate::MemoryType::Host, 0),
        RemoteSpace::Device(device) => (crate::MemoryType::Device, device.get().into()),
        RemoteSpace::File(number) => (crate::MemoryType::File, number),
        _ => return None,
    })
}

/// The space that a span of this process is in for others, under NIXL's number of the device or file.
pub(super) fn space_of(span: &Span, number: u64) -> Option<RemoteSpace> {
    Some(match span.location {
        Location::Host(_) => RemoteSpace::Host,
        Location::Device { device, .. } => RemoteSpace::Device(device),
        Location::File(_) => RemoteSpace::File(number),
        _ => return None,
    })
}
