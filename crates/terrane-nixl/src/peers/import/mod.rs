//! Imports: peers' layouts are checked, passed to NIXL, and built.

pub(super) mod check;
mod load;

use std::sync::Arc;

use terrane_wire::{LayoutDescriptor, WireLimits};

use super::claims;
use super::error::ImportError;
use super::loaded::LoadedPeers;
use super::metadata::parts::MetadataParts;
use super::remote::RemoteLayout;
use crate::agent::Agent;
use crate::bindings::process;
use crate::bindings::without_tracing::without_tracing;
use check::CheckedImport;

/// How an import treats a known peer.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum ImportMode {
    /// The peer is unchanged, or the import fails.
    Import,
    /// The peer is a new one: earlier imports from it are unusable.
    Refresh,
}

impl Agent {
    /// Imports a layout that a peer has exported.
    ///
    /// Importing the same bytes again returns the same layout while it lives. It reconnects to the
    /// peer if a transfer has found the connection broken. The first import of a peer connects to
    /// it, which is expensive, so keep a layout of a peer that will be used again. Import a further
    /// layout of a peer while no transfer with the peer is in flight. Otherwise it fails with
    /// [`ImportError::PeerBusy`], unless the layout is in known registrations.
    ///
    /// The bytes are checked; [`RemoteLayout`] lists the checks, and what is trusted.
    ///
    /// # Errors
    ///
    /// [`ImportError`]. The state is then unchanged, except for [`ImportError::PeerLost`].
    /// [`ImportError::PeerChanged`] means that the peer was restarted, or has registered memory
    /// again whose layout is in use here: see [`refresh`](Self::refresh).
    pub fn import(&self, bytes: &[u8]) -> Result<RemoteLayout, ImportError> {
        self.import_within(bytes, &WireLimits::DEFAULT)
    }

    /// Like [`import`](Self::import), with other limits.
    ///
    /// # Errors
    ///
    /// As for [`import`](Self::import).
    pub fn import_within(
        &self,
        bytes: &[u8],
        limits: &WireLimits,
    ) -> Result<RemoteLayout, ImportError> {
        self.import_described(LayoutDescriptor::decode(bytes, limits)?, ImportMode::Import)
    }

    /// Imports a layout of a peer that was restarted under the same name, or has registered its
    /// memory again.
    ///
    /// Layouts that were imported before are unusable: transfers with them fail. The peer has
    /// another [`PeerId`](terrane_core::PeerId) from now on. An unknown peer is imported.
    ///
    /// A process that hangs does not reserve its name. Its replacement can be imported while
    /// transfers with the old process are in flight. These transfers end at their deadline. Their
    /// local blocks stay in use until NIXL reports that it no longer accesses them. NIXL may never
    /// report that.
    ///
    /// # Errors
    ///
    /// As for [`import`](Self::import). [`ImportError::PeerBusy`] if transfers with this same
    /// process are in flight. If NIXL refuses the metadata ([`ImportError::Load`],
    /// [`ImportError::NotFound`]), the peer is no longer known.
    pub fn refresh(&self, bytes: &[u8]) -> Result<RemoteLayout, ImportError> {
        let described = LayoutDescriptor::decode(bytes, &WireLimits::DEFAULT)?;
        self.import_described(described, ImportMode::Refresh)
    }

    pub(super) fn import_described(
        &self,
        described: LayoutDescriptor,
        mode: ImportMode,
    ) -> Result<RemoteLayout, ImportError> {
        process::check()?;
        let described = Arc::new(described);
        if described.agent() == self.name() {
            return Err(self.own_name(&described));
        }
        let checked = self.check(&described)?;
        let mut loaded = self.peer_table().loaded();
        self.end_peers_among(&mut loaded);
        let imported = without_tracing(|| self.import_checked(&mut loaded, &checked, mode));
        self.end_peers_among(&mut loaded);
        drop(loaded);
        // Another thread may have skipped this while this one had locked the table.
        self.end_peers();
        imported
    }

    fn import_checked(
        &self,
        loaded: &mut LoadedPeers,
        checked: &CheckedImport<'_>,
        mode: ImportMode,
    ) -> Result<RemoteLayout, ImportError> {
        let name = checked.described.agent();
        if let Some(before) = loaded.peers.get(name) {
            let peer = Arc::clone(&before.peer);
            let is_same_process =
                claims::is_same_process(&before.connection, checked.parts.connection);
            if mode == ImportMode::Refresh {
                self.end_replaced(loaded, &peer, is_same_process)?;
            } else if !is_same_process
                && before.ended.is_none()
                && peer.is_checked
                && peer.state().is_forgotten
            {
                loaded.set_replaced(name);
            }
        }
        self.revive(loaded, checked);
        match loaded.peers.get_mut(name) {
            Some(peer) => self.import_further(peer, checked),
            None => self.import_first(loaded, checked),
        }
    }

    /// The error for a layout with this agent's name: either it is this agent's own, or another
    /// agent has the same name.
    fn own_name(&self, described: &LayoutDescriptor) -> ImportError {
        let agent = self.name().clone();
        let theirs = MetadataParts::split(described.metadata()).map(|parts| parts.connection);
        let ours = self.connection_metadata().ok();
        if theirs == ours.as_deref() {
            ImportError::OwnLayout { agent }
        } else {
            ImportError::OwnName { agent }
        }
    }
}
