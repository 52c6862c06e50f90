//! The peers that an agent knows, and forgetting them.

use terrane_core::{
    AgentName, Capability, CapabilityReport, CapabilityStatus, PeerId, Reason, Requirement,
};

use super::error::{ForgetError, ImportError};
use super::metadata::Metadata;
use crate::agent::Agent;
use crate::bindings::process;
use crate::bindings::status::Status;

/// The result of forgetting a peer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum ForgetOutcome {
    /// The peer is forgotten completely.
    Now,
    /// This many transfers with the peer are in flight. It ends with the last of them, and no new
    /// transfer begins.
    AfterTransfers(usize),
}

impl Agent {
    /// Forgets a peer, with everything imported from it. Transfers in flight with it complete. No
    /// new transfer begins, not even with the remaining [`RemoteLayout`](crate::RemoteLayout)s.
    ///
    /// A peer is forgotten automatically when the last of its layouts drops; this function forgets
    /// it earlier. If it is imported again, it gets another [`PeerId`]. NIXL keeps the connections
    /// to the 32 peers that were forgotten last, so importing them again is cheap; see
    /// [`disconnect`](Self::disconnect).
    ///
    /// # Errors
    ///
    /// [`ForgetError::UnknownPeer`] if the agent never knew the peer, or it has ended.
    pub fn forget(&self, peer: PeerId) -> Result<ForgetOutcome, ForgetError> {
        process::check()?;
        let unknown = || ForgetError::UnknownPeer { agent: self.name().clone(), peer };
        let known = self.peer_table().get(peer).ok_or_else(unknown)?;
        let mut loaded = self.peer_table().loaded();
        let mut transfers = 0;
        self.peer_table().change(&known, |state| {
            state.is_forgotten = true;
            transfers = state.transfers;
        });
        self.end_peers_among(&mut loaded);
        drop(loaded);
        self.end_peers();
        Ok(if transfers == 0 {
            ForgetOutcome::Now
        } else {
            ForgetOutcome::AfterTransfers(transfers)
        })
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
            .filter(|peer| !peer.state().is_forgotten)
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
        let forgotten = known.state().is_forgotten;
        (!forgotten).then(|| (known.name.clone(), known.nixl_name.clone()))
    }

    /// Whether imports check peers' metadata before NIXL reads it
    /// ([`CheckedMetadata`](Capability::CheckedMetadata)). They can if the library writes metadata
    /// in the form of NIXL 1.5. See
    /// [`AgentBuilder::metadata_checks`](crate::AgentBuilder::metadata_checks).
    #[must_use]
    pub fn capabilities(&self) -> CapabilityReport {
        let status = match (self.metadata_checks(), self.reachable()) {
            (Requirement::Off, _) | (_, Err(_)) => CapabilityStatus::NotTried,
            (_, Ok(Some(_))) => CapabilityStatus::Granted,
            (_, Ok(None)) => {
                CapabilityStatus::Refused(Reason::Unsupported { by: "this release of NIXL" })
            }
        };
        let mut report = CapabilityReport::default();
        report.record(Capability::CheckedMetadata, self.metadata_checks(), status);
        report
    }

    /// The backends through which peers can reach this agent, according to its own metadata; `None`
    /// if that has an unknown form.
    pub(super) fn reachable(&self) -> Result<Option<&[Box<str>]>, ImportError> {
        self.peer_table().reachable(|| {
            process::check()?;
            let own = self.connection_metadata();
            let own =
                own.map_err(|error| ImportError::OwnMetadata { status: Status::of(&error) })?;
            let connections = Metadata::parse(&own).ok().map(|own| own.connections);
            Ok(connections.map(|all| all.iter().map(|c| c.backend.into()).collect()))
        })
    }
}
