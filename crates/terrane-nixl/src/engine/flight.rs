//! One transfer: its requests, from the first to the last.

use std::collections::VecDeque;
use std::mem::ManuallyDrop;
use std::sync::Arc;
use std::time::Instant;

use terrane_core::ByteCount;
use terrane_transfer::{CopyFailure, CopyJob, EngineTimes, WaiterProgress};

use super::error::{NixlStep, RequestFailed};
use super::file_ends;
use super::lists::{Most, Place, Refused, Stretch};
use super::posted::{Left, Posted, State, settle};
use super::prepared::Prepared;
use super::remains::Abandoned;
use super::route::{Begun, Rates, Route};
use crate::peers::{PeerUse, Readiness};
use crate::{Agent, NixlEngineOptions, Status, process};

/// A transfer, from when it is submitted until it has ended.
pub(super) struct Flight {
    /// `None` once it has ended.
    job: Option<CopyJob>,
    route: Route,
    peer: Option<PeerUse>,
    options: Arc<NixlEngineOptions>,
    prepared: Arc<Prepared>,
    /// The indices of a request's pieces at either end; kept for the next request.
    numbers: [Vec<i32>; 2],
    /// The transfer's deadline. Once it has begun, at most the options' deadline.
    deadline: Option<Instant>,
    has_begun: bool,
    /// Where the next request begins.
    next: Place,
    /// In the order in which they were posted.
    requests: VecDeque<Posted>,
    /// Whether the peer must still be notified, and no request does so.
    to_tell: bool,
    /// The number of completed layers, from the first one on.
    layers_done: u32,
    /// The first failure, while requests in flight end.
    failure: Option<CopyFailure>,
    times: Option<EngineTimes>,
}

/// The result of an attempt to post.
enum Next {
    /// A request has been posted, or the peer notified.
    Posted,
    /// Posting must wait.
    Later,
    /// There is nothing left to post.
    Nothing,
}

/// The result of polling a flight.
pub(super) enum Step {
    /// Nothing has changed.
    Quiet,
    /// Something has been posted, or has ended.
    News,
    /// It is over.
    Over,
    /// It is over, but its requests are not.
    GivenUp(Box<Abandoned>),
}

impl Flight {
    pub(super) fn new(
        job: CopyJob,
        begun: Begun,
        options: &Arc<NixlEngineOptions>,
        prepared: &Arc<Prepared>,
    ) -> Self {
        let Begun { route, peer } = begun;
        let deadline = job.options().deadline;
        let (to_tell, layers_done) =
            (job.options().notification.is_some(), job.plan().layers().start);
        Self {
            job: Some(job),
            route,
            peer,
            options: Arc::clone(options),
            prepared: Arc::clone(prepared),
            numbers: Default::default(),
            deadline,
            has_begun: false,
            next: Place::default(),
            requests: VecDeque::new(),
            to_tell,
            layers_done,
            failure: None,
            times: None,
        }
    }

    /// Lets threads that wait for the job advance it.
    pub(super) fn invite(&self, attendant: Arc<dyn WaiterProgress>) {
        if let Some(job) = &self.job {
            job.invite_waiters(attendant);
        }
    }

    fn begin(&mut self) {
        if std::mem::replace(&mut self.has_begun, true) {
            return;
        }
        if let Some(job) = &self.job {
            job.start();
        }
        let usual = self.options.deadline.and_then(|most| Instant::now().checked_add(most));
        self.deadline = match (self.deadline, usual) {
            (Some(own), Some(usual)) => Some(own.min(usual)),
            (one, other) => one.or(other),
        };
    }

    /// Posts the next request, and polls those in flight.
    pub(super) fn advance(&mut self, agent: &Agent, rates: &Rates) -> Step {
        self.begin();
        let news = self.collect(agent);
        // Before reading the clock: the peer may have been notified already that all has arrived.
        if self.is_done() {
            self.end(rates);
            return Step::Over;
        }
        if self.failure.is_none() && self.is_late() {
            self.failure = Some(CopyFailure::DeadlineExceeded);
        }
        if self.failure.is_some() {
            return self.wind_up(agent, news);
        }
        match self.post_next(agent) {
            Ok(Next::Posted) => Step::News,
            Ok(Next::Later | Next::Nothing) if news => Step::News,
            Ok(Next::Later | Next::Nothing) => Step::Quiet,
            Err(failure) => {
                self.failure = Some(failure);
                self.wind_up(agent, true)
            }
        }
    }

