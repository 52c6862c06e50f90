//! Selects the backend, the direction and the peer for a plan.

pub(super) mod rates;

use std::borrow::Cow;
use std::sync::Arc;

use terrane_core::{AgentName, BackendName, Location, PeerId, StorageKind};
use terrane_transfer::{Decision, Declined, Endpoint, EndpointCache, Side, TransferPlan};

use super::descriptors::region_bases::RegionBases;
use super::error::{NixlStep, RequestError};
use super::local_and_target::LocalAndTarget;
use crate::agent::Agent;
use crate::agent::backend::Backend;
use crate::agent::config::FileAccess;
use crate::bindings::memory_type::MemoryType;
use crate::bindings::status::Status;
use crate::peers::peer_use::{PeerUnavailable, PeerUse};

/// The backend, the direction and the target of a plan.
#[derive(Clone, Debug)]
pub(super) struct Route {
    pub(super) operation: Operation,
    /// The side of the local memory; the other side is the target.
    pub(super) local: Side,
    /// The backend's index in the agent.
    pub(super) backend: usize,
    pub(super) target: Target,
    pub(super) bases: LocalAndTarget<Arc<RegionBases>>,
}

/// A route, and the other data of its explanation.
#[derive(Clone, Debug)]
pub(super) struct QuotedRoute {
    pub(super) route: Route,
    pub(super) backend: BackendName,
    /// The number of the plan's runs, which become descriptors.
    pub(super) runs: u64,
}

impl Decision for QuotedRoute {
    fn path(&self) -> Cow<'_, str> {
        let Self { route, backend, runs } = self;
        format!("{backend} {}, {runs} descriptors", route.operation).into()
    }

    fn label(&self) -> &'static str {
        match self.route.target {
            Target::Peer { .. } => "to or from a peer",
            Target::File => "to or from a file",
        }
    }

    fn reason(&self) -> Cow<'_, str> {
        let backend = &self.backend;
        match &self.route.target {
            Target::Peer { name: peer, .. } => {
                format!("{backend} accepted both this memory and that of {peer}").into()
            }
            Target::File => format!("file and memory are registered with {backend}").into(),
        }
    }
}

/// The route of a submitted transfer, which reserves the peer.
#[derive(Debug)]
pub(super) struct ReservedRoute {
    pub(super) route: Route,
    /// NIXL keeps its data of the peer while this value lives.
    pub(super) peer: Option<PeerUse>,
}

/// The direction, seen from the local memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Operation {
    Read,
    Write,
}

impl Operation {
    pub(super) fn raw(self) -> nixl_sys::XferOp {
        match self {
            Self::Read => nixl_sys::XferOp::Read,
            Self::Write => nixl_sys::XferOp::Write,
        }
    }
}

terrane_core::display_names!(Operation { Self::Read => "read", Self::Write => "write" });

/// The end that is not local memory.
#[derive(Clone, Debug)]
pub(super) enum Target {
    Peer {
        id: PeerId,
        name: AgentName,
        /// NIXL's name for the peer.
        nixl_name: AgentName,
    },
    /// A local file. NIXL treats the agent as its own peer then.
    File,
}

/// The kinds of ends that have routes.
enum EndKind {
    Memory,
    File,
    Peer(PeerId),
}

impl EndKind {
    fn of(endpoint: &Endpoint) -> Option<Self> {
        match endpoint.kind() {
            StorageKind::System | StorageKind::Pinned | StorageKind::Device(_) => {
                Some(Self::Memory)
            }
            StorageKind::Disk => Some(Self::File),
            StorageKind::Remote(peer) => Some(Self::Peer(peer)),
            _ => None,
        }
    }
}

