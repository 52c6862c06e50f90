//! Requests that nobody waits for any more and that have not ended.

use std::mem::ManuallyDrop;
use std::time::Instant;

use terrane_transfer::Remains;

use super::flight::Posted;
use crate::Agent;
use crate::peers::PeerUse;

/// The requests of a transfer that was given up, and the memory that they may still touch.
pub(super) struct Abandoned {
    // Requests first: NIXL lets go of them before the memory does.
    requests: Vec<Posted>,
    remains: Option<Remains>,
    _peer: Option<PeerUse>,
}

impl Abandoned {
    pub(super) fn new(
        requests: impl IntoIterator<Item = Posted>,
        remains: Remains,
        peer: Option<PeerUse>,
    ) -> Self {
        Self { requests: requests.into_iter().collect(), remains: Some(remains), _peer: peer }
    }

    /// Looks whether they have all ended, and if so lets go of the memory.
    pub(super) fn has_ended(&mut self, agent: &Agent) -> bool {
        self.requests.retain_mut(|request| !request.look(agent).has_ended());
        let ended = self.requests.is_empty();
        if ended {
            self.remains = None;
        }
        ended
    }
}

impl Drop for Abandoned {
    fn drop(&mut self) {
        if let Some(remains) = self.remains.take() {
            tracing::error!(
                ?remains,
                requests = self.requests.len(),
                "requests of NIXL have not ended though they were given up; the memory that they \
                 may still touch is not used again"
            );
            // Nobody drops it, and nobody releases the requests: some backends would free what the
            // kernel still writes to.
            let _never = ManuallyDrop::new((std::mem::take(&mut self.requests), remains));
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
