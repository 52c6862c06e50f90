//! A peer and its uses.
//!
//! NIXL reports only that a request failed, permanently: some of its descriptors may still be in
//! flight. They end with the connection. So a peer with which a request has failed is poisoned: no
//! more requests are posted. Once all of its remaining transfers wait for it, the connection is
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
    /// Whether its metadata is checked, and renamed. Otherwise NIXL knows it by its own name.
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

    /// An ended peer that NIXL still knows, under its next number.
    pub(super) fn again(&self) -> Self {
        let (name, nixl_name) = (self.name.clone(), self.nixl_name.clone());
        Self {
            id: PeerId::next(),
            name,
            nixl_name,
            is_checked: self.is_checked,
            state: Mutex::default(),
        }
    }

    /// Its uses. A panic leaves only counts and flags, which are consistent at any time.
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
    /// No new transfer begins.
    pub(super) forgotten: bool,
    /// NIXL is loading or forgetting the peer: nothing is posted meanwhile.
    pub(super) reloading: bool,
    /// How often NIXL has begun to load or forget the peer.
    pub(super) generation: u64,
    /// A request has failed.
    pub(super) poisoned: bool,
    /// NIXL does not know the peer, and may be unable to close its connection.
    pub(super) is_unclosable: bool,
    /// How often the connection was closed, and the last time.
    pub(super) close_count: u64,
    pub(super) last_close: Option<Instant>,
}

impl PeerState {
    pub(super) fn must_end(&self) -> bool {
        self.transfers == 0 && (self.forgotten || self.layouts == 0)
    }

    pub(super) fn must_close(&self) -> bool {
        self.poisoned
            && !self.is_unclosable
            && !self.reloading
            && self.transfers == self.failed_in_flight
    }

    /// NIXL is about to load or forget the peer.
    pub(super) fn begin_reload(&mut self) {
        self.reloading = true;
        self.generation += 1;
    }

    /// The connection has been closed. If NIXL did not know the peer, this is uncertain.
    pub(super) fn record_close(&mut self, was_known: bool) {
        if !was_known && self.failed_in_flight > 0 {
            self.is_unclosable = true;
            return;
        }
        // Transfers that waited for this do not use the next connection.
        self.transfers -= self.failed_in_flight;
        self.failed_in_flight = 0;
        self.poisoned = false;
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

/// NIXL is loading a peer; the owner holds the lock of the loaded peers.
pub(super) struct Reloading<'a>(&'a Peer);

impl Drop for Reloading<'_> {
    fn drop(&mut self) {
        self.0.state().reloading = false;
    }
}