impl Route {
    pub(super) fn of(
        agent: &Agent,
        cache: &EndpointCache<Arc<RegionBases>>,
        plan: &TransferPlan,
    ) -> Result<Self, Declined> {
        let kinds = [plan.source(), plan.destination()].map(EndKind::of);
        let (operation, local, other) = match kinds {
            [Some(EndKind::Memory), Some(other @ (EndKind::File | EndKind::Peer(_)))] => {
                (Operation::Write, Side::Source, other)
            }
            [Some(other @ (EndKind::File | EndKind::Peer(_))), Some(EndKind::Memory)] => {
                (Operation::Read, Side::Destination, other)
            }
            _ => return Err(Declined::Kinds),
        };
        let target_side = local.other();
        let bases = |endpoint: &Endpoint, find: fn(&Agent, &Endpoint) -> Option<RegionBases>| {
            let compute = || Some(cache.insert(endpoint, Arc::new(find(agent, endpoint)?)));
            cache.get(endpoint).or_else(compute)
        };
        let local_bases = bases(plan.end(local), RegionBases::local)
            .filter(|end| end.is_registered)
            .ok_or(Declined::NotRegistered(local))?;
        let (target, target_bases) = match other {
            EndKind::Peer(peer) => {
                let (name, nixl_name) = agent.peer_names(peer).ok_or(Declined::UnknownPeer)?;
                let bases =
                    bases(plan.end(target_side), RegionBases::remote).ok_or(Declined::Kinds)?;
                (Target::Peer { id: peer, name, nixl_name }, bases)
            }
            _ => {
                let bases = bases(plan.end(target_side), RegionBases::local)
                    .filter(|end| end.is_registered)
                    .ok_or(Declined::NotRegistered(target_side))?;
                (Target::File, bases)
            }
        };
        let suits = |(number, backend): &(usize, &Backend)| {
            let has_files = backend.memory.contains(&MemoryType::File);
            has_files == matches!(target, Target::File)
                && [&local_bases, &target_bases].iter().all(|bases| {
                    backend.memory.contains(&bases.memory) && bases.of_backend(*number).is_some()
                })
                && is_aligned(backend, plan)
        };
        let has_enough = |(_, backend): &(usize, &Backend)| {
            backend.ios.as_ref().is_none_or(|ios| ios.has_enough())
        };
        let suitable = || agent.created_backends().iter().enumerate().filter(suits);
        let (backend, _) = suitable().find(has_enough).ok_or_else(|| {
            if suitable().next().is_some() {
                Declined::NoIosLeft
            } else {
                Declined::NoCommonBackend
            }
        })?;
        let bases = LocalAndTarget { local: local_bases, target: target_bases };
        Ok(Self { operation, local, backend, target, bases })
    }

    /// Reserves the peer for a transfer, so that it stays known until the transfer has ended.
    pub(super) fn reserve(self, agent: &Agent) -> Result<ReservedRoute, RequestError> {
        let unavailable = |reason| match reason {
            PeerUnavailable::Unknown => RequestError::Declined(Declined::UnknownPeer),
            PeerUnavailable::Lost(peer) => RequestError::PeerLost {
                peer,
                backend: self.backend_name(agent),
                step: NixlStep::Prepare,
                status: Status::NotFound,
            },
        };
        let peer = match &self.target {
            Target::Peer { id, .. } => Some(agent.use_peer(*id).map_err(unavailable)?),
            Target::File => None,
        };
        Ok(ReservedRoute { route: self, peer })
    }

    /// The side of the target.
    pub(super) fn target_side(&self) -> Side {
        self.local.other()
    }

    pub(super) fn backend<'a>(&self, agent: &'a Agent) -> Option<&'a Backend> {
        agent.created_backends().get(self.backend)
    }

    /// The name of the backend.
    pub(super) fn backend_name(&self, agent: &Agent) -> BackendName {
        // The backend was found among the agent's backends.
        self.backend(agent).map_or_else(|| "no backend".into(), |backend| backend.name.clone())
    }

    /// The agent name in requests to NIXL.
    pub(super) fn nixl_name<'a>(&'a self, agent: &'a Agent) -> &'a AgentName {
        match &self.target {
            Target::Peer { nixl_name, .. } => nixl_name,
            Target::File => agent.name(),
        }
    }

    /// The peer's name; `None` for a file.
    pub(super) fn peer_name(&self) -> Option<&AgentName> {
        match &self.target {
            Target::Peer { name, .. } => Some(name),
            Target::File => None,
        }
    }
}

/// Whether the plan's file accesses are aligned as a backend with direct I/O needs. GDS and GDS_MT
/// align them themselves.
fn is_aligned(backend: &Backend, plan: &TransferPlan) -> bool {
    let direct = backend.file_access == FileAccess::Direct;
    if !direct || matches!(backend.name.as_str(), "GDS" | "GDS_MT") {
        return true;
    }
    Side::BOTH.into_iter().all(|side| {
        plan.end(side).bases().iter().all(|base| match base {
            Location::File(position) => position.file.direct.is_some_and(|direct| {
                !plan.breaks_pieces()
                    && plan.alignment(side) >= direct.offset_alignment
                    && plan.alignment(side.other()) >= direct.memory_alignment
            }),
            _ => true,
        })
    })
}
