//! The peers that are loaded into NIXL.

use std::collections::{HashMap, HashSet};
use std::sync::Arc;

use terrane_core::AgentName;
use terrane_transfer::{Endpoint, WeakEndpoint};
use terrane_wire::LayoutDescriptor;

use super::claims;
use super::metadata::parts::MetadataParts;
use super::metadata::{KeyLocation, MemoryKey, Metadata};
use super::overlap::first_shared;
use super::peer::Peer;
use crate::bindings::memory_type::MemoryType;

/// NIXL's data of a peer is reloaded once this many of its layouts have dropped, and at least as
/// many as are alive.
const MAX_DROPPED_LAYOUTS: usize = 256;

/// The number of ended peers that NIXL keeps.
const MAX_ENDED_PEERS: usize = 32;

/// The peers that NIXL knows.
#[derive(Default)]
pub(super) struct LoadedPeers {
    /// The latest peer of each name.
    pub(super) peers: HashMap<AgentName, LoadedPeer>,
    /// Peers whose name now belongs to another process, and whose transfers have not ended.
    replaced: Vec<LoadedPeer>,
    /// The number of peers that have ended so far.
    ended: u64,
}

impl LoadedPeers {
    /// Marks a peer as ended. Another peer can then have its name.
    pub(super) fn end(&mut self, peer: &Peer) {
        let ended = self.ended + 1;
        let Some(known) = self.of(peer) else { return };
        known.ended = Some(ended);
        claims::release(&known.connection, peer.id);
        self.ended = ended;
    }

    /// NIXL's data of exactly this peer.
    pub(super) fn of(&mut self, peer: &Peer) -> Option<&mut LoadedPeer> {
        let latest = self.peers.get_mut(&peer.name).into_iter();
        latest.chain(&mut self.replaced).find(|known| known.peer.id == peer.id)
    }

    /// Frees a peer's name for another process. The peer is kept until its transfers have ended.
    pub(super) fn set_replaced(&mut self, name: &AgentName) {
        self.replaced.extend(self.peers.remove(name));
    }

    /// Removes an ended peer that NIXL need not keep. A peer whose name another process has goes
    /// first, then a peer that NIXL has lost. The peer that ended first goes only if more than
    /// [`MAX_ENDED_PEERS`] have ended.
    pub(super) fn take_excess(&mut self) -> Option<Arc<Peer>> {
        if let Some(index) = self.replaced.iter().position(|known| known.ended.is_some()) {
            return Some(self.replaced.swap_remove(index).peer);
        }
        let mut ended: Vec<_> = self
            .peers
            .values()
            .filter_map(|known| Some((!known.is_lost, known.ended?, &known.peer.name)))
            .collect();
        ended.sort_unstable();
        let &(is_whole, _, name) = ended.first()?;
        if is_whole && ended.len() <= MAX_ENDED_PEERS {
            return None;
        }
        let name = name.clone();
        Some(self.peers.remove(&name)?.peer)
    }

    /// Removes any peer that has ended.
    pub(super) fn take_ended(&mut self) -> Option<Arc<Peer>> {
        let ended = self.peers.values().filter(|known| known.ended.is_some());
        let name = ended.map(|known| known.peer.name.clone()).next()?;
        Some(self.peers.remove(&name)?.peer)
    }
}

/// A peer that NIXL knows.
pub(super) struct LoadedPeer {
    pub(super) peer: Arc<Peer>,
    /// Its connection data.
    pub(super) connection: Box<[u8]>,
    /// The memory for which NIXL has keys, including that of dropped layouts. NIXL keeps the first
    /// key of a location, and silently ignores any other.
    pub(super) keys: HashMap<OwnedKeyLocation, Box<[u8]>>,
    pub(super) layouts: Vec<LoadedLayout>,
    /// The number of layouts that have dropped since the last reload.
    dropped_layouts: usize,
    /// Its rank among ended peers; `None` while in use.
    pub(super) ended: Option<u64>,
    /// Whether NIXL unexpectedly does not know it.
    pub(super) is_lost: bool,
}

pub(super) type OwnedKeyLocation = KeyLocation<Box<str>>;

impl OwnedKeyLocation {
    fn space(&self) -> (&str, MemoryType, u64) {
        (&self.backend, self.memory, self.device)
    }
}

/// The memory for which a layout's metadata has keys.
fn key_locations(layout: &LayoutDescriptor) -> Vec<OwnedKeyLocation> {
    let keys =
        MetadataParts::split(layout.metadata()).and_then(|parts| Metadata::parse(parts.keys).ok());
    keys.into_iter().flat_map(|keys| keys.memory).map(|key| key.location.into()).collect()
}

impl From<KeyLocation<&str>> for OwnedKeyLocation {
    fn from(location: KeyLocation<&str>) -> Self {
        let KeyLocation { backend, memory, device, address, length } = location;
        Self { backend: backend.into(), memory, device, address, length }
    }
}

pub(super) struct LoadedLayout {
    endpoint: WeakEndpoint,
    described: Arc<LayoutDescriptor>,
}

