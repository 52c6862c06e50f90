//! Imports: layouts of peers, checked, told to NIXL, and laid out.

use std::sync::Arc;

use nixl_sys::XferDescList;
use rustc_hash::FxHashSet;
use terrane_core::{AgentName, BackendName};
use terrane_wire::{LayoutDescriptor, RegionDescriptor, WireLimits};

use super::claims::Claim;
use super::export::Parts;
use super::loaded::{Loaded, LoadedPeer};
use super::metadata::{Key, Metadata};
use super::remote::{RemoteLayout, device_of};
use super::table::{Lease, Peer};
use super::{ImportError, MalformedMetadata, PeerChange};
use crate::{Agent, Status};

/// What to do about a peer that is known.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Known {
    /// It is what it was, or the import fails.
    Same,
    /// It is another: whatever was imported of it can no longer be used.
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
        let described = Arc::new(LayoutDescriptor::decode(bytes, limits)?);
        if described.agent() == self.name() {
            return Err(self.own_name(&described));
        }
        let checked = self.check(&described)?;
        let mut loaded = self.peer_table().loaded();
        self.end_peers_among(&mut loaded);
        let imported = self.import_checked(&mut loaded, &checked, known);
        self.end_peers_among(&mut loaded);
        drop(loaded);
        // Somebody may have found the table locked meanwhile.
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
        if known == Known::Replaced {
            self.end(loaded, name)?;
        }
        self.revive(loaded, checked);
        match loaded.peers.get_mut(name) {
            Some(peer) => self.add(peer, checked),
            None => self.begin(loaded, checked),
        }
    }

    /// The layout is this agent's own, or another agent has its name.
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

    /// What can be checked before NIXL sees any of it.
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

    /// The backends that both agents have and that give access to all regions; one at least.
    fn check_keys(
        &self,
        described: &LayoutDescriptor,
        reachable: &[Box<str>],
        connections: &[&str],
        keys: &[Key<'_>],
    ) -> Result<Vec<BackendName>, ImportError> {
        let is_reachable = |name: &str| reachable.iter().any(|reachable| **reachable == *name);
        // NIXL refuses all of it, and forgets the peer.
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
        // Both are as long as the sender likes.
        let connections: FxHashSet<&str> = connections.iter().copied().collect();
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

    /// Ends a peer that may have become another.
    fn end(&self, loaded: &mut Loaded, name: &AgentName) -> Result<(), ImportError> {
        let Some(known) = loaded.peers.get(name) else { return Ok(()) };
        let peer = Arc::clone(&known.peer);
        let mut state = peer.state();
        if state.transfers > 0 {
            let (peer, transfers) = (name.clone(), state.transfers);
            return Err(ImportError::PeerBusy { peer, transfers });
        }
        state.forgotten = true;
        drop(state);
        self.peer_table().remove(peer.id);
        loaded.end(&peer);
        Ok(())
    }

    /// Takes up a peer that has ended and is known to NIXL, if it is what it was. If not, NIXL lets
    /// go of it: nobody uses it.
    fn revive(&self, loaded: &mut Loaded, checked: &Checked<'_>) {
        let name = checked.described.agent();
        let Some(known) = loaded.peers.get_mut(name).filter(|known| known.ended.is_some()) else {
            return;
        };
        let is_same = self.is_known(name)
            && !known.peer.state().suspect
            && *known.connection == *checked.parts.connection
            && !known.is_stale(&checked.keys, std::iter::empty());
        if is_same {
            let peer = Arc::new(Peer::new(name.clone()));
            self.peer_table().insert(&peer);
            known.revive(Arc::clone(&peer));
            // It ends again, unless it gets a layout now.
            self.peer_table().change(&peer, |_| ());
        } else {
            loaded.peers.remove(name);
            self.invalidate(name);
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
            self.load(name, checked.parts.connection)?;
            self.load(name, checked.parts.keys)
        };
        if let Err(status) = load() {
            self.invalidate(name);
            return Err(ImportError::Load { peer: name.clone(), status });
        }
        if !self.finds(&checked.described) {
            self.invalidate(name);
            return Err(ImportError::NotFound { peer: name.clone() });
        }
        let lease = Lease::new(self, &peer, claim);
        // From here on the lease ends the peer, should the layout not be built.
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
        let state = peer.state();
        if state.forgotten || state.suspect {
            // Or it would have ended, or its connection would have been closed.
            return Err(busy(state.transfers));
        }
        drop(state);
        if *known.connection != *checked.parts.connection {
            return Err(ImportError::PeerChanged { peer: name(), change: PeerChange::Connection });
        }
        if !self.is_known(described.agent()) {
            // A connection that broke has been closed.
            let _reloading = peer.reload().map_err(busy)?;
            self.reload(known).map_err(|status| self.lose(known, status))?;
        }
        let keys = &checked.keys;
        // What nobody has by the old key NIXL can let go of, further down.
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
            // NIXL lets go of keys that nobody needs. With transfers in flight it keeps them.
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
            // NIXL drops all that it knows of a peer with keys that it does not take, and does not say
            // any more what becomes of the requests that are in flight with it.
            let _reloading = peer.reload().map_err(busy)?;
            if let Err(refusal) = self.load(described.agent(), checked.parts.keys) {
                self.reload(known).map_err(|status| self.lose(known, status))?;
                return Err(ImportError::Load { peer: name(), status: refusal });
            }
            known.add_keys(keys);
        }
        if !self.finds(described) {
            return Err(ImportError::NotFound { peer: name() });
        }
        let lease = Lease::new(self, &known.peer, claim);
        let layout = RemoteLayout::new(known.peer.id, lease, described, &checked.usable)?;
        known.add_layout(&layout);
        Ok(layout)
    }

    /// Claims the bytes of the layout, which another agent of this process may have.
    fn claim(&self, peer: &Peer, checked: &Checked<'_>) -> Result<Claim, ImportError> {
        let (connection, described) = (checked.parts.connection, &checked.described);
        Claim::new(connection, peer.id, self.name(), described).map_err(|(region, by)| {
            ImportError::InUse { region, peer: described.agent().clone(), by }
        })
    }

    /// Whether NIXL knows a peer that it has been told of.
    fn is_known(&self, name: &AgentName) -> bool {
        self.raw().check_remote_metadata(name.as_str(), None)
    }

    fn lose(&self, known: &mut LoadedPeer, status: Status) -> ImportError {
        known.is_lost = true;
        self.peer_table().change(&known.peer, |state| state.forgotten = true);
        ImportError::PeerLost { peer: known.peer.name.clone(), status }
    }

    /// Tells NIXL of a peer anew: how to connect to it, and of its layouts that live.
    fn reload(&self, known: &mut LoadedPeer) -> Result<(), Status> {
        self.invalidate(&known.peer.name);
        known.reset();
        self.load(&known.peer.name, &known.connection)?;
        let live: Vec<Arc<LayoutDescriptor>> = known.live().cloned().collect();
        for described in live {
            let Some(parts) = Parts::split(described.metadata()) else { continue };
            self.load(&known.peer.name, parts.keys)?;
            if let Ok(metadata) = Metadata::parse(parts.keys) {
                known.add_keys(&metadata.memory);
            }
        }
        Ok(())
    }

    fn load(&self, name: &AgentName, metadata: &[u8]) -> Result<(), Status> {
        match self.raw().load_remote_md(metadata) {
            Ok(loaded) if loaded == name.as_str() => Ok(()),
            // Of metadata in a form that was not read before.
            Ok(other) => {
                self.invalidate(&other.into());
                Err(Status::InvalidParameter)
            }
            Err(error) => Err(Status::of(&error)),
        }
    }

    /// Whether NIXL finds every region in what it has loaded.
    fn finds(&self, described: &LayoutDescriptor) -> bool {
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
        self.raw().check_remote_metadata(described.agent().as_str(), list.as_ref())
    }
}

