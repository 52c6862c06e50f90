//! The polling interval of the engine's thread for requests in flight.

use std::time::{Duration, Instant};

/// The delay until the next poll.
///
/// Many backends move bytes only while a thread polls. So polls follow without a delay for as long
/// as a request is expected to take. After that the delay grows: the end is noticed late by a
/// twentieth of the time that passed since, and by 50 µs at most.
#[derive(Debug)]
pub(super) struct Pace {
    attention: Duration,
    last_news: Instant,
}

/// The longest delay.
const LONGEST: Duration = Duration::from_micros(50);

/// Shorter delays are not worth a sleep.
const SHORTEST: Duration = Duration::from_micros(10);

impl Pace {
    /// A pace without delays for this long after each change.
    pub(super) fn new(attention: Duration) -> Self {
        Self { attention, last_news: Instant::now() }
    }

    /// A request has ended or begun.
    pub(super) fn news(&mut self) {
        self.last_news = Instant::now();
    }

    /// How long to sleep; `None` to poll again at once.
    pub(super) fn rest(&self) -> Option<Duration> {
        self.rest_after(self.last_news.elapsed())
    }

    fn rest_after(&self, quiet: Duration) -> Option<Duration> {
        let rest = (quiet.saturating_sub(self.attention) / 20).min(LONGEST);
        (rest >= SHORTEST).then_some(rest)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rests_begin_after_the_attention_and_end_at_fifty_microseconds() {
        let micros = Duration::from_micros;
        for (attention, quiet, rest) in [
            (0, 199, None),
            (0, 200, Some(10)),
            (0, 400, Some(20)),
            (0, 3_000_000, Some(50)),
            (1000, 1199, None),
            (1000, 1200, Some(10)),
        ] {
            let pace = Pace::new(micros(attention));
            assert_eq!(pace.rest_after(micros(quiet)), rest.map(micros), "{attention} {quiet}");
        }
    }
}
