//! The messages to the relay's thread.

use super::route::RelayRoute;
use super::step::{PartId, RelayFailure};
use crate::engine::job::CopyJob;
use crate::error::TransferError;

/// A message to the thread.
pub(super) enum Message {
    NewTransfer(Box<NewTransfer>),
    /// A part of a transfer has ended.
    Ended(PartEnded),
    /// A transfer was cancelled. It may have ended.
    Cancelled(u64),
    /// The engine has dropped. Nothing begins after this.
    Close,
}

/// A new transfer.
pub(super) struct NewTransfer {
    pub(super) transfer: u64,
    pub(super) job: CopyJob,
    /// The route, or the failure of the part that waits for the device order.
    pub(super) route: Result<RelayRoute, RelayFailure>,
    /// Whether a part that waits for the device's order is in flight.
    pub(super) ordered: bool,
}

/// The end of a part.
pub(super) struct PartEnded {
    pub(super) part: PartId,
    pub(super) result: Result<Option<PartSums>, TransferError>,
    /// Whether the copy may continue, because its engine orphaned it.
    pub(super) is_orphaned: bool,
}

/// The checksums that a part has computed.
pub(super) struct PartSums {
    /// In the order of the chunk.
    pub(super) sums: Box<[u64]>,
    /// The bytes of the part.
    pub(super) bytes: u64,
}
