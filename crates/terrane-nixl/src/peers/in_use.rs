//! What is in use of a peer, and what that means for its connection.
//!
//! Of a request that failed NIXL says no more than that, for good: of its descriptors some may be on
//! their way still. They end with the connection. So a peer with which a request has failed is
//! suspect: nothing more is posted, and once all that is left of its transfers waits for that, the
//! connection is closed.

use std::fmt;
use std::sync::Arc;
use std::time::{Duration, Instant};

use terrane_core::{AgentName, PeerId};

use super::table::Peer;
use crate::{Agent, process};

/// How long after a connection was closed what went over it is left alone. NIXL does not wait for
/// UCX to have taken the connection down, which takes one round of UCX's progress.
const SETTLING: Duration = Duration::from_millis(100);

/// What is in use of a peer.
#[derive(Default)]
pub(super) struct State {
    /// Transfers with the peer that have not ended.
    pub(super) transfers: usize,
    /// How many of them wait for the connection to be closed, and for nothing else.
    adrift: usize,
    /// Layouts of the peer that live.
    pub(super) layouts: usize,
    /// No transfer begins any more.
    pub(super) forgotten: bool,
    /// NIXL is being told of the peer, or made to let go of it: nothing is posted meanwhile.
    pub(super) reloading: bool,
    /// How often NIXL has begun to be told, or to let go.
    generation: u64,
    /// A request has failed.
    pub(super) suspect: bool,
    /// NIXL knows neither the peer nor, perhaps, how to close its connection.
    is_unclosable: bool,
    /// How often the connection was closed, and when last.
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

    /// NIXL is about to be told of the peer, or to let go of it.
    pub(super) fn begin_reload(&mut self) {
        self.reloading = true;
        self.generation += 1;
    }

    /// The connection has been closed; or it is not known to be, if NIXL did not know the peer.
    pub(super) fn closed(&mut self, was_known: bool) {
        if !was_known && self.adrift > 0 {
            self.is_unclosable = true;
            return;
        }
        // What waited for this is no transfer over the next connection.
        self.transfers -= self.adrift;
        self.adrift = 0;
        self.suspect = false;
        self.closings += 1;
        self.last_closing = Some(Instant::now());
    }
}

impl Peer {
    /// Keeps transfers from posting while NIXL is told of the peer; those that begin meanwhile wait.
    ///
    /// # Errors
    ///
    /// How many transfers are in flight, if any are.
    pub(super) fn reload(&self) -> Result<Reloading<'_>, usize> {
        let mut state = self.state();
        if state.transfers > 0 {
            return Err(state.transfers);
        }
        state.begin_reload();
        Ok(Reloading(self))
    }
}

/// NIXL is being told of a peer, by whoever holds the lock of what NIXL has been told.
pub(super) struct Reloading<'a>(&'a Peer);

impl Drop for Reloading<'_> {
    fn drop(&mut self) {
        self.0.state().reloading = false;
    }
}

/// Why no transfer begins with a peer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum NoUse {
    /// It is not known, or no more.
    Unknown,
    /// A request has failed, and the connection to the peer of this name is about to be closed.
    Lost(AgentName),
}

impl Agent {
    /// Says that a transfer with a peer begins; it ends with what is returned.
    ///
    /// Whatever names the peer to NIXL holds one, so that the peer stays what it is meanwhile.
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

/// A transfer with a peer, or something else that NIXL does with it.
pub(crate) struct PeerUse {
    agent: Agent,
    peer: Arc<Peer>,
    /// How often the connection had been closed when this began to wait for the next time.
    adrift_since: Option<u64>,
}

/// Whether a request can be posted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Readiness {
    Ready,
    /// NIXL is being told of the peer.
    Later,
    /// Another request has failed.
    Lost,
}

/// What has become of the connection for which somebody waits to be closed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Connection {
    Open,
    Closed,
    /// Nobody will ever know.
    Unknown,
}

impl PeerUse {
    /// The name of the peer's agent.
    pub(crate) fn name(&self) -> &AgentName {
        &self.peer.name
    }

    /// The name under which NIXL knows the peer.
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

    /// Which account of the peer NIXL has: how often it has been given another, or has been told more,
    /// by this process.
    ///
    /// Once the peer is [ready](Readiness::Ready), the account stays what it is for as long as this
    /// lives and does not wait for the connection to be [closed](Self::closing); but NIXL may drop it by
    /// itself, and then knows no such peer until there is another one.
    pub(crate) fn generation(&self) -> u64 {
        self.peer.state().generation
    }

    /// Waits until NIXL has been told of the peer, if it is being told.
    pub(crate) fn wait_until_ready(&self) -> Readiness {
        if self.readiness() == Readiness::Later {
            // Whoever tells NIXL holds this, and it is not told anew while a transfer is in flight.
            drop(self.agent.peer_table().loaded());
        }
        self.readiness()
    }

    /// A request with the peer has failed.
    pub(crate) fn suspect(&self) {
        self.peer.state().suspect = true;
    }

    /// Nothing of the transfer is left but what ends with the connection, which can be closed for its
    /// sake. Says whether it has been.
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
            // It was counted out when the connection was closed.
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
