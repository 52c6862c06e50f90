//! Notifications that have arrived at an agent.

use std::collections::{BTreeMap, VecDeque};
use std::sync::{Mutex, MutexGuard};

use terrane_core::AgentName;
use terrane_core::sync::lock;

/// Notifications that have arrived and were not returned yet. Their number is not limited.
#[derive(Debug, Default)]
pub(crate) struct Mailbox(Mutex<Unread>);

/// The messages of each sender, in their order of arrival.
pub(crate) type Unread = BTreeMap<AgentName, VecDeque<Vec<u8>>>;

impl Mailbox {
    pub(crate) fn lock(&self) -> MutexGuard<'_, Unread> {
        lock(&self.0)
    }
}
