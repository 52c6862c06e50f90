//! Flights that the engine's thread and the threads that wait for them advance, one at a time.

use std::ops::Range;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, TryLockError, Weak};
use std::time::{Duration, Instant};

use terrane_transfer::{Attend, CopyJob};

use super::flight::{Flight, Step};
use super::prepared::Prepared;
use super::remains::Abandoned;
use super::route::{Begun, Rates};
use super::worker::Queue;
use crate::{Agent, NixlEngineOptions, process};

/// How long the engine's thread leaves a new flight to the thread that has submitted it, which mostly
/// waits next. It would copy where it wakes, and whoever waits would have to be woken in turn; where it
/// wakes on the submitter's own processor, that one could not even begin to wait.
///
/// Longer than it takes from a submit to a wait, and as long as a wake-up.
pub(super) const GRACE: Duration = Duration::from_micros(100);

/// How long the engine's thread does not look at a flight that somebody else is at. Who waits for the end
/// stays until then, or says so; it would have to unwind to go without a word.
const WATCH: Duration = Duration::from_millis(20);

/// The same where it may be somebody who waits for a layer, and goes without a word once that is there.
const WATCH_OF_LAYERS: Duration = Duration::from_millis(1);

/// A flight that whoever comes first advances: a thread that waits for it and has nothing else to do,
/// or, after a [grace](GRACE), the engine's thread.
///
/// The lock is held while NIXL posts and looks, and while the job is finished, which runs foreign
/// code. So nobody ever waits for it: where it is taken, the flight is in good hands, which may be those
/// of this very thread further up its stack.
pub(super) struct Attended {
    state: Mutex<State>,
    /// Until when it is left to a thread that waits.
    left_until: Instant,
    /// Somebody has asked for it who does not wait here, so that it is not left any more.
    is_asked_for: AtomicBool,
    watch: Duration,
    means: Arc<Means>,
    /// Gone once the engine's thread has.
    queue: Weak<Queue>,
}

/// What it takes to advance a flight.
pub(super) struct Means {
    pub(super) agent: Agent,
    pub(super) options: Arc<NixlEngineOptions>,
    pub(super) rates: Rates,
    pub(super) prepared: Arc<Prepared>,
}

enum State {
    InFlight(Box<Flight>),
    /// What a flight that was given up leaves is the engine's thread's to look after.
    Over(Option<Box<Abandoned>>),
}

/// What the engine's thread finds.
pub(super) enum Visit {
    /// It is left alone until then.
    Left(Instant),
    /// Somebody else is at it. To be looked at again after so long, in case nobody is any more.
    Elsewhere(Duration),
    /// Nothing has changed.
    Quiet,
    /// Something has been posted, or has ended.
    News,
    /// It is over, and this is left of it.
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
        let watch = if job.terms().layer_wise { WATCH_OF_LAYERS } else { WATCH };
        let flight = Flight::new(job, begun, &means.options, &means.prepared);
        let attended = Arc::new(Self {
            state: Mutex::new(State::InFlight(Box::new(flight))),
            left_until: Instant::now() + GRACE,
            is_asked_for: AtomicBool::new(false),
            watch,
            means: Arc::clone(means),
            queue: Arc::downgrade(queue),
        });
        // Nobody else knows of it yet.
        if let Ok(state) = attended.state.try_lock()
            && let State::InFlight(flight) = &*state
        {
            flight.invite(attended.clone());
        }
        attended
    }

    /// Until when the engine's thread leaves it alone, unless somebody has asked for it.
    pub(super) fn left_until(&self) -> Option<Instant> {
        // Whoever asks after this nudges after this, too.
        (!self.is_asked_for.load(Ordering::Relaxed)).then_some(self.left_until)
    }

    /// Advances the flight on the engine's thread, unless it is left alone now.
    pub(super) fn visit(&self, now: Instant) -> Visit {
        // Whoever asks says so under the lock of the queue as well, under which this thread has looked.
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

    /// Advances the flight and says whether anything has changed; `None` if somebody else is at it.
    fn advance(&self) -> Option<(MutexGuard<'_, State>, bool)> {
        if process::is_forked() {
            return None;
        }
        let mut state = match self.state.try_lock() {
            Ok(state) => state,
            // What a panic left behind can be advanced, or is over.
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
    /// Has the engine's thread see to the flight.
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

impl Attend for Attended {
    /// Looks at nothing, as a look at a request may copy for as long as there is anything to copy. But
    /// who only looks does not wait, so the engine's thread begins.
    fn poll(&self) {
        if !self.is_asked_for.load(Ordering::Relaxed) {
            self.ask();
        }
    }

    fn serve(&self) -> bool {
        self.advance().is_some_and(|(_, news)| news)
    }

    /// Who asks is about to sleep, so the engine's thread goes on.
    fn due(&self) -> Option<Range<Instant>> {
        self.ask();
        None
    }
}
