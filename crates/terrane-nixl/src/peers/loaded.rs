//! What NIXL has been told of a peer.

use std::collections::HashMap;
use std::sync::Arc;

use terrane_transfer::WeakEndpoint;
use terrane_wire::LayoutDescriptor;

use super::metadata::{Key, Place};
use super::remote::RemoteLayout;
use super::table::Peer;
use crate::MemoryType;

/// As many layouts may have gone of a peer, beside as many again as live, before NIXL is told anew
/// what is left of it.
const TOLERATED: usize = 16;

/// A peer that NIXL knows.
pub(super) struct LoadedPeer {
    pub(super) peer: Arc<Peer>,
    /// How to connect to it.
    pub(super) connection: Box<[u8]>,
    /// The memory that NIXL has a key for, also for layouts that have gone. It keeps the first that
    /// it has been told for a place, without a word about another.
    keys: HashMap<OwnedPlace, Box<[u8]>>,
    layouts: Vec<LoadedLayout>,
    /// How many layouts have gone since NIXL was told anew.
    gone: usize,
}

#[derive(PartialEq, Eq, Hash)]
struct OwnedPlace {
    backend: Box<str>,
    memory: MemoryType,
    device: u64,
    address: u64,
    length: u64,
}

impl From<Place<'_>> for OwnedPlace {
    fn from(place: Place<'_>) -> Self {
        let Place { backend, memory, device, address, length } = place;
        Self { backend: backend.into(), memory, device, address, length }
    }
}

struct LoadedLayout {
    endpoint: WeakEndpoint,
    described: Arc<LayoutDescriptor>,
}

impl LoadedPeer {
    pub(super) fn new(peer: Arc<Peer>, connection: &[u8]) -> Self {
        let (keys, layouts) = (HashMap::new(), Vec::new());
        Self { peer, connection: connection.into(), keys, layouts, gone: 0 }
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

    /// Whether NIXL has one of these places under another key.
    pub(super) fn contradicts(&self, keys: &[Key<'_>]) -> bool {
        let differs = |key: &Key<'_>| {
            self.keys.get(&key.place.into()).is_some_and(|known| **known != *key.key)
        };
        keys.iter().any(differs)
    }

    /// Whether NIXL has all of these keys.
    pub(super) fn has_all(&self, keys: &[Key<'_>]) -> bool {
        keys.iter().all(|key| self.keys.contains_key(&key.place.into()))
    }

    /// The layout, if it is imported and lives.
    pub(super) fn find(&self, described: &LayoutDescriptor) -> Option<RemoteLayout> {
        let same = self.layouts.iter().filter(|layout| *layout.described == *described);
        same.filter_map(|layout| {
            let endpoint = layout.endpoint.upgrade()?;
            let described = Arc::clone(&layout.described);
            Some(RemoteLayout::from_parts(endpoint, self.peer.id, described))
        })
        .next()
    }

    /// The first region that shares bytes with a layout that lives.
    pub(super) fn overlap(&self, described: &LayoutDescriptor) -> Option<u32> {
        let of_others = |layout: &&LoadedLayout| !layout.endpoint.has_gone();
        let mut others: Vec<_> = self
            .layouts
            .iter()
            .filter(of_others)
            .flat_map(|layout| layout.described.regions())
            .map(|region| (region.space(), region.address(), region.length()))
            .collect();
        others.sort_unstable();
        // None of them overlap: of those that begin before a region ends, the last ends last.
        (0_u32..).zip(described.regions()).find_map(|(number, region)| {
            // Validated: no sum of the two leaves 64 bits.
            let end = region.address().saturating_add(region.length().get());
            let before = others
                .partition_point(|&(space, address, _)| (space, address) < (region.space(), end));
            let (space, address, length) = *others.get(before.checked_sub(1)?)?;
            let shares =
                space == region.space() && address.saturating_add(length.get()) > region.address();
            shares.then_some(number)
        })
    }

    /// Lets go of layouts that have gone. `true` if they were many: NIXL then has many keys that
    /// nobody needs.
    pub(super) fn sweep(&mut self) -> bool {
        let before = self.layouts.len();
        self.layouts.retain(|layout| !layout.endpoint.has_gone());
        self.gone += before - self.layouts.len();
        self.gone > TOLERATED.max(self.layouts.len())
    }

    /// What the layouts that live were described with.
    pub(super) fn live(&self) -> impl Iterator<Item = &Arc<LayoutDescriptor>> {
        let live = self.layouts.iter().filter(|layout| !layout.endpoint.has_gone());
        live.map(|layout| &layout.described)
    }

    /// NIXL has been told nothing.
    pub(super) fn reset(&mut self) {
        self.keys.clear();
        self.gone = 0;
    }
}
