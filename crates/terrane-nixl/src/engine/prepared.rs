//! Lists of all pieces of an end, that NIXL has prepared, for requests to be made from by index.
//!
//! NIXL keeps raw pointers in such a list: to what its backend has of a registration here, or of a key
//! of a peer. So
//!
//! - a list of memory of this process is prepared only where whatever NIXL may find for it is a
//!   registration of the endpoint's own, and used by transfers of that endpoint alone, which hold it;
//! - a list of a peer's memory is used only while what NIXL has been told of the peer is what it was
//!   ([`PeerUse::generation`]), which is so from when a transfer finds the peer ready until it ends;
//! - an agent with a listener, whose peers can have it forget others and be told of them anew, prepares
//!   none.
//!
//! A request has copies of what it is made from. And NIXL follows no pointer as it releases a list, so
//! that a list may go after the memory; but not after the agent, and under the agent's lock, which is
//! held for as long as a post takes. So lists are released by the threads that post, and never by one
//! that submits.

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

/// What has been prepared of the ends of an engine's transfers.
#[derive(Debug)]
pub(super) struct Prepared {
    /// The most pieces of which a list is made.
    most: u64,
    /// How often they are listed anew before that.
    after: u64,
    kept: Mutex<FxHashMap<Key, Kept>>,
}

/// An end, and a backend by its place among the agent's.
type Key = (EndpointId, usize);

#[derive(Debug)]
struct Kept {
    endpoint: WeakEndpoint,
    numbering: Arc<Numbering>,
    /// How many descriptors have been listed anew that a list would have had.
    listed: u64,
    /// Whether NIXL has not made a list of them, or does not take the one it made. Then the next attempt
    /// comes no sooner than after as much work as that one was.
    has_failed: bool,
    list: Option<Arc<List>>,
}

/// All pieces of one end, prepared by one backend.
pub(super) struct List {
    // Fields drop in this order: the list is released before the agent ends.
    raw: nixl_sys::XferDlistHandle,
    _agent: Agent,
    numbering: Arc<Numbering>,
    /// Of what NIXL has been told of the peer; 0 for memory of this process.
    generation: u64,
}

// SAFETY: NIXL changes nothing of a list once it is prepared, and releases it under the agent's lock,
// whichever thread asks for that. The agent lives for as long as the list.
unsafe impl Send for List {}
// SAFETY: as above; through a shared reference there is nothing but its address to be had.
unsafe impl Sync for List {}

/// A piece of the work that has been asked for: the list of one end that is to be prepared.
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

    /// The lists of this process's end and of the target, for a request of so many descriptors. Makes
    /// them if as much has been spent on doing without; `None` if it is to be done without again.
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
                // A new endpoint is as good a time as any to forget those that have gone.
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
                // A transfer that comes while it is prepared goes on listing.
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

    /// Lets go of the lists of both ends: NIXL does not take them.
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
    /// Has NIXL prepare all pieces of an end. `None` if it does not, or if it might find a registration
    /// that is not the endpoint's.
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
            // Nothing is registered or deregistered between the look and NIXL's.
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

    /// The numbers of its pieces.
    pub(super) fn numbering(&self) -> &Numbering {
        &self.numbering
    }

    /// The list as the bindings know it. Nothing that is made of it may outlive what NIXL has of the
    /// memory; a request has copies, and ends before that.
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

/// All pieces of an end, in the order of their numbers.
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
    // The bindings hand the descriptors over to NIXL's list now, and not under a lock.
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
