//! Imports: checks peers' layouts, passes them to NIXL, and builds them.

use std::sync::Arc;

use nixl_sys::XferDescList;
use rustc_hash::FxHashSet;
use terrane_core::BackendName;
use terrane_wire::{LayoutDescriptor, RegionDescriptor, WireLimits};

use super::claims::{self, Claim};
use super::export::Parts;
use super::loaded::{Loaded, LoadedPeer};
use super::metadata::{ConnectionInfo, Key, Metadata, Place};
use super::remote::{RemoteLayout, device_of};
use super::table::{Lease, Peer};
use super::{ImportError, MalformedMetadata, PeerChange};
use crate::quiet::quietly;
use crate::{Agent, Status, process};

/// The policy for a known peer.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Known {
    /// The peer is unchanged, or the import fails.
    Same,
    /// The peer is a new one: earlier imports from it can no longer be used.
    Replaced,
}

/// An import that has been checked as far as this process can.
pub(super) struct Checked<'a> {
    described: Arc<LayoutDescriptor>,
    parts: Parts<'a>,
    keys: Vec<Key<'a>>,
    /// The backends by which every region is reached.
    pub(super) usable: Vec<BackendName>,
}

impl Agent {
    pub(super) fn import_with(
        &self,
        bytes: &[u8],
        limits: &WireLimits,
        known: Known,
    ) -> Result<RemoteLayout, ImportError> {
        self.import_described(LayoutDescriptor::decode(bytes, limits)?, known)
    }

    pub(super) fn import_described(
        &self,
        described: LayoutDescriptor,
        known: Known,
    ) -> Result<RemoteLayout, ImportError> {
        process::check()?;
        let described = Arc::new(described);
        if described.agent() == self.name() {
            return Err(self.own_name(&described));
        }
        let checked = self.check(&described)?;
        let mut loaded = self.peer_table().loaded();
        self.end_peers_among(&mut loaded);
        let imported = quietly(|| self.import_checked(&mut loaded, &checked, known));
        self.end_peers_among(&mut loaded);
        drop(loaded);
        // Another thread may have skipped this while the table was locked.
        self.end_peers();
        imported
    }

    fn import_checked(
        &self,
        loaded: &mut Loaded,
        checked: &Checked<'_>,
        known: Known,
    ) -> Result<RemoteLayout, ImportError> {
        let name = checked.described.agent();
        if let Some(before) = loaded.peers.get(name) {
            let peer = Arc::clone(&before.peer);
            let is_same_process =
                claims::is_same_process(&before.connection, checked.parts.connection);
            if known == Known::Replaced {
                self.end(loaded, &peer, is_same_process)?;
            } else if !is_same_process && before.ended.is_none() && peer.state().forgotten {
                loaded.set_aside(name);
            }
        }
        self.revive(loaded, checked);
        match loaded.peers.get_mut(name) {
            Some(peer) => self.add(peer, checked),
            None => self.begin(loaded, checked),
        }
    }

    /// The error for a layout under this agent's name: it is this agent's own, or another agent has
    /// the name.
    fn own_name(&self, described: &LayoutDescriptor) -> ImportError {
        let agent = self.name().clone();
        let theirs = Parts::split(described.metadata()).map(|parts| parts.connection);
        let ours = self.connection_metadata().ok();
        if theirs == ours.as_deref() {
            ImportError::OwnLayout { agent }
        } else {
            ImportError::OwnName { agent }
        }
    }

