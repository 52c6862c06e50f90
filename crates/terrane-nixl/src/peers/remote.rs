//! Layouts in the memory of peers.

use std::sync::Arc;

use terrane_core::{
    AgentName, BackendName, BackendOutcome, ForeignMemory, Location, PeerId, RegistrationRecord,
    RemoteAddress, Span, StorageKind,
};
use terrane_layout::{Geometry, LayoutBuilder, LayoutError, LayoutFingerprint};
use terrane_transfer::Endpoint;
use terrane_wire::{GeometryMismatch, LayoutDescriptor, RegionDescriptor};

use super::lease::Lease;

/// A layout in a peer's memory. It can only be an end of transfers, because this process cannot
/// access its addresses.
///
/// Clones share it. The peer stays known while a clone, an endpoint or a transfer of it lives;
/// [`Agent::forget`](crate::Agent::forget) ends that earlier.
///
/// # Trust
///
/// Unless [`AgentBuilder::metadata_checks`](crate::AgentBuilder::metadata_checks) permits
/// otherwise, an import checks:
/// - the frame, its checksum and its version;
/// - every count and length, against limits;
/// - the strides, proved to be nested, with their fingerprint;
/// - that regions are disjoint and end within their address space;
/// - the form of NIXL's metadata;
/// - that the metadata belongs to the agent that the description names;
/// - that the metadata reaches every region through a backend that both agents have.
///
/// The backend's own data, such as UCX's address of the peer and its memory keys, is passed to the
/// backend unchecked. Only UCX can read it, and UCX is not hardened against forged data. A checksum
/// is no protection either, because anyone can compute it.
///
/// So import only from peers that you trust, over a channel that authenticates them.
#[derive(Clone)]
pub struct RemoteLayout {
    pub(super) endpoint: Endpoint,
    pub(super) peer: PeerId,
    pub(super) described: Arc<LayoutDescriptor>,
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
        let memory = described.regions().iter().map(|region| {
            let at = RemoteAddress { peer, space: region.space(), address: region.address() };
            let (kind, location) = (StorageKind::Remote(peer), Location::Remote(at));
            let span = Span { kind, location, length: region.length() };
            // The peer's claim about its registration, with the backends by which this agent
            // reaches it.
            let reached = region.backends().iter().filter(|backend| usable.contains(backend));
            let accepted =
                |backend: &BackendName| BackendOutcome { backend: backend.clone(), refusal: None };
            let backends = reached.map(accepted).collect();
            let record = RegistrationRecord { agent: described.agent().clone(), span, backends };
            // SAFETY: the span is constant, and no code in this process dereferences its address.
            let memory = unsafe { ForeignMemory::new(span, Arc::clone(&lease)) };
            // SAFETY: the peer states that it has registered the span, and the metadata that NIXL
            // has loaded proves that.
            unsafe { memory.with_registration(record) }
        });
        let layout = LayoutBuilder::from_geometry(described.geometry().clone())
            .adopt_memory(memory)
            .unregistered()
            .build()?;
        // SAFETY: only `Agent::import` creates endpoints of a peer's memory. It creates none of
        // bytes that another live endpoint has: not in the same agent (`LoadedPeer::overlap`), and
        // not in another agent of this process (the claim in the lease). The exception is an
        // endpoint of a peer that has ended: no transfer with it is in flight or begins. An
        // agent of this process may have exported the bytes. Then the exporter and the peer agree
        // on when each of them uses a block (`Agent::export`). The memory belongs to no file that
        // this process opens.
        let endpoint = unsafe { Endpoint::sharing(layout) };
        Ok(Self { endpoint, peer, described })
    }

    /// The layout as an end of transfers.
    #[must_use]
    pub fn endpoint(&self) -> &Endpoint {
        &self.endpoint
    }

    /// The peer that has the layout.
    #[must_use]
    pub const fn peer(&self) -> PeerId {
        self.peer
    }

    /// The name of the peer's agent.
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

    /// The kind of memory in the peer's process.
    #[must_use]
    pub fn storage(&self) -> StorageKind {
        self.described.storage()
    }

    /// The regions, as the peer describes them.
    #[must_use]
    pub fn regions(&self) -> &[RegionDescriptor] {
        self.described.regions()
    }

    /// Checks that each element has the same position as in `geometry`.
    ///
    /// # Errors
    ///
    /// [`GeometryMismatch`] with the first difference and both values.
    pub fn expect(&self, geometry: &Geometry) -> Result<(), GeometryMismatch> {
        self.described.expect(geometry)
    }

    /// Checks that whole blocks can be copied between the layout and a layout of `geometry`,
    /// whatever their strides. Each transfer makes the same check; this function makes it earlier.
    ///
    /// # Errors
    ///
    /// [`GeometryMismatch`] with the first difference and both values.
    pub fn expect_shape(&self, geometry: &Geometry) -> Result<(), GeometryMismatch> {
        self.described.expect_shape(geometry)
    }
}

terrane_core::debug_fields!(RemoteLayout, |it| { peer: it.peer,
    agent: it.agent(),
    geometry: it.geometry().label(),
    storage: it.storage(),
    fingerprint: it.fingerprint() });
