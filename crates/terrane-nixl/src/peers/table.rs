//! The peers that an agent knows.
//!
//! A peer has a number that is never reused, and NIXL's name for the peer contains it. So a process
//! that was restarted under its name is another peer to NIXL too. Its requests and those to its
//! predecessor do not mix.
//!
//! A peer is known while a layout of it lives. It ends when it is forgotten or its last layout
//! drops, but not before its transfers have ended.
//!
//! NIXL keeps the latest of the ended peers, because most of them return and connecting takes
//! milliseconds. Each connection that NIXL 1.5.1 closes also leaks a file descriptor on both sides.
//!
//! There are three locks, taken in this order: `loaded`, while NIXL loads peers; the state of one
//! peer; `known`, for look-ups. The last two are never held during a call to NIXL, because threads
//! that submit need them. If a thread finds that a peer must end or its connection must close, it
//! adds the peer to the list `due`. It processes the list if `loaded` is free. Otherwise the thread
//! that holds `loaded` does so after it has released that lock.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock};

use terrane_core::PeerId;
use terrane_core::sync::{attempted, lock};

use super::loaded::LoadedPeers;
use super::peer::{Peer, PeerState};

/// An agent's data about its peers.
#[derive(Default)]
pub(crate) struct PeerTable {
    loaded: Mutex<LoadedPeers>,
    known: Mutex<KnownPeers>,
    /// The agent's own backends that peers can reach, if the library writes metadata in the form
    /// that this crate parses.
    reachable: OnceLock<Option<Vec<Box<str>>>>,
}

#[derive(Default)]
struct KnownPeers {
    by_id: HashMap<PeerId, Arc<Peer>>,
    /// Peers that may have to end, or whose connections may have to close.
    due: Vec<Arc<Peer>>,
}

impl PeerTable {
    pub(super) fn loaded(&self) -> MutexGuard<'_, LoadedPeers> {
        lock(&self.loaded)
    }

    /// The loaded peers, unless another thread holds the lock.
    pub(super) fn try_loaded(&self) -> Option<MutexGuard<'_, LoadedPeers>> {
        attempted(self.loaded.try_lock())
    }

    /// Whether a peer is on the list of those that may have to end.
    pub(super) fn has_due(&self) -> bool {
        !lock(&self.known).due.is_empty()
    }

    /// Takes a peer from the list of those that may have to end.
    pub(super) fn pop_due(&self) -> Option<Arc<Peer>> {
        lock(&self.known).due.pop()
    }

    pub(super) fn insert(&self, peer: &Arc<Peer>) {
        lock(&self.known).by_id.insert(peer.id, Arc::clone(peer));
    }

    pub(super) fn get(&self, id: PeerId) -> Option<Arc<Peer>> {
        lock(&self.known).by_id.get(&id).cloned()
    }

    pub(super) fn all(&self) -> Vec<Arc<Peer>> {
        lock(&self.known).by_id.values().cloned().collect()
    }

    pub(super) fn remove(&self, id: PeerId) {
        lock(&self.known).by_id.remove(&id);
    }

    /// The result of `find_out`, which is called until it succeeds.
    pub(super) fn reachable<E>(
        &self,
        find_out: impl FnOnce() -> Result<Option<Vec<Box<str>>>, E>,
    ) -> Result<Option<&[Box<str>]>, E> {
        if let Some(known) = self.reachable.get() {
            return Ok(known.as_deref());
        }
        let found = find_out()?;
        Ok(self.reachable.get_or_init(|| found).as_deref())
    }

    /// Changes the uses of a peer. Adds it to the list if it must end, or its connection must
    /// close.
    pub(super) fn change<T>(
        &self,
        peer: &Arc<Peer>,
        change: impl FnOnce(&mut PeerState) -> T,
    ) -> T {
        let mut state = peer.state();
        let answer = change(&mut state);
        if state.must_end() || state.must_close() {
            lock(&self.known).due.push(Arc::clone(peer));
        }
        answer
    }
}
