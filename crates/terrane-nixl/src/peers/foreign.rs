//! Peers that use NIXL without Terrane: serving engines in Python, for example.
//!
//! Such a peer has NIXL's metadata and a list of its memory's addresses. It does not know Terrane's
//! [exports](Agent::export).

use rustc_hash::FxHashSet;
use terrane_core::convert::to_u64;
use terrane_core::{AgentName, BackendName, ByteCount, StorageKind};
use terrane_layout::{Geometry, PhysicalLayout};
use terrane_wire::{LayoutDescriptor, RegionDescriptor, WireLimits};

use super::error::{ExportError, ImportError};
use super::import::ImportMode;
use super::metadata::parts::MetadataParts;
use super::metadata::{ConnectionInfo, MAX_CONNECTIONS, MalformedMetadata, MemoryKey, Metadata};
use super::remote::RemoteLayout;
use crate::agent::Agent;

/// The metadata that a NIXL agent without Terrane needs to reach a layout of this process.
///
/// The bytes are in NIXL's own form: `nixl_agent.add_remote_agent` in Python loads them, and so
/// does `nixlAgent::loadRemoteMD` in C++. They contain the keys of the registrations that the
/// layout uses and no others.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct NixlMetadata {
    /// The connection data of the agent. A peer loads this first.
    pub connection: Vec<u8>,
    /// The keys of the registrations that contain the layout.
    pub keys: Vec<u8>,
    /// The location of the regions, for the peer's descriptors.
    pub regions: Vec<RegionDescriptor>,
}

impl NixlMetadata {
    /// The pieces in the order in which a peer loads them.
    #[must_use]
    pub fn pieces(&self) -> [&[u8]; 2] {
        [&self.connection, &self.keys]
    }

    /// Both pieces in one, for protocols that send one. Python's `get_partial_agent_metadata` with
    /// `inc_conn_info=True` returns the same.
    ///
    /// # Errors
    ///
    /// [`ExportError::UnknownForm`] if this NIXL writes its metadata in another form than NIXL 1.5.
    pub fn whole(&self) -> Result<Vec<u8>, ExportError> {
        let parse = |piece| Metadata::parse(piece).map_err(|_| ExportError::UnknownForm);
        let [connection, keys] = self.pieces().map(parse);
        let (connection, keys) = (connection?, keys?);
        Ok(Metadata { memory: keys.memory, ..connection }.write())
    }
}

/// A layout in the memory of a NIXL agent without Terrane, for [`Agent::import_foreign`].
///
/// The peer sends its metadata and its memory's location. Both sides know the strides, which follow
/// from the configurations of the model and of its cache.
#[derive(Clone, Debug)]
pub struct ForeignLayout<'a> {
    /// The sections of the layout and their strides, with consecutive region numbers:
    /// [`Geometry::from_sections`] or [`Geometry::from_form`] of the peer's tensors.
    pub geometry: Geometry,
    /// The kind of the peer's memory. [`StorageKind::Device`] contains the peer's device number.
    pub storage: StorageKind,
    /// The name of the peer's agent.
    pub agent: AgentName,
    /// The peer's metadata in NIXL's form: all of it (`get_agent_metadata` in Python), a part with
    /// connection information (`get_partial_agent_metadata` with `inc_conn_info=True`), or several
    /// parts, one of which contains it.
    pub metadata: &'a [&'a [u8]],
    /// The location of the layout's regions, in the order of the geometry. A region may be longer
    /// than the layout needs. The metadata names the backends that reach it; the backends of these
    /// descriptors are ignored.
    pub regions: Vec<RegionDescriptor>,
}

impl Agent {
    /// Returns the metadata that a NIXL agent without Terrane needs to reach a layout that is
    /// registered with this agent.
    ///
    /// A peer that uses Terrane needs an [`export`](Self::export) instead, which also describes the
    /// geometry. As for an export, this process does not track the peer's reads and writes.
    ///
    /// # Errors
    ///
    /// As for [`export`](Self::export).
    pub fn nixl_metadata(&self, layout: &PhysicalLayout) -> Result<NixlMetadata, ExportError> {
        let described = self.describe(layout)?;
        let parts = MetadataParts::split(described.metadata()).ok_or(ExportError::UnknownForm)?;
        let (connection, keys) = (parts.connection.to_vec(), parts.keys.to_vec());
        Ok(NixlMetadata { connection, keys, regions: described.regions().to_vec() })
    }

    /// Imports a layout in the memory of a NIXL agent that does not use Terrane.
    ///
    /// The layout is an end of transfers like one that was [imported](Self::import), with the same
    /// checks. NIXL loads only the keys that the regions need. So after the peer has registered
    /// more memory, its longer metadata returns the same layout.
    ///
    /// # Errors
    ///
    /// [`ImportError`]. The state is then unchanged, except for [`ImportError::PeerLost`]. The
    /// metadata may be refused:
    /// - [`ImportError::MetadataTooLong`] if the pieces have more than 2 MiB, the default of
    ///   [`WireLimits::metadata`].
    /// - [`ImportError::Metadata`] if a piece is truncated or damaged.
    /// - [`ImportError::OtherAgent`] if a piece belongs to another agent.
    /// - [`ImportError::NoConnection`] and [`ImportError::TwoConnections`] if no piece has
    ///   connection data, or two pieces have different connection data.
    /// - [`ImportError::NotCovered`] if no key gives access to a region.
    /// - [`ImportError::NoCommonBackend`] if the agents have no backend in common.
    ///
    /// [`ImportError::Wire`] names the region that does not fit the geometry. A peer that was
    /// restarted under its name is [`ImportError::PeerChanged`]; see
    /// [`refresh_foreign`](Self::refresh_foreign).
    pub fn import_foreign(&self, layout: &ForeignLayout<'_>) -> Result<RemoteLayout, ImportError> {
        self.import_described(self.describe_foreign(layout)?, ImportMode::Import)
    }

