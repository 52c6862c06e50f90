//! Layouts that one agent exports and others import.
//!
//! An export is bytes: the layout's geometry, the location of its regions, and the metadata with
//! which NIXL reaches them. The two processes send it by any channel that they have. The importer
//! gets a [`RemoteLayout`], which is an end of transfers.

mod claims;
mod error;
mod export;
mod foreign;
mod import;
mod in_use;
mod loaded;
mod metadata;
mod remote;
mod table;
#[cfg(test)]
mod tests;

use terrane_core::{AgentName, PeerId};
use terrane_layout::PhysicalLayout;
use terrane_wire::WireLimits;

pub use error::{ExportError, ForgetError, ImportError, PeerChange};
pub use foreign::{ForeignLayout, NixlMetadata};
pub(crate) use in_use::{Connection, NoUse, PeerUse, Readiness};
pub use metadata::MalformedMetadata;
pub use remote::RemoteLayout;
pub(crate) use table::Peers;

use crate::{Agent, process};
use import::Known;
use metadata::Metadata;

/// The result of forgetting a peer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Forgotten {
    /// The peer is forgotten completely.
    Now,
    /// This many transfers with it are in flight, and the peer ends with the last of them. No new
    /// transfer begins.
    AfterTransfers(usize),
}

impl Agent {
    /// Describes a layout that is registered with this agent as bytes, for peers to
    /// [`import`](Self::import).
    ///
    /// It offers only the layout's blocks. However, a peer that has it can reach all registrations
    /// that the blocks lie in.
    ///
    /// A peer reads and writes exported blocks without notice to this process, so this process does
    /// not track its transfers. The two sides must agree on which of them uses which block when
    /// ([notifications](Self::notifications) report the arrival of bytes).
    ///
    /// # Errors
    ///
    /// - [`ExportError::NotRegistered`] and [`ExportError::NotCovered`] if the layout is not, not
    ///   wholly, or no longer registered with this agent.
    /// - [`ExportError::NoBackend`] if peers cannot reach it through any backend.
    /// - [`ExportError::NotOurs`] for a peer's layout.
    /// - [`ExportError::Metadata`] and [`ExportError::Wire`] if NIXL or the encoding fails.
    pub fn export(&self, layout: &PhysicalLayout) -> Result<Vec<u8>, ExportError> {
        Ok(self.describe(layout)?.encode()?)
    }

    /// Imports a layout that a peer has exported.
    ///
    /// Importing the same bytes again returns the same layout while it lives. It reconnects to the
    /// peer if a transfer has found the connection broken. The first import of a peer connects to
    /// it, which is expensive; so keep a layout of a peer that will be used again. Import a further
    /// layout of a peer while no transfer with the peer is in flight. Otherwise it is
    /// [`ImportError::PeerBusy`], unless the layout lies in known registrations.
    ///
    /// The bytes are checked; [`RemoteLayout`] states which properties are checked and which are
    /// trusted.
    ///
    /// # Errors
    ///
    /// [`ImportError`]. The state is then unchanged, except for [`ImportError::PeerLost`].
    /// [`ImportError::PeerChanged`] means that the peer was restarted, or has registered memory
    /// again whose layout is in use here: see [`refresh`](Self::refresh).
    pub fn import(&self, bytes: &[u8]) -> Result<RemoteLayout, ImportError> {
        self.import_within(bytes, &WireLimits::DEFAULT)
    }

    /// As [`import`](Self::import), with other limits.
    ///
    /// # Errors
    ///
    /// As from [`import`](Self::import).
    pub fn import_within(
        &self,
        bytes: &[u8],
        limits: &WireLimits,
    ) -> Result<RemoteLayout, ImportError> {
        self.import_with(bytes, limits, Known::Same)
    }

    /// Imports a layout of a peer that was restarted under the same name, or has registered its
    /// memory again.
    ///
    /// Layouts that were imported before can no longer be used: transfers with them fail. The peer
    /// has another [`PeerId`] from now on. An unknown peer is imported.
    ///
    /// A process that hangs does not keep its name: its replacement is imported while transfers
    /// with the old process are in flight. These end at their deadline. Their local blocks stay in
    /// use until NIXL reports that they are no longer read or written, which may never happen.
    ///
    /// # Errors
    ///
    /// [`ImportError`], as from [`import`](Self::import). [`ImportError::PeerBusy`] if transfers
    /// with this same process are in flight. If NIXL refuses the metadata ([`ImportError::Load`],
    /// [`ImportError::NotFound`]), the peer is no longer known.
    pub fn refresh(&self, bytes: &[u8]) -> Result<RemoteLayout, ImportError> {
        self.refresh_within(bytes, &WireLimits::DEFAULT)
    }

