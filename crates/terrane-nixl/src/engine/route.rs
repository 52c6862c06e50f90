//! Selects the backend, the direction and the peer for a plan.

use std::borrow::Cow;
use std::fmt;
use std::sync::{Arc, PoisonError, RwLock};
use std::time::Duration;

use terrane_core::{AgentName, BackendName, Location, PeerId, StorageKind};
use terrane_transfer::engines::Rate;
use terrane_transfer::{Decision, Declined, Endpoint, Side, TransferPlan};

use super::end::{ByEndpoint, End};
use super::error::{NixlStep, RequestFailed};
use crate::agent::Backend;
use crate::peers::{NoUse, PeerUse};
use crate::{Agent, FileAccess, MemoryType, Status};

/// How a plan is executed.
#[derive(Clone, Debug)]
pub(super) struct Route {
    pub(super) operation: Operation,
    /// The side of the local memory; the other side is the target.
    pub(super) local: Side,
    /// The backend's index in the agent.
    pub(super) backend: usize,
    pub(super) target: Target,
    /// The local memory, and the target.
    pub(super) ends: [Arc<End>; 2],
}

/// A route, and the rest of its explanation.
#[derive(Clone, Debug)]
pub(super) struct QuotedRoute {
    pub(super) route: Route,
    pub(super) backend: BackendName,
    /// The runs of the plan; each becomes a descriptor.
    pub(super) runs: u64,
}

impl Decision for QuotedRoute {
    fn path(&self) -> Cow<'_, str> {
        let Self { route, backend, runs } = self;
        format!("{backend} {}, {runs} descriptors", route.operation).into()
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

/// The route of a transfer that has begun.
#[derive(Debug)]
pub(super) struct Begun {
    pub(super) route: Route,
    /// NIXL keeps its data of the peer while this lives.
    pub(super) peer: Option<PeerUse>,
}

/// The direction, seen from the local memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Operation {
    Read,
    Write,
}

impl fmt::Display for Operation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Self::Read => "read",
            Self::Write => "write",
        })
    }
}

/// The source or destination of the bytes.
#[derive(Clone, Debug)]
pub(super) enum Target {
    Peer {
        id: PeerId,
        name: AgentName,
        /// NIXL's name for the peer.
        nixl_name: AgentName,
    },
    /// A local file. For NIXL, the agent is its own peer then.
    File,
}

/// Cached data of endpoints.
#[derive(Debug, Default)]
pub(super) struct Known(RwLock<ByEndpoint<Arc<End>>>);

impl Known {
    fn end(
        &self,
        endpoint: &Endpoint,
        find: impl FnOnce(&Endpoint) -> Option<End>,
    ) -> Option<Arc<End>> {
        let known = self.0.read().unwrap_or_else(PoisonError::into_inner);
        if let Some((_, end)) = known.get(&endpoint.id()) {
            return Some(Arc::clone(end));
        }
        drop(known);
        let end = Arc::new(find(endpoint)?);
        let mut known = self.0.write().unwrap_or_else(PoisonError::into_inner);
        // A new endpoint is a good time to remove those that have dropped.
        known.retain(|_, (endpoint, _)| !endpoint.has_gone());
        known.insert(endpoint.id(), (endpoint.downgrade(), Arc::clone(&end)));
        Some(end)
    }
}

/// The sorts of ends between which there are routes.
enum Sort {
    Memory,
    File,
    Peer(PeerId),
}

impl Sort {
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
    pub(super) fn of(agent: &Agent, known: &Known, plan: &TransferPlan) -> Result<Self, Declined> {
        let sorts = [plan.source(), plan.destination()].map(Sort::of);
        let (operation, local, other) = match sorts {
            [Some(Sort::Memory), Some(other @ (Sort::File | Sort::Peer(_)))] => {
                (Operation::Write, Side::Source, other)
            }
            [Some(other @ (Sort::File | Sort::Peer(_))), Some(Sort::Memory)] => {
                (Operation::Read, Side::Destination, other)
            }
            _ => return Err(Declined::Kinds),
        };
        let target_side = other_side(local);
        let here = known
            .end(plan.end(local), |end| End::local(agent, end))
            .filter(|end| end.is_registered)
            .ok_or(Declined::NotRegistered(local))?;
        let (target, there) = match other {
            Sort::Peer(peer) => {
                let (name, nixl_name) = agent.peer_names(peer).ok_or(Declined::UnknownPeer)?;
                let there = known
                    .end(plan.end(target_side), |end| End::remote(agent, end))
                    .ok_or(Declined::Kinds)?;
                (Target::Peer { id: peer, name, nixl_name }, there)
            }
            _ => {
                let there = known
                    .end(plan.end(target_side), |end| End::local(agent, end))
                    .filter(|end| end.is_registered)
                    .ok_or(Declined::NotRegistered(target_side))?;
                (Target::File, there)
            }
        };
        let suits = |(number, backend): &(usize, &Backend)| {
            let stores = backend.memory.contains(&MemoryType::File);
            stores == matches!(target, Target::File)
                && [&here, &there]
                    .iter()
                    .all(|end| backend.memory.contains(&end.memory) && end.bases(*number).is_some())
                && is_aligned(backend, plan)
        };
        let (backend, _) =
            agent.created().iter().enumerate().find(suits).ok_or(Declined::NoCommonBackend)?;
        Ok(Self { operation, local, backend, target, ends: [here, there] })
    }

