//! The reasons why layouts could not be exported, imported or forgotten.

use terrane_core::{AgentName, BackendName, ByteCount, ForkedProcess, PeerId, StorageKind};
use terrane_layout::LayoutError;
use terrane_wire::WireError;

use super::metadata::MalformedMetadata;
use crate::bindings::status::Status;
use crate::error::list;

/// The reason why a layout could not be exported.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ExportError {
    /// The process was forked from one that had built an agent.
    #[error("NIXL cannot be used in a forked process; start a new program with `exec` instead")]
    Forked(#[from] ForkedProcess),
    /// A region is not registered with the agent.
    #[error(
        "region {region} is not registered with agent {agent}; it is registered with {}; \
         register the layout with this agent (`LayoutBuilder::register`), or export it from that one",
        list(.found, "no agent")
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
    #[error("region {region} is only partly registered with agent {agent}; register all of it")]
    NotCovered {
        /// The first such region.
        region: u32,
        /// The agent.
        agent: AgentName,
    },
    /// Memory that only its owner can export.
    #[error("{storage} memory cannot be exported by this process; its owner must export it")]
    NotOurs {
        /// Its kind.
        storage: StorageKind,
    },
    /// No backend that peers can reach has the whole layout.
    #[error(
        "no backend of agent {agent} that peers can reach accepted all regions of {storage} memory; \
         add one that supports it, such as UCX for host and device memory"
    )]
    NoBackend {
        /// The agent.
        agent: AgentName,
        /// The kind of the layout's memory.
        storage: StorageKind,
    },
    /// A region's owner declares it registered, but its registration has ended.
    #[error(
        "agent {agent} has no key for region {region}: its registration has ended; register it again"
    )]
    RegistrationGone {
        /// The first such region.
        region: u32,
        /// The agent.
        agent: AgentName,
    },
    /// NIXL refused to return the metadata.
    #[error("NIXL returned no metadata of agent {agent}: {status}; see its log on standard error")]
    Metadata {
        /// The agent.
        agent: AgentName,
        /// The status that NIXL returned.
        status: Status,
    },
    /// This agent's own metadata is not in the form of NIXL 1.5, so it cannot be parsed.
    #[error("this NIXL does not write metadata in the form of NIXL 1.5; install NIXL 1.5.1")]
    UnknownForm,
    /// The description could not be encoded.
    #[error(transparent)]
    Wire(#[from] WireError),
}

