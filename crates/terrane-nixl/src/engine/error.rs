//! How requests fail.

use std::fmt;

use terrane_core::{AgentName, BackendName, OsError};

use crate::Status;

/// Why a transfer through NIXL failed: the source of the
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
        /// The step that failed.
        step: NixlStep,
        /// The status that NIXL returned.
        status: Status,
    },
    /// The connection to the peer has broken, mostly because the peer's process has ended. Or a
    /// request has failed, parts of it may still be in flight, and the connection is closed for
    /// that reason. No transfer with the peer begins until one of its layouts is imported again.
    #[error(
        "the connection to peer {peer} was lost at {step}, by {backend}: {status}; import one of its \
         layouts again, or what it exports now if it was started again"
    )]
    PeerLost {
        /// The peer.
        peer: AgentName,
        /// The backend.
        backend: BackendName,
        /// The step that failed.
        step: NixlStep,
        /// The status that NIXL returned, now or when the connection was lost.
        status: Status,
    },
    /// The file ends before the end of the read.
    #[error(
        "the file has {length} bytes and was to be read to {wanted}; somebody has truncated it, so \
         write its blocks again"
    )]
    FileEnds {
        /// The length of the file, in bytes.
        length: u64,
        /// The end of the last byte to read, in bytes.
        wanted: u64,
    },
    /// The file ends before the end of the written bytes, though the backend reported success.
    #[error(
        "the file has {length} bytes and was written to {wanted}; make room on its file system or raise \
         RLIMIT_FSIZE, and write its blocks again"
    )]
    WrittenShort {
        /// The length of the file, in bytes.
        length: u64,
        /// The end of the last byte to write, in bytes.
        wanted: u64,
    },
    /// The length of a file could not be queried.
    #[error(
        "the length of the file could not be found out; see whether its file system is still there"
    )]
    FileLength {
        /// The system's error.
        #[source]
        source: OsError,
    },
    /// The quoted transfer is no longer possible: the peer was forgotten meanwhile.
    #[error("not begun: the engine {0}")]
    Declined(#[from] terrane_transfer::Declined),
    /// The plan has an invalid address: a region's memory breaks its contract, and extends beyond
    /// the address space. Memory that keeps its contract never causes this.
    #[error("a run of the plan lies nowhere; the memory at one end breaks its contract")]
    NoAddress,
}

/// The step of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum NixlStep {
    /// A request was being prepared.
    Prepare,
    /// A request was being posted.
    Post,
    /// A request was in flight.
    Transfer,
    /// The peer was being notified.
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
