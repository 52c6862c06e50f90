//! The use of a peer by a transfer.

use std::sync::Arc;
use std::time::Duration;

use terrane_core::{AgentName, PeerId};

use super::peer::Peer;
use crate::agent::Agent;
use crate::bindings::process;

/// The time for which the memory of a closed connection's requests is kept. NIXL does not wait
/// until UCX has closed the connection, which takes one progress iteration of UCX.
const CLOSE_DELAY: Duration = Duration::from_millis(100);

/// The reason why no transfer begins with a peer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum PeerUnavailable {
    /// The peer is unknown, or already forgotten.
    Unknown,
    /// A request has failed, and the connection to the peer with this name is about to be closed.
    Lost(AgentName),
}

impl Agent {
    /// Begins a transfer with a peer. It ends when the returned value drops.
    ///
    /// Every call that passes the peer's name to NIXL owns such a value, so that the peer does not
    /// change during the call.
    pub(crate) fn use_peer(&self, id: PeerId) -> Result<PeerUse, PeerUnavailable> {
        let peer = self.peer_table().get(id).ok_or(PeerUnavailable::Unknown)?;
        let mut state = peer.state();
        if state.is_forgotten {
            return Err(PeerUnavailable::Unknown);
        }
        if state.is_poisoned {
            return Err(PeerUnavailable::Lost(peer.name.clone()));
        }
        state.transfers += 1;
        drop(state);
        Ok(PeerUse { agent: self.clone(), peer, close_count_before: None })
    }
}

/// A transfer with a peer, or another operation of NIXL with it.
pub(crate) struct PeerUse {
    agent: Agent,
    peer: Arc<Peer>,
    /// The number of closings of the connection when this began to wait for the next one.
    close_count_before: Option<u64>,
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

/// The state of a connection whose closing a transfer waits for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ConnectionState {
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
        match (state.is_poisoned, state.is_reloading) {
            (true, _) => Readiness::Lost,
            (false, true) => Readiness::Later,
            (false, false) => Readiness::Ready,
        }
    }

    /// The version of NIXL's data of the peer: the number of times that this process has replaced
    /// or extended it.
    ///
    /// Once the peer is [ready](Readiness::Ready), the version is constant until this value drops
    /// or [requests the closing](Self::request_close) of the connection. However, NIXL may drop the
    /// peer by itself, and then does not know it until there is a new version.
    pub(crate) fn generation(&self) -> u64 {
        self.peer.state().generation
    }

    /// Waits while NIXL is loading the peer.
    pub(crate) fn wait_until_ready(&self) -> Readiness {
        if self.readiness() == Readiness::Later {
            // The loading thread holds this lock. NIXL loads nothing again while a transfer is in
            // flight.
            drop(self.agent.peer_table().loaded());
        }
        self.readiness()
    }

    /// Records that a request with the peer has failed.
    pub(crate) fn poison(&self) {
        self.peer.state().is_poisoned = true;
    }

    /// Declares that the rest of the transfer ends only with the connection, which may be closed
    /// now. Returns whether it has been closed.
    pub(crate) fn request_close(&mut self) -> ConnectionState {
        let since = match self.close_count_before {
            Some(since) => since,
            None => {
                let since = self.agent.peer_table().change(&self.peer, |state| {
                    state.is_poisoned = true;
                    state.failed_in_flight += 1;
                    state.close_count
                });
                self.close_count_before = Some(since);
                self.agent.end_peers();
                since
            }
        };
        let state = self.peer.state();
        if state.close_count == since {
            return if state.is_unclosable {
                ConnectionState::Unknown
            } else {
                ConnectionState::Open
            };
        }
        match state.last_close {
            Some(closed) if closed.elapsed() < CLOSE_DELAY => ConnectionState::Open,
            _ => ConnectionState::Closed,
        }
    }
}

impl Drop for PeerUse {
    fn drop(&mut self) {
        if process::is_forked() {
            return;
        }
        let since = self.close_count_before;
        self.agent.peer_table().change(&self.peer, |state| match since {
            // It was subtracted when the connection was closed.
            Some(since) if since != state.close_count => {}
            Some(_) => {
                (state.transfers, state.failed_in_flight) =
                    (state.transfers - 1, state.failed_in_flight - 1)
            }
            None => state.transfers -= 1,
        });
        self.agent.end_peers();
    }
}

terrane_core::debug_fields!(PeerUse, |it| { peer: it.peer.id });