impl LoadedPeer {
    pub(super) fn new(peer: Arc<Peer>, connection: &[u8]) -> Self {
        let (keys, layouts) = (HashMap::new(), Vec::new());
        Self {
            peer,
            connection: connection.into(),
            keys,
            layouts,
            dropped_layouts: 0,
            ended: None,
            is_lost: false,
        }
    }

    pub(super) fn add_keys(&mut self, keys: &[MemoryKey<'_>]) {
        for key in keys {
            self.keys.entry(key.location.into()).or_insert_with(|| key.key.into());
        }
    }

    pub(super) fn add_layout(&mut self, endpoint: &Endpoint, described: &Arc<LayoutDescriptor>) {
        let (endpoint, described) = (endpoint.downgrade(), Arc::clone(described));
        self.layouts.push(LoadedLayout { endpoint, described });
    }

    /// Whether NIXL has a different key for one of these locations.
    pub(super) fn contradicts(&self, keys: &[MemoryKey<'_>]) -> bool {
        let differs = |key: &MemoryKey<'_>| {
            self.keys.get(&key.location.into()).is_some_and(|known| **known != *key.key)
        };
        keys.iter().any(differs)
    }

    /// Whether NIXL has keys that conflict with these and that none of the layouts `in_use` needs.
    /// A key conflicts if it is for the same memory, or for memory that shares bytes with it. The
    /// peer may have registered it differently since, and NIXL would use either key.
    pub(super) fn is_stale<'a>(
        &self,
        keys: &[MemoryKey<'_>],
        in_use: impl Iterator<Item = &'a Arc<LayoutDescriptor>>,
    ) -> bool {
        let keys: HashMap<OwnedKeyLocation, &[u8]> =
            keys.iter().map(|key| (key.location.into(), key.key)).collect();
        let is_new = |location: &OwnedKeyLocation, key: &[u8]| {
            keys.get(location).is_none_or(|new| *new != key)
        };
        let mut others: Vec<&OwnedKeyLocation> = self
            .keys
            .iter()
            .filter(|(location, key)| is_new(location, key))
            .map(|(location, _)| location)
            .collect();
        if others.is_empty() {
            return false;
        }
        let needed: HashSet<OwnedKeyLocation> =
            in_use.flat_map(|layout| key_locations(layout)).collect();
        others.retain(|location| !needed.contains(location));
        others.sort_unstable();
        // For each key, the highest end of all keys up to it.
        let mut ends: Vec<u64> = Vec::with_capacity(others.len());
        for (index, location) in others.iter().enumerate() {
            let before = index.checked_sub(1).and_then(|i| Some((others.get(i)?, *ends.get(i)?)));
            let before = before.filter(|(other, _)| other.space() == location.space());
            let end = location.address.saturating_add(location.length);
            ends.push(before.map_or(end, |(_, before)| before.max(end)));
        }
        keys.keys().any(|location| {
            let end = location.address.saturating_add(location.length);
            let after =
                others.partition_point(|o| (o.space(), o.address) < (location.space(), end));
            after.checked_sub(1).is_some_and(|last| {
                others.get(last).is_some_and(|other| other.space() == location.space())
                    && ends.get(last).is_some_and(|end| *end > location.address)
            })
        })
    }

    /// Records the peer's return under a new number.
    pub(super) fn revive(&mut self, peer: Arc<Peer>) {
        self.peer = peer;
        self.dropped_layouts += self.layouts.len();
        self.layouts.clear();
        self.ended = None;
    }

    /// Whether NIXL has all of these keys.
    pub(super) fn has_all(&self, keys: &[MemoryKey<'_>]) -> bool {
        keys.iter().all(|key| self.keys.contains_key(&key.location.into()))
    }

    /// The layout, if it is imported and alive.
    pub(super) fn find(
        &self,
        described: &LayoutDescriptor,
    ) -> Option<(Endpoint, Arc<LayoutDescriptor>)> {
        let mut same = self.layouts.iter().filter(|layout| *layout.described == *described);
        same.find_map(|layout| Some((layout.endpoint.upgrade()?, Arc::clone(&layout.described))))
    }

    /// The first region that shares bytes with a live layout.
    pub(super) fn overlap(&self, described: &LayoutDescriptor) -> Option<u32> {
        first_shared(self.live_layouts().map(|layout| &**layout), described)
    }

    /// Removes dropped layouts. Returns `true` if there were many: NIXL then has many unused keys.
    pub(super) fn remove_dropped(&mut self) -> bool {
        let before = self.layouts.len();
        self.layouts.retain(|layout| !layout.endpoint.has_gone());
        self.dropped_layouts += before - self.layouts.len();
        self.dropped_layouts > MAX_DROPPED_LAYOUTS.max(self.layouts.len())
    }

    /// The descriptions of the live layouts.
    pub(super) fn live_layouts(&self) -> impl Iterator<Item = &Arc<LayoutDescriptor>> {
        let live = self.layouts.iter().filter(|layout| !layout.endpoint.has_gone());
        live.map(|layout| &layout.described)
    }

    /// Records that NIXL has no data of the peer.
    pub(super) fn reset(&mut self) {
        self.keys.clear();
        self.dropped_layouts = 0;
    }
}
