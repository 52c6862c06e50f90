//! One transfer: its requests, from the first to the last.

pub(super) mod file_length;
pub(super) mod orphaned;
mod posting;
pub(super) mod request;
pub(super) mod shared;
#[cfg(test)]
mod tests;

use std::collections::VecDeque;
use std::mem::ManuallyDrop;
use std::sync::Arc;
use std::time::Instant;

use terrane_core::ByteCount;
use terrane_transfer::{CopyFailure, CopyJob, EngineTimes, WaiterProgress};

use super::descriptors::chunk::PlanPosition;
use super::descriptors::prepared::PreparedLists;
use super::error::{NixlStep, RequestError};
use super::local_and_target::LocalAndTarget;
use super::options::NixlEngineOptions;
use super::route::rates::Rates;
use super::route::{ReservedRoute, Route};
use crate::agent::Agent;
use crate::bindings::process;
use crate::bindings::status::Status;
use crate::peers::peer_use::{PeerUse, Readiness};
use crate::register::held::TransferRegistrations;
use orphaned::OrphanedRequests;
use request::{Outstanding, Request, RequestState, poll_failed};

/// A transfer, from its submission until it has completed, failed or been orphaned.
pub(super) struct NixlTransfer {
    /// `None` once it has ended.
    job: Option<CopyJob>,
    route: Route,
    peer: Option<PeerUse>,
    options: Arc<NixlEngineOptions>,
    prepared: Arc<PreparedLists>,
    /// The indices of a request's pieces at either end; the buffers are kept for the next request.
    piece_indices: LocalAndTarget<Vec<i32>>,
    /// The transfer's deadline. After the start, at most the options' deadline.
    deadline: Option<Instant>,
    has_started: bool,
    /// The position at which the next request begins.
    next: PlanPosition,
    /// In the order in which they were posted.
    requests: VecDeque<Request>,
    /// The registrations that its requests may use. They drop after the requests.
    registrations: TransferRegistrations,
    /// Whether the peer must still be notified, and no request does that.
    must_notify: bool,
    /// The number of completed layers, from the first one on.
    layers_completed: u32,
    /// The first failure, while the requests in flight end.
    failure: Option<CopyFailure>,
    times: Option<EngineTimes>,
}

/// The result of advancing a transfer.
pub(super) enum TransferProgress {
    Unchanged,
    /// A request was posted or has ended.
    Changed,
    /// The transfer has completed or failed, and none of its requests is in flight.
    Ended,
    /// The transfer has failed, and its requests have not ended.
    Orphaned(Box<OrphanedRequests>),
}

impl NixlTransfer {
    pub(super) fn new(
        job: CopyJob,
        reserved: ReservedRoute,
        options: &Arc<NixlEngineOptions>,
        prepared: &Arc<PreparedLists>,
    ) -> Self {
        let ReservedRoute { route, peer } = reserved;
        let deadline = job.options().deadline;
        let (must_notify, layers_completed) =
            (job.options().notification.is_some(), job.plan().layers().start);
        Self {
            job: Some(job),
            route,
            peer,
            options: Arc::clone(options),
            prepared: Arc::clone(prepared),
            piece_indices: LocalAndTarget::default(),
            deadline,
            has_started: false,
            next: PlanPosition::default(),
            requests: VecDeque::new(),
            registrations: TransferRegistrations::default(),
            must_notify,
            layers_completed,
            failure: None,
            times: None,
        }
    }

    /// Lets threads that wait for the job advance it.
    pub(super) fn let_waiters_advance(&self, waiter: Arc<dyn WaiterProgress>) {
        if let Some(job) = &self.job {
            job.invite_waiters(waiter);
        }
    }

    fn start(&mut self) {
        if std::mem::replace(&mut self.has_started, true) {
            return;
        }
        if let Some(job) = &self.job {
            job.start();
        }
        let default = self.options.deadline.and_then(|most| Instant::now().checked_add(most));
        self.deadline = match (self.deadline, default) {
            (Some(own), Some(default)) => Some(own.min(default)),
            (one, other) => one.or(other),
        };
    }

