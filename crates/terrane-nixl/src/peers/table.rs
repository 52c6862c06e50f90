//! The peers that an agent knows.
//!
//! A peer has a number that is never given again, and NIXL is told a name of which this number is a
//! part. So a process that was started again under its name is another peer to NIXL as well: its
//! requests and those to the process before it do not meet.
//!
//! A peer is known while a layout of it lives, and ends when it is forgotten or its last layout has
//! gone; in either case not before the transfers with it have ended.
//!
//! Of the peers that have ended, NIXL goes on knowing the latest: they mostly come back, connecting
//! takes milliseconds, and each connection that NIXL 1.5.1 closes leaves a file descriptor open on
//! both sides.
//!
//! There are three locks, taken in this order: `loaded`, while NIXL is told of peers; the state of
//! one peer; `known`, for look-ups. The latter two are never held while NIXL is asked anything, as
//! whoever submits a transfer takes them. Whoever finds that a peer has to end, or its connection to
//! be closed, puts it on the list `due`, and sees to what is there if `loaded` is free. If it is not,
//! its holder does so, as it looks at the list after it has let go of the lock.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError, TryLockError};

use terrane_core::{AgentName, PeerId};

use super::claims::Claim;
use super::in_use::State;
use super::loaded::Loaded;
use crate::quiet::quietly;
use crate::{Agent, process};

/// What an agent knows of its peers.
#[derive(Default)]
pub(crate) struct Peers {
    loaded: Mutex<Loaded>,
    known: Mutex<Known>,
    /// The agent's own backends that peers can reach, if the library writes metadata in the form
    /// that is read here.
    reachable: OnceLock<Option<Vec<Box<str>>>>,
}

#[derive(Default)]
struct Known {
    by_id: HashMap<PeerId, Arc<Peer>>,
    /// Peers that may have to end, or their connections to be closed.
    due: Vec<Arc<Peer>>,
}

/// A peer, as it is known from one import until it ends.
pub(crate) struct Peer {
    pub(super) id: PeerId,
    /// The name of the peer's agent.
    pub(super) name: AgentName,
    /// The name under which NIXL is told of the peer.
    pub(super) nixl_name: AgentName,
    state: Mutex<State>,
}

impl Peer {
    /// A peer that NIXL has not been told of.
    pub(super) fn new(name: AgentName) -> Self {
        let id = PeerId::next();
        let nixl_name = AgentName::from(format!("{name} (peer {id})"));
        Self { id, name, nixl_name, state: Mutex::default() }
    }

    /// A peer that has ended, and that NIXL still knows, under its next number.
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

    /// What `find_out` answers, which is asked until it does.
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

    /// Changes what is in use of a peer, and puts it on the list if it has to end, or its connection
    /// to be closed.
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
    /// Ends the peers that have to end, and closes the connections that have to be closed, unless
    /// somebody else is at it.
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

    /// Has NIXL let go of a peer and close its connection to it. Says whether NIXL knew the peer: one
    /// that it did not know it may have lost together with the means to close its connection.
    pub(super) fn invalidate(&self, peer: &Peer) -> bool {
        quietly(|| self.raw().invalidate_remote_md(peer.nixl_name.as_str())).is_ok()
    }
}

/// A layout of a peer that lives: its memory holds one.
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

/// What a panic left behind is counts and maps, which are whole at any time.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
