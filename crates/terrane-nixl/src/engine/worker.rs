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

/// Submitted jobs that the thread has not taken yet.
#[derive(Default)]
pub(super) struct Queue {
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Default)]
struct State {
    submitted: VecDeque<Submitted>,
    /// A thread that helped has stopped helping.
    is_nudged: bool,
    is_closed: bool,
    /// The thread has ended, and takes no more jobs.
    is_deserted: bool,
    /// When the thread next wakes by itself, if it sleeps until a given time.
    wakes_at: Option<Instant>,
}

pub(super) enum Submitted {
    Flight(Arc<Attended>),
    /// The job is no longer possible.
    Refused(Box<CopyJob>, RequestFailed),
}

impl Queue {
    pub(super) fn push(&self, submitted: Submitted) {
        let mut state = self.lock();
        if state.is_deserted {
            drop(state);
            // Dropping a job tells its waiters that its engine has stopped.
            return drop(submitted);
        }
        // A thread that wakes by itself within the grace need not be woken.
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

    /// The thread takes no more jobs.
    fn desert(&self) {
        let mut state = self.lock();
        state.is_deserted = true;
        let left = std::mem::take(&mut state.submitted);
        drop(state);
        drop(left);
    }

    /// Makes the thread poll all flights.
    pub(super) fn nudge(&self) {
        self.lock().is_nudged = true;
        self.changed.notify_one();
    }

    /// No more jobs are submitted.
    pub(super) fn close(&self) {
        self.lock().is_closed = true;
        self.changed.notify_one();
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Takes the queued jobs. Waits for them at most this long; `None` has no limit. The end is
    /// reported once, to a caller that does not know of it.
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

/// Marks the queue as deserted when the thread unwinds, so that no thread waits for it.
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
    /// No flight needs polling until then; `None` if one does.
    spared_until: Option<Instant>,
    /// Until then, it checks in every [grace](GRACE) for new submissions.
    lingers_until: Option<Instant>,
}

/// A flight, as the engine's thread last saw it.
struct Watched {
    flight: Arc<Attended>,
    /// Another thread advances it until then. That thread reports if it stops earlier.
    spared_until: Option<Instant>,
}

/// How long the thread lingers after a submission. Later submitters then need not wake it, which
/// would take as long as copying a block of 128 KiB.
const LINGER: Duration = Duration::from_millis(1);

impl Worker {
    pub(super) fn new(means: Arc<Means>, queue: Arc<Queue>) -> Self {
        let (flights, abandoned) = (Vec::new(), Vec::new());
        Self { means, queue, flights, abandoned, spared_until: None, lingers_until: None }
    }

    /// Serves until the engine has dropped and all flights have ended, or until a panic.
    pub(super) fn serve(mut self) {
        // Dropped before the flights are: their drops may submit another.
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
                // `None` for a farewell beyond the clock's range.
                let until = *leaves_by.get_or_insert_with(|| Instant::now().checked_add(farewell));
                if self.abandoned.is_empty() || until.is_some_and(|until| Instant::now() >= until) {
                    return;
                }
            }
        }
    }

    /// How long to wait for a submission before the next poll.
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

    /// Polls once each transfer that no other thread advances. Returns whether anything has
    /// changed.
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
