//! How often the engine's thread looks after requests in flight.

use std::time::{Duration, Instant};

/// How long to rest until the next look. Looks follow one another closely at first and spread as time
/// passes without news: the end is noticed late by a tenth of the time that the request took, and by
/// 50 µs at most.
#[derive(Debug)]
pub(super) struct Pace {
    last_news: Instant,
}

/// What a look may be late by.
const LONGEST: Duration = Duration::from_micros(50);

/// Rests shorter than this are not worth going to sleep for.
const SHORTEST: Duration = Duration::from_micros(5);

impl Pace {
    pub(super) fn new() -> Self {
        Self { last_news: Instant::now() }
    }

    /// Something has ended or begun.
    pub(super) fn news(&mut self) {
        self.last_news = Instant::now();
    }

    /// How long to sleep; `None` to look again at once.
    pub(super) fn rest(&self) -> Option<Duration> {
        rest_after(self.last_news.elapsed())
    }
}

fn rest_after(quiet: Duration) -> Option<Duration> {
    let rest = (quiet / 10).min(LONGEST);
    (rest >= SHORTEST).then_some(rest)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rests_grow_with_the_quiet_and_end_at_fifty_microseconds() {
        let micros = Duration::from_micros;
        assert_eq!(rest_after(micros(49)), None);
        assert_eq!(rest_after(micros(50)), Some(micros(5)));
        assert_eq!(rest_after(micros(200)), Some(micros(20)));
        assert_eq!(rest_after(Duration::from_secs(3)), Some(micros(50)));
    }
}
