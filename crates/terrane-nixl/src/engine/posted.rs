//! A request, from its post until it no longer touches memory.

use terrane_transfer::EngineTimes;

use super::lists::Stretch;
use crate::agent::TakenIos;
use crate::peers::{Connection, PeerUse};
use crate::{Agent, Status};

/// A request that has been posted, or that NIXL failed to post.
pub(super) struct Posted {
    // Fields drop in this order: the request's backend resources are free once it is released.
    request: nixl_sys::XferRequest,
    _ios: Option<TakenIos>,
    pub(super) stretch: Stretch,
    /// Whether the backend reports failure only once nothing of it is in flight.
    fails_at_the_end: bool,
    state: State,
}

/// The state of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum State {
    InFlight,
    Done,
    /// NIXL reports that it has failed, and reports nothing else from then on. UCX does so for the
    /// first descriptor that failed, and stops polling those posted before. So parts of it may
    /// still be in flight.
    Adrift(Status),
    /// It has failed, and nothing of it is in flight.
    Failed(Status),
    /// NIXL no longer knows the peer, and reports only that, whatever the request does.
    Unknown,
    /// It failed, and ended with its connection.
    Closed,
}

/// Which requests of several have not ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Left {
    /// None.
    Nothing,
    /// Some that NIXL can be asked about, or whose connection must still be closed.
    Some,
    /// Only requests whose end will never be known.
    Lost,
}

impl Posted {
    pub(super) fn new(
        request: nixl_sys::XferRequest,
        ios: Option<TakenIos>,
        stretch: Stretch,
        fails_at_the_end: bool,
        state: State,
    ) -> Self {
        Self { request, _ios: ios, stretch, fails_at_the_end, state }
    }

    pub(super) fn state(&self) -> State {
        self.state
    }

    pub(super) fn has_ended(&self) -> bool {
        matches!(self.state, State::Done | State::Failed(_) | State::Closed)
    }

    /// Polls NIXL, unless it can report nothing more.
    pub(super) fn look(&mut self, agent: &Agent) -> State {
        if self.state == State::InFlight {
            self.state = match agent.raw().get_xfer_status(&self.request) {
                Ok(nixl_sys::XferStatus::InProgress) => State::InFlight,
                Ok(nixl_sys::XferStatus::Success) => State::Done,
                Err(nixl_sys::NixlError::NotFound) => State::Unknown,
                Err(error) if self.fails_at_the_end => State::Failed(Status::of(&error)),
                Err(error) => State::Adrift(Status::of(&error)),
            };
        }
        self.state
    }

    /// Adds the times that NIXL has measured.
    pub(super) fn add_times(&self, times: &mut Option<EngineTimes>) {
        let Ok(measured) = self.request.get_telemetry() else { return };
        let times = times.get_or_insert_default();
        times.post += std::time::Duration::from_micros(measured.post_duration_us);
        times.transfer += std::time::Duration::from_micros(measured.xfer_duration_us);
        times.requests += 1;
        times.descriptors += measured.desc_count;
    }
}

/// Polls the requests of a failed transfer. Once none is in flight, it closes the peer's connection
/// to end those that are adrift. A file has no connection, so its adrift requests are never known
/// to have ended.
pub(super) fn settle<'a>(
    requests: impl Iterator<Item = &'a mut Posted>,
    peer: Option<&mut PeerUse>,
    agent: &Agent,
) -> Left {
    let (mut adrift, mut left) = (Vec::new(), Left::Nothing);
    for request in requests {
        match request.look(agent) {
            State::Done | State::Failed(_) | State::Closed => {}
            State::InFlight => return Left::Some,
            State::Unknown => left = Left::Lost,
            State::Adrift(_) => adrift.push(request),
        }
    }
    if adrift.is_empty() && left == Left::Nothing {
        return Left::Nothing;
    }
    match peer.map_or(Connection::Unknown, PeerUse::closing) {
        Connection::Open if !adrift.is_empty() => Left::Some,
        Connection::Open => left,
        Connection::Closed => {
            adrift.into_iter().for_each(|request| request.state = State::Closed);
            left
        }
        Connection::Unknown => Left::Lost,
    }
}
