//! The engine's thread.

use std::collections::VecDeque;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use terrane_transfer::{CopyFailure, CopyJob};

use super::attended::{Attended, GRACE, Means, Visit};
use super::error::RequestFailed;
use super::pace::Pace;
use super::posted::Left;
use super::remains::{Abandoned, Rounds};

/// What has been submitted and not been taken up yet.
#[derive(Default)]
pub(super) struct Queue {
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Default)]
struct State {
    submitted: VecDeque<Submitted>,
    /// Somebody who has helped does not any more.
    is_nudged: bool,
    is_closed: bool,
    /// The thread has ended, and takes nothing any more.
    is_deserted: bool,
    /// When the thread looks again by itself, where it sleeps until then.
    wakes_at: Option<Instant>,
}

pub(super) enum Submitted {
    Flight(Arc<Attended>),
    /// It cannot be done any more.
    Refused(Box<CopyJob>, RequestFailed),
}

impl Queue {
    pub(super) fn push(&self, submitted: Submitted) {
        let mut state = self.lock();
        if state.is_deserted {
            drop(state);
            // The drop of a job says that its engine has stopped, to whoever waits for it.
            return drop(submitted);
        }
        // A thread that wakes by itself within the grace is not woken.
        let is_soon_enough = match (&submitted, state.wakes_at) {
            (Submitted::Flight(flight), Some(wakes_at)) => {
                flight.left_until().is_some_and(|left_until| wakes_at <= left_until)
            }
            _ => false,
        };
        state.submitted.push_back(submitted);
        drop(state);
        if !is_soon_enough {
            self.changed.notify_one();
        }
    }

    /// Nobody takes anything any more.
    fn desert(&self) {
        let mut state = self.lock();
        state.is_deserted = true;
        let left = std::mem::take(&mut state.submitted);
        drop(state);
        drop(left);
    }

    /// Has the thread look at all flights.
    pub(super) fn nudge(&self) {
        self.lock().is_nudged = true;
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
        let nothing = |state: &mut State| {
            state.submitted.is_empty() && !state.is_nudged && (knows_of_end || !state.is_closed)
        };
        let mut state = self.lock();
        state = match rest {
            Some(Duration::ZERO) => {
                drop(state);
                thread::yield_now();
                self.lock()
            }
            Some(rest) if nothing(&mut state) => {
                state.wakes_at = Instant::now().checked_add(rest);
                let waited = self.changed.wait_timeout(state, rest);
                let mut state = waited.unwrap_or_else(PoisonError::into_inner).0;
                state.wakes_at = None;
                state
            }
            Some(_) => state,
            None => self.changed.wait_while(state, nothing).unwrap_or_else(PoisonError::into_inner),
        };
        let submitted = std::mem::take(&mut state.submitted);
        let is_nudged = std::mem::take(&mut state.is_nudged);
        Taken { submitted, is_nudged, is_closed: state.is_closed }
    }
}

struct Taken {
    submitted: VecDeque<Submitted>,
    is_nudged: bool,
    is_closed: bool,
}

/// Has nobody wait for a thread that unwinds.
struct Deserter(Arc<Queue>);

impl Drop for Deserter {
    fn drop(&mut self) {
        self.0.desert();
    }
}

pub(super) struct Worker {
    means: Arc<Means>,
    queue: Arc<Queue>,
    flights: Vec<Watched>,
    abandoned: Vec<Abandoned>,
    /// Until when no flight needs to be looked at; `None` if one does.
    spared_until: Option<Instant>,
    /// Until when it looks in every [grace](GRACE) whether something has been submitted.
    lingers_until: Option<Instant>,
}

/// A flight, as the engine's thread has found it.
struct Watched {
    flight: Arc<Attended>,
    /// In other hands until then. Whoever lets go of it before says so.
    spared_until: Option<Instant>,
}

/// How long the thread lingers after something has been submitted: whoever submits more meanwhile need not
/// wake it, which takes them as long as a block of 128 KiB does.
const LINGER: Duration = Duration::from_millis(1);