    /// Whether everything has been posted and has succeeded.
    fn is_done(&self) -> bool {
        let all = self.job.as_ref().map_or(0, |job| job.plan().runs().len());
        let is_posted = self.next.run >= all && !self.to_tell;
        is_posted && self.requests.is_empty() && self.failure.is_none()
    }

    fn is_late(&self) -> bool {
        self.deadline.is_some_and(|deadline| deadline <= Instant::now())
    }

    /// Polls the requests in flight. Returns whether one has ended.
    fn collect(&mut self, agent: &Agent) -> bool {
        let mut news = false;
        for number in 0..self.requests.len() {
            let Some(posted) = self.requests.get_mut(number) else { break };
            let before = posted.state();
            let state = posted.look(agent);
            if state == before {
                continue;
            }
            news = true;
            let status = match state {
                State::Adrift(status) | State::Failed(status) => status,
                State::Unknown => Status::NotFound,
                State::InFlight | State::Done | State::Closed => continue,
            };
            let run = posted.stretch.places.start;
            let failure = self.failed(agent, NixlStep::Transfer, status, Some(run));
            self.failure.get_or_insert(failure);
        }
        while self.requests.front().is_some_and(Posted::has_ended) {
            if let Some(posted) = self.requests.pop_front() {
                self.account(agent, &posted);
            }
        }
        news
    }

    /// Accounts for a request that has ended, and releases it.
    fn account(&mut self, agent: &Agent, posted: &Posted) {
        let Some(job) = &self.job else { return };
        if posted.state() != State::Done {
            return;
        }
        job.progress().add(posted.stretch.bytes);
        if agent.has_telemetry() {
            posted.add_times(&mut self.times);
        }
        // Requests are removed in the order in which they were posted.
        if self.failure.is_none()
            && let Some(layers) = job.layers()
        {
            let plan = job.plan();
            let next = posted.stretch.places.end.run;
            let is_last = next >= plan.runs().len();
            let reached = if is_last { plan.layers().end } else { plan.layer(next) };
            if reached > self.layers_done {
                layers.done(self.layers_done..reached);
                self.layers_done = reached;
            }
        }
    }

    /// Posts a request, or notifies the peer, if either is possible now.
    fn post_next(&mut self, agent: &Agent) -> Result<Next, CopyFailure> {
        let Some(job) = &self.job else { return Ok(Next::Nothing) };
        if self.requests.len() >= self.options.requests.get() {
            return Ok(Next::Later);
        }
        match self.peer.as_ref().map_or(Readiness::Ready, PeerUse::readiness) {
            Readiness::Ready => {}
            Readiness::Later => return Ok(Next::Later),
            // NIXL is not called at all.
            Readiness::Lost => {
                return Err(self.failed(agent, NixlStep::Prepare, Status::NotFound, None));
            }
        }
        let (plan, options) = (job.plan(), job.options());
        let most = Most::of(&self.options, self.route.backend(agent));
        let Some(stretch) = most.stretch(plan, self.next, options.layer_by_layer) else {
            return if self.to_tell && self.requests.is_empty() {
                self.tell(agent)
            } else {
                Ok(Next::Nothing)
            };
        };
        let is_first = self.next == Place::default();
        let is_last = stretch.places.end.run >= plan.runs().len();
        // The last request notifies the peer, so all others must have ended.
        if is_last && self.to_tell && !self.requests.is_empty() {
            return Ok(Next::Later);
        }
        // I/Os are free again when other requests have ended.
        let ios = match self.route.backend(agent).and_then(|backend| backend.ios.as_ref()) {
            Some(ios) => match ios.take(stretch.descriptors(), stretch.bytes.get()) {
                Some(taken) => Some(taken),
                None => return Ok(Next::Later),
            },
            None => None,
        };
        if is_first {
            file_ends::check_before(&self.route, job.plan()).map_err(engine)?;
        }
        let message = options.notification.as_deref().filter(|_| is_last);
        let run = Some(stretch.places.start);
        let mut numbers = std::mem::take(&mut self.numbers);
        let request = self.request(agent, &stretch, &mut numbers, message);
        self.numbers = numbers;
        let request = request.map_err(|refused| match refused {
            Refused::Status(status) => self.failed(agent, NixlStep::Prepare, status, run),
            Refused::Failed(cause) => engine(cause),
        })?;
        let (state, failure) = match agent.raw().post_xfer_req(&request, None) {
            Ok(true) => (State::InFlight, None),
            Ok(false) => (State::Done, None),
            Err(error) => {
                let status = Status::of(&error);
                let failure = self.failed(agent, NixlStep::Post, status, run);
                if status == Status::NotFound && self.is_unknown(agent) {
                    // NIXL itself checks that it knows the peer before it posts.
                    return Err(failure);
                }
                (State::Adrift(status), Some(failure))
            }
        };
        self.next = stretch.places.end;
        self.to_tell &= !is_last;
        let is_final = self.route.backend(agent).is_some_and(|backend| backend.fails_at_the_end);
        self.requests.push_back(Posted::new(request, ios, stretch, is_final, state));
        failure.map_or(Ok(Next::Posted), Err)
    }

