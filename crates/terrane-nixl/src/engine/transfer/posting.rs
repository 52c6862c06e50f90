//! Posting the requests of a transfer.

use terrane_transfer::CopyFailure;

use super::request::{Request, RequestState};
use super::{NixlTransfer, engine_failure, file_length};
use crate::agent::Agent;
use crate::agent::options::notifying;
use crate::bindings::status::Status;
use crate::bindings::without_tracing::without_tracing;
use crate::engine::descriptors::chunk::{Chunk, ListError, PlanPosition, RequestLimits};
use crate::engine::error::{NixlStep, RequestError};
use crate::engine::local_and_target::LocalAndTarget;
use crate::engine::route::Target;
use crate::peers::peer_use::{PeerUse, Readiness};

impl NixlTransfer {
    /// Posts a request, or notifies the peer, if either is possible now. Returns whether it did.
    pub(super) fn post_next(&mut self, agent: &Agent) -> Result<bool, CopyFailure> {
        let Some(job) = &self.job else { return Ok(false) };
        if self.requests.len() >= self.options.requests.get() {
            return Ok(false);
        }
        match self.peer.as_ref().map_or(Readiness::Ready, PeerUse::readiness) {
            Readiness::Ready => {}
            Readiness::Later => return Ok(false),
            // NIXL is not called.
            Readiness::Lost => {
                return Err(self.failed(agent, NixlStep::Prepare, Status::NotFound, None));
            }
        }
        let (plan, options) = (job.plan(), job.options());
        let limits = RequestLimits::of(&self.options, self.route.backend(agent));
        let Some(chunk) = limits.chunk(plan, self.next, options.layer_by_layer) else {
            let must_notify = self.must_notify && self.requests.is_empty();
            return if must_notify { self.notify(agent) } else { Ok(false) };
        };
        let is_first = self.next == PlanPosition::default();
        let is_last = chunk.positions.end.run >= plan.runs().len();
        // The last request notifies the peer, so all others must have ended.
        if is_last && self.must_notify && !self.requests.is_empty() {
            return Ok(false);
        }
        // I/Os become free when other requests have ended.
        let ios = match self.route.backend(agent).and_then(|backend| backend.ios.as_ref()) {
            Some(ios) => match ios.reserve(chunk.descriptors(), chunk.bytes.get()) {
                Some(reserved) => Some(reserved),
                None if ios.has_enough() => return Ok(false),
                None => {
                    let backend = self.route.backend_name(agent);
                    return Err(engine_failure(RequestError::NoIosLeft { backend }));
                }
            },
            None => None,
        };
        if is_first {
            file_length::check_before(&self.route, job.plan()).map_err(engine_failure)?;
        }
        let position = Some(chunk.positions.start);
        let request = self.create_request(agent, &chunk, is_last).map_err(|error| match error {
            ListError::Status(status) => self.failed(agent, NixlStep::Prepare, status, position),
            ListError::Failed(cause) => engine_failure(cause),
        })?;
        let (state, failure) = match agent.raw().post_xfer_req(&request, None) {
            Ok(true) => (RequestState::InFlight, None),
            Ok(false) => (RequestState::Completed, None),
            Err(error) => {
                let status = Status::of(&error);
                let failure = self.failed(agent, NixlStep::Post, status, position);
                if status == Status::NotFound && self.is_peer_unknown(agent) {
                    // NIXL itself checks that it knows the peer before it posts.
                    return Err(failure);
                }
                (RequestState::FailedInFlight(status), Some(failure))
            }
        };
        self.next = chunk.positions.end;
        self.must_notify &= !is_last;
        let failure_is_final =
            self.route.backend(agent).is_some_and(|backend| backend.failure_is_final);
        self.requests.push_back(Request::new(request, ios, chunk, failure_is_final, state));
        failure.map_or(Ok(true), Err)
    }

