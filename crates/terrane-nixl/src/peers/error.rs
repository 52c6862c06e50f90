//! Why layouts could not be exported, imported or forgotten.

use terrane_core::{AgentName, BackendName, ForkedProcess, PeerId, StorageKind};
use terrane_layout::LayoutError;
use terrane_wire::WireError;

use super::MalformedMetadata;
use crate::Status;

/// Why a layout could not be exported.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ExportError {
    /// The process was forked from one that had built an agent.
    #[error("NIXL cannot be used in a forked process; start another program with `exec` for that")]
    Forked(#[from] ForkedProcess),
    /// A region is not registered with the agent.
    #[error(
        "region {region} is not registered with agent {agent}, but with {}; \
         register the layout with this agent (LayoutBuilder::register), or export it from another",
        names(.found)
    )]
    NotRegistered {
        /// The first such region.
        region: u32,
        /// The agent.
        agent: AgentName,
        /// The agents that hold a registration.
        found: Vec<AgentName>,
    },
    /// A region is registered with the agent, but not all of its blocks.
    #[error(
        "region {region} lies outside what is registered with agent {agent}; register all of it"
    )]
    NotCovered {
        /// The first such region.
        region: u32,
        /// The agent.
        agent: AgentName,
    },
    /// Memory that only its owner can export.
    #[error("{storage} memory cannot be exported; ask its owner for an export")]
    NotOurs {
        /// Its kind.
        storage: StorageKind,
    },
    /// No backend that peers can reach has the whole layout.
    #[error(
        "no backend of agent {agent} that peers can reach has accepted all regions of {storage} \
         memory; create one that takes it, such as UCX for host and device memory"
    )]
    NoBackend {
        /// The agent.
        agent: AgentName,
        /// The kind of the layout's memory.
        storage: StorageKind,
    },
    /// A region's owner declares it registered, but it no longer is.
    #[error(
        "region {region} is said to be registered with agent {agent}, which has no key for it; \
         its registration has ended, so register it anew"
    )]
    RegistrationGone {
        /// The first such region.
        region: u32,
        /// The agent.
        agent: AgentName,
    },
    /// NIXL refused to return the metadata.
    #[error("NIXL gave no metadata of agent {agent}: {status}")]
    Metadata {
        /// The agent.
        agent: AgentName,
        /// The status that NIXL returned.
        status: Status,
    },
    /// This agent's own metadata is not in the form of NIXL 1.5, so it cannot be parsed.
    #[error("NIXL writes its metadata in another form than NIXL 1.5; install NIXL 1.5.1")]
    UnknownForm,
    /// The description could not be encoded.
    #[error(transparent)]
    Wire(#[from] WireError),
}

