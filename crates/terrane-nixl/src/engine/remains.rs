//! Requests that no thread waits for, and that are not known to have ended.

use std::mem::ManuallyDrop;
use std::time::Instant;

use terrane_transfer::Orphaned;

use super::posted::{Left, Posted, settle};
use crate::Agent;
use crate::peers::PeerUse;

/// The requests of a transfer that was given up, and the memory that they may still touch.
pub(super) struct Abandoned {
    // Requests first: NIXL releases them before the memory is freed.
    requests: Vec<Posted>,
    remains: Option<Orphaned>,
    peer: Option<PeerUse>,
}

impl Abandoned {
    pub(super) fn new(
        requests: impl IntoIterator<Item = Posted>,
        remains: Orphaned,
        peer: Option<PeerUse>,
    ) -> Self {
        Self { requests: requests.into_iter().collect(), remains: Some(remains), peer }
    }

    /// Polls them, and frees the memory once all have ended. If that will never be known, drop
    /// this.
    pub(super) fn look(&mut self, agent: &Agent) -> Left {
        let left = settle(self.requests.iter_mut(), self.peer.as_mut(), agent);
        self.requests.retain(|request| !request.has_ended());
        if left == Left::Nothing {
            self.requests.clear();
            self.remains = None;
        }
        left
    }
}

impl Drop for Abandoned {
    fn drop(&mut self) {
        if let Some(remains) = self.remains.take() {
            tracing::error!(
                ?remains,
                requests = self.requests.len(),
                peer = self.peer.as_ref().map(|peer| tracing::field::display(peer.name())),
                "requests of NIXL are not known to have ended; the memory that they may still touch \
                 is not used again, and the agent's peer stays busy"
            );
            // Neither the memory nor the requests are released: some backends would free memory
            // that the kernel still writes to. The requests also keep the peer from being reloaded.
            let requests = std::mem::take(&mut self.requests);
            let _never = ManuallyDrop::new((requests, remains, self.peer.take()));
        }
    }
}

/// The time of the next poll of requests that were given up. Polls are rare, as no thread waits.
#[derive(Debug)]
pub(super) struct Rounds {
    next: Instant,
}

impl Rounds {
    pub(super) const EVERY: std::time::Duration = std::time::Duration::from_millis(5);

    pub(super) fn new() -> Self {
        Self { next: Instant::now() }
    }

    /// Whether it is time for another round.
    pub(super) fn is_due(&mut self) -> bool {
        let now = Instant::now();
        let due = now >= self.next;
        if due {
            self.next = now + Self::EVERY;
        }
        due
    }
}
