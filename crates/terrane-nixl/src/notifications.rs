//! Messages between agents: what a peer says when its transfer has arrived.

use std::collections::{BTreeMap, VecDeque};
use std::sync::{Mutex, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use terrane_core::{AgentName, PeerId};

use crate::peers::{NoUse, Readiness};
use crate::quiet::quietly;
use crate::{Agent, NixlError, Status, process};

/// A message that a peer has sent: with a transfer
/// ([`Transfer::notify`](terrane_transfer::Transfer::notify)), or by itself ([`Agent::notify`]).
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Notification {
    /// The name that the sender gave as its own.
    pub from: AgentName,
    /// The bytes, as they were sent.
    pub message: Vec<u8>,
}

/// What has arrived and has not been taken: all of it, however much it is.
#[derive(Debug, Default)]
pub(crate) struct Mailbox(Mutex<Unread>);

type Unread = BTreeMap<AgentName, VecDeque<Vec<u8>>>;

impl Agent {
    /// Takes all messages that have arrived, those of one peer in the order in which they did.
    ///
    /// A message that came with a transfer is here only when the transfer's bytes are. What is not
    /// taken is kept, without a bound. The message is the sender's to choose, and so is the name that
    /// it gives: NIXL checks neither. What comes under a name that is not UTF-8 is dropped, with an error
    /// in the log, as the bindings give no access to it.
    ///
    /// # Errors
    ///
    /// [`NixlError::Call`] if a backend fails, or none of the agent's has messages. Those that have
    /// arrived by other backends are kept for the next call.
    pub fn notifications(&self) -> Result<Vec<Notification>, NixlError> {
        let taken = self.collect(std::mem::take)?.into_iter();
        let each = taken.flat_map(|(from, messages)| {
            let from = std::iter::repeat_n(from, messages.len());
            from.zip(messages).map(|(from, message)| Notification { from, message })
        });
        Ok(each.collect())
    }

    /// Takes the messages of one peer, and leaves the others'.
    ///
    /// # Errors
    ///
    /// As [`notifications`](Self::notifications).
    pub fn notifications_from(&self, sender: &AgentName) -> Result<Vec<Vec<u8>>, NixlError> {
        let of_sender = self.collect(|unread| unread.remove(sender))?;
        Ok(of_sender.unwrap_or_default().into())
    }

    /// Blocks the thread until there are messages, or `deadline` has passed, and takes them all.
    ///
    /// NIXL wakes nobody, so the thread looks, as often as the wait is young: it is late by a tenth of
    /// the time it has waited, and by a millisecond at most.
    ///
    /// # Errors
    ///
    /// As [`notifications`](Self::notifications).
    pub fn wait_for_notifications(
        &self,
        deadline: Instant,
    ) -> Result<Vec<Notification>, NixlError> {
        const LONGEST: Duration = Duration::from_millis(1);
        let begun = Instant::now();
        loop {
            let found = self.notifications()?;
            let left = deadline.saturating_duration_since(Instant::now());
            if !found.is_empty() || left.is_zero() {
                return Ok(found);
            }
            match (begun.elapsed() / 10).min(LONGEST).min(left) {
                rest if rest < Duration::from_micros(5) => thread::yield_now(),
                rest => thread::sleep(rest),
            }
        }
    }

    /// Sends a message to a peer, of no transfer. That it was sent does not mean that it has
    /// arrived: if the connection breaks meanwhile, nothing says so.
    ///
    /// # Errors
    ///
    /// [`NixlError::UnknownPeer`] if the agent does not know the peer, or no more,
    /// [`NixlError::PeerLost`] if the connection to it has broken, now or before.
    pub fn notify(&self, peer: PeerId, message: &[u8]) -> Result<(), NixlError> {
        process::check()?;
        let agent = || self.name().clone();
        let lost = |name| NixlError::PeerLost { agent: agent(), peer: name };
        let known = self.use_peer(peer).map_err(|reason| match reason {
            NoUse::Unknown => NixlError::UnknownPeer { agent: agent(), peer },
            NoUse::Lost(name) => lost(name),
        })?;
        if known.wait_until_ready() == Readiness::Lost {
            return Err(lost(known.name().clone()));
        }
        let name = known.nixl_name().as_str();
        self.raw().send_notification(name, message, None).map_err(|error| {
            tracing::debug!(peer = %known.name(), ?error, "a notification could not be sent");
            known.suspect();
            lost(known.name().clone())
        })
    }

    /// Puts what NIXL has into the mailbox, and takes some of what is there.
    fn collect<T>(&self, take: impl FnOnce(&mut Unread) -> T) -> Result<T, NixlError> {
        const TAKING: &str = "taking notifications";
        process::check()?;
        let failed = Status::during(TAKING);
        let mut map = nixl_sys::NotificationMap::new().map_err(failed)?;
        // Locked before NIXL is asked, so that two threads keep the order of what arrives.
        let mut unread = self.mailbox().0.lock().unwrap_or_else(PoisonError::into_inner);
        let mut outcome = quietly(|| self.raw().get_notifications(&mut map, None));
        let mut nameless = Vec::new();
        // If a backend failed, what the others had is here nevertheless, and nowhere else.
        for sender in map.agents() {
            let messages = sender.and_then(|sender| Ok((sender, map.get_notifications(sender)?)));
            let (sender, messages) = match messages {
                Ok(found) => found,
                Err(error) => {
                    nameless.push(error);
                    continue;
                }
            };
            let box_of = unread.entry(AgentName::from(sender)).or_default();
            for message in messages {
                match message {
                    Ok(message) => box_of.push_back(message),
                    Err(error) => outcome = outcome.and(Err(error)),
                }
            }
        }
        let taken = outcome.map(|()| take(&mut unread));
        drop(unread);
        // Not under the lock: what listens may ask for messages.
        for error in nameless {
            tracing::error!(agent = %self.name(), ?error, "a sender whose name is none");
        }
        taken.map_err(failed)
    }
}
