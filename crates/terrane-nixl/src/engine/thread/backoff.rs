//! The polling interval of the engine's thread for requests in flight.

use std::time::{Duration, Instant};

/// The delay until the next poll.
///
/// Many backends move bytes only while a thread polls. So the thread polls without a delay for as
/// long as a request is expected to take. After that the delay grows: it is a twentieth of the time
/// since then, at most 50 µs.
#[derive(Debug)]
pub(super) struct Backoff {
    busy_poll: Duration,
    last_change: Instant,
}

/// The longest delay.
const LONGEST: Duration = Duration::from_micros(50);

/// Shorter delays are replaced by a poll without sleep.
const SHORTEST: Duration = Duration::from_micros(10);

impl Backoff {
    /// Creates a backoff without delays for this time after each change.
    pub(super) fn new(busy_poll: Duration) -> Self {
        Self { busy_poll, last_change: Instant::now() }
    }

    /// Records that a request has ended or begun.
    pub(super) fn reset(&mut self) {
        self.last_change = Instant::now();
    }

    /// The time to sleep; `None` to poll again at once.
    pub(super) fn delay(&self) -> Option<Duration> {
        self.delay_after(self.last_change.elapsed())
    }

    fn delay_after(&self, unchanged: Duration) -> Option<Duration> {
        let delay = (unchanged.saturating_sub(self.busy_poll) / 20).min(LONGEST);
        (delay >= SHORTEST).then_some(delay)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn delays_begin_after_busy_polling_and_end_at_fifty_microseconds() {
        let micros = Duration::from_micros;
        for (busy_poll, unchanged, delay) in [
            (0, 199, None),
            (0, 200, Some(10)),
            (0, 400, Some(20)),
            (0, 3_000_000, Some(50)),
            (1000, 1199, None),
            (1000, 1200, Some(10)),
        ] {
            let backoff = Backoff::new(micros(busy_poll));
            let found = backoff.delay_after(micros(unchanged));
            assert_eq!(found, delay.map(micros), "{busy_poll} {unchanged}");
        }
    }
}
