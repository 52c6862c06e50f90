//! Live layouts of peers.

use std::sync::Arc;

use super::claims::Claim;
use super::peer::Peer;
use crate::agent::Agent;
use crate::bindings::process;

/// A live layout of a peer. The layout's memory owns the lease.
pub(super) struct Lease {
    agent: Agent,
    peer: Arc<Peer>,
    _claim: Claim,
}

impl Lease {
    pub(super) fn new(agent: &Agent, peer: &Arc<Peer>, claim: Claim) -> Self {
        peer.state().layouts += 1;
        Self { agent: agent.clone(), peer: Arc::clone(peer), _claim: claim }
    }
}

impl Drop for Lease {
    fn drop(&mut self) {
        if process::is_forked() {
            return;
        }
        self.agent.peer_table().change(&self.peer, |state| state.layouts -= 1);
        self.agent.end_peers();
    }
}
