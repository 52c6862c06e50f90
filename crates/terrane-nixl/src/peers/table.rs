//! The peers that an agent knows.
//!
//! A peer has a number that is never reused, and NIXL's name for the peer contains it. So a process
//! that was restarted under its name is another peer to NIXL too. Its requests and those to its
//! predecessor do not mix.
//!
//! A peer is known while a layout of it lives. It ends when it is forgotten or its last layout
//! drops, but not before its transfers have ended.
//!
//! NIXL keeps the latest of the ended peers: they mostly return, and connecting takes milliseconds.
//! Each connection that NIXL 1.5.1 closes also leaks a file descriptor on both sides.
//!
//! There are three locks, taken in this order: `loaded`, while NIXL loads peers; the state of one
//! peer; `known`, for look-ups. The latter two are never held during a call to NIXL, as submitting
//! threads take them. A thread that finds that a peer must end, or its connection must close, puts
//! it on the list `due`. It processes the list if `loaded` is free. If it is not, its holder does
//! so after it has released the lock.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError, TryLockError};

use terrane_core::{AgentName, PeerId};

use super::claims::Claim;
use super::in_use::State;
use super::loaded::Loaded;
use crate::quiet::quietly;
use crate::{Agent, process};

/// An agent's data about its peers.
#[derive(Default)]
pub(crate) struct Peers {
    loaded: Mutex<Loaded>,
    known: Mutex<Known>,
    /// The agent's own backends that peers can reach, if the library writes metadata in the form
    /// that this crate parses.
    reachable: OnceLock<Option<Vec<Box<str>>>>,
}

#[derive(Default)]
struct Known {
    by_id: HashMap<PeerId, Arc<Peer>>,
    /// Peers that may have to end, or whose connections may have to close.
    due: Vec<Arc<Peer>>,
}

/// A peer, from its first import until it ends.
pub(crate) struct Peer {
    pub(super) id: PeerId,
    /// The name of the peer's agent.
    pub(super) name: AgentName,
    /// NIXL's name for the peer.
    pub(super) nixl_name: AgentName,
    state: Mutex<State>,
}

impl Peer {
    /// A peer that NIXL has not loaded.
    pub(super) fn new(name: AgentName) -> Self {
        let id = PeerId::next();
        let nixl_name = AgentName::from(format!("{name} (peer {id})"));
        Self { id, name, nixl_name, state: Mutex::default() }
    }

    /// An ended peer that NIXL still knows, under its next number.
    pub(super) fn again(&self) -> Self {
        let (name, nixl_name) = (self.name.clone(), self.nixl_name.clone());
        Self { id: PeerId::next(), name, nixl_name, state: Mutex::default() }
    }

    pub(super) fn state(&self) -> MutexGuard<'_, State> {
        lock(&self.state)
    }
}

impl Peers {
    pub(super) fn loaded(&self) -> MutexGuard<'_, Loaded> {
        lock(&self.loaded)
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

    /// The answer of `find_out`, which is called until it has one.
    pub(super) fn reachable(
        &self,
        find_out: impl FnOnce() -> Option<Option<Vec<Box<str>>>>,
    ) -> Option<Option<&[Box<str>]>> {
        if let Some(known) = self.reachable.get() {
            return Some(known.as_deref());
        }
        let found = find_out()?;
        Some(self.reachable.get_or_init(|| found).as_deref())
    }

    /// Changes the uses of a peer. Puts it on the list if it must end, or its connection must
    /// close.
    pub(super) fn change<T>(&self, peer: &Arc<Peer>, change: impl FnOnce(&mut State) -> T) -> T {
        let mut state = peer.state();
        let answer = change(&mut state);
        if state.has_to_end() || state.has_to_close() {
            lock(&self.known).due.push(Arc::clone(peer));
        }
        answer
    }
}

impl Agent {
    /// Ends the peers that must end, and closes the connections that must close, unless another
    /// thread does so now.
    pub(super) fn end_peers(&self) {
        while !lock(&self.peer_table().known).due.is_empty() {
            let mut loaded = match self.peer_table().loaded.try_lock() {
                Ok(loaded) => loaded,
                Err(TryLockError::Poisoned(poisoned)) => poisoned.into_inner(),
                Err(TryLockError::WouldBlock) => return,
            };
            self.end_peers_among(&mut loaded);
        }
    }

    pub(super) fn end_peers_among(&self, loaded: &mut Loaded) {
        let table = self.peer_table();
        loop {
            let Some(peer) = lock(&table.known).due.pop() else { break };
            self.close_if_due(loaded, &peer);
            let mut state = peer.state();
            if !state.has_to_end() {
                continue;
            }
            state.forgotten = true;
            drop(state);
            table.remove(peer.id);
            loaded.end(&peer);
        }
        while let Some(peer) = loaded.superfluous() {
            self.invalidate(&peer);
        }
    }

    /// Closes the connection to a peer with which a request has failed, once nothing else is in
    /// flight with it.
    fn close_if_due(&self, loaded: &mut Loaded, peer: &Arc<Peer>) {
        let mut state = peer.state();
        if !state.has_to_close() {
            return;
        }
        // Nothing is posted meanwhile.
        state.begin_reload();
        drop(state);
        let was_known = self.invalidate(peer);
        if let Some(known) = loaded.of(peer) {
            known.reset();
        }
        let mut state = peer.state();
        state.reloading = false;
        state.closed(was_known);
    }

    /// Makes NIXL forget a peer and close its connection. Returns whether NIXL knew the peer. If
    /// not, NIXL may also have lost the means to close its connection.
    pub(super) fn invalidate(&self, peer: &Peer) -> bool {
        quietly(|| self.raw().invalidate_remote_md(peer.nixl_name.as_str())).is_ok()
    }
}

/// A live layout of a peer: its memory holds one.
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

/// A panic leaves only counts and maps, which are consistent at any time.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
