//! Prepared descriptor lists of all pieces of an end, from which requests are made by index.
//!
//! NIXL keeps raw pointers in such a list: to its backend's data of a local registration, or of a
//! peer's key. So
//!
//! - a list of local memory is prepared only if NIXL can find no registration for it but the
//!   endpoint's own. Only transfers of that endpoint use it, and they hold the registration;
//! - a list of a peer's memory is used only while NIXL's data of the peer is unchanged
//!   ([`PeerUse::generation`]). It is unchanged from when a transfer finds the peer ready until the
//!   transfer ends;
//! - an agent with a listener prepares no lists, as its peers can make it forget and reload others.
//!
//! A request copies the data that it needs from the lists. NIXL follows no pointer when it releases
//! a list, so a list may outlive the memory. It must not outlive the agent. Releasing takes the
//! agent's lock, which a post holds for its whole duration. So posting threads release lists, and
//! submitting threads never do.

use std::collections::hash_map::Entry;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use rustc_hash::FxHashMap;
use terrane_core::ByteCount;
use terrane_transfer::{Endpoint, EndpointId, Side, TransferPlan, WeakEndpoint};

use super::end::End;
use super::numbering::Numbering;
use super::route::{Route, Target};
use crate::peers::PeerUse;
use crate::quiet::quietly;
use crate::register::Descriptor;
use crate::{Agent, NixlEngineOptions};

/// The prepared lists of the ends of an engine's transfers.
#[derive(Debug)]
pub(super) struct Prepared {
    /// The most pieces in a list.
    most: u64,
    /// The multiple of its length that must be listed before it is prepared.
    after: u64,
    kept: Mutex<FxHashMap<Key, Kept>>,
}

/// An end, and a backend's index in the agent.
type Key = (EndpointId, usize);

#[derive(Debug)]
struct Kept {
    endpoint: WeakEndpoint,
    numbering: Arc<Numbering>,
    /// The number of descriptors listed so far without a list that a list would have had.
    listed: u64,
    /// Whether NIXL failed to prepare the list, or refused the prepared one. The next attempt then
    /// waits for at least as much work as that one cost.
    has_failed: bool,
    list: Option<Arc<List>>,
}

/// All pieces of one end, prepared by one backend.
pub(super) struct List {
    // Fields drop in this order: the list is released before the agent ends.
    raw: nixl_sys::XferDlistHandle,
    _agent: Agent,
    numbering: Arc<Numbering>,
    /// The version of NIXL's data of the peer; 0 for local memory.
    generation: u64,
}

// SAFETY: NIXL changes nothing of a list once it is prepared. It releases the list under the
// agent's lock, on any thread. The agent lives as long as the list.
unsafe impl Send for List {}
// SAFETY: as above; a shared reference gives access only to its address.
unsafe impl Sync for List {}

/// A requested piece of work: the list of one end that is to be prepared.
struct Due {
    key: Key,
    side: Side,
    numbering: Arc<Numbering>,
    generation: u64,
}

impl Prepared {
    pub(super) fn new(options: &NixlEngineOptions) -> Self {
        Self {
            most: ByteCount::from_usize(options.prepared_descriptors).get(),
            after: options.prepare_after.into(),
            kept: Mutex::default(),
        }
    }

    /// The lists of the local end and of the target, for a request of so many descriptors. Prepares
    /// them once as much work has been spent without them. `None` if this request does without
    /// them.
    pub(super) fn lists(
        &self,
        agent: &Agent,
        route: &Route,
        plan: &TransferPlan,
        peer: &PeerUse,
        descriptors: usize,
    ) -> Option<[Arc<List>; 2]> {
        if self.most == 0 || agent.listens() || !matches!(route.target, Target::Peer { .. }) {
            return None;
        }
        let sides = [(route.local, 0), (route.target_side(), peer.generation())];
        let mut released = Vec::new();
        let mut kept = self.lock();
        let mut lists = [None, None];
        let (mut due, mut is_due) = (Vec::new(), true);
        for ((side, generation), list) in sides.into_iter().zip(&mut lists) {
            let end = plan.end(side);
            let key = (end.id(), route.backend);
            if !kept.contains_key(&key) {
                // A new endpoint is a good time to remove those that have dropped.
                let gone = kept.extract_if(|_, kept| kept.endpoint.has_gone());
                released.extend(gone.filter_map(|(_, kept)| kept.list));
            }
            let known = match kept.entry(key) {
                Entry::Occupied(known) => known.into_mut(),
                Entry::Vacant(room) => room.insert(Kept::new(end)?),
            };
            if let Some(stale) = known.list.take_if(|list| list.generation != generation) {
                released.push(stale);
                known.listed = 0;
            }
            *list = known.list.clone();
            if list.is_none() {
                let pieces = known.numbering.count();
                let after = if known.has_failed { self.after.max(1) } else { self.after };
                is_due &= pieces <= self.most && known.listed >= pieces.saturating_mul(after);
                let numbering = Arc::clone(&known.numbering);
                due.push(Due { key, side, numbering, generation });
            }
        }
        for due in &due {
            if let Some(known) = kept.get_mut(&due.key) {
                let listed = ByteCount::from_usize(descriptors).get();
                // A transfer that arrives during the preparation continues to list.
                known.has_failed |= is_due;
                known.listed = if is_due { 0 } else { known.listed.saturating_add(listed) };
            }
        }
        drop(kept);
        drop(released);
        if !is_due {
            return None;
        }
        for due in due {
            let list = Arc::new(List::prepare(agent, route, plan, &due)?);
            let mut kept = self.lock();
            let replaced = kept.get_mut(&due.key).and_then(|known| {
                known.has_failed = false;
                known.list.replace(Arc::clone(&list))
            });
            drop(kept);
            drop(replaced);
            let [here, there] = &mut lists;
            *(if due.side == route.local { here } else { there }) = Some(list);
        }
        let [here, there] = lists;
        Some([here?, there?])
    }

