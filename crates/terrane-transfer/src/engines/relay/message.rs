//! The messages to the relay's thread.

use super::route::Route;
use super::step::{Failure, Part};
use crate::engine::job::CopyJob;
use crate::error::TransferError;

/// A message to the thread.
pub(super) enum Message {
    Begin(Box<Begin>),
    /// A part of a transfer has ended.
    Ended(PartEnd),
    /// The engine has dropped. Nothing begins after this.
    Close,
}

/// A transfer that begins.
pub(super) struct Begin {
    pub(super) transfer: u64,
    pub(super) job: CopyJob,
    /// The route, or the failure of the part that waits for the device's order.
    pub(super) route: Result<Route, Failure>,
    /// Whether a part that waits for the device's order is in flight.
    pub(super) ordered: bool,
}

/// How a part has ended.
pub(super) struct PartEnd {
    pub(super) part: Part,
    pub(super) result: Result<(), TransferError>,
    /// Whether the copy may continue: its engine gave it up.
    pub(super) has_remains: bool,
}
