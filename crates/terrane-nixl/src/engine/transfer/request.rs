//! A request, from its post until it no longer accesses memory.

use std::mem::ManuallyDrop;
use std::time::Duration;

use terrane_transfer::EngineTimes;

use crate::agent::Agent;
use crate::agent::io_limit::ReservedIos;
use crate::bindings::status::Status;
use crate::engine::descriptors::chunk::Chunk;
use crate::peers::peer_use::{ConnectionState, PeerUse};

/// A request that has been posted, or that NIXL failed to post.
pub(super) struct Request {
    // Fields drop in this order: the I/Os of the backend are free once the request is released.
    raw: nixl_sys::XferRequest,
    ios: Option<ReservedIos>,
    pub(super) chunk: Chunk,
    /// Whether the backend reports a failure only once no part of the request is in flight.
    failure_is_final: bool,
    state: RequestState,
}

/// The state of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum RequestState {
    InFlight,
    Completed,
    /// NIXL reports that it has failed, and reports nothing else from then on. UCX does so at the
    /// first descriptor that fails, and no longer polls those posted before. So parts of the
    /// request may still be in flight.
    FailedInFlight(Status),
    /// It has failed, and none of its parts is in flight.
    Failed(Status),
    /// NIXL no longer knows the peer. It reports only that, whatever the request does.
    PeerUnknown,
    /// It failed, and ended with its connection.
    ConnectionClosed,
}

/// Which of a transfer's requests have not ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::engine) enum Outstanding {
    /// None.
    Nothing,
    /// Some that NIXL can report on, or whose connection must still be closed.
    Some,
    /// Only requests whose end will never be known.
    Unknowable,
}

impl Request {
    pub(super) fn new(
        raw: nixl_sys::XferRequest,
        ios: Option<ReservedIos>,
        chunk: Chunk,
        failure_is_final: bool,
        state: RequestState,
    ) -> Self {
        Self { raw, ios, chunk, failure_is_final, state }
    }

    pub(super) fn state(&self) -> RequestState {
        self.state
    }

    /// Whether none of its parts is in flight.
    pub(super) fn has_ended(&self) -> bool {
        use RequestState as S;
        matches!(self.state, S::Completed | S::Failed(_) | S::ConnectionClosed)
    }

    /// Polls NIXL, unless it can report nothing more.
    pub(super) fn poll(&mut self, agent: &Agent) -> RequestState {
        if self.state == RequestState::InFlight {
            self.state = match agent.raw().get_xfer_status(&self.raw) {
                Ok(nixl_sys::XferStatus::InProgress) => RequestState::InFlight,
                Ok(nixl_sys::XferStatus::Success) => RequestState::Completed,
                Err(nixl_sys::NixlError::NotFound) => RequestState::PeerUnknown,
                Err(error) if self.failure_is_final => RequestState::Failed(Status::of(&error)),
                Err(error) => RequestState::FailedInFlight(Status::of(&error)),
            };
        }
        self.state
    }

    /// Leaks the request, which keeps its I/Os.
    pub(super) fn leak(self) {
        if let Some(ios) = &self.ios {
            ios.lose();
        }
        let _leaked = ManuallyDrop::new(self);
    }

    /// Adds the times that NIXL has measured.
    pub(super) fn add_times(&self, times: &mut Option<EngineTimes>) {
        let Ok(measured) = self.raw.get_telemetry() else { return };
        let times = times.get_or_insert_default();
        times.post += Duration::from_micros(measured.post_duration_us);
        times.transfer += Duration::from_micros(measured.xfer_duration_us);
        times.requests += 1;
        times.descriptors += measured.desc_count;
    }
}

/// Polls the requests of a failed transfer. Once NIXL reports none in flight, this closes the
/// peer's connection, which ends those that failed in flight. A file has no connection, so the end
/// of its failed requests is never known.
pub(super) fn poll_failed<'a>(
    requests: impl Iterator<Item = &'a mut Request>,
    peer: Option<&mut PeerUse>,
    agent: &Agent,
) -> Outstanding {
    let (mut failed_in_flight, mut rest) = (Vec::new(), Outstanding::Nothing);
    for request in requests {
        match request.poll(agent) {
            RequestState::Completed | RequestState::Failed(_) | RequestState::ConnectionClosed => {}
            RequestState::InFlight => return Outstanding::Some,
            RequestState::PeerUnknown => rest = Outstanding::Unknowable,
            RequestState::FailedInFlight(_) => failed_in_flight.push(request),
        }
    }
    if failed_in_flight.is_empty() && rest == Outstanding::Nothing {
        return Outstanding::Nothing;
    }
    match peer.map_or(ConnectionState::Unknown, PeerUse::request_close) {
        ConnectionState::Open if !failed_in_flight.is_empty() => Outstanding::Some,
        ConnectionState::Open => rest,
        ConnectionState::Closed => {
            for request in failed_in_flight {
                request.state = RequestState::ConnectionClosed;
            }
            rest
        }
        ConnectionState::Unknown => Outstanding::Unknowable,
    }
}