/// Why a layout of a peer could not be imported. The state is unchanged, unless the variant says
/// otherwise.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ImportError {
    /// The process was forked from one that had built an agent.
    #[error("NIXL cannot be used in a forked process; start another program with `exec` for that")]
    Forked(#[from] ForkedProcess),
    /// The bytes are not a valid layout description.
    #[error(transparent)]
    Wire(#[from] WireError),
    /// The agent's metadata is malformed.
    #[error(transparent)]
    Metadata(#[from] MalformedMetadata),
    /// This agent's own metadata is not in the form that this crate parses. Peers' metadata then
    /// cannot be checked before NIXL reads it, and NIXL trusts it.
    #[error(
        "NIXL writes its metadata in another form than NIXL 1.5, so that what peers send cannot be \
         checked; install NIXL 1.5.1"
    )]
    UnknownForm,
    /// The layout is in memory of this same agent.
    #[error("the layout was exported by this agent, {agent}; use the layout itself")]
    OwnLayout {
        /// The agent.
        agent: AgentName,
    },
    /// The layout belongs to another agent with this agent's name.
    #[error(
        "the layout was exported by another agent of this agent's name, {agent}; agents that \
         exchange layouts need different names (AgentBuilder::unnamed)"
    )]
    OwnName {
        /// The name.
        agent: AgentName,
    },
    /// The metadata is from another agent than the description.
    #[error(
        "the layout is of agent {described}, and the metadata of agent \"{}\"; take both from one \
         agent, as it gives them",
        .found.escape_debug()
    )]
    OtherAgent {
        /// The agent that the description names.
        described: AgentName,
        /// The agent that the metadata names.
        found: String,
    },
    /// No piece of the metadata has connection data of the agent.
    #[error(
        "the metadata of agent {peer} does not say how to connect to it; pass all of it, or a part \
         with connection information"
    )]
    NoConnection {
        /// The agent that has the layout.
        peer: AgentName,
    },
    /// Two pieces of the metadata connect to one backend in different ways.
    #[error(
        "two pieces of the metadata of agent {peer} connect to backend {backend} in different ways; \
         take all pieces from one process"
    )]
    TwoConnections {
        /// The agent that has the layout.
        peer: AgentName,
        /// The backend.
        backend: BackendName,
    },
    /// The metadata has no key for a region.
    #[error(
        "region {region} of agent {peer} is not in what the agent's metadata gives access to, for \
         any backend that takes all regions"
    )]
    NotCovered {
        /// The first such region.
        region: u32,
        /// The agent that has the region.
        peer: AgentName,
    },
    /// The metadata has keys for a backend that does not communicate with peers.
    #[error(
        "the metadata of agent {peer} has keys for backend {backend}, which talks to no peers; \
         no agent exports such keys"
    )]
    DeafBackend {
        /// The agent that has the metadata.
        peer: AgentName,
        /// The backend.
        backend: BackendName,
    },
    /// The agents have no backend in common that reaches the layout.
    #[error(
        "the layout of agent {peer} is reached through {}, and this agent has {}; \
         create one of them", list(.theirs), list(.ours)
    )]
    NoCommonBackend {
        /// The agent that has the layout.
        peer: AgentName,
        /// The backends that reach it.
        theirs: Vec<BackendName>,
        /// This agent's backends.
        ours: Vec<BackendName>,
    },
    /// The known peer was restarted, or has registered the same memory again.
    #[error(
        "agent {peer} has {change} since it was imported; drop what is left of it and refresh \
         (Agent::refresh) with what it exports now"
    )]
    PeerChanged {
        /// The peer.
        peer: AgentName,
        /// The change.
        change: PeerChange,
    },
    /// Transfers with the peer's process are in flight, and NIXL would have to load or forget data
    /// of it. This occurs if the peer is being forgotten, if its connection has broken, or if the
    /// layout's keys are new to NIXL. NIXL drops a peer whose keys it refuses, with those
    /// transfers. So import a peer's layouts before you transfer.
    ///
    /// A process that hangs stays busy. So does a process with transfers that an engine abandoned
    /// when it dropped. A replacement process under its name is not busy:
    /// [`Agent::refresh`](crate::Agent::refresh) imports its layouts at once.
    #[error("{transfers} transfers with agent {peer} are in flight; wait for them, and try again")]
    PeerBusy {
        /// The peer.
        peer: AgentName,
        /// The number of transfers in flight.
        transfers: usize,
    },
    /// Another live layout of the peer has some of the bytes.
    #[error(
        "region {region} of agent {peer} shares bytes with another layout of that agent that is in \
         use; transfer through that one, or drop it first"
    )]
    Overlap {
        /// The first such region.
        region: u32,
        /// The agent that has the region.
        peer: AgentName,
    },
    /// Another agent of this process has imported some of the bytes, and tracks their transfers.
    #[error(
        "region {region} of agent {peer} shares bytes with a layout that agent {by} of this process has \
         imported; transfer through that agent, or have it drop or forget the layout first"
    )]
    InUse {
        /// The first such region.
        region: u32,
        /// The agent that has the region.
        peer: AgentName,
        /// The agent that has imported the other layout.
        by: AgentName,
    },
    /// NIXL refused the metadata.
    #[error("NIXL took no metadata of agent {peer}: {status}; its log on standard error says more")]
    Load {
        /// The peer.
        peer: AgentName,
        /// The status that NIXL returned.
        status: Status,
    },
    /// NIXL refused the metadata, and has dropped the peer. Its layouts that were imported before
    /// can no longer be used. Its connection stays open until the agent is dropped.
    #[error(
        "NIXL took no metadata of agent {peer} ({status}) and has lost the agent; import its other \
         layouts again"
    )]
    PeerLost {
        /// The peer.
        peer: AgentName,
        /// The status that NIXL returned.
        status: Status,
    },
    /// NIXL has loaded the metadata, but does not find the layout in it.
    #[error(
        "NIXL does not find the layout in the metadata of agent {peer}; have the agent export it again"
    )]
    NotFound {
        /// The peer.
        peer: AgentName,
    },
    /// The layout could not be built in the peer's memory.
    #[error(transparent)]
    Layout(#[from] LayoutError),
}

/// How a peer has changed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum PeerChange {
    /// Its connection data differs: it was restarted, or has other backends.
    Connection,
    /// It has registered known memory again.
    Registration,
}

impl std::fmt::Display for PeerChange {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.pad(match self {
            Self::Connection => "been started again, or changed its backends,",
            Self::Registration => "registered the same memory anew",
        })
    }
}

/// Why a peer could not be forgotten.
#[derive(Clone, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ForgetError {
    /// The process was forked from one that had built an agent.
    #[error("NIXL cannot be used in a forked process; start another program with `exec` for that")]
    Forked(#[from] ForkedProcess),
    /// There is no such peer; not any more, perhaps.
    #[error("agent {agent} knows no peer {peer}; it was forgotten, or is another agent's")]
    UnknownPeer {
        /// The agent.
        agent: AgentName,
        /// The peer.
        peer: PeerId,
    },
}

fn names(agents: &[AgentName]) -> String {
    if agents.is_empty() {
        return "nobody".to_owned();
    }
    agents.iter().map(AgentName::as_str).collect::<Vec<_>>().join(", ")
}

fn list(backends: &[BackendName]) -> String {
    if backends.is_empty() {
        return "none".to_owned();
    }
    backends.iter().map(BackendName::as_str).collect::<Vec<_>>().join(", ")
}
