//! Requests that nobody waits for any more and that have not ended, as far as anybody knows.

use std::mem::ManuallyDrop;
use std::time::Instant;

use terrane_transfer::Remains;

use super::posted::{Left, Posted, settle};
use crate::Agent;
use crate::peers::PeerUse;

/// The requests of a transfer that was given up, and the memory that they may still touch.
pub(super) struct Abandoned {
    // Requests first: NIXL lets go of them before the memory does.
    requests: Vec<Posted>,
    remains: Option<Remains>,
    peer: Option<PeerUse>,
}

impl Abandoned {
    pub(super) fn new(
        requests: impl IntoIterator<Item = Posted>,
        remains: Remains,
        peer: Option<PeerUse>,
    ) -> Self {
        Self { requests: requests.into_iter().collect(), remains: Some(remains), peer }
    }

    /// Looks what is left of them, and lets go of the memory if nothing is. If nobody will ever know,
    /// this is to be dropped.
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
            // Nobody drops it, and nobody releases the requests: some backends would free what the
            // kernel still writes to. Nor is the peer's connection theirs to be told anew.
            let requests = std::mem::take(&mut self.requests);
            let _never = ManuallyDrop::new((requests, remains, self.peer.take()));
        }
    }
}

/// When requests that were given up are looked after next: seldom, as nobody waits.
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
