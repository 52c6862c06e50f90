//! Requests that outlive their transfer.

use std::mem::ManuallyDrop;
use std::time::{Duration, Instant};

use terrane_transfer::Orphaned;

use super::request::{Outstanding, Request, poll_failed};
use crate::agent::Agent;
use crate::peers::peer_use::PeerUse;
use crate::register::held::TransferRegistrations;

/// The requests of a transfer that was orphaned, and the memory that they may still access.
pub(in crate::engine) struct OrphanedRequests {
    // Requests drop first: NIXL releases them before the memory is deregistered and freed.
    requests: Vec<Request>,
    registrations: TransferRegistrations,
    memory: Option<Orphaned>,
    peer: Option<PeerUse>,
}

impl OrphanedRequests {
    pub(super) fn new(
        requests: impl IntoIterator<Item = Request>,
        registrations: TransferRegistrations,
        memory: Orphaned,
        peer: Option<PeerUse>,
    ) -> Self {
        let requests = requests.into_iter().collect();
        Self { requests, registrations, memory: Some(memory), peer }
    }

    /// Polls the requests, and frees the memory once all have ended. If the result is
    /// [`Outstanding::Unknowable`], drop this value.
    pub(in crate::engine) fn poll(&mut self, agent: &Agent) -> Outstanding {
        let outstanding = poll_failed(self.requests.iter_mut(), self.peer.as_mut(), agent);
        self.requests.retain(|request| !request.has_ended());
        if outstanding == Outstanding::Nothing {
            self.requests.clear();
            self.registrations = TransferRegistrations::default();
            self.memory = None;
        }
        outstanding
    }
}

impl Drop for OrphanedRequests {
    fn drop(&mut self) {
        let Some(memory) = self.memory.take() else { return };
        // Neither the memory nor the requests are released: some backends would free memory that
        // the kernel still writes to. The requests also keep the peer from being loaded again. They
        // are leaked before the trace, whose subscriber may panic.
        let registrations = std::mem::take(&mut self.registrations);
        let leaked = ManuallyDrop::new((memory, registrations, self.peer.take()));
        let requests = self.requests.len();
        self.requests.drain(..).for_each(Request::leak);
        let (memory, _, peer) = &*leaked;
        tracing::error!(
            ?memory,
            requests,
            peer = peer.as_ref().map(|peer| tracing::field::display(peer.name())),
            "requests of NIXL are not known to have ended; the memory that they may still \
             access is never used again, and the agent's peer stays busy"
        );
    }
}

/// The time of the next poll of orphaned requests. Polls are rare, because no thread waits for
/// them.
#[derive(Debug)]
pub(in crate::engine) struct OrphanPoll {
    next: Instant,
}

impl OrphanPoll {
    pub(in crate::engine) const INTERVAL: Duration = Duration::from_millis(5);

    pub(in crate::engine) fn new() -> Self {
        Self { next: Instant::now() }
    }

    /// Whether the next poll is due.
    pub(in crate::engine) fn is_due(&mut self) -> bool {
        let now = Instant::now();
        let due = now >= self.next;
        if due {
            self.next = now + Self::INTERVAL;
        }
        due
    }
}