    /// Imports a layout of a NIXL agent without Terrane that was restarted under its name, or has
    /// registered its memory again. This is [`refresh`](Self::refresh) for
    /// [`import_foreign`](Self::import_foreign).
    ///
    /// # Errors
    ///
    /// As for [`import_foreign`](Self::import_foreign) and [`refresh`](Self::refresh).
    pub fn refresh_foreign(&self, layout: &ForeignLayout<'_>) -> Result<RemoteLayout, ImportError> {
        self.import_described(self.describe_foreign(layout)?, ImportMode::Refresh)
    }

    /// Describes a foreign layout as an agent of Terrane would export it.
    pub(super) fn describe_foreign(
        &self,
        layout: &ForeignLayout<'_>,
    ) -> Result<LayoutDescriptor, ImportError> {
        let ForeignLayout { geometry, storage, agent, .. } = layout;
        let reachable = self.reachable()?.ok_or(ImportError::UnknownForm)?;
        let metadata = joined(agent, layout.metadata)?;
        let numbered = (0_u32..).zip(&layout.regions);
        let regions: Vec<RegionDescriptor> =
            numbered.map(|(number, region)| cut(region, geometry.region_bytes(number))).collect();

        let mut theirs: Vec<&str> = metadata.connections.iter().map(|c| c.backend).collect();
        theirs.retain(|name| reachable.iter().any(|reachable| **reachable == **name));
        let usable = self.usable_backends(agent, &regions, &theirs, &metadata.memory)?;
        let (usable, keys): (Vec<BackendName>, Vec<_>) = usable.into_iter().unzip();
        let keys = keys.into_iter().flat_map(each_once).collect();
        let reached = |region: &RegionDescriptor| {
            let (space, address) = (region.space(), region.address());
            RegionDescriptor::new(space, address, region.length(), usable.iter().cloned())
        };
        let regions = regions.iter().map(reached).collect();
        let name = metadata.agent;
        let connection =
            Metadata { agent: name, connections: metadata.connections, memory: Vec::new() };
        let keys = Metadata { agent: name, connections: Vec::new(), memory: keys };
        let parts = MetadataParts { connection: &connection.write(), keys: &keys.write() };
        let too_long =
            MalformedMetadata { offset: 0, expected: "connection information below 4 GiB" };
        let metadata = parts.join().ok_or(too_long)?;
        let geometry = geometry.clone();
        Ok(LayoutDescriptor::new(geometry, *storage, agent.clone(), metadata, regions)?)
    }
}

/// The pieces of an agent's metadata as one.
fn joined<'a>(agent: &'a AgentName, pieces: &[&'a [u8]]) -> Result<Metadata<'a>, ImportError> {
    check_length(pieces)?;
    let mut connections: Vec<ConnectionInfo<'a>> = Vec::new();
    let mut memory: Vec<MemoryKey<'a>> = Vec::new();
    for piece in pieces {
        let piece = Metadata::parse(piece)?;
        if piece.agent != agent.as_str() {
            let (described, found) = (agent.clone(), piece.agent.to_owned());
            return Err(ImportError::OtherAgent { described, found });
        }
        for connection in piece.connections {
            match connections.iter().find(|known| known.backend == connection.backend) {
                None if connections.len() >= MAX_CONNECTIONS => {
                    let expected = "piece after which the agent has up to 64 connections";
                    return Err(MalformedMetadata { offset: 0, expected }.into());
                }
                None => connections.push(connection),
                Some(known) if *known == connection => {}
                Some(_) => {
                    let (peer, backend) = (agent.clone(), connection.backend.into());
                    return Err(ImportError::TwoConnections { peer, backend });
                }
            }
        }
        memory.extend(piece.memory);
    }
    if connections.is_empty() {
        return Err(ImportError::NoConnection { peer: agent.clone() });
    }
    Ok(Metadata { agent: agent.as_str(), connections, memory })
}

/// Checks that the pieces are not longer than the metadata of a peer with Terrane may be.
fn check_length(pieces: &[&[u8]]) -> Result<(), ImportError> {
    let limit = WireLimits::DEFAULT.metadata;
    let actual = pieces.iter().map(|piece| to_u64(piece.len())).sum();
    if actual > limit.get() {
        return Err(ImportError::MetadataTooLong { actual: ByteCount::new(actual), limit });
    }
    Ok(())
}

/// The part of a region that the layout uses. A region that is too short is returned unchanged, and
/// refused later.
fn cut(region: &RegionDescriptor, length: ByteCount) -> RegionDescriptor {
    let length = region.length().min(length);
    RegionDescriptor::new(region.space(), region.address(), length, [])
}

/// The keys of one backend, each once and in NIXL's order: several regions may be in one
/// registration.
fn each_once(mut keys: Vec<MemoryKey<'_>>) -> Vec<MemoryKey<'_>> {
    let mut seen = FxHashSet::default();
    keys.retain(|key| seen.insert(key.location));
    keys.sort_by_key(|key| (key.location.memory, key.location.device, key.location.address));
    keys
}