    /// Posts the next request, and polls those in flight.
    pub(super) fn advance(&mut self, agent: &Agent, rates: &Rates) -> TransferProgress {
        if !self.has_started
            && let Some(reason) = self.job.as_ref().and_then(CopyJob::reason_to_stop)
        {
            return self.end_before_start(reason);
        }
        self.start();
        let changed = self.poll_requests(agent);
        // Before reading the clock: all bytes may have arrived, and the peer may have been notified
        // already.
        if self.is_complete() {
            self.finish(rates);
            return TransferProgress::Ended;
        }
        if self.failure.is_none() {
            self.failure = self.reason_to_stop();
        }
        if self.failure.is_some() {
            return self.end_failed(agent, changed);
        }
        match self.post_next(agent) {
            Ok(posted) if posted || changed => TransferProgress::Changed,
            Ok(_) => TransferProgress::Unchanged,
            Err(failure) => {
                self.failure = Some(failure);
                self.end_failed(agent, true)
            }
        }
    }

    /// Ends a transfer that has not started, so its destination is unchanged.
    fn end_before_start(&mut self, reason: CopyFailure) -> TransferProgress {
        self.release();
        if let Some(job) = self.job.take() {
            job.finish(Err(reason));
        }
        TransferProgress::Ended
    }

    /// The reason to stop: the job was cancelled and not all of it is posted, or a deadline has
    /// passed.
    fn reason_to_stop(&self) -> Option<CopyFailure> {
        // The last request may have notified the peer.
        let is_too_late =
            |reason: &CopyFailure| matches!(reason, CopyFailure::Cancelled) && self.is_posted();
        let of_job = self.job.as_ref().and_then(CopyJob::reason_to_stop);
        of_job
            .filter(|reason| !is_too_late(reason))
            .or_else(|| self.is_late().then_some(CopyFailure::DeadlineExceeded))
    }

    /// Whether all requests have been posted and have completed.
    fn is_complete(&self) -> bool {
        self.is_posted() && self.requests.is_empty() && self.failure.is_none()
    }

    /// Whether all requests have been posted.
    fn is_posted(&self) -> bool {
        let all = self.job.as_ref().map_or(0, |job| job.plan().runs().len());
        self.next.run >= all && !self.must_notify
    }

    fn is_late(&self) -> bool {
        self.deadline.is_some_and(|deadline| deadline <= Instant::now())
    }

    /// Polls the requests in flight. Returns whether one has ended.
    fn poll_requests(&mut self, agent: &Agent) -> bool {
        let mut changed = false;
        for number in 0..self.requests.len() {
            let Some(request) = self.requests.get_mut(number) else { break };
            let before = request.state();
            let state = request.poll(agent);
            if state == before {
                continue;
            }
            changed = true;
            let status = match state {
                RequestState::FailedInFlight(status) | RequestState::Failed(status) => status,
                RequestState::PeerUnknown => Status::NotFound,
                RequestState::InFlight
                | RequestState::Completed
                | RequestState::ConnectionClosed => continue,
            };
            let position = request.chunk.positions.start;
            let failure = self.failed(agent, NixlStep::Transfer, status, Some(position));
            self.failure.get_or_insert(failure);
        }
        while self.requests.front().is_some_and(Request::has_ended) {
            if let Some(request) = self.requests.pop_front() {
                self.account_for(agent, &request);
            }
        }
        changed
    }

    /// Adds a request that has ended to the job's progress.
    fn account_for(&mut self, agent: &Agent, request: &Request) {
        let Some(job) = &self.job else { return };
        if request.state() != RequestState::Completed {
            return;
        }
        job.progress().add(request.chunk.bytes);
        if agent.has_telemetry() {
            request.add_times(&mut self.times);
        }
        // Requests are removed in the order in which they were posted.
        if self.failure.is_none()
            && let Some(layers) = job.layers()
        {
            let plan = job.plan();
            let next = request.chunk.positions.end.run;
            let is_last = next >= plan.runs().len();
            let reached = if is_last { plan.layers().end } else { plan.layer(next) };
            if reached > self.layers_completed {
                layers.done(self.layers_completed..reached);
                self.layers_completed = reached;
            }
        }
    }

