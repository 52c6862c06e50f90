//! Flights that the engine's thread and waiting threads advance, one thread at a time.

use std::ops::Range;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, TryLockError, Weak};
use std::time::{Duration, Instant};

use terrane_transfer::{CopyJob, WaiterProgress};

use super::flight::{Flight, Step};
use super::prepared::Prepared;
use super::remains::Abandoned;
use super::route::{Begun, Rates};
use super::worker::Queue;
use crate::{Agent, NixlEngineOptions, process};

/// How long the engine's thread leaves a new flight to the submitting thread, which mostly waits
/// next. Otherwise the engine's thread would wake, copy, and then have to wake the waiter. If it
/// wakes on the submitter's processor, the submitter could not even begin to wait.
///
/// It is longer than the time from a submit to a wait, and as long as a wake-up.
pub(super) const GRACE: Duration = Duration::from_micros(100);

/// How long the engine's thread does not poll a flight that another thread advances. A thread that
/// waits for the end stays until then, or reports that it leaves. It would have to unwind to leave
/// without a report.
const WATCH: Duration = Duration::from_millis(20);

/// The same where a thread may wait only for a layer, and leaves without a report once that is
/// done.
const WATCH_OF_LAYERS: Duration = Duration::from_millis(1);

/// A flight that the first thread to arrive advances: a waiting thread, or, after a [grace](GRACE),
/// the engine's thread.
///
/// The lock is held while NIXL posts and polls, and while the job is finished, which runs foreign
/// code. So no thread ever waits for the lock. If it is taken, another thread advances the flight,
/// or this same thread does so further up its stack.
pub(super) struct Attended {
    state: Mutex<State>,
    /// Until then it is left to a waiting thread.
    left_until: Instant,
    /// A thread that does not wait here has asked for it, so it is no longer left.
    is_asked_for: AtomicBool,
    watch: Duration,
    means: Arc<Means>,
    /// Dangling once the engine's thread has ended.
    queue: Weak<Queue>,
}

/// The data needed to advance a flight.
pub(super) struct Means {
    pub(super) agent: Agent,
    pub(super) options: Arc<NixlEngineOptions>,
    pub(super) rates: Rates,
    pub(super) prepared: Arc<Prepared>,
}

enum State {
    InFlight(Box<Flight>),
    /// The engine's thread looks after the remains of a flight that was given up.
    Over(Option<Box<Abandoned>>),
}

/// The result of a visit by the engine's thread.
pub(super) enum Visit {
    /// It is left alone until then.
    Left(Instant),
    /// Another thread advances it. Visit it again after this delay, in case that thread has
    /// stopped.
    Elsewhere(Duration),
    /// Nothing has changed.
    Quiet,
    /// Something has been posted, or has ended.
    News,
    /// It is over, with these remains.
    Over(Option<Box<Abandoned>>),
}

impl Attended {
    /// A flight that has not begun. Threads that wait for the job can advance it from now on.
    pub(super) fn new(
        job: CopyJob,
        begun: Begun,
        means: &Arc<Means>,
        queue: &Arc<Queue>,
    ) -> Arc<Self> {
        let watch = if job.options().layer_by_layer { WATCH_OF_LAYERS } else { WATCH };
        let flight = Flight::new(job, begun, &means.options, &means.prepared);
        let attended = Arc::new(Self {
            state: Mutex::new(State::InFlight(Box::new(flight))),
            left_until: Instant::now() + GRACE,
            is_asked_for: AtomicBool::new(false),
            watch,
            means: Arc::clone(means),
            queue: Arc::downgrade(queue),
        });
        // No other thread knows of it yet.
        if let Ok(state) = attended.state.try_lock()
            && let State::InFlight(flight) = &*state
        {
            flight.invite(attended.clone());
        }
        attended
    }

    /// Until when the engine's thread leaves it alone, unless a thread has asked for it.
    pub(super) fn left_until(&self) -> Option<Instant> {
        // A thread that asks later also nudges later.
        (!self.is_asked_for.load(Ordering::Relaxed)).then_some(self.left_until)
    }

    /// Advances the flight on the engine's thread, unless it is left alone now.
    pub(super) fn visit(&self, now: Instant) -> Visit {
        // A thread that asks also sets the nudge under the queue's lock, under which this thread
        // has checked.
        if let Some(until) = self.left_until().filter(|until| now < *until) {
            return Visit::Left(until);
        }
        let Some((mut state, news)) = self.advance() else { return Visit::Elsewhere(self.watch) };
        match &mut *state {
            State::InFlight(_) if news => Visit::News,
            State::InFlight(_) => Visit::Quiet,
            State::Over(rest) => Visit::Over(rest.take()),
        }
    }

    /// Advances the flight and returns whether anything has changed; `None` if another thread does
    /// so.
    fn advance(&self) -> Option<(MutexGuard<'_, State>, bool)> {
        if process::is_forked() {
            return None;
        }
        let mut state = match self.state.try_lock() {
            Ok(state) => state,
            // After a panic, the state can still be advanced, or is over.
            Err(TryLockError::Poisoned(state)) => state.into_inner(),
            Err(TryLockError::WouldBlock) => return None,
        };
        let State::InFlight(flight) = &mut *state else { return Some((state, false)) };
        let rest = match flight.advance(&self.means.agent, &self.means.rates) {
            Step::Quiet => return Some((state, false)),
            Step::News => return Some((state, true)),
            Step::Over => None,
            Step::GivenUp(rest) => Some(rest),
        };
        *state = State::Over(rest);
        Some((state, true))
    }
}

impl Attended {
    /// Makes the engine's thread advance the flight.
    fn ask(&self) {
        if process::is_forked() {
            return;
        }
        self.is_asked_for.store(true, Ordering::Relaxed);
        if let Some(queue) = self.queue.upgrade() {
            queue.nudge();
        }
    }
}

impl WaiterProgress for Attended {
    /// Does not poll, as polling a request may copy for as long as there is data to copy. A caller
    /// that only polls does not wait, so the engine's thread starts.
    fn poll(&self) {
        if !self.is_asked_for.load(Ordering::Relaxed) {
            self.ask();
        }
    }

    fn poll_blocking(&self) -> bool {
        self.advance().is_some_and(|(_, news)| news)
    }

    /// The caller is about to sleep, so the engine's thread takes over.
    fn expected_end(&self) -> Option<Range<Instant>> {
        self.ask();
        None
    }
}
