//! Loads checked imports into NIXL.

use std::sync::Arc;

use nixl_sys::XferDescList;
use terrane_core::ByteCount;
use terrane_wire::LayoutDescriptor;

use super::check::CheckedImport;
use crate::agent::Agent;
use crate::bindings::status::Status;
use crate::peers::claims::Claim;
use crate::peers::error::{ImportError, PeerChange};
use crate::peers::lease::Lease;
use crate::peers::loaded::{LoadedPeer, LoadedPeers};
use crate::peers::metadata::Metadata;
use crate::peers::metadata::parts::MetadataParts;
use crate::peers::peer::Peer;
use crate::peers::remote::RemoteLayout;
use crate::peers::spaces::device_of;

impl Agent {
    /// Ends a peer that may have been replaced by another process. If it has transfers in flight,
    /// its name is free at once, and it ends with the last of them.
    pub(super) fn end_replaced(
        &self,
        loaded: &mut LoadedPeers,
        peer: &Arc<Peer>,
        is_same_process: bool,
    ) -> Result<(), ImportError> {
        let mut state = peer.state();
        let transfers = state.transfers;
        // NIXL knows an unchecked peer by its own name, which its replacement has too.
        if transfers > 0 && (is_same_process || !peer.is_checked) {
            return Err(ImportError::PeerBusy { peer: peer.name.clone(), transfers });
        }
        state.is_forgotten = true;
        drop(state);
        if transfers > 0 {
            loaded.set_replaced(&peer.name);
        } else {
            self.peer_table().remove(peer.id);
            loaded.end(peer);
        }
        Ok(())
    }

    /// Revives an ended peer that NIXL still knows, if it is unchanged. Otherwise makes NIXL forget
    /// it, because it has no user.
    pub(super) fn revive(&self, loaded: &mut LoadedPeers, checked: &CheckedImport<'_>) {
        let name = checked.described.agent();
        let Some(known) = loaded.peers.get_mut(name).filter(|known| known.ended.is_some()) else {
            return;
        };
        let is_same = checked.is_checked
            && self.is_known(&known.peer)
            && !known.peer.state().is_poisoned
            && *known.connection == *checked.parts.connection
            && !known.is_stale(&checked.keys, std::iter::empty());
        if is_same {
            let peer = Arc::new(known.peer.again());
            self.peer_table().insert(&peer);
            known.revive(Arc::clone(&peer));
            // It ends again, unless it gets a layout now.
            self.peer_table().change(&peer, |_| ());
        } else {
            let peer = Arc::clone(&known.peer);
            loaded.peers.remove(name);
            self.invalidate(&peer);
        }
    }

    /// Imports the first layout of a peer.
    pub(super) fn import_first(
        &self,
        loaded: &mut LoadedPeers,
        checked: &CheckedImport<'_>,
    ) -> Result<RemoteLayout, ImportError> {
        let name = checked.described.agent();
        let peer = Arc::new(Peer::new(name.clone(), checked.is_checked));
        let claim = self.claim(&peer, checked)?;
        let load = || {
            self.load(&peer, checked.parts.connection)?;
            self.load(&peer, checked.parts.keys)
        };
        if let Err(status) = load() {
            self.invalidate(&peer);
            return Err(ImportError::Load { peer: name.clone(), status });
        }
        if !self.finds_regions(&peer, &checked.described) {
            self.invalidate(&peer);
            return Err(ImportError::NotFound { peer: name.clone() });
        }
        let lease = Lease::new(self, &peer, claim);
        // From here on, dropping the lease ends the peer if building the layout fails.
        self.peer_table().insert(&peer);
        let mut new = LoadedPeer::new(Arc::clone(&peer), checked.parts.connection);
        new.add_keys(&checked.keys);
        let known = loaded.peers.entry(name.clone()).insert_entry(new).into_mut();
        let layout = RemoteLayout::new(peer.id, lease, &checked.described, &checked.usable)?;
        known.add_layout(layout.endpoint(), &layout.described);
        Ok(layout)
    }

