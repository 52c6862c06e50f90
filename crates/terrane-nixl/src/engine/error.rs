//! Failures of requests.

use terrane_core::{AgentName, BackendName, OsError};

use crate::bindings::status::Status;

/// The reason why a transfer through NIXL failed: the source of the
/// [`TransferError`](terrane_transfer::TransferError).
#[derive(Clone, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum RequestError {
    /// NIXL refused a request, or it failed in flight.
    #[error("{backend} failed while {step}{}: {status}; see NIXL's log on standard error", with(.peer))]
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
    /// The connection to the peer has broken, usually because the peer's process has ended. It is
    /// also closed after a request has failed whose parts may still be in flight. No transfer with
    /// the peer begins until one of its layouts is imported again.
    #[error(
        "{backend} lost the connection to peer {peer} while {step}: {status}; import one of its layouts \
         again, or a new export if the peer was restarted"
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
        "the read ends at byte {wanted}, and the file has only {length} bytes; it was truncated, so \
         write its blocks again"
    )]
    FileEnds {
        /// The length of the file, in bytes.
        length: u64,
        /// The end of the last byte to read, in bytes.
        wanted: u64,
    },
    /// The file ends before the end of the written bytes, although the backend reported success.
    #[error(
        "the write ends at byte {wanted}, and the file has only {length} bytes; free space on its file \
         system or raise RLIMIT_FSIZE, and write its blocks again"
    )]
    WrittenShort {
        /// The length of the file, in bytes.
        length: u64,
        /// The end of the last byte to write, in bytes.
        wanted: u64,
    },
    /// The length of a file could not be queried.
    #[error(
        "the length of the file could not be queried; check that its file system is still mounted"
    )]
    FileLength {
        /// The system's error.
        #[source]
        source: OsError,
    },
    /// The quoted transfer is no longer possible, because the peer has been forgotten.
    #[error("the transfer was not started: the engine {0}")]
    Declined(#[from] terrane_transfer::Declined),
    /// Too few I/Os of the backend are left for a request. The others belong to requests whose end
    /// is not known.
    #[error(
        "{backend} has too few I/Os left for a request: failed requests, whose end is not known, \
         keep them; create another agent"
    )]
    NoIosLeft {
        /// The backend.
        backend: BackendName,
    },
    /// The plan has an invalid address: a region's memory violates its contract, and extends beyond
    /// the address space.
    #[error(
        "a run of the plan has no valid address; the memory of one end violates the contract of `Memory`"
    )]
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

terrane_core::display_names!(NixlStep {
    Self::Prepare => "preparing a request",
    Self::Post => "posting a request",
    Self::Transfer => "transferring",
    Self::Notify => "notifying the peer",
});

fn with(peer: &Option<AgentName>) -> String {
    peer.as_ref().map(|peer| format!(" with peer {peer}")).unwrap_or_default()
}
