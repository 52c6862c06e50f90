//! Notifications between agents: a peer sends one when its transfer has arrived.

use std::thread;
use std::time::{Duration, Instant};

use terrane_core::sync::lock;
use terrane_core::{AgentName, PeerId};

use super::peer_use::{PeerUnavailable, Readiness};
use crate::agent::Agent;
use crate::bindings::process;
use crate::bindings::without_tracing::without_tracing;
use crate::error::NixlError;

/// A notification from a peer, sent with a transfer
/// ([`Transfer::notify`](terrane_transfer::Transfer::notify)) or alone ([`Agent::notify`]).
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Notification {
    /// The name that the sender states.
    pub from: AgentName,
    /// The bytes that were sent.
    pub message: Vec<u8>,
}

impl Agent {
    /// Returns all notifications that have arrived. Those of one peer keep their order of arrival.
    ///
    /// A notification of a transfer arrives only after the transfer's bytes. Notifications are kept
    /// until they are returned, without a limit. The sender chooses the message and the name; NIXL
    /// checks neither. A notification under a name that is not UTF-8 is dropped, with an error in
    /// the log, because the bindings give no access to it.
    ///
    /// # Errors
    ///
    /// [`NixlError::Call`] if a backend fails, or if no backend of the agent supports
    /// notifications. Notifications that arrived through other backends are kept for the next call.
    pub fn notifications(&self) -> Result<Vec<Notification>, NixlError> {
        const TAKING: &str = "taking notifications";
        process::check()?;
        let failed = NixlError::during(TAKING);
        let mut map = nixl_sys::NotificationMap::new().map_err(failed)?;
        // Locked before NIXL is polled, so that two threads keep the order of arrival.
        let mut pending = lock(self.pending_notifications());
        let mut outcome = without_tracing(|| self.raw().get_notifications(&mut map, None));
        let mut nameless = Vec::new();
        // If a backend failed, the notifications of the others exist only here.
        for sender in map.agents() {
            let messages = sender.and_then(|sender| Ok((sender, map.get_notifications(sender)?)));
            let (sender, messages) = match messages {
                Ok(found) => found,
                Err(error) => {
                    nameless.push(error);
                    continue;
                }
            };
            let from = AgentName::from(sender);
            for message in messages {
                match message {
                    Ok(message) => pending.push(Notification { from: from.clone(), message }),
                    Err(error) => outcome = outcome.and(Err(error)),
                }
            }
        }
        let taken = outcome.map(|()| std::mem::take(&mut *pending));
        drop(pending);
        // Outside the lock: a log subscriber may query notifications.
        for error in nameless {
            tracing::error!(agent = %self.name(), ?error, "a sender's name is not UTF-8; its notification is dropped");
        }
        taken.map_err(failed)
    }

    /// Blocks the thread until there are notifications, or `deadline` has passed, and returns all
    /// of them.
    ///
    /// NIXL wakes no thread, so this thread polls at growing intervals. The interval is at most a
    /// tenth of the time waited so far, and at most a millisecond.
    ///
    /// # Errors
    ///
    /// As for [`notifications`](Self::notifications).
    pub fn wait_for_notifications(
        &self,
        deadline: Instant,
    ) -> Result<Vec<Notification>, NixlError> {
        const LONGEST: Duration = Duration::from_millis(1);
        let begun = Instant::now();
        loop {
            let found = self.notifications()?;
            let remaining = deadline.saturating_duration_since(Instant::now());
            if !found.is_empty() || remaining.is_zero() {
                return Ok(found);
            }
            match (begun.elapsed() / 10).min(LONGEST).min(remaining) {
                rest if rest < Duration::from_micros(5) => thread::yield_now(),
                rest => thread::sleep(rest),
            }
        }
    }

    /// Sends a notification to a peer, without a transfer. Success does not mean that it arrived:
    /// if the connection breaks before, no error reports it.
    ///
    /// # Errors
    ///
    /// [`NixlError::UnknownPeer`] if the agent does not know the peer, or has forgotten it.
    /// [`NixlError::PeerLost`] if the connection to it breaks, or broke before.
    pub fn notify(&self, peer: PeerId, message: &[u8]) -> Result<(), NixlError> {
        process::check()?;
        let agent = || self.name().clone();
        let lost = |name| NixlError::PeerLost { agent: agent(), peer: name };
        let known = self.use_peer(peer).map_err(|reason| match reason {
            PeerUnavailable::Unknown => NixlError::UnknownPeer { agent: agent(), peer },
            PeerUnavailable::Lost(name) => lost(name),
        })?;
        if known.wait_until_ready() == Readiness::Lost {
            return Err(lost(known.name().clone()));
        }
        let name = known.nixl_name().as_str();
        self.raw().send_notification(name, message, None).map_err(|error| {
            tracing::debug!(peer = %known.name(), ?error, "a notification could not be sent");
            known.poison();
            lost(known.name().clone())
        })
    }
}