    fn request(
        &self,
        agent: &Agent,
        stretch: &Stretch,
        numbers: &mut [Vec<i32>; 2],
        message: Option<&[u8]>,
    ) -> Result<nixl_sys::XferRequest, Refused> {
        let Some(job) = &self.job else { return Err(Refused::Status(Status::Bindings)) };
        let status = |error| Refused::Status(Status::of(&error));
        let Some(backend) = self.route.backend(agent) else {
            return Err(Refused::Status(Status::NotFound));
        };
        let telling = message.map(|m| backend.telling(m)).transpose().map_err(status)?;
        let options = telling.as_ref().unwrap_or_else(|| backend.options());
        if let Some(request) = self.prepared_request(agent, stretch, numbers, options) {
            return Ok(request);
        }
        let [here, there] = stretch.lists(job.plan(), &self.route)?;
        let (operation, peer) = (self.route.operation.raw(), self.route.nixl_name(agent));
        let raw = agent.raw();
        raw.create_xfer_req(operation, &here, &there, peer.as_str(), Some(options)).map_err(status)
    }

    /// A request from prepared lists. `None` if there are none for it, or NIXL refuses them: its
    /// descriptors are then listed again, and NIXL reports any error of those.
    ///
    /// The peer is known to be ready.
    fn prepared_request(
        &self,
        agent: &Agent,
        stretch: &Stretch,
        numbers: &mut [Vec<i32>; 2],
        options: &nixl_sys::OptArgs,
    ) -> Option<nixl_sys::XferRequest> {
        let (plan, peer) = (self.job.as_ref()?.plan(), self.peer.as_ref()?);
        if !stretch.is_of_pieces(plan) {
            return None;
        }
        let (route, descriptors) = (&self.route, stretch.descriptors());
        let [here, there] = self.prepared.lists(agent, route, plan, peer, descriptors)?;
        let [near, far] = numbers;
        stretch.numbers(plan, route.local, here.numbering(), near)?;
        stretch.numbers(plan, route.target_side(), there.numbering(), far)?;
        let (operation, options) = (route.operation.raw(), Some(options));
        let raw = agent.raw();
        match raw.make_xfer_req(operation, here.raw(), near, there.raw(), far, options) {
            Ok(request) => Some(request),
            Err(error) => {
                tracing::debug!(agent = %agent.name(), %error, "prepared descriptors were refused");
                self.prepared.forget(route, plan);
                None
            }
        }
    }