    /// As [`refresh`](Self::refresh), with other limits.
    ///
    /// # Errors
    ///
    /// As from [`refresh`](Self::refresh).
    pub fn refresh_within(
        &self,
        bytes: &[u8],
        limits: &WireLimits,
    ) -> Result<RemoteLayout, ImportError> {
        self.import_with(bytes, limits, Known::Replaced)
    }

    /// Forgets a peer, with everything imported from it. Transfers in flight with it run to their
    /// end. No new transfer begins, even with the remaining [`RemoteLayout`]s.
    ///
    /// A peer is forgotten automatically when the last of its layouts drops; this ends it sooner.
    /// If it is imported again, it gets another [`PeerId`]. NIXL keeps the connections to the 32
    /// peers that were forgotten last, so importing them again is cheap; see
    /// [`disconnect`](Self::disconnect).
    ///
    /// # Errors
    ///
    /// [`ForgetError::UnknownPeer`] if the peer is unknown or already forgotten.
    pub fn forget(&self, peer: PeerId) -> Result<Forgotten, ForgetError> {
        process::check()?;
        let unknown = || ForgetError::UnknownPeer { agent: self.name().clone(), peer };
        let known = self.peer_table().get(peer).ok_or_else(unknown)?;
        let mut loaded = self.peer_table().loaded();
        let mut transfers = 0;
        self.peer_table().change(&known, |state| {
            state.forgotten = true;
            transfers = state.transfers;
        });
        self.end_peers_among(&mut loaded);
        drop(loaded);
        self.end_peers();
        Ok(if transfers == 0 { Forgotten::Now } else { Forgotten::AfterTransfers(transfers) })
    }

    /// Closes the connections to forgotten peers whose transfers have ended, and returns their
    /// number.
    ///
    /// With NIXL 1.5.1, closing a connection over UCX leaks a file descriptor in both processes.
    pub fn disconnect(&self) -> usize {
        if process::is_forked() {
            return 0;
        }
        let mut loaded = self.peer_table().loaded();
        self.end_peers_among(&mut loaded);
        let mut closed = 0;
        while let Some(peer) = loaded.take_ended() {
            self.invalidate(&peer);
            closed += 1;
        }
        drop(loaded);
        self.end_peers();
        closed
    }

    /// The known peers that are not forgotten, in the order in which they became known.
    #[must_use]
    pub fn peers(&self) -> Vec<(PeerId, AgentName)> {
        if process::is_forked() {
            return Vec::new();
        }
        let known = self.peer_table().all().into_iter();
        let mut peers: Vec<_> = known
            .filter(|peer| !peer.state().forgotten)
            .map(|peer| (peer.id, peer.name.clone()))
            .collect();
        peers.sort_unstable_by_key(|(id, _)| *id);
        peers
    }

    /// The name of a peer's agent; `None` if this agent does not know the peer, or has forgotten
    /// it.
    #[must_use]
    pub fn peer_name(&self, peer: PeerId) -> Option<AgentName> {
        self.peer_names(peer).map(|(name, _)| name)
    }

    /// The name of a peer's agent, and NIXL's name for the peer.
    pub(crate) fn peer_names(&self, peer: PeerId) -> Option<(AgentName, AgentName)> {
        process::check().ok()?;
        let known = self.peer_table().get(peer)?;
        let forgotten = known.state().forgotten;
        (!forgotten).then(|| (known.name.clone(), known.nixl_name.clone()))
    }

    /// Whether imports can check NIXL's metadata before NIXL reads it. They can if the library
    /// writes it in the form of NIXL 1.5. With another form, every import is
    /// [`ImportError::UnknownForm`].
    #[must_use]
    pub fn checks_metadata(&self) -> bool {
        self.reachable().is_some()
    }

    /// The backends through which peers can reach this agent, according to its own metadata.
    fn reachable(&self) -> Option<&[Box<str>]> {
        let find_out = || {
            process::check().ok()?;
            let own = self.connection_metadata().ok()?;
            let connections = Metadata::parse(&own).ok().map(|own| own.connections);
            Some(connections.map(|all| all.iter().map(|c| c.backend.into()).collect()))
        };
        // An agent that cannot tell is asked again, and is unreachable until then.
        self.peer_table().reachable(find_out).unwrap_or(Some(&[]))
    }
}