    /// Converts NIXL's refusal to a failure. Poisons the peer, unless only a preparation failed.
    fn failed(
        &self,
        agent: &Agent,
        step: NixlStep,
        status: Status,
        at: Option<PlanPosition>,
    ) -> CopyFailure {
        let backend = self.route.backend_name(agent);
        let cause = match (&self.peer, self.route.peer_name().cloned()) {
            (Some(peer_use), Some(peer)) => {
                if step != NixlStep::Prepare {
                    peer_use.poison();
                }
                if peer_use.readiness() == Readiness::Lost || self.is_peer_unknown(agent) {
                    RequestError::PeerLost { peer, backend, step, status }
                } else {
                    RequestError::Status { backend, peer: Some(peer), step, status }
                }
            }
            (_, peer) => RequestError::Status { backend, peer, step, status },
        };
        match at {
            Some(PlanPosition { run, offset }) => CopyFailure::Run {
                index: run,
                offset: ByteCount::new(offset),
                source: cause.into(),
            },
            None => engine_failure(cause),
        }
    }

    /// Whether NIXL does not know the peer.
    fn is_peer_unknown(&self, agent: &Agent) -> bool {
        let known =
            |peer: &PeerUse| agent.raw().check_remote_metadata(peer.nixl_name().as_str(), None);
        !self.peer.as_ref().is_none_or(known)
    }

    /// Ends a failed transfer once none of its requests is in flight. Orphans it if that takes too
    /// long, or if NIXL no longer reports what is in flight.
    fn end_failed(&mut self, agent: &Agent, changed: bool) -> TransferProgress {
        let is_in_flight = |request: &Request| request.state() == RequestState::InFlight;
        if self.requests.iter().any(is_in_flight) && !self.is_late() {
            return if changed { TransferProgress::Changed } else { TransferProgress::Unchanged };
        }
        let outstanding = poll_failed(self.requests.iter_mut(), self.peer.as_mut(), agent);
        let Some(job) = self.job.take() else { return TransferProgress::Ended };
        let failure = self.failure.take().unwrap_or(CopyFailure::DeadlineExceeded);
        if outstanding == Outstanding::Nothing {
            self.requests.clear();
            self.release();
            job.finish(Err(failure));
            return TransferProgress::Ended;
        }
        TransferProgress::Orphaned(Box::new(self.orphan(job, failure)))
    }

    /// Fails the job, and keeps the memory of its requests.
    fn orphan(&mut self, job: CopyJob, failure: CopyFailure) -> OrphanedRequests {
        let memory = job.orphan(failure);
        let registrations = std::mem::take(&mut self.registrations);
        OrphanedRequests::new(self.requests.drain(..), registrations, memory, self.peer.take())
    }

    /// Releases the peer and the registrations, before the outcome is visible. No request is left.
    fn release(&mut self) {
        self.peer = None;
        self.registrations = TransferRegistrations::default();
    }

    fn finish(&mut self, rates: &Rates) {
        let Some(mut job) = self.job.take() else { return };
        self.release();
        // The file may have been truncated during the read, or written short.
        if let Err(cause) = file_length::check_after(&self.route, job.plan()) {
            return job.finish(Err(engine_failure(cause)));
        }
        if let Some(times) = self.times {
            job.measured(times);
        }
        rates.of(&self.route).learn(job.plan().bytes(), job.running_for());
        job.finish(Ok(()));
    }
}

impl Drop for NixlTransfer {
    /// The memory of requests in flight is kept, even if the thread unwinds.
    fn drop(&mut self) {
        if process::is_forked() {
            // The parent's NIXL continues the requests, and the parent owns all other state.
            let requests = std::mem::take(&mut self.requests);
            let _parents = ManuallyDrop::new((requests, self.job.take(), self.peer.take()));
            return;
        }
        let Some(job) = self.job.take() else { return };
        if self.requests.is_empty() {
            return;
        }
        let stopped = CopyFailure::Engine { source: "the engine's thread has stopped".into() };
        drop(self.orphan(job, stopped));
    }
}

fn engine_failure(cause: RequestError) -> CopyFailure {
    CopyFailure::Engine { source: cause.into() }
}
