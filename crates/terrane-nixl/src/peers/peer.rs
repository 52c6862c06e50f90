//! A peer and its uses.
//!
//! After a failure, NIXL reports only that a request failed: some of its descriptors may still be
//! in flight. They end with the connection. So a peer with a failed request is poisoned: no more
//! requests are posted. Once all of its remaining transfers wait for that, the connection is
//! closed.

use std::sync::{Mutex, MutexGuard};
use std::time::Instant;

use terrane_core::sync::lock;
use terrane_core::{AgentName, PeerId};

/// A peer, from its first import until it ends.
pub(super) struct Peer {
    pub(super) id: PeerId,
    /// The name of the peer's agent.
    pub(super) name: AgentName,
    /// NIXL's name for the peer.
    pub(super) nixl_name: AgentName,
    /// Whether its metadata is checked, and renamed. If not, NIXL knows it by its own name.
    pub(super) is_checked: bool,
    state: Mutex<PeerState>,
}

impl Peer {
    /// A peer that NIXL has not loaded.
    pub(super) fn new(name: AgentName, is_checked: bool) -> Self {
        let id = PeerId::next();
        let nixl_name =
            if is_checked { format!("{name} (peer {id})").into() } else { name.clone() };
        Self { id, name, nixl_name, is_checked, state: Mutex::default() }
    }

    /// Returns an ended peer that NIXL still knows, under its next number.
    pub(super) fn again(&self) -> Self {
        let (id, state) = (PeerId::next(), Mutex::default());
        let (name, nixl_name) = (self.name.clone(), self.nixl_name.clone());
        Self { id, name, nixl_name, is_checked: self.is_checked, state }
    }

    /// Its uses. A panic leaves only counts and flags, which are always consistent.
    pub(super) fn state(&self) -> MutexGuard<'_, PeerState> {
        lock(&self.state)
    }
}

/// The uses of a peer.
#[derive(Default)]
pub(super) struct PeerState {
    /// Transfers with the peer that have not ended.
    pub(super) transfers: usize,
    /// The number of transfers that wait only for the connection to be closed.
    pub(super) failed_in_flight: usize,
    /// Live layouts of the peer.
    pub(super) layouts: usize,
    /// Whether no new transfer begins.
    pub(super) is_forgotten: bool,
    /// Whether NIXL is loading or forgetting the peer. Nothing is posted during that time.
    pub(super) is_reloading: bool,
    /// The number of times that NIXL has begun to load or forget the peer.
    pub(super) generation: u64,
    /// Whether a request has failed.
    pub(super) is_poisoned: bool,
    /// Whether NIXL does not know the peer, and may be unable to close its connection.
    pub(super) is_unclosable: bool,
    /// The number of times that the connection was closed, and the last time.
    pub(super) close_count: u64,
    pub(super) last_close: Option<Instant>,
}

impl PeerState {
    pub(super) fn must_end(&self) -> bool {
        self.transfers == 0 && (self.is_forgotten || self.layouts == 0)
    }

    pub(super) fn must_close(&self) -> bool {
        self.is_poisoned
            && !self.is_unclosable
            && !self.is_reloading
            && self.transfers == self.failed_in_flight
    }

    /// Records that NIXL is about to load or forget the peer.
    pub(super) fn begin_reload(&mut self) {
        self.is_reloading = true;
        self.generation += 1;
    }

    /// Records that the connection has been closed. If NIXL did not know the peer, this is
    /// uncertain.
    pub(super) fn record_close(&mut self, was_known: bool) {
        if !was_known && self.failed_in_flight > 0 {
            self.is_unclosable = true;
            return;
        }
        // Transfers that waited for this do not use the next connection.
        self.transfers -= self.failed_in_flight;
        self.failed_in_flight = 0;
        self.is_poisoned = false;
        self.close_count += 1;
        self.last_close = Some(Instant::now());
    }
}

impl Peer {
    /// Keeps transfers from posting while NIXL loads the peer; new ones wait.
    ///
    /// # Errors
    ///
    /// The number of transfers in flight, if there are any.
    pub(super) fn reload(&self) -> Result<Reloading<'_>, usize> {
        let mut state = self.state();
        if state.transfers > 0 {
            return Err(state.transfers);
        }
        state.begin_reload();
        Ok(Reloading(self))
    }
}

/// NIXL is loading a peer. The owner holds the lock of the loaded peers.
pub(super) struct Reloading<'a>(&'a Peer);

impl Drop for Reloading<'_> {
    fn drop(&mut self) {
        self.0.state().is_reloading = false;
    }
}
