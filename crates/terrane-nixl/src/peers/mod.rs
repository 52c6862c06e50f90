//! Layouts that travel: exported by the agent that registered them, imported by others.
//!
//! An export is bytes: what the layout is, where its regions are, and what NIXL needs to reach them.
//! It is sent by whatever means the two processes have. Whoever imports it gets a
//! [`RemoteLayout`], which is an end of transfers.

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

/// What became of a peer that was to be forgotten.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Forgotten {
    /// Nothing is left of it.
    Now,
    /// Transfers with it are in flight, this many, and with the last of them it ends. None begins any
    /// more.
    AfterTransfers(usize),
}

impl Agent {
    /// Describes a layout that is registered with this agent as bytes, for peers to
    /// [`import`](Self::import).
    ///
    /// It offers the layout's blocks, and no other memory of the agent; but a peer that has it can
    /// reach all of the registrations that the blocks lie in.
    ///
    /// A peer reads and writes exported blocks without a word to this process, so nothing here
    /// tracks its transfers: who uses which block when is for the two to agree upon
    /// ([notifications](Self::notifications) say when bytes have arrived).
    ///
    /// # Errors
    ///
    /// - [`ExportError::NotRegistered`] and [`ExportError::NotCovered`] if the layout is not, or not
    ///   wholly, registered with this agent, or not any more.
    /// - [`ExportError::NoBackend`] if peers cannot reach it through any backend.
    /// - [`ExportError::NotOurs`] for a layout of a peer.
    /// - [`ExportError::Metadata`] and [`ExportError::Wire`] if NIXL or the encoding fails.
    pub fn export(&self, layout: &PhysicalLayout) -> Result<Vec<u8>, ExportError> {
        Ok(self.describe(layout)?.encode()?)
    }

    /// Takes a layout that a peer has exported.
    ///
    /// Importing the same bytes again gives the same layout, while it lives, and connects to the peer
    /// again if a transfer has found the connection broken. The first import of a peer connects to it,
    /// which is work; so keep a layout of a peer that will be used again. A further layout of a peer is
    /// imported while no transfer with the peer is in flight, or it is [`ImportError::PeerBusy`],
    /// unless it lies in registrations that are known already.
    ///
    /// The bytes are checked; [`RemoteLayout`] says how far, and what is left to trust.
    ///
    /// # Errors
    ///
    /// [`ImportError`]; then everything is as it was, but for [`ImportError::PeerLost`]. A peer
    /// that was started again, or has registered memory anew of which a layout is in use here, is
    /// [`ImportError::PeerChanged`]: see [`refresh`](Self::refresh).
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

    /// Takes a layout of a peer that may not be what it was: that was started again under the same
    /// name, or has registered its memory anew.
    ///
    /// The layouts that were imported before can no longer be used: transfers with them fail, and the peer
    /// has another [`PeerId`] from now on. A peer that is not known is imported.
    ///
    /// A process that hangs does not keep its name: the process that replaces it is imported while
    /// transfers with the old one are in flight. These end at their deadline. Their blocks of this
    /// process stay in use until NIXL says that nothing writes or reads them any more, which may be
    /// never.
    ///
    /// # Errors
    ///
    /// [`ImportError`], as from [`import`](Self::import). [`ImportError::PeerBusy`] if transfers
    /// with this very process are in flight. If NIXL refuses the metadata ([`ImportError::Load`],
    /// [`ImportError::NotFound`]), the peer is not known any more.
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

    /// Forgets a peer, with all that was imported of it. Transfers with it that are in flight run to
    /// their end, and none begins any more: not with the [`RemoteLayout`]s that are left either.
    ///
    /// A peer is forgotten by itself when the last of its layouts has gone, so this is for ending it
    /// sooner. Imported again, it is another peer, of another [`PeerId`]. NIXL keeps the connections
    /// to the 32 peers that were forgotten last, so that coming back is cheap; see
    /// [`disconnect`](Self::disconnect).
    ///
    /// # Errors
    ///
    /// [`ForgetError::UnknownPeer`] if there is no such peer, or no more.
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

    /// Closes the connections to peers that are forgotten and whose transfers have ended; says to how
    /// many.
    ///
    /// With NIXL 1.5.1, a connection over UCX that is closed leaves a file descriptor open, in both
    /// processes.
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

    /// The peers that are known and not forgotten, in the order in which they became known.
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

    /// The name of a peer's agent; `None` if this agent knows no such peer, or no more.
    #[must_use]
    pub fn peer_name(&self, peer: PeerId) -> Option<AgentName> {
        self.peer_names(peer).map(|(name, _)| name)
    }

    /// The name of a peer's agent, and the name under which NIXL knows the peer.
    pub(crate) fn peer_names(&self, peer: PeerId) -> Option<(AgentName, AgentName)> {
        process::check().ok()?;
        let known = self.peer_table().get(peer)?;
        let forgotten = known.state().forgotten;
        (!forgotten).then(|| (known.name.clone(), known.nixl_name.clone()))
    }

    /// Whether imports can look into NIXL's metadata before NIXL does. They can if the library writes
    /// it in the form of NIXL 1.5; with another form, every import is [`ImportError::UnknownForm`].
    #[must_use]
    pub fn checks_metadata(&self) -> bool {
        self.reachable().is_some()
    }

    /// The backends through which peers can reach this agent, as its own metadata says.
    fn reachable(&self) -> Option<&[Box<str>]> {
        let find_out = || {
            process::check().ok()?;
            let own = self.connection_metadata().ok()?;
            let connections = Metadata::parse(&own).ok().map(|own| own.connections);
            Some(connections.map(|all| all.iter().map(|c| c.backend.into()).collect()))
        };
        // An agent that cannot say how to reach it is asked again, and reached by nobody until then.
        self.peer_table().reachable(find_out).unwrap_or(Some(&[]))
    }
}
