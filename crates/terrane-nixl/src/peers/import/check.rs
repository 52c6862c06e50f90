//! The checks of an import before NIXL reads any of it.

use std::sync::Arc;

use rustc_hash::FxHashSet;
use terrane_core::{AgentName, BackendName, Requirement};
use terrane_wire::{LayoutDescriptor, RegionDescriptor};

use crate::agent::Agent;
use crate::peers::error::ImportError;
use crate::peers::metadata::coverage::covering;
use crate::peers::metadata::parts::MetadataParts;
use crate::peers::metadata::{ConnectionInfo, MalformedMetadata, MemoryKey, Metadata};

/// An import after all checks that this process can make.
pub(in crate::peers) struct CheckedImport<'a> {
    pub(super) described: Arc<LayoutDescriptor>,
    pub(super) parts: MetadataParts<'a>,
    pub(super) keys: Vec<MemoryKey<'a>>,
    /// The backends by which every region is reached.
    pub(in crate::peers) usable: Vec<BackendName>,
    /// Whether the metadata was checked. If not, `keys` is empty.
    pub(super) is_checked: bool,
}

impl Agent {
    /// Checks everything that can be checked before NIXL reads the metadata.
    pub(in crate::peers) fn check<'a>(
        &self,
        described: &'a Arc<LayoutDescriptor>,
    ) -> Result<CheckedImport<'a>, ImportError> {
        let parts = MetadataParts::split(described.metadata())
            .ok_or(MalformedMetadata { offset: 0, expected: "two parts" })?;
        let checks = self.metadata_checks();
        if checks == Requirement::Off {
            return self.unchecked(described, parts);
        }
        let reachable = match (checks, self.reachable()?) {
            (_, Some(reachable)) => reachable,
            (Requirement::Required, None) => return Err(ImportError::UnknownForm),
            (_, None) => return self.unchecked(described, parts),
        };
        let connection = Metadata::parse(parts.connection)?;
        let keys = Metadata::parse(parts.keys)?;
        for found in [connection.agent, keys.agent] {
            if found != described.agent().as_str() {
                let (described, found) = (described.agent().clone(), found.to_owned());
                return Err(ImportError::OtherAgent { described, found });
            }
        }
        let usable =
            self.check_keys(described, reachable, &connection.connections, &keys.memory)?;
        let keys = keys.memory;
        Ok(CheckedImport {
            described: Arc::clone(described),
            parts,
            keys,
            usable,
            is_checked: true,
        })
    }

    /// An import whose metadata only NIXL reads. The description names the backends.
    fn unchecked<'a>(
        &self,
        described: &'a Arc<LayoutDescriptor>,
        parts: MetadataParts<'a>,
    ) -> Result<CheckedImport<'a>, ImportError> {
        let reaches_all = |backend: &&BackendName| {
            described.regions().iter().all(|region| region.backends().contains(backend))
        };
        let usable: Vec<BackendName> = self.backends().filter(reaches_all).cloned().collect();
        if usable.is_empty() {
            let theirs = described.regions().first().map(|region| region.backends().to_vec());
            let (peer, theirs) = (described.agent().clone(), theirs.unwrap_or_default());
            let ours = self.backends().cloned().collect();
            return Err(ImportError::NoCommonBackend { peer, theirs, ours });
        }
        let described = Arc::clone(described);
        Ok(CheckedImport { described, parts, keys: Vec::new(), usable, is_checked: false })
    }

    /// The backends that both agents have and that reach all regions; at least one.
    fn check_keys(
        &self,
        described: &LayoutDescriptor,
        reachable: &[Box<str>],
        connections: &[ConnectionInfo<'_>],
        keys: &[MemoryKey<'_>],
    ) -> Result<Vec<BackendName>, ImportError> {
        let is_reachable = |name: &str| reachable.iter().any(|reachable| **reachable == *name);
        // NIXL would refuse all of the metadata, and forget the peer.
        let is_local_only = |ours: &&BackendName| {
            !is_reachable(ours.as_str()) && keys.iter().any(|k| k.location.backend == ours.as_str())
        };
        if let Some(backend) = self.backends().find(is_local_only) {
            let (peer, backend) = (described.agent().clone(), backend.clone());
            return Err(ImportError::BackendNotRemote { peer, backend });
        }
        let mut theirs: Vec<&str> = keys.iter().map(|key| key.location.backend).collect();
        theirs.sort_unstable();
        theirs.dedup();
        // The sender chooses the length of both.
        let connections: FxHashSet<&str> = connections.iter().map(|c| c.backend).collect();
        theirs.retain(|backend| connections.contains(backend));
        let usable = self.usable_backends(described.agent(), described.regions(), &theirs, keys)?;
        Ok(usable.into_iter().map(|(backend, _)| backend).collect())
    }

    /// Those backends of both agents that reach all regions, with the key of each region; at least
    /// one.
    pub(in crate::peers) fn usable_backends<'a>(
        &self,
        peer: &AgentName,
        regions: &[RegionDescriptor],
        theirs: &[&str],
        keys: &[MemoryKey<'a>],
    ) -> Result<Vec<(BackendName, Vec<MemoryKey<'a>>)>, ImportError> {
        let (mut usable, mut furthest) = (Vec::new(), None);
        for backend in self.backends().filter(|ours| theirs.contains(&ours.as_str())) {
            match covering(regions, backend, keys) {
                Ok(keys) => usable.push((backend.clone(), keys)),
                Err(region) => furthest = furthest.max(Some(region)),
            }
        }
        if !usable.is_empty() {
            return Ok(usable);
        }
        let peer = peer.clone();
        Err(match furthest {
            Some(region) => ImportError::NotCovered { region, peer },
            None => ImportError::NoCommonBackend {
                peer,
                theirs: theirs.iter().copied().map(BackendName::from).collect(),
                ours: self.backends().cloned().collect(),
            },
        })
    }
}
