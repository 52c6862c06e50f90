//! The uses of a peer, and their effect on its connection.
//!
//! NIXL reports only that a request failed, permanently: some of its descriptors may still be in
//! flight. They end with the connection. So a peer with which a request has failed is suspect: no
//! more requests are posted. Once all of its remaining transfers wait for it, the connection is
//! closed.

use std::fmt;
use std::sync::Arc;
use std::time::{Duration, Instant};

use terrane_core::{AgentName, PeerId};

use super::table::Peer;
use crate::{Agent, process};

/// How long the memory of a closed connection's requests is left alone. NIXL does not wait until
/// UCX has closed the connection, which takes one round of UCX's progress.
const SETTLING: Duration = Duration::from_millis(100);

/// The uses of a peer.
#[derive(Default)]
pub(super) struct State {
    /// Transfers with the peer that have not ended.
    pub(super) transfers: usize,
    /// The number of transfers that wait only for the connection to be closed.
    adrift: usize,
    /// Live layouts of the peer.
    pub(super) layouts: usize,
    /// No new transfer begins.
    pub(super) forgotten: bool,
    /// NIXL is loading or forgetting the peer: nothing is posted meanwhile.
    pub(super) reloading: bool,
    /// How often NIXL has begun to load or forget the peer.
    generation: u64,
    /// A request has failed.
    pub(super) suspect: bool,
    /// NIXL does not know the peer, and may be unable to close its connection.
    is_unclosable: bool,
    /// How often the connection was closed, and the last time.
    closings: u64,
    last_closing: Option<Instant>,
}

impl State {
    pub(super) fn has_to_end(&self) -> bool {
        self.transfers == 0 && (self.forgotten || self.layouts == 0)
    }

    pub(super) fn has_to_close(&self) -> bool {
        self.suspect && !self.is_unclosable && !self.reloading && self.transfers == self.adrift
    }

    /// NIXL is about to load or forget the peer.
    pub(super) fn begin_reload(&mut self) {
        self.reloading = true;
        self.generation += 1;
    }

    /// The connection has been closed. If NIXL did not know the peer, this is uncertain.
    pub(super) fn closed(&mut self, was_known: bool) {
        if !was_known && self.adrift > 0 {
            self.is_unclosable = true;
            return;
        }
        // Transfers that waited for this do not use the next connection.
        self.transfers -= self.adrift;
        self.adrift = 0;
        self.suspect = false;
        self.closings += 1;
        self.last_closing = Some(Instant::now());
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

/// Why no transfer begins with a peer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum NoUse {
    /// It is unknown, or already forgotten.
    Unknown,
    /// A request has failed, and the connection to the peer of this name is about to be closed.
    Lost(AgentName),
}

impl Agent {
    /// Begins a transfer with a peer; the returned value ends it when it drops.
    ///
    /// Every call that names the peer to NIXL holds one, so that the peer does not change
    /// meanwhile.
    pub(crate) fn use_peer(&self, id: PeerId) -> Result<PeerUse, NoUse> {
        let peer = self.peer_table().get(id).ok_or(NoUse::Unknown)?;
        let mut state = peer.state();
        if state.forgotten {
            return Err(NoUse::Unknown);
        }
        if state.suspect {
            return Err(NoUse::Lost(peer.name.clone()));
        }
        state.transfers += 1;
        drop(state);
        Ok(PeerUse { agent: self.clone(), peer, adrift_since: None })
    }
}

/// A transfer with a peer, or another operation of NIXL with it.
pub(crate) struct PeerUse {
    agent: Agent,
    peer: Arc<Peer>,
    /// How often the connection had been closed when this began to wait for the next closing.
    adrift_since: Option<u64>,
}

/// Whether a request can be posted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Readiness {
    Ready,
    /// NIXL is loading the peer.
    Later,
    /// Another request has failed.
    Lost,
}

/// The state of a connection that a transfer waits to be closed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Connection {
    Open,
    Closed,
    /// It will never be known.
    Unknown,
}

impl PeerUse {
    /// The name of the peer's agent.
    pub(crate) fn name(&self) -> &AgentName {
        &self.peer.name
    }

    /// NIXL's name for the peer.
    pub(crate) fn nixl_name(&self) -> &AgentName {
        &self.peer.nixl_name
    }

    pub(crate) fn readiness(&self) -> Readiness {
        let state = self.peer.state();
        match (state.suspect, state.reloading) {
            (true, _) => Readiness::Lost,
            (false, true) => Readiness::Later,
            (false, false) => Readiness::Ready,
        }
    }

    /// The version of NIXL's data about the peer: how often this process has replaced or extended
    /// it.
    ///
    /// Once the peer is [ready](Readiness::Ready), the version is constant while this lives and
    /// does not wait for the connection to be [closed](Self::closing). However, NIXL may drop the
    /// peer by itself, and then does not know it until there is a new version.
    pub(crate) fn generation(&self) -> u64 {
        self.peer.state().generation
    }

    /// Waits until NIXL has loaded the peer, if it is loading it.
    pub(crate) fn wait_until_ready(&self) -> Readiness {
        if self.readiness() == Readiness::Later {
            // The loading thread holds this, and NIXL loads nothing again while a transfer is in
            // flight.
            drop(self.agent.peer_table().loaded());
        }
        self.readiness()
    }

    /// A request with the peer has failed.
    pub(crate) fn suspect(&self) {
        self.peer.state().suspect = true;
    }

    /// Declares that the rest of the transfer ends only with the connection, which may now be
    /// closed. Returns whether it has been closed.
    pub(crate) fn closing(&mut self) -> Connection {
        let since = match self.adrift_since {
            Some(since) => since,
            None => {
                let since = self.agent.peer_table().change(&self.peer, |state| {
                    state.suspect = true;
                    state.adrift += 1;
                    state.closings
                });
                self.adrift_since = Some(since);
                self.agent.end_peers();
                since
            }
        };
        let state = self.peer.state();
        if state.closings == since {
            return if state.is_unclosable { Connection::Unknown } else { Connection::Open };
        }
        match state.last_closing {
            Some(closed) if closed.elapsed() < SETTLING => Connection::Open,
            _ => Connection::Closed,
        }
    }
}

impl Drop for PeerUse {
    fn drop(&mut self) {
        if process::is_forked() {
            return;
        }
        let since = self.adrift_since;
        self.agent.peer_table().change(&self.peer, |state| match since {
            // It was subtracted when the connection was closed.
            Some(since) if since != state.closings => {}
            Some(_) => (state.transfers, state.adrift) = (state.transfers - 1, state.adrift - 1),
            None => state.transfers -= 1,
        });
        self.agent.end_peers();
    }
}

impl fmt::Debug for PeerUse {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("PeerUse").field("peer", &self.peer.id).finish_non_exhaustive()
    }
}