    /// Notifies the peer of a transfer that had nothing to copy.
    fn tell(&mut self, agent: &Agent) -> Result<Next, CopyFailure> {
        self.to_tell = false;
        let message = self.job.as_ref().and_then(|job| job.options().notification.clone());
        let (Some(message), Some(peer)) = (message, &self.peer) else { return Ok(Next::Nothing) };
        let backend = self.route.backend(agent).map(|backend| &backend.raw);
        match agent.raw().send_notification(peer.nixl_name().as_str(), &message, backend) {
            Ok(()) => Ok(Next::Posted),
            Err(error) => Err(self.failed(agent, NixlStep::Notify, Status::of(&error), None)),
        }
    }

    /// Converts NIXL's refusal to a failure.
    fn failed(
        &self,
        agent: &Agent,
        step: NixlStep,
        status: Status,
        at: Option<Place>,
    ) -> CopyFailure {
        let backend = self.route.backend_name(agent);
        let cause = match (&self.peer, self.route.peer().cloned()) {
            (Some(held), Some(peer)) => {
                if step != NixlStep::Prepare {
                    held.suspect();
                }
                if held.readiness() == Readiness::Lost || self.is_unknown(agent) {
                    RequestFailed::PeerLost { peer, backend, step, status }
                } else {
                    RequestFailed::Status { backend, peer: Some(peer), step, status }
                }
            }
            (_, peer) => RequestFailed::Status { backend, peer, step, status },
        };
        match at {
            Some(Place { run, offset }) => CopyFailure::Run {
                index: run,
                offset: ByteCount::new(offset),
                source: cause.into(),
            },
            None => engine(cause),
        }
    }

    /// Whether NIXL does not know the peer.
    fn is_unknown(&self, agent: &Agent) -> bool {
        let known =
            |peer: &PeerUse| agent.raw().check_remote_metadata(peer.nixl_name().as_str(), None);
        !self.peer.as_ref().is_none_or(known)
    }

    /// Ends a failed transfer once nothing of it is in flight. Gives it up if that takes too long,
    /// or if NIXL no longer reports what is in flight.
    fn wind_up(&mut self, agent: &Agent, news: bool) -> Step {
        let waits = |posted: &Posted| posted.state() == State::InFlight;
        if self.requests.iter().any(waits) && !self.is_late() {
            return if news { Step::News } else { Step::Quiet };
        }
        let left = settle(self.requests.iter_mut(), self.peer.as_mut(), agent);
        let Some(job) = self.job.take() else { return Step::Over };
        let failure = self.failure.take().unwrap_or(CopyFailure::DeadlineExceeded);
        if left == Left::Nothing {
            self.requests.clear();
            // The peer is free before the outcome is visible.
            self.peer = None;
            job.finish(Err(failure));
            return Step::Over;
        }
        let remains = job.orphan(failure);
        Step::GivenUp(Box::new(Abandoned::new(self.requests.drain(..), remains, self.peer.take())))
    }

    fn end(&mut self, rates: &Rates) {
        let Some(mut job) = self.job.take() else { return };
        // The peer is free before the outcome is visible.
        self.peer = None;
        // The file may have been truncated during the read, or written short.
        if let Err(cause) = file_ends::check_after(&self.route, job.plan()) {
            return job.finish(Err(engine(cause)));
        }
        if let Some(times) = self.times {
            job.measured(times);
        }
        rates.of(&self.route).learn(job.plan().bytes(), job.running_for());
        job.finish(Ok(()));
    }
}

impl Drop for Flight {
    /// Memory of requests in flight is kept, even if the thread unwinds.
    fn drop(&mut self) {
        if process::is_forked() {
            // The parent's NIXL continues the requests, and the parent owns the rest.
            let requests = std::mem::take(&mut self.requests);
            let _parents = ManuallyDrop::new((requests, self.job.take(), self.peer.take()));
            return;
        }
        let Some(job) = self.job.take() else { return };
        if self.requests.is_empty() {
            return;
        }
        let lost = CopyFailure::Engine { source: "the engine's thread has stopped".into() };
        let remains = job.orphan(lost);
        drop(Abandoned::new(self.requests.drain(..), remains, self.peer.take()));
    }
}

fn engine(cause: RequestFailed) -> CopyFailure {
    CopyFailure::Engine { source: cause.into() }
}

#[cfg(test)]
mod tests;
