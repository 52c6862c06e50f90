//! Prepared descriptor lists of all pieces of an endpoint, from which requests are created by
//! index.
//!
//! NIXL stores raw pointers in such a list: to its backend's data of a local registration, or of a
//! peer's key. Therefore:
//!
//! - a list of local memory is prepared only if NIXL can use no other registrations for it than
//!   those that the endpoint uses. Only transfers of that endpoint use the list, and they keep the
//!   registrations alive;
//! - a list of a peer's memory is used only while NIXL's data of the peer is unchanged
//!   ([`PeerUse::generation`]). That data does not change from the moment when a transfer finds the
//!   peer ready until the transfer ends.
//!
//! A request copies the data that it needs from the lists. NIXL follows no pointer when it releases
//! a list, so a list may outlive the memory. It must not outlive the agent. Releasing a list takes
//! the agent's lock, which a post holds for its whole duration. So threads that post release lists,
//! and threads that submit never do.

pub(in crate::engine) mod list;
#[cfg(test)]
mod tests;

use std::collections::hash_map::Entry;
use std::sync::{Arc, Mutex, MutexGuard};

use rustc_hash::FxHashMap;
use terrane_core::convert::to_u64;
use terrane_core::sync::lock;
use terrane_transfer::{Endpoint, EndpointId, TransferPlan, WeakEndpoint};

use super::piece_index::PieceIndex;
use crate::agent::Agent;
use crate::engine::local_and_target::LocalAndTarget;
use crate::engine::options::NixlEngineOptions;
use crate::engine::route::{Route, Target};
use crate::peers::peer_use::PeerUse;
use list::{ListKey, PreparedList};

/// The prepared lists of the ends of an engine's transfers.
#[derive(Debug)]
pub(in crate::engine) struct PreparedLists {
    /// The maximum number of pieces in a list.
    max_pieces: u64,
    /// A list is prepared once requests have listed this multiple of its length without it.
    threshold: u64,
    ends: Mutex<FxHashMap<EndKey, EndLists>>,
}

/// An end, and a backend's index in the agent.
type EndKey = (EndpointId, usize);

/// The list of an endpoint, or the progress towards one.
#[derive(Debug)]
struct EndLists {
    endpoint: WeakEndpoint,
    index: Arc<PieceIndex>,
    /// The number of descriptors listed so far that a prepared list would have saved.
    listed: u64,
    /// Whether NIXL refused to prepare the list, or refused the prepared list. The next attempt
    /// then waits for at least as much work as the failed one cost.
    has_failed: bool,
    list: Option<Arc<PreparedList>>,
}

/// A list that is missing for a request.
struct MissingList {
    key: EndKey,
    list: ListKey,
}

impl PreparedLists {
    pub(in crate::engine) fn new(options: &NixlEngineOptions) -> Self {
        Self {
            max_pieces: to_u64(options.prepared_descriptors),
            threshold: options.prepare_threshold.into(),
            ends: Mutex::default(),
        }
    }

    /// Returns the lists for a request of this many descriptors. They are prepared once the same
    /// amount of work has been spent without them. `None` if this request uses none.
    pub(in crate::engine) fn lists(
        &self,
        agent: &Agent,
        route: &Route,
        plan: &TransferPlan,
        peer: &PeerUse,
        descriptors: usize,
    ) -> Option<LocalAndTarget<Arc<PreparedList>>> {
        if self.max_pieces == 0 || !matches!(route.target, Target::Peer { .. }) {
            return None;
        }
        let mut released = Vec::new();
        let mut ends = self.lock();
        let mut lists: LocalAndTarget<Option<Arc<PreparedList>>> = LocalAndTarget::default();
        let (mut missing, mut is_due) = (Vec::new(), true);
        for (side, generation, list) in [
            (route.local, 0, &mut lists.local),
            (route.target_side(), peer.generation(), &mut lists.target),
        ] {
            let end = plan.end(side);
            let key = (end.id(), route.backend);
            if !ends.contains_key(&key) {
                // A new endpoint is an occasion to remove the lists of dropped ones.
                let dropped = ends.extract_if(|_, entry| entry.endpoint.has_gone());
                released.extend(dropped.filter_map(|(_, entry)| entry.list));
            }
            let entry = match ends.entry(key) {
                Entry::Occupied(entry) => entry.into_mut(),
                Entry::Vacant(vacant) => vacant.insert(EndLists::new(end)?),
            };
            if let Some(stale) = entry.list.take_if(|list| list.generation != generation) {
                released.push(stale);
                entry.listed = 0;
            }
            *list = entry.list.clone();
            if list.is_none() {
                let pieces = entry.index.count();
                let threshold =
                    if entry.has_failed { self.threshold.max(1) } else { self.threshold };
                is_due &=
                    pieces <= self.max_pieces && entry.listed >= pieces.saturating_mul(threshold);
                let index = Arc::clone(&entry.index);
                missing.push(MissingList { key, list: ListKey { side, index, generation } });
            }
        }
        for missing in &missing {
            if let Some(entry) = ends.get_mut(&missing.key) {
                let listed = to_u64(descriptors);
                // A transfer that arrives during the preparation lists its descriptors.
                entry.has_failed |= is_due;
                entry.listed = if is_due { 0 } else { entry.listed.saturating_add(listed) };
            }
        }
        drop(ends);
        drop(released);
        if !is_due {
            return None;
        }
        for missing in missing {
            let list = Arc::new(PreparedList::prepare(agent, route, plan, &missing.list)?);
            let mut ends = self.lock();
            let replaced = ends.get_mut(&missing.key).and_then(|entry| {
                entry.has_failed = false;
                entry.list.replace(Arc::clone(&list))
            });
            drop(ends);
            drop(replaced);
            let is_local = missing.list.side == route.local;
            *(if is_local { &mut lists.local } else { &mut lists.target }) = Some(list);
        }
        Some(LocalAndTarget { local: lists.local?, target: lists.target? })
    }

    /// Removes the lists of both ends, because NIXL refuses them.
    pub(in crate::engine) fn forget(&self, route: &Route, plan: &TransferPlan) {
        let keys = [plan.source(), plan.destination()].map(|end| (end.id(), route.backend));
        let mut ends = self.lock();
        let lists = keys.map(|key| {
            let entry = ends.get_mut(&key)?;
            (entry.listed, entry.has_failed) = (0, true);
            entry.list.take()
        });
        drop(ends);
        drop(lists);
    }

    fn lock(&self) -> MutexGuard<'_, FxHashMap<EndKey, EndLists>> {
        lock(&self.ends)
    }
}

impl EndLists {
    /// `None` if the end has no pieces to index.
    fn new(end: &Endpoint) -> Option<Self> {
        let index = Arc::new(PieceIndex::of(end.layout().geometry())?);
        let endpoint = end.downgrade();
        Some(Self { endpoint, index, listed: 0, has_failed: false, list: None })
    }
}
