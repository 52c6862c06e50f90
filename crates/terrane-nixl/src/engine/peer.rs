//! Peers, for as long as transfers with them are in flight.

use std::collections::BTreeMap;
use std::fmt;
use std::sync::{Arc, Mutex, PoisonError};

use terrane_core::{AgentName, PeerId};

use crate::Agent;

/// The peers of all agents of the process: a number is one agent's alone.
static PEERS: Mutex<BTreeMap<PeerId, Arc<Peer>>> = Mutex::new(BTreeMap::new());

/// A peer that an agent knows.
///
/// A transfer holds it until all of its requests have ended, so that what NIXL knows of the peer is
/// not torn down under them.
pub(crate) struct Peer {
    agent: AgentName,
    name: AgentName,
}

impl Peer {
    /// What NIXL calls it.
    pub(crate) fn name(&self) -> &AgentName {
        &self.name
    }
}

impl Agent {
    /// A peer that this agent knows.
    pub(crate) fn peer(&self, peer: PeerId) -> Option<Arc<Peer>> {
        let peers = PEERS.lock().unwrap_or_else(PoisonError::into_inner);
        peers.get(&peer).filter(|peer| peer.agent == *self.name()).cloned()
    }

    /// Takes a peer whose metadata NIXL has loaded.
    pub(crate) fn introduce(&self, name: AgentName) -> PeerId {
        let id = PeerId::next();
        let peer = Peer { agent: self.name().clone(), name };
        PEERS.lock().unwrap_or_else(PoisonError::into_inner).insert(id, Arc::new(peer));
        id
    }
}

impl fmt::Debug for Peer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Peer").field(&self.name).finish()
    }
}
