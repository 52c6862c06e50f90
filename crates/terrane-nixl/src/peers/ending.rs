//! The ends of peers, and of their connections.

use std::sync::Arc;

use super::loaded::LoadedPeers;
use super::peer::Peer;
use crate::agent::Agent;
use crate::bindings::without_tracing::without_tracing;

impl Agent {
    /// Ends the peers that must end, and closes the connections that must close, unless another
    /// thread is doing so.
    pub(super) fn end_peers(&self) {
        while self.peer_table().has_due() {
            let Some(mut loaded) = self.peer_table().try_loaded() else { return };
            self.end_peers_among(&mut loaded);
        }
    }

    pub(super) fn end_peers_among(&self, loaded: &mut LoadedPeers) {
        let table = self.peer_table();
        while let Some(peer) = table.pop_due() {
            self.close_if_due(loaded, &peer);
            let mut state = peer.state();
            if !state.must_end() {
                continue;
            }
            state.is_forgotten = true;
            drop(state);
            table.remove(peer.id);
            loaded.end(&peer);
        }
        while let Some(peer) = loaded.take_excess() {
            self.invalidate(&peer);
        }
    }

    /// Closes the connection to a peer with a failed request, once no other request is in flight
    /// with the peer.
    fn close_if_due(&self, loaded: &mut LoadedPeers, peer: &Arc<Peer>) {
        let mut state = peer.state();
        if !state.must_close() {
            return;
        }
        // Nothing is posted during the call.
        state.begin_reload();
        drop(state);
        let was_known = self.invalidate(peer);
        if let Some(known) = loaded.of(peer) {
            known.reset();
        }
        let mut state = peer.state();
        state.is_reloading = false;
        state.record_close(was_known);
    }

    /// Makes NIXL forget a peer and close its connection. Returns whether NIXL knew the peer. If it
    /// did not, it may also be unable to close the connection.
    pub(super) fn invalidate(&self, peer: &Peer) -> bool {
        without_tracing(|| self.raw().invalidate_remote_md(peer.nixl_name.as_str())).is_ok()
    }
}