    /// Begins a transfer, so that the peer stays known until it has ended.
    pub(super) fn begin(self, agent: &Agent) -> Result<Begun, RequestFailed> {
        let no_use = |reason| match reason {
            NoUse::Unknown => RequestFailed::Declined(Declined::UnknownPeer),
            NoUse::Lost(peer) => RequestFailed::PeerLost {
                peer,
                backend: self.backend_name(agent),
                step: NixlStep::Prepare,
                status: Status::NotFound,
            },
        };
        let peer = match &self.target {
            Target::Peer { id, .. } => Some(agent.use_peer(*id).map_err(no_use)?),
            Target::File => None,
        };
        Ok(Begun { route: self, peer })
    }

    /// The side of the target.
    pub(super) fn target_side(&self) -> Side {
        other_side(self.local)
    }

    pub(super) fn backend<'a>(&self, agent: &'a Agent) -> Option<&'a Backend> {
        agent.created().get(self.backend)
    }

    /// The name of the backend.
    pub(super) fn backend_name(&self, agent: &Agent) -> BackendName {
        // It was found among the agent's backends.
        self.backend(agent).map_or_else(|| "no backend".into(), |backend| backend.name.clone())
    }

    /// The agent name that requests pass to NIXL.
    pub(super) fn nixl_name<'a>(&'a self, agent: &'a Agent) -> &'a AgentName {
        match &self.target {
            Target::Peer { nixl_name, .. } => nixl_name,
            Target::File => agent.name(),
        }
    }

    /// The peer's name; `None` for a file.
    pub(super) fn peer(&self) -> Option<&AgentName> {
        match &self.target {
            Target::Peer { name, .. } => Some(name),
            Target::File => None,
        }
    }
}

fn other_side(side: Side) -> Side {
    match side {
        Side::Source => Side::Destination,
        Side::Destination => Side::Source,
    }
}

/// Whether the plan's file accesses are aligned as a backend needs that bypasses the page cache.
/// GDS aligns them by itself.
fn is_aligned(backend: &Backend, plan: &TransferPlan) -> bool {
    let direct = backend.file_access == FileAccess::Direct;
    if !direct || backend.name.as_str().starts_with("GDS") {
        return true;
    }
    [Side::Source, Side::Destination].into_iter().all(|side| {
        let other = other_side(side);
        plan.end(side).bases().iter().all(|base| match base {
            Location::File(position) => position.file.direct.is_some_and(|direct| {
                !plan.breaks_pieces()
                    && plan.alignment(side) >= direct.offset_alignment
                    && plan.alignment(other) >= direct.memory_alignment
            }),
            _ => true,
        })
    })
}

/// How fast each backend is, in each direction.
#[derive(Debug)]
pub(super) struct Rates {
    by_backend: Box<[[Rate; 2]]>,
    /// The rates of a backend that the agent does not have.
    of_none: [Rate; 2],
}

impl Rates {
    /// Estimates, which the first transfers replace. They were measured with UCX between two
    /// processes of a machine of two cores.
    pub(super) fn new(agent: &Agent) -> Self {
        let guess = || Rate::new(4e9, Duration::from_micros(60), Duration::from_micros(2));
        let guesses = || [guess(), guess()];
        let by_backend = agent.created().iter().map(|_| guesses()).collect();
        Self { by_backend, of_none: guesses() }
    }

    pub(super) fn of(&self, route: &Route) -> &Rate {
        let [read, write] = self.by_backend.get(route.backend).unwrap_or(&self.of_none);
        match route.operation {
            Operation::Read => read,
            Operation::Write => write,
        }
    }
}