    /// Removes the lists of both ends: NIXL refuses them.
    pub(super) fn forget(&self, route: &Route, plan: &TransferPlan) {
        let keys = [plan.source(), plan.destination()].map(|end| (end.id(), route.backend));
        let mut kept = self.lock();
        let lists = keys.map(|key| {
            let known = kept.get_mut(&key)?;
            (known.listed, known.has_failed) = (0, true);
            known.list.take()
        });
        drop(kept);
        drop(lists);
    }

    fn lock(&self) -> MutexGuard<'_, FxHashMap<Key, Kept>> {
        self.kept.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Kept {
    /// `None` if the end has no pieces to number.
    fn new(end: &Endpoint) -> Option<Self> {
        let numbering = Arc::new(Numbering::of(end.layout().geometry())?);
        let endpoint = end.downgrade();
        Some(Self { endpoint, numbering, listed: 0, has_failed: false, list: None })
    }
}

impl List {
    /// Makes NIXL prepare all pieces of an end. `None` if it fails, or if it could find a
    /// registration that is not the endpoint's.
    fn prepare(agent: &Agent, route: &Route, plan: &TransferPlan, due: &Due) -> Option<Self> {
        let [here, there] = &route.ends;
        let is_local = due.side == route.local;
        let end = if is_local { here } else { there };
        let begun = std::time::Instant::now();
        let list = all_pieces(end, route.backend, &due.numbering)?;
        let options = route.backend(agent)?.options();
        let prepare = |name: &str| agent.raw().prepare_xfer_dlist(name, &list, Some(options));
        let raw = if is_local {
            let (own, regions) = registered(agent, route, end, plan.end(due.side))?;
            // No registration may change between this check and NIXL's.
            let table = agent.table().lock().unwrap_or_else(PoisonError::into_inner);
            if !regions.iter().all(|region| table.has_only(&own, region, route.backend)) {
                return None;
            }
            // An empty name means the agent itself.
            quietly(|| prepare("")).ok()?
        } else {
            prepare(route.nixl_name(agent).as_str()).ok()?
        };
        let (numbering, generation) = (Arc::clone(&due.numbering), due.generation);
        tracing::debug!(
            agent = %agent.name(),
            descriptors = numbering.count(),
            is_local,
            took = ?begun.elapsed(),
            "descriptors prepared"
        );
        Some(Self { raw, _agent: agent.clone(), numbering, generation })
    }

    /// The indices of its pieces.
    pub(super) fn numbering(&self) -> &Numbering {
        &self.numbering
    }

    /// The bindings' list. Objects made from it must not outlive NIXL's data of the memory; a
    /// request has copies, and ends before that.
    pub(super) fn raw(&self) -> &nixl_sys::XferDlistHandle {
        &self.raw
    }
}

impl std::fmt::Debug for List {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("List")
            .field("pieces", &self.numbering.count())
            .field("generation", &self.generation)
            .finish_non_exhaustive()
    }
}

/// All pieces of an end, in the order of their indices.
fn all_pieces(
    end: &End,
    backend: usize,
    numbering: &Numbering,
) -> Option<nixl_sys::XferDescList<'static>> {
    let mut list = nixl_sys::XferDescList::new(end.memory.into_raw()).ok()?;
    let length = numbering.piece().to_usize();
    for at in numbering.places() {
        let base = end.base(backend, at.region)?;
        let address = ByteCount::new(base.address.checked_add(at.offset)?).to_usize();
        list.add_desc(address, length, base.device);
    }
    // The bindings pass the descriptors to NIXL's list now, outside any lock.
    let _handed_over = list.as_ptr();
    Some(list)
}

/// The endpoint's own registrations with a backend, and its regions.
fn registered(
    agent: &Agent,
    route: &Route,
    end: &End,
    endpoint: &Endpoint,
) -> Option<(Vec<Descriptor>, Vec<Descriptor>)> {
    let (backend, layout) = (route.backend(agent)?, endpoint.layout());
    let own = layout.registrations().into_iter().map(|found| found.record);
    let own = own
        .filter(|record| record.agent == *agent.name() && record.accepted_by(&backend.name))
        .filter_map(|record| Descriptor::of(&record.span, backend.file_access).ok());
    let geometry = layout.geometry();
    let bases = (0_u32..).zip(end.bases(route.backend)?.iter());
    let regions = bases.map(|(number, base)| Descriptor {
        memory: end.memory,
        address: ByteCount::new(base.address).to_usize(),
        length: geometry.region_bytes(number).to_usize(),
        device: base.device,
    });
    Some((own.collect(), regions.collect()))
}

#[cfg(test)]
mod tests;