/// The reason why a layout of a peer could not be imported. The state is unchanged, unless the
/// variant states otherwise.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ImportError {
    /// The process was forked from one that had built an agent.
    #[error("NIXL cannot be used in a forked process; start a new program with `exec` instead")]
    Forked(#[from] ForkedProcess),
    /// The bytes are not a valid layout description.
    #[error(transparent)]
    Wire(#[from] WireError),
    /// The agent's metadata is malformed.
    #[error(transparent)]
    Metadata(#[from] MalformedMetadata),
    /// The metadata of a peer without Terrane is too long.
    #[error(
        "the agent's metadata has {actual}, and the limit is {limit}; send only the keys of the layout \
         (`get_partial_agent_metadata` in Python)"
    )]
    MetadataTooLong {
        /// The length of all pieces.
        actual: ByteCount,
        /// The limit.
        limit: ByteCount,
    },
    /// This agent's own metadata is not in the form that this crate parses. So peers' metadata
    /// cannot be checked before NIXL reads it, and NIXL does not check it.
    #[error(
        "this NIXL does not write metadata in the form of NIXL 1.5, so peers' metadata cannot be checked; \
         install NIXL 1.5.1"
    )]
    UnknownForm,
    /// NIXL did not return this agent's own metadata, which the check of a peer's metadata needs.
    #[error(
        "NIXL did not return the metadata of this agent: {status}; retry, and see its log on standard error"
    )]
    OwnMetadata {
        /// The status that NIXL returned.
        status: Status,
    },
    /// The layout is in memory of this same agent.
    #[error("this same agent, {agent}, exported the layout; use the local layout")]
    OwnLayout {
        /// The agent.
        agent: AgentName,
    },
    /// The layout belongs to another agent with this agent's name.
    #[error(
        "another agent with this agent's name, {agent}, exported the layout; agents that exchange layouts \
         need different names (`AgentBuilder::unnamed`)"
    )]
    OwnName {
        /// The name.
        agent: AgentName,
    },
    /// The metadata belongs to another agent than the description.
    #[error(
        "the layout belongs to agent {described}, and the metadata to agent \"{}\"; pass both from one \
         agent",
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
        "the metadata of agent {peer} has no connection information; pass all of it, or a part that has \
         it"
    )]
    NoConnection {
        /// The agent that has the layout.
        peer: AgentName,
    },
    /// Two pieces of the metadata have different connection information for one backend.
    #[error(
        "two pieces of the metadata of agent {peer} have different connection information for backend \
         {backend}; pass pieces from one process"
    )]
    TwoConnections {
        /// The agent that has the layout.
        peer: AgentName,
        /// The backend.
        backend: BackendName,
    },
    /// The metadata has no key for a region.
    #[error(
        "the metadata of agent {peer} has no key for region {region} that any common backend can use; \
         export the layout again"
    )]
    NotCovered {
        /// The first such region.
        region: u32,
        /// The agent that has the region.
        peer: AgentName,
    },
    /// The metadata has keys for a backend that does not communicate with peers.
    #[error(
        "the metadata of agent {peer} has keys for backend {backend}, which cannot reach peers; it is \
         damaged or forged, so discard it"
    )]
    BackendNotRemote {
        /// The agent that has the metadata.
        peer: AgentName,
        /// The backend.
        backend: BackendName,
    },
    /// The agents have no backend in common that reaches the layout.
    #[error(
        "the layout of agent {peer} is reachable through {}, and this agent has {}; \
         add a common backend", list(.theirs, "none"), list(.ours, "none")
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
        "agent {peer} has {change} since it was imported; pass its new export to `Agent::refresh`"
    )]
    PeerChanged {
        /// The peer.
        peer: AgentName,
        /// The change.
        change: PeerChange,
    },
    /// Transfers with the peer's process are in flight, and NIXL would have to load or forget data
    /// of it. This occurs if the peer is being forgotten, if its connection has broken, or if the
    /// layout's keys are new to NIXL. If NIXL refuses keys, it drops the peer and those transfers.
    /// So import a peer's layouts before you transfer.
    ///
    /// A process that hangs stays busy. So does a process with transfers that an engine orphaned
    /// when it dropped. A replacement process with the same name is not busy:
    /// [`Agent::refresh`](crate::Agent::refresh) imports its layouts at once.
    #[error("{transfers} transfers with agent {peer} are in flight; wait for them, and retry")]
    PeerBusy {
        /// The peer.
        peer: AgentName,
        /// The number of transfers in flight.
        transfers: usize,
    },
    /// Another live layout of the peer has some of the bytes.
    #[error(
        "region {region} of agent {peer} shares bytes with another imported layout of that agent; use \
         that layout, or drop it first"
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
         imported; transfer through that agent, or drop or forget the layout there first"
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
    #[error("NIXL refused the metadata of agent {peer}: {status}; see its log on standard error")]
    Load {
        /// The peer.
        peer: AgentName,
        /// The status that NIXL returned.
        status: Status,
    },
    /// NIXL refused the metadata, and has dropped the peer. Its layouts that were imported before
    /// are unusable. Its connection stays open until the agent is dropped.
    #[error(
        "NIXL refused the metadata of agent {peer} ({status}) and dropped the agent; import its other \
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
        "NIXL does not find the layout in the metadata of agent {peer}; export the layout again"
    )]
    NotFound {
        /// The peer.
        peer: AgentName,
    },
    /// The layout could not be built in the peer's memory.
    #[error(transparent)]
    Layout(#[from] LayoutError),
}

/// The change of a peer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum PeerChange {
    /// Its connection data differs: it was restarted, or has other backends.
    Connection,
    /// It has registered known memory again.
    Registration,
}

terrane_core::display_names!(PeerChange {
    Self::Connection => "been restarted, or changed its backends,",
    Self::Registration => "registered the same memory again",
});

/// The reason why a peer could not be forgotten.
#[derive(Clone, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ForgetError {
    /// The process was forked from one that had built an agent.
    #[error("NIXL cannot be used in a forked process; start a new program with `exec` instead")]
    Forked(#[from] ForkedProcess),
    /// The agent does not know the peer, or has forgotten it.
    #[error(
        "agent {agent} does not know peer {peer}; it was forgotten, or belongs to another agent"
    )]
    UnknownPeer {
        /// The agent.
        agent: AgentName,
        /// The peer.
        peer: PeerId,
    },
}
