//! How requests fail.

use std::fmt;

use terrane_core::{AgentName, BackendName, OsError};

use crate::Status;

/// Why a transfer through NIXL failed: the cause beneath the
/// [`TransferError`](terrane_transfer::TransferError).
#[derive(Clone, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum RequestFailed {
    /// NIXL refused a request, or it failed in flight.
    #[error("{backend} failed at {step}{}: {status}; NIXL's log on standard error says more", with(.peer))]
    Status {
        /// The backend.
        backend: BackendName,
        /// The peer; `None` for a file.
        peer: Option<AgentName>,
        /// What was being done.
        step: NixlStep,
        /// What NIXL said.
        status: Status,
    },
    /// The connection to the peer has broken, mostly because the peer's process has ended; or a request
    /// has failed so that nobody knows what of it goes on, and the connection is closed for that. No
    /// transfer with the peer begins until one of its layouts is imported again.
    #[error(
        "the connection to peer {peer} was lost at {step}, by {backend}: {status}; import one of its \
         layouts again, or what it exports now if it was started again"
    )]
    PeerLost {
        /// The peer.
        peer: AgentName,
        /// The backend.
        backend: BackendName,
        /// What was being done.
        step: NixlStep,
        /// What NIXL said, now or when the connection was lost.
        status: Status,
    },
    /// The file ends before the bytes that were to be read.
    #[error(
        "the file has {length} bytes and was to be read to {wanted}; somebody has truncated it, so \
         write its blocks again"
    )]
    FileEnds {
        /// The length of the file.
        length: u64,
        /// Where the last byte to read ends.
        wanted: u64,
    },
    /// The file ends before the bytes that were written, though the backend reported success.
    #[error(
        "the file has {length} bytes and was written to {wanted}; make room on its file system or raise \
         RLIMIT_FSIZE, and write its blocks again"
    )]
    WrittenShort {
        /// The length of the file.
        length: u64,
        /// Where the last byte to write ends.
        wanted: u64,
    },
    /// The length of a file could not be asked for.
    #[error(
        "the length of the file could not be found out; see whether its file system is still there"
    )]
    FileLength {
        /// What the system said.
        #[source]
        source: OsError,
    },
    /// What was quoted cannot be done any more: the peer has been forgotten since.
    #[error("not begun: the engine {0}")]
    Declined(#[from] terrane_transfer::Declined),
    /// An address of the plan that is none: a region whose memory breaks its contract, and reaches beyond
    /// all addresses. No memory that keeps it comes to this.
    #[error("a run of the plan lies nowhere; the memory at one end breaks its contract")]
    NoAddress,
}

/// What NIXL was doing.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum NixlStep {
    /// A request was being prepared.
    Prepare,
    /// A request was being posted.
    Post,
    /// A request was in flight.
    Transfer,
    /// The peer was being told.
    Notify,
}

impl fmt::Display for NixlStep {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Self::Prepare => "preparing a request",
            Self::Post => "posting a request",
            Self::Transfer => "a request in flight",
            Self::Notify => "telling the peer",
        })
    }
}

fn with(peer: &Option<AgentName>) -> String {
    peer.as_ref().map(|peer| format!(" with peer {peer}")).unwrap_or_default()
}
