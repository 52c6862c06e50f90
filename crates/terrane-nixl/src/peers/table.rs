//! The peers that an agent knows.
//!
//! NIXL knows a peer by its name, and here it has a number besides, that is never given again. A
//! peer is known while a layout of it lives, and ends when it is forgotten or its last layout has
//! gone; in either case not before the transfers with it have ended.
//!
//! Of the peers that have ended, NIXL goes on knowing the latest: they mostly come back, connecting
//! takes milliseconds, and each connection that NIXL 1.5.1 closes leaves a file descriptor open on
//! both sides.
//!
//! There are three locks, taken in this order: `loaded`, while NIXL is told of peers; the state of
//! one peer; `known`, for look-ups. Whoever finds that a peer has to end puts it on the list
//! `ending`, and ends what is there if `loaded` is free. If it is not, its holder does so, as it
//! looks at the list after it has let go of the lock.

use std::collections::HashMap;
use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError, TryLockError};

use terrane_core::{AgentName, PeerId};

use super::loaded::Loaded;
use crate::Agent;

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
    /// Peers that may have to end.
    ending: Vec<Arc<Peer>>,
}

/// A peer, as it is known from one import until it ends.
pub(crate) struct Peer {
    pub(super) id: PeerId,
    pub(super) name: AgentName,
    pub(super) state: Mutex<State>,
}

#[derive(Default)]
pub(super) struct State {
    /// Transfers with the peer that have not ended.
    pub(super) transfers: usize,
    /// Layouts of the peer that live.
    pub(super) layouts: usize,
    /// No transfer begins any more.
    pub(super) forgotten: bool,
}

impl State {
    fn has_to_end(&self) -> bool {
        self.transfers == 0 && (self.forgotten || self.layouts == 0)
    }
}

impl Peer {
    pub(super) fn new(name: AgentName) -> Self {
        Self { id: PeerId::next(), name, state: Mutex::default() }
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

    /// Changes what is in use of a peer, and puts it on the list if it has to end.
    pub(super) fn change(&self, peer: &Arc<Peer>, change: impl FnOnce(&mut State)) {
        let mut state = peer.state();
        change(&mut state);
        if state.has_to_end() {
            lock(&self.known).ending.push(Arc::clone(peer));
        }
    }
}

impl Agent {
    /// Ends the peers that have to end, unless somebody else is at it.
    pub(super) fn end_peers(&self) {
        while !lock(&self.peer_table().known).ending.is_empty() {
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
            let Some(peer) = lock(&table.known).ending.pop() else { break };
            let mut state = peer.state();
            if !state.has_to_end() {
                continue;
            }
            state.forgotten = true;
            drop(state);
            table.remove(peer.id);
            loaded.end(&peer);
        }
        while let Some(name) = loaded.superfluous() {
            self.invalidate(&name);
        }
    }

    /// Has NIXL let go of a peer. What it says is of no consequence: it knows the peer or not.
    pub(super) fn invalidate(&self, name: &AgentName) {
        if let Err(error) = self.raw().invalidate_remote_md(name.as_str()) {
            tracing::debug!(agent = %self.name(), peer = %name, ?error, "NIXL knew no such peer");
        }
    }

    /// Says that a transfer with a peer begins; it ends with what is returned. `None` once the
    /// peer is forgotten.
    ///
    /// Whatever names the peer to NIXL holds one, so that the peer stays what it is meanwhile.
    pub(crate) fn use_peer(&self, id: PeerId) -> Option<PeerUse> {
        let peer = self.peer_table().get(id)?;
        let mut state = peer.state();
        if state.forgotten {
            return None;
        }
        state.transfers += 1;
        drop(state);
        Some(PeerUse { agent: self.clone(), peer })
    }
}

/// A transfer with a peer, or something else that NIXL does with it.
pub(crate) struct PeerUse {
    agent: Agent,
    peer: Arc<Peer>,
}

impl PeerUse {
    /// The peer's name, by which NIXL knows it.
    pub(crate) fn name(&self) -> &AgentName {
        &self.peer.name
    }
}

impl Drop for PeerUse {
    fn drop(&mut self) {
        self.agent.peer_table().change(&self.peer, |state| state.transfers -= 1);
        self.agent.end_peers();
    }
}

impl fmt::Debug for PeerUse {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("PeerUse").field("peer", &self.peer.id).finish_non_exhaustive()
    }
}

/// A layout of a peer that lives: its memory holds one.
pub(super) struct Lease {
    agent: Agent,
    peer: Arc<Peer>,
}

impl Lease {
    pub(super) fn new(agent: &Agent, peer: &Arc<Peer>) -> Self {
        peer.state().layouts += 1;
        Self { agent: agent.clone(), peer: Arc::clone(peer) }
    }
}

impl Drop for Lease {
    fn drop(&mut self) {
        self.agent.peer_table().change(&self.peer, |state| state.layouts -= 1);
        self.agent.end_peers();
    }
}

/// What a panic left behind is counts and maps, which are whole at any time.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
