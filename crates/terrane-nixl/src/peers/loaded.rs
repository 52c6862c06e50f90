//! The peers that are loaded into NIXL.

use std::collections::{HashMap, HashSet};
use std::sync::Arc;

use terrane_core::AgentName;
use terrane_transfer::WeakEndpoint;
use terrane_wire::LayoutDescriptor;

use super::claims;
use super::export::Parts;
use super::metadata::{Key, Metadata, Place};
use super::remote::RemoteLayout;
use super::table::Peer;
use crate::MemoryType;

/// NIXL's data of a peer is reloaded once this many of its layouts have dropped, and at least as
/// many as live.
const TOLERATED_LAYOUTS: usize = 256;

/// The number of ended peers that NIXL keeps.
const TOLERATED_PEERS: usize = 32;

/// The peers that NIXL knows.
#[derive(Default)]
pub(super) struct Loaded {
    /// The latest peer of each name.
    pub(super) peers: HashMap<AgentName, LoadedPeer>,
    /// Peers whose name now belongs to another process, and whose transfers have not ended.
    replaced: Vec<LoadedPeer>,
    /// How many peers have ended so far.
    ended: u64,
}

impl Loaded {
    /// Marks a peer as ended. Another peer can take its name then.
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
    pub(super) fn set_aside(&mut self, name: &AgentName) {
        self.replaced.extend(self.peers.remove(name));
    }