    fn create_request(
        &mut self,
        agent: &Agent,
        chunk: &Chunk,
        is_last: bool,
    ) -> Result<nixl_sys::XferRequest, ListError> {
        let status = |error| ListError::Status(Status::of(&error));
        let Some(backend) = self.route.backend(agent) else {
            return Err(ListError::Status(Status::NotFound));
        };
        let message = self.job.as_ref().and_then(|job| job.options().notification.as_deref());
        let message = message.filter(|_| is_last);
        let notifying = message.map(|message| notifying(&backend.raw, message)).transpose();
        let notifying = notifying.map_err(status)?;
        let options = notifying.as_ref().unwrap_or_else(|| backend.options());
        let mut indices = std::mem::take(&mut self.piece_indices);
        let prepared = self.create_prepared_request(agent, chunk, &mut indices, options);
        self.piece_indices = indices;
        if let Some(request) = prepared {
            return Ok(request);
        }
        let Some(job) = &self.job else { return Err(ListError::Status(Status::Bindings)) };
        let (plan, route) = (job.plan(), &self.route);
        let LocalAndTarget { local, target } = chunk.descriptor_lists(plan, route)?;
        // The bindings pass the descriptors to NIXL's lists here, outside any lock.
        let _handed_over = (local.as_ptr(), target.as_ptr());
        let (operation, peer) = (route.operation.raw(), route.nixl_name(agent).as_str());
        let raw = agent.raw();
        let _unchanged = self.registrations.hold(agent, |table| {
            let LocalAndTarget { local, target } = &route.bases;
            let ends = [(local, route.local), (target, route.target_side())];
            let is_here = |side| side == route.local || matches!(route.target, Target::File);
            let ends = ends.into_iter().filter(|(_, side)| is_here(*side));
            let entries = ends.map(|(bases, side)| {
                bases.overlapping(table, route.backend, plan.end(side).layout().geometry())
            });
            entries.flat_map(|entries| entries.to_vec()).collect()
        });
        without_tracing(|| raw.create_xfer_req(operation, &local, &target, peer, Some(options)))
            .map_err(status)
    }

    /// Creates a request from prepared lists. `None` if there are none, or if NIXL refuses them.
    /// The descriptors are then listed, and NIXL reports the errors of these.
    ///
    /// The peer is known to be ready.
    fn create_prepared_request(
        &self,
        agent: &Agent,
        chunk: &Chunk,
        indices: &mut LocalAndTarget<Vec<i32>>,
        options: &nixl_sys::OptArgs,
    ) -> Option<nixl_sys::XferRequest> {
        let (plan, peer) = (self.job.as_ref()?.plan(), self.peer.as_ref()?);
        if !chunk.is_of_pieces(plan) {
            return None;
        }
        let (route, descriptors) = (&self.route, chunk.descriptors());
        let lists = self.prepared.lists(agent, route, plan, peer, descriptors)?;
        let LocalAndTarget { local, target } = indices;
        chunk.piece_indices(plan, route.local, &lists.local.index, local)?;
        chunk.piece_indices(plan, route.target_side(), &lists.target.index, target)?;
        let (operation, options) = (route.operation.raw(), Some(options));
        let (local_list, target_list) = (&lists.local.raw, &lists.target.raw);
        let raw = agent.raw();
        match raw.make_xfer_req(operation, local_list, local, target_list, target, options) {
            Ok(request) => Some(request),
            Err(error) => {
                tracing::debug!(agent = %agent.name(), %error, "prepared descriptors were refused");
                self.prepared.forget(route, plan);
                None
            }
        }
    }

    /// Notifies the peer of a transfer that had no bytes to copy.
    fn notify(&mut self, agent: &Agent) -> Result<bool, CopyFailure> {
        self.must_notify = false;
        let message = self.job.as_ref().and_then(|job| job.options().notification.clone());
        let (Some(message), Some(peer)) = (message, &self.peer) else {
            return Ok(false);
        };
        let backend = self.route.backend(agent).map(|backend| &backend.raw);
        match agent.raw().send_notification(peer.nixl_name().as_str(), &message, backend) {
            Ok(()) => Ok(true),
            Err(error) => Err(self.failed(agent, NixlStep::Notify, Status::of(&error), None)),
        }
    }
}