    /// Imports a further layout of a peer.
    pub(super) fn import_further(
        &self,
        known: &mut LoadedPeer,
        checked: &CheckedImport<'_>,
    ) -> Result<RemoteLayout, ImportError> {
        let described = &checked.described;
        let name = || described.agent().clone();
        let peer = Arc::clone(&known.peer);
        let changed = |change| ImportError::PeerChanged { peer: name(), change };
        let busy = |transfers| ImportError::PeerBusy { peer: peer.name.clone(), transfers };
        if *known.connection != *checked.parts.connection {
            return Err(changed(PeerChange::Connection));
        }
        let state = peer.state();
        if state.is_forgotten || state.is_poisoned {
            // Otherwise the peer would have ended, or its connection would have been closed.
            return Err(busy(state.transfers));
        }
        drop(state);
        if !self.is_known(&peer) {
            // A broken connection has been closed.
            let _reloading = peer.reload().map_err(busy)?;
            self.reload(known).map_err(|status| self.mark_lost(known, status))?;
        }
        let keys = &checked.keys;
        // NIXL can drop unused keys, as below.
        if known.contradicts(keys) && !known.is_stale(keys, known.live_layouts()) {
            return Err(changed(PeerChange::Registration));
        }
        if let Some((endpoint, described)) = known.find(described) {
            return Ok(RemoteLayout { endpoint, peer: peer.id, described });
        }
        if let Some(region) = known.overlap(described) {
            return Err(ImportError::Overlap { region, peer: name() });
        }
        let claim = self.claim(&peer, checked)?;
        if known.remove_dropped() || known.is_stale(keys, known.live_layouts()) {
            // NIXL drops unused keys here. With transfers in flight it keeps them.
            if let Ok(_reloading) = peer.reload() {
                self.reload(known).map_err(|status| self.mark_lost(known, status))?;
            }
        }
        if known.contradicts(keys) {
            return Err(changed(PeerChange::Registration));
        }
        if !checked.is_checked || !known.has_all(keys) {
            // If NIXL refuses keys, it drops all its data of the peer. It then no longer reports
            // the state of the requests in flight with the peer.
            let _reloading = peer.reload().map_err(busy)?;
            if !checked.is_checked {
                // NIXL would keep an earlier key of the same memory. Unchecked keys are unknown.
                self.reload(known).map_err(|status| self.mark_lost(known, status))?;
            }
            if let Err(refusal) = self.load(&peer, checked.parts.keys) {
                self.reload(known).map_err(|status| self.mark_lost(known, status))?;
                return Err(ImportError::Load { peer: name(), status: refusal });
            }
            known.add_keys(keys);
        }
        if !self.finds_regions(&peer, described) {
            return Err(ImportError::NotFound { peer: name() });
        }
        let lease = Lease::new(self, &known.peer, claim);
        let layout = RemoteLayout::new(known.peer.id, lease, described, &checked.usable)?;
        known.add_layout(layout.endpoint(), &layout.described);
        Ok(layout)
    }

    /// Claims the layout's bytes, which another agent of this process may have.
    fn claim(&self, peer: &Peer, checked: &CheckedImport<'_>) -> Result<Claim, ImportError> {
        let (connection, described) = (checked.parts.connection, &checked.described);
        Claim::new(connection, peer.id, self.name(), described).map_err(|(region, by)| {
            ImportError::InUse { region, peer: described.agent().clone(), by }
        })
    }

    /// Whether NIXL still knows a peer that was loaded.
    fn is_known(&self, peer: &Peer) -> bool {
        self.raw().check_remote_metadata(peer.nixl_name.as_str(), None)
    }

    fn mark_lost(&self, known: &mut LoadedPeer, status: Status) -> ImportError {
        known.is_lost = true;
        self.peer_table().change(&known.peer, |state| state.is_forgotten = true);
        ImportError::PeerLost { peer: known.peer.name.clone(), status }
    }

    /// Loads a peer into NIXL again: its connection data, and its live layouts.
    fn reload(&self, known: &mut LoadedPeer) -> Result<(), Status> {
        let peer = Arc::clone(&known.peer);
        self.invalidate(&peer);
        known.reset();
        self.load(&peer, &known.connection)?;
        let live: Vec<Arc<LayoutDescriptor>> = known.live_layouts().cloned().collect();
        for described in live {
            let Some(parts) = MetadataParts::split(described.metadata()) else { continue };
            self.load(&peer, parts.keys)?;
            if let Ok(metadata) = Metadata::parse(parts.keys) {
                known.add_keys(&metadata.memory);
            }
        }
        Ok(())
    }

    /// Loads a piece of a peer's metadata into NIXL, under NIXL's name for the peer.
    fn load(&self, peer: &Peer, metadata: &[u8]) -> Result<(), Status> {
        let name = peer.nixl_name.as_str();
        let renamed = if peer.is_checked {
            let metadata = Metadata::parse(metadata).map_err(|_| Status::InvalidParameter)?;
            Some(Metadata { agent: name, ..metadata }.write())
        } else {
            None
        };
        match self.raw().load_remote_md(renamed.as_deref().unwrap_or(metadata)) {
            Ok(loaded) if loaded == name => Ok(()),
            Ok(_) => Err(Status::InvalidParameter),
            Err(error) => Err(Status::of(&error)),
        }
    }

    /// Whether NIXL finds every region in the loaded metadata.
    fn finds_regions(&self, peer: &Peer, described: &LayoutDescriptor) -> bool {
        let mut list: Option<XferDescList<'_>> = None;
        for region in described.regions() {
            let Some((memory, device)) = device_of(region.space()) else { return false };
            let list = match &mut list {
                Some(list) => list,
                None => match XferDescList::new(memory.into_raw()) {
                    Ok(new) => list.insert(new),
                    Err(_) => return false,
                },
            };
            let address = ByteCount::new(region.address()).to_usize();
            list.add_desc(address, region.length().to_usize(), device);
        }
        self.raw().check_remote_metadata(peer.nixl_name.as_str(), list.as_ref())
    }
}