/// The first region to which the keys for this backend give no access.
pub(super) fn uncovered(
    regions: &[RegionDescriptor],
    backend: &BackendName,
    keys: &[Key<'_>],
) -> Option<u32> {
    let mut places: Vec<_> =
        keys.iter().map(|key| key.place).filter(|p| p.backend == backend.as_str()).collect();
    places.sort_unstable_by_key(|place| (place.memory, place.device, place.address));
    // The place that reaches furthest, of all that begin no later.
    for index in 1..places.len() {
        let [before, place] = places.get_mut(index - 1..=index)? else { return Some(0) };
        let same = (before.memory, before.device) == (place.memory, place.device);
        let end = |place: &super::metadata::Place<'_>| place.address.saturating_add(place.length);
        if same && end(before) >= end(place) {
            *place = *before;
        }
    }
    (0_u32..).zip(regions).find_map(|(number, region)| {
        let Some((memory, device)) = device_of(region.space()) else { return Some(number) };
        let at = (memory, device, region.address());
        let after = places.partition_point(|p| (p.memory, p.device, p.address) <= at);
        let before = after.checked_sub(1).and_then(|index| places.get(index));
        let covered =
            before.is_some_and(|p| p.covers(memory, device, region.address(), region.length()));
        (!covered).then_some(number)
    })
}