    /// Removes a peer that NIXL no longer needs: one whose name another has, one that NIXL has
    /// lost, or the one that ended first, if there are too many.
    pub(super) fn superfluous(&mut self) -> Option<Arc<Peer>> {
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
        if is_whole && ended.len() <= TOLERATED_PEERS {
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
    /// The memory that NIXL has a key for, including dropped layouts. NIXL keeps the first key
    /// loaded for a place, and silently ignores another.
    pub(super) keys: HashMap<OwnedPlace, Box<[u8]>>,
    pub(super) layouts: Vec<LoadedLayout>,
    /// How many layouts have dropped since the last reload.
    gone: usize,
    /// Its rank among ended peers; `None` while in use.
    pub(super) ended: Option<u64>,
    /// NIXL unexpectedly does not know it.
    pub(super) is_lost: bool,
}

#[derive(PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(super) struct OwnedPlace {
    backend: Box<str>,
    memory: MemoryType,
    device: u64,
    address: u64,
    length: u64,
}

impl OwnedPlace {
    fn space(&self) -> (&str, MemoryType, u64) {
        (&self.backend, self.memory, self.device)
    }
}

/// The places that a layout came with keys for.
fn places(layout: &LayoutDescriptor) -> Vec<OwnedPlace> {
    let keys = Parts::split(layout.metadata()).and_then(|parts| Metadata::parse(parts.keys).ok());
    keys.into_iter().flat_map(|keys| keys.memory).map(|key| key.place.into()).collect()
}

impl From<Place<'_>> for OwnedPlace {
    fn from(place: Place<'_>) -> Self {
        let Place { backend, memory, device, address, length } = place;
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
            gone: 0,
            ended: None,
            is_lost: false,
        }
    }

    pub(super) fn add_keys(&mut self, keys: &[Key<'_>]) {
        for key in keys {
            self.keys.entry(key.place.into()).or_insert_with(|| key.key.into());
        }
    }

    pub(super) fn add_layout(&mut self, layout: &RemoteLayout) {
        let endpoint = layout.endpoint().downgrade();
        let described = Arc::clone(layout.described());
        self.layouts.push(LoadedLayout { endpoint, described });
    }

    /// Whether NIXL has a different key for one of these places.
    pub(super) fn contradicts(&self, keys: &[Key<'_>]) -> bool {
        let differs = |key: &Key<'_>| {
            self.keys.get(&key.place.into()).is_some_and(|known| **known != *key.key)
        };
        keys.iter().any(differs)
    }

    /// Whether NIXL has unused keys that conflict with these, not needed by any of the layouts
    /// `in_use`. A key conflicts if it is for the same memory, or for memory that shares bytes with
    /// it. The peer may have registered it differently since, and NIXL would use either key.
    pub(super) fn is_stale<'a>(
        &self,
        keys: &[Key<'_>],
        in_use: impl Iterator<Item = &'a Arc<LayoutDescriptor>>,
    ) -> bool {
        let keys: HashMap<OwnedPlace, &[u8]> =
            keys.iter().map(|key| (key.place.into(), key.key)).collect();
        let is_new = |place: &OwnedPlace, key: &[u8]| keys.get(place).is_none_or(|new| *new != key);
        let mut others: Vec<&OwnedPlace> = self
            .keys
            .iter()
            .filter(|(place, key)| is_new(place, key))
            .map(|(place, _)| place)
            .collect();
        if others.is_empty() {
            return false;
        }
        let needed: HashSet<OwnedPlace> = in_use.flat_map(|layout| places(layout)).collect();
        others.retain(|place| !needed.contains(place));
        others.sort_unstable();
        // The highest end of all others up to each one.
        let mut ends: Vec<u64> = Vec::with_capacity(others.len());
        for (index, place) in others.iter().enumerate() {
            let before = index.checked_sub(1).and_then(|i| Some((others.get(i)?, *ends.get(i)?)));
            let before = before.filter(|(other, _)| other.space() == place.space());
            let end = place.address.saturating_add(place.length);
            ends.push(before.map_or(end, |(_, before)| before.max(end)));
        }
        keys.keys().any(|place| {
            let end = place.address.saturating_add(place.length);
            let after = others.partition_point(|o| (o.space(), o.address) < (place.space(), end));
            after.checked_sub(1).is_some_and(|last| {
                others.get(last).is_some_and(|other| other.space() == place.space())
                    && ends.get(last).is_some_and(|end| *end > place.address)
            })
        })
    }

    /// The peer is back under a new number.
    pub(super) fn revive(&mut self, peer: Arc<Peer>) {
        self.peer = peer;
        self.gone += self.layouts.len();
        self.layouts.clear();
        self.ended = None;
    }

    /// Whether NIXL has all of these keys.
    pub(super) fn has_all(&self, keys: &[Key<'_>]) -> bool {
        keys.iter().all(|key| self.keys.contains_key(&key.place.into()))
    }

    /// The layout, if it is imported and live.
    pub(super) fn find(&self, described: &LayoutDescriptor) -> Option<RemoteLayout> {
        let same = self.layouts.iter().filter(|layout| *layout.described == *described);
        same.filter_map(|layout| {
            let endpoint = layout.endpoint.upgrade()?;
            let described = Arc::clone(&layout.described);
            Some(RemoteLayout::from_parts(endpoint, self.peer.id, described))
        })
        .next()
    }

    /// The first region that shares bytes with a live layout.
    pub(super) fn overlap(&self, described: &LayoutDescriptor) -> Option<u32> {
        let live = self.layouts.iter().filter(|layout| !layout.endpoint.has_gone());
        first_shared(live.map(|layout| &*layout.described), described)
    }

    /// Removes dropped layouts. Returns `true` if they were many: NIXL then has many unused keys.
    pub(super) fn sweep(&mut self) -> bool {
        let before = self.layouts.len();
        self.layouts.retain(|layout| !layout.endpoint.has_gone());
        self.gone += before - self.layouts.len();
        self.gone > TOLERATED_LAYOUTS.max(self.layouts.len())
    }

    /// The descriptions of the live layouts.
    pub(super) fn live(&self) -> impl Iterator<Item = &Arc<LayoutDescriptor>> {
        let live = self.layouts.iter().filter(|layout| !layout.endpoint.has_gone());
        live.map(|layout| &layout.described)
    }

    /// NIXL's data is empty.
    pub(super) fn reset(&mut self) {
        self.keys.clear();
        self.gone = 0;
    }
}

/// The first region of a layout that shares bytes with `others`, no two of which share any.
pub(super) fn first_shared<'a>(
    others: impl Iterator<Item = &'a LayoutDescriptor>,
    described: &LayoutDescriptor,
) -> Option<u32> {
    let mut others: Vec<_> = others
        .flat_map(LayoutDescriptor::regions)
        .map(|region| (region.space(), region.address(), region.length()))
        .collect();
    others.sort_unstable();
    // Among those that begin before a region ends, the last also ends last.
    (0_u32..).zip(described.regions()).find_map(|(number, region)| {
        // Validated: the sum fits in 64 bits.
        let end = region.address().saturating_add(region.length().get());
        let before =
            others.partition_point(|&(space, address, _)| (space, address) < (region.space(), end));
        let (space, address, length) = *others.get(before.checked_sub(1)?)?;
        let shares =
            space == region.space() && address.saturating_add(length.get()) > region.address();
        shares.then_some(number)
    })
}