    /// Checks everything that can be checked before NIXL reads any of it.
    pub(super) fn check<'a>(
        &self,
        described: &'a Arc<LayoutDescriptor>,
    ) -> Result<Checked<'a>, ImportError> {
        let parts = Parts::split(described.metadata())
            .ok_or(MalformedMetadata { offset: 0, expected: "two parts" })?;
        let reachable = self.reachable().ok_or(ImportError::UnknownForm)?;
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
        Ok(Checked { described: Arc::clone(described), parts, keys, usable })
    }

    /// The backends that both agents have and that give access to all regions; at least one.
    fn check_keys(
        &self,
        described: &LayoutDescriptor,
        reachable: &[Box<str>],
        connections: &[ConnectionInfo<'_>],
        keys: &[Key<'_>],
    ) -> Result<Vec<BackendName>, ImportError> {
        let is_reachable = |name: &str| reachable.iter().any(|reachable| **reachable == *name);
        // NIXL refuses the whole metadata, and forgets the peer.
        let is_deaf = |ours: &&BackendName| {
            !is_reachable(ours.as_str()) && keys.iter().any(|k| k.place.backend == ours.as_str())
        };
        if let Some(backend) = self.backends().find(is_deaf) {
            let (peer, backend) = (described.agent().clone(), backend.clone());
            return Err(ImportError::DeafBackend { peer, backend });
        }
        let mut theirs: Vec<&str> = keys.iter().map(|key| key.place.backend).collect();
        theirs.sort_unstable();
        theirs.dedup();
        // The sender chooses the length of both.
        let connections: FxHashSet<&str> = connections.iter().map(|c| c.backend).collect();
        theirs.retain(|backend| connections.contains(backend));
        let ours = || self.backends().any(|ours| theirs.contains(&ours.as_str()));
        let (mut usable, mut furthest) = (Vec::new(), 0);
        for backend in self.backends().filter(|ours| theirs.contains(&ours.as_str())) {
            match uncovered(described.regions(), backend, keys) {
                None => usable.push(backend.clone()),
                Some(region) => furthest = furthest.max(region),
            }
        }
        if !usable.is_empty() {
            return Ok(usable);
        }
        let peer = described.agent().clone();
        if ours() {
            return Err(ImportError::NotCovered { region: furthest, peer });
        }
        let theirs = theirs.into_iter().map(BackendName::from).collect();
        Err(ImportError::NoCommonBackend { peer, theirs, ours: self.backends().cloned().collect() })
    }

    /// Ends a peer that may have become another. If it has transfers in flight, its name is free
    /// for another process at once, and it ends with the last of them.
    fn end(
        &self,
        loaded: &mut Loaded,
        peer: &Arc<Peer>,
        is_same_process: bool,
    ) -> Result<(), ImportError> {
        let mut state = peer.state();
        let transfers = state.transfers;
        if transfers > 0 && is_same_process {
            return Err(ImportError::PeerBusy { peer: peer.name.clone(), transfers });
        }
        state.forgotten = true;
        drop(state);
        if transfers > 0 {
            loaded.set_aside(&peer.name);
        } else {
            self.peer_table().remove(peer.id);
            loaded.end(peer);
        }
        Ok(())
    }

    /// Revives an ended peer that NIXL still knows, if it is unchanged. Otherwise NIXL forgets it:
    /// it has no user.
    fn revive(&self, loaded: &mut Loaded, checked: &Checked<'_>) {
        let name = checked.described.agent();
        let Some(known) = loaded.peers.get_mut(name).filter(|known| known.ended.is_some()) else {
            return;
        };
        let is_same = self.is_known(&known.peer)
            && !known.peer.state().suspect
            && *known.connection == *checked.parts.connection
            && !known.is_stale(&checked.keys, std::iter::empty());
        if is_same {
            let peer = Arc::new(known.peer.again());
            self.peer_table().insert(&peer);
            known.revive(Arc::clone(&peer));
            // It ends again, unless it gets a layout now.
            self.peer_table().change(&peer, |_| ());
        } else {
            let peer = Arc::clone(&known.peer);
            loaded.peers.remove(name);
            self.invalidate(&peer);
        }
    }

    /// Imports the first layout of a peer.
    fn begin(
        &self,
        loaded: &mut Loaded,
        checked: &Checked<'_>,
    ) -> Result<RemoteLayout, ImportError> {
        let name = checked.described.agent();
        let peer = Arc::new(Peer::new(name.clone()));
        let claim = self.claim(&peer, checked)?;
        let load = || {
            self.load(&peer, checked.parts.connection)?;
            self.load(&peer, checked.parts.keys)
        };
        if let Err(status) = load() {
            self.invalidate(&peer);
            return Err(ImportError::Load { peer: name.clone(), status });
        }
        if !self.finds(&peer, &checked.described) {
            self.invalidate(&peer);
            return Err(ImportError::NotFound { peer: name.clone() });
        }
        let lease = Lease::new(self, &peer, claim);
        // From here on the lease ends the peer if building the layout fails.
        self.peer_table().insert(&peer);
        let mut new = LoadedPeer::new(Arc::clone(&peer), checked.parts.connection);
        new.add_keys(&checked.keys);
        let known = loaded.peers.entry(name.clone()).insert_entry(new).into_mut();
        let layout = RemoteLayout::new(peer.id, lease, &checked.described, &checked.usable)?;
        known.add_layout(&layout);
        Ok(layout)
    }

    /// Imports a further layout of a peer.
    fn add(
        &self,
        known: &mut LoadedPeer,
        checked: &Checked<'_>,
    ) -> Result<RemoteLayout, ImportError> {
        let described = &checked.described;
        let name = || described.agent().clone();
        let peer = Arc::clone(&known.peer);
        let busy = |transfers| ImportError::PeerBusy { peer: peer.name.clone(), transfers };
        if *known.connection != *checked.parts.connection {
            return Err(ImportError::PeerChanged { peer: name(), change: PeerChange::Connection });
        }
        let state = peer.state();
        if state.forgotten || state.suspect {
            // Otherwise it would have ended, or its connection would have been closed.
            return Err(busy(state.transfers));
        }
        drop(state);
        if !self.is_known(&peer) {
            // A broken connection has been closed.
            let _reloading = peer.reload().map_err(busy)?;
            self.reload(known).map_err(|status| self.lose(known, status))?;
        }
        let keys = &checked.keys;
        // Keys without users can be dropped by NIXL, further down.
        if known.contradicts(keys) && !known.is_stale(keys, known.live()) {
            return Err(ImportError::PeerChanged {
                peer: name(),
                change: PeerChange::Registration,
            });
        }
        if let Some(layout) = known.find(described) {
            return Ok(layout);
        }
        if let Some(region) = known.overlap(described) {
            return Err(ImportError::Overlap { region, peer: name() });
        }
        let claim = self.claim(&peer, checked)?;
        if known.sweep() || known.is_stale(keys, known.live()) {
            // NIXL drops unused keys. With transfers in flight it keeps them.
            if let Ok(_reloading) = peer.reload() {
                self.reload(known).map_err(|status| self.lose(known, status))?;
            }
        }
        if known.contradicts(keys) {
            return Err(ImportError::PeerChanged {
                peer: name(),
                change: PeerChange::Registration,
            });
        }
        if !known.has_all(keys) {
            // If NIXL refuses keys, it drops all that it knows of the peer. It then no longer
            // reports the state of the requests in flight with it.
            let _reloading = peer.reload().map_err(busy)?;
            if let Err(refusal) = self.load(&peer, checked.parts.keys) {
                self.reload(known).map_err(|status| self.lose(known, status))?;
                return Err(ImportError::Load { peer: name(), status: refusal });
            }
            known.add_keys(keys);
        }
        if !self.finds(&peer, described) {
            return Err(ImportError::NotFound { peer: name() });
        }
        let lease = Lease::new(self, &known.peer, claim);
        let layout = RemoteLayout::new(known.peer.id, lease, described, &checked.usable)?;
        known.add_layout(&layout);
        Ok(layout)
    }

    /// Claims the layout's bytes, which another agent of this process may have.
    fn claim(&self, peer: &Peer, checked: &Checked<'_>) -> Result<Claim, ImportError> {
        let (connection, described) = (checked.parts.connection, &checked.described);
        Claim::new(connection, peer.id, self.name(), described).map_err(|(region, by)| {
            ImportError::InUse { region, peer: described.agent().clone(), by }
        })
    }

    /// Whether NIXL still knows a peer that was loaded.
    fn is_known(&self, peer: &Peer) -> bool {
        self.raw().check_remote_metadata(peer.nixl_name.as_str(), None)
    }

    fn lose(&self, known: &mut LoadedPeer, status: Status) -> ImportError {
        known.is_lost = true;
        self.peer_table().change(&known.peer, |state| state.forgotten = true);
        ImportError::PeerLost { peer: known.peer.name.clone(), status }
    }

    /// Loads a peer into NIXL again: its connection data, and its live layouts.
    fn reload(&self, known: &mut LoadedPeer) -> Result<(), Status> {
        let peer = Arc::clone(&known.peer);
        self.invalidate(&peer);
        known.reset();
        self.load(&peer, &known.connection)?;
        let live: Vec<Arc<LayoutDescriptor>> = known.live().cloned().collect();
        for described in live {
            let Some(parts) = Parts::split(described.metadata()) else { continue };
            self.load(&peer, parts.keys)?;
            if let Ok(metadata) = Metadata::parse(parts.keys) {
                known.add_keys(&metadata.memory);
            }
        }
        Ok(())
    }

    /// Loads a piece of a peer's metadata into NIXL, under NIXL's name for the peer.
    fn load(&self, peer: &Peer, metadata: &[u8]) -> Result<(), Status> {
        let name = peer.nixl_name.as_str();
        let metadata = Metadata::parse(metadata).map_err(|_| Status::InvalidParameter)?;
        let metadata = Metadata { agent: name, ..metadata }.write();
        match self.raw().load_remote_md(&metadata) {
            Ok(loaded) if loaded == name => Ok(()),
            Ok(_) => Err(Status::InvalidParameter),
            Err(error) => Err(Status::of(&error)),
        }
    }

    /// Whether NIXL finds every region in the loaded metadata.
    fn finds(&self, peer: &Peer, described: &LayoutDescriptor) -> bool {
        let mut list: Option<XferDescList<'_>> = None;
        for region in described.regions() {
            let Some((memory, device)) = device_of(region.space()) else { return false };
            let list = match &mut list {
                Some(list) => list,
                None => match XferDescList::new(memory.into_raw()) {
                    Ok(new) => list.insert(new),
                    Err(_) => return false,
                },
            };
            let address = terrane_core::ByteCount::new(region.address()).to_usize();
            list.add_desc(address, region.length().to_usize(), device);
        }
        self.raw().check_remote_metadata(peer.nixl_name.as_str(), list.as_ref())
    }
}

/// The first region to which the keys for this backend give no access.
pub(super) fn uncovered(
    regions: &[RegionDescriptor],
    backend: &BackendName,
    keys: &[Key<'_>],
) -> Option<u32> {
    covering(regions, backend, keys).err()
}

/// The key of this backend that gives access to each region. If several do, it is the one with the
/// highest end, of all that begin no later.
///
/// # Errors
///
/// The first region to which no key gives access.
pub(super) fn covering<'a>(
    regions: &[RegionDescriptor],
    backend: &BackendName,
    keys: &[Key<'a>],
) -> Result<Vec<Key<'a>>, u32> {
    let mut keys: Vec<_> =
        keys.iter().filter(|key| key.place.backend == backend.as_str()).copied().collect();
    keys.sort_by_key(|key| (key.place.memory, key.place.device, key.place.address));
    for index in 1..keys.len() {
        let Some([before, key]) = keys.get_mut(index - 1..=index) else { break };
        let (a, b) = (before.place, key.place);
        let end = |place: &Place<'_>| place.address.saturating_add(place.length);
        if (a.memory, a.device) == (b.memory, b.device) && end(&a) >= end(&b) {
            *key = *before;
        }
    }
    let key_of = |region: &RegionDescriptor| {
        let (memory, device) = device_of(region.space())?;
        let at = (memory, device, region.address());
        let after = keys
            .partition_point(|key| (key.place.memory, key.place.device, key.place.address) <= at);
        let key = keys.get(after.checked_sub(1)?)?;
        let covers = key.place.covers(memory, device, region.address(), region.length());
        covers.then_some(*key)
    };
    (0_u32..).zip(regions).map(|(number, region)| key_of(region).ok_or(number)).collect()
}
