//! Flights that the engine's thread and the threads that wait for them advance, one at a time.

use std::ops::Range;
use std::sync::{Arc, Mutex, MutexGuard, TryLockError, Weak};
use std::time::Instant;

use terrane_transfer::{Attend, CopyJob};

use super::flight::{Flight, Step};
use super::prepared::Prepared;
use super::remains::Abandoned;
use super::route::{Begun, Rates};
use super::worker::Queue;
use crate::{Agent, NixlEngineOptions};

/// A flight that whoever comes first advances: a thread that waits for it and has nothing else to do,
/// or the engine's thread, which has to be woken first.
///
/// The lock is held while NIXL posts and looks, and while the job is finished, which runs foreign
/// code. So nobody ever waits for it: where it is taken, the flight is in good hands, which may be those
/// of this very thread further up its stack.
pub(super) struct Attended {
    state: Mutex<State>,
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
    /// Somebody else is at it.
    Elsewhere,
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
        let flight = Flight::new(job, begun, &means.options, &means.prepared);
        let attended = Arc::new(Self {
            state: Mutex::new(State::InFlight(Box::new(flight))),
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

    /// Advances the flight on the engine's thread.
    pub(super) fn visit(&self) -> Visit {
        let Some((mut state, news)) = self.advance() else { return Visit::Elsewhere };
        match &mut *state {
            State::InFlight(_) if news => Visit::News,
            State::InFlight(_) => Visit::Quiet,
            State::Over(rest) => Visit::Over(rest.take()),
        }
    }

    /// Advances the flight and says whether anything has changed; `None` if somebody else is at it.
    fn advance(&self) -> Option<(MutexGuard<'_, State>, bool)> {
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

impl Attend for Attended {
    /// Nothing: a look at a request may copy for as long as there is anything to copy.
    fn poll(&self) {}

    fn serve(&self) -> bool {
        self.advance().is_some_and(|(_, news)| news)
    }

    /// Who asks is about to sleep, so the engine's thread goes on.
    fn due(&self) -> Option<Range<Instant>> {
        if let Some(queue) = self.queue.upgrade() {
            queue.nudge();
        }
        None
    }
}
