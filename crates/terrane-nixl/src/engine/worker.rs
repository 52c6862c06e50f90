//! The engine's thread.

use std::collections::VecDeque;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use terrane_transfer::{CopyFailure, CopyJob, Declined};

use super::error::RequestFailed;
use super::flight::{Flight, Step};
use super::options::NixlEngineOptions;
use super::pace::Pace;
use super::remains::{Abandoned, Rounds};
use super::route::{Begun, Rates};
use crate::Agent;

/// What has been submitted and not been taken up yet.
#[derive(Debug, Default)]
pub(super) struct Queue {
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Debug, Default)]
struct State {
    jobs: VecDeque<(CopyJob, Result<Begun, Declined>)>,
    is_closed: bool,
}

impl Queue {
    pub(super) fn push(&self, job: CopyJob, route: Result<Begun, Declined>) {
        self.lock().jobs.push_back((job, route));
        self.changed.notify_one();
    }

    /// Nothing is submitted any more.
    pub(super) fn close(&self) {
        self.lock().is_closed = true;
        self.changed.notify_one();
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Takes what there is. Waits for it at most so long; for ever with `None`. The end comes as
    /// news once, to whoever does not know of it.
    fn take(&self, rest: Option<Duration>, knows_of_end: bool) -> Taken {
        let nothing =
            |state: &mut State| state.jobs.is_empty() && (knows_of_end || !state.is_closed);
        let mut state = self.lock();
        state = match rest {
            Some(Duration::ZERO) => {
                drop(state);
                thread::yield_now();
                self.lock()
            }
            Some(rest) if nothing(&mut state) => {
                let waited = self.changed.wait_timeout(state, rest);
                waited.unwrap_or_else(PoisonError::into_inner).0
            }
            Some(_) => state,
            None => self.changed.wait_while(state, nothing).unwrap_or_else(PoisonError::into_inner),
        };
        let jobs = std::mem::take(&mut state.jobs);
        Taken { jobs, is_closed: state.is_closed }
    }
}

struct Taken {
    jobs: VecDeque<(CopyJob, Result<Begun, Declined>)>,
    is_closed: bool,
}

pub(super) struct Worker {
    agent: Agent,
    options: Arc<NixlEngineOptions>,
    queue: Arc<Queue>,
    rates: Arc<Rates>,
    flights: Vec<Flight>,
    abandoned: Vec<Abandoned>,
}

impl Worker {
    pub(super) fn new(
        agent: Agent,
        options: NixlEngineOptions,
        queue: Arc<Queue>,
        rates: Arc<Rates>,
    ) -> Self {
        let options = Arc::new(options);
        Self { agent, options, queue, rates, flights: Vec::new(), abandoned: Vec::new() }
    }

    /// Serves until the engine has dropped and everything has ended.
    pub(super) fn serve(mut self) {
        let (mut pace, mut rounds) = (Pace::new(self.options.attention), Rounds::new());
        let (mut is_closed, mut leaves_by) = (false, None);
        loop {
            let taken = self.queue.take(self.rest(&pace, is_closed), is_closed);
            is_closed = taken.is_closed;
            if !taken.jobs.is_empty() {
                pace.news();
            }
            for (job, route) in taken.jobs {
                self.take_up(job, route);
            }
            if self.advance() {
                pace.news();
            }
            if !self.abandoned.is_empty() && rounds.is_due() {
                let agent = &self.agent;
                self.abandoned.retain_mut(|abandoned| !abandoned.has_ended(agent));
            }
            if is_closed && self.flights.is_empty() {
                // `None` for a farewell that no clock reaches.
                let until = *leaves_by
                    .get_or_insert_with(|| Instant::now().checked_add(self.options.farewell));
                if self.abandoned.is_empty() || until.is_some_and(|until| Instant::now() >= until) {
                    return;
                }
            }
        }
    }

    /// How long to wait for something to be submitted before the next look.
    fn rest(&self, pace: &Pace, is_closed: bool) -> Option<Duration> {
        match (self.flights.is_empty(), self.abandoned.is_empty()) {
            (false, _) => Some(pace.rest().unwrap_or(Duration::ZERO)),
            (true, false) => Some(Rounds::EVERY),
            (true, true) if is_closed => Some(Duration::ZERO),
            (true, true) => None,
        }
    }

    fn take_up(&mut self, job: CopyJob, route: Result<Begun, Declined>) {
        match route {
            Ok(route) => self.flights.push(Flight::new(job, route, &self.options)),
            Err(declined) => {
                let source = Box::new(RequestFailed::Declined(declined));
                job.finish(Err(CopyFailure::Engine { source }));
            }
        }
    }

    /// Looks once at every transfer. Says whether anything has changed.
    fn advance(&mut self) -> bool {
        let mut news = false;
        let (agent, rates, abandoned) = (&self.agent, &self.rates, &mut self.abandoned);
        self.flights.retain_mut(|flight| match flight.advance(agent, rates) {
            Step::Quiet => true,
            Step::News => {
                news = true;
                true
            }
            Step::Over => {
                news = true;
                false
            }
            Step::GivenUp(rest) => {
                news = true;
                abandoned.push(*rest);
                false
            }
        });
        news
    }
}
