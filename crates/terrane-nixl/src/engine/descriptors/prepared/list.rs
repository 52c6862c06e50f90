//! One prepared list.

use std::sync::Arc;
use std::time::Instant;

use terrane_core::ByteCount;
use terrane_core::sync::lock;
use terrane_transfer::{Endpoint, Side, TransferPlan};

use crate::agent::Agent;
use crate::bindings::without_tracing::without_tracing;
use crate::engine::descriptors::piece_index::PieceIndex;
use crate::engine::descriptors::region_bases::RegionBases;
use crate::engine::route::Route;
use crate::register::descriptor::Descriptor;

/// All pieces of one end, prepared by one backend.
pub(in crate::engine) struct PreparedList {
    // Fields drop in this order: the list is released before the agent ends.
    pub(in crate::engine) raw: nixl_sys::XferDlistHandle,
    _agent: Agent,
    pub(in crate::engine) index: Arc<PieceIndex>,
    /// The version of NIXL's data of the peer; 0 for local memory.
    pub(super) generation: u64,
}

// SAFETY: NIXL does not change a list after its preparation. It releases the list under the agent's
// lock, on any thread. The agent lives as long as the list.
unsafe impl Send for PreparedList {}
// SAFETY: as above; a shared reference gives access only to its address.
unsafe impl Sync for PreparedList {}

/// Identifies the list to prepare.
pub(super) struct ListKey {
    pub(super) side: Side,
    pub(super) index: Arc<PieceIndex>,
    pub(super) generation: u64,
}

impl PreparedList {
    /// Makes NIXL prepare all pieces of an end. `None` if NIXL refuses, or if it could use a
    /// registration that the endpoint does not use.
    pub(super) fn prepare(
        agent: &Agent,
        route: &Route,
        plan: &TransferPlan,
        key: &ListKey,
    ) -> Option<Self> {
        let is_local = key.side == route.local;
        let bases = if is_local { &route.bases.local } else { &route.bases.target };
        let begun = Instant::now();
        let list = all_pieces(bases, route.backend, &key.index)?;
        let options = route.backend(agent)?.options();
        let prepare = |name: &str| agent.raw().prepare_xfer_dlist(name, &list, Some(options));
        let raw = if is_local {
            let local = LocalRegistrations::of(agent, route, bases, plan.end(key.side))?;
            // No registration may change between this check and NIXL's lookup.
            let table = lock(agent.registrations());
            let is_own = |region| table.has_only(&local.own, region, route.backend);
            if !local.regions.iter().all(is_own) {
                return None;
            }
            // An empty name stands for the agent itself.
            without_tracing(|| prepare("")).ok()?
        } else {
            prepare(route.nixl_name(agent).as_str()).ok()?
        };
        let (index, generation) = (Arc::clone(&key.index), key.generation);
        tracing::debug!(
            agent = %agent.name(),
            descriptors = index.count(),
            is_local,
            took = ?begun.elapsed(),
            "descriptors prepared"
        );
        Some(Self { raw, _agent: agent.clone(), index, generation })
    }
}

terrane_core::debug_fields!(PreparedList, |it| { pieces: it.index.count(),
    generation: it.generation });

/// All pieces of an end, in the order of their indices.
fn all_pieces(
    bases: &RegionBases,
    backend: usize,
    index: &PieceIndex,
) -> Option<nixl_sys::XferDescList<'static>> {
    let mut list = nixl_sys::XferDescList::new(bases.memory.into_raw()).ok()?;
    let length = index.piece_bytes.to_usize();
    for at in index.starts() {
        let base = bases.base(backend, at.region)?;
        let address = ByteCount::new(base.address.checked_add(at.offset)?).to_usize();
        list.add_desc(address, length, base.device);
    }
    // The bindings pass the descriptors to NIXL's list here, outside any lock.
    let _handed_over = list.as_ptr();
    Some(list)
}

/// The registrations of a local end with one backend.
struct LocalRegistrations {
    /// The spans of the endpoint's own registrations.
    own: Vec<Descriptor>,
    /// Its regions.
    regions: Vec<Descriptor>,
}

impl LocalRegistrations {
    fn of(agent: &Agent, route: &Route, bases: &RegionBases, endpoint: &Endpoint) -> Option<Self> {
        let (backend, layout) = (route.backend(agent)?, endpoint.layout());
        let own = layout.registrations().into_iter().map(|found| found.record);
        let own = own
            .filter(|record| record.agent == *agent.name() && record.accepted_by(&backend.name))
            .filter_map(|record| Descriptor::of(&record.span, backend.file_access).ok());
        let regions = bases.regions(route.backend, layout.geometry());
        Some(Self { own: own.collect(), regions: regions.collect() })
    }
}