impl Worker {
    pub(super) fn new(means: Arc<Means>, queue: Arc<Queue>) -> Self {
        let (flights, abandoned) = (Vec::new(), Vec::new());
        Self { means, queue, flights, abandoned, spared_until: None, lingers_until: None }
    }

    /// Serves until the engine has dropped and everything has ended, or something panics.
    pub(super) fn serve(mut self) {
        // Dropped before the flights are: whoever drops those may submit another.
        let _desert = Deserter(Arc::clone(&self.queue));
        let (mut pace, mut rounds) = (Pace::new(self.means.options.attention), Rounds::new());
        let (mut is_closed, mut leaves_by) = (false, None);
        loop {
            let taken = self.queue.take(self.rest(&pace, is_closed), is_closed);
            is_closed = taken.is_closed;
            if !taken.submitted.is_empty() {
                self.lingers_until = Some(Instant::now() + LINGER);
                pace.news();
            }
            if taken.is_nudged {
                pace.news();
            }
            if taken.is_nudged || is_closed {
                self.flights.iter_mut().for_each(|watched| watched.spared_until = None);
            }
            for submitted in taken.submitted {
                self.take_up(submitted);
            }
            if self.advance() {
                pace.news();
            }
            if !self.abandoned.is_empty() && rounds.is_due() {
                let agent = &self.means.agent;
                self.abandoned.retain_mut(|abandoned| abandoned.look(agent) == Left::Some);
            }
            if is_closed && self.flights.is_empty() {
                let farewell = self.means.options.farewell;
                // `None` for a farewell that no clock reaches.
                let until = *leaves_by.get_or_insert_with(|| Instant::now().checked_add(farewell));
                if self.abandoned.is_empty() || until.is_some_and(|until| Instant::now() >= until) {
                    return;
                }
            }
        }
    }

    /// How long to wait for something to be submitted before the next look.
    fn rest(&self, pace: &Pace, is_closed: bool) -> Option<Duration> {
        let now = Instant::now();
        let flights = match self.spared_until {
            _ if self.flights.is_empty() => None,
            Some(until) => Some(until.saturating_duration_since(now)),
            None => Some(pace.rest().unwrap_or(Duration::ZERO)),
        };
        let lingering = self.lingers_until.filter(|until| now < *until).map(|_| GRACE);
        let rounds = (!self.abandoned.is_empty()).then_some(Rounds::EVERY);
        let rest = [flights, lingering, rounds].into_iter().flatten().min();
        rest.or(is_closed.then_some(Duration::ZERO))
    }

    fn take_up(&mut self, submitted: Submitted) {
        match submitted {
            Submitted::Flight(flight) => self.flights.push(Watched { flight, spared_until: None }),
            Submitted::Refused(job, cause) => {
                job.finish(Err(CopyFailure::Engine { source: cause.into() }));
            }
        }
    }

    /// Looks once at every transfer that is not in other hands. Says whether anything has changed.
    fn advance(&mut self) -> bool {
        let (mut news, mut needs_looks, mut spared_until) = (false, false, None::<Instant>);
        let (abandoned, now) = (&mut self.abandoned, Instant::now());
        self.flights.retain_mut(|watched| {
            if watched.spared_until.is_none_or(|until| until <= now) {
                watched.spared_until = None;
                match watched.flight.visit(now) {
                    Visit::Left(until) => watched.spared_until = Some(until),
                    Visit::Elsewhere(watch) => watched.spared_until = Some(now + watch),
                    Visit::Quiet => {}
                    Visit::News => news = true,
                    Visit::Over(rest) => {
                        news = true;
                        abandoned.extend(rest.map(|rest| *rest));
                        return false;
                    }
                }
            }
            match (watched.spared_until, spared_until) {
                (None, _) => needs_looks = true,
                (Some(until), Some(earlier)) => spared_until = Some(until.min(earlier)),
                (Some(until), None) => spared_until = Some(until),
            }
            true
        });
        self.spared_until = spared_until.filter(|_| !needs_looks);
        news
    }
}
