//! Time measurements: warm-up, repeats, median and spread.

use std::hint::black_box;
use std::time::Instant;

use crate::settings::Settings;

/// The median of repeated measurements, with the least and the greatest of them.
///
/// One interrupted repeat changes a mean, but not a median. The extremes show the spread.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Spread {
    /// The middle value. With an even number of values, the mean of the two in the middle.
    pub median: f64,
    /// The least value.
    pub min: f64,
    /// The greatest value.
    pub max: f64,
}

impl Spread {
    /// Summarises measured values. `None` without values.
    pub fn of(values: &[f64]) -> Option<Self> {
        let mut sorted = values.to_vec();
        sorted.sort_by(f64::total_cmp);
        let (min, max) = (*sorted.first()?, *sorted.last()?);
        let upper = sorted.get(sorted.len() / 2)?;
        let lower = sorted.get((sorted.len() - 1) / 2)?;
        Some(Self { median: f64::midpoint(*lower, *upper), min, max })
    }

    /// A value that was measured once.
    pub fn single(value: f64) -> Self {
        Self { median: value, min: value, max: value }
    }

    /// Converts the values to another unit: seconds times `1e9` are nanoseconds.
    #[must_use]
    pub fn scaled(self, factor: f64) -> Self {
        Self { median: self.median * factor, min: self.min * factor, max: self.max * factor }
    }

    /// Converts seconds to a rate: `amount` per second. The slowest repeat has the lowest rate.
    ///
    /// For GB/s, pass the bytes times `1e-9`.
    #[must_use]
    pub fn rate(self, amount: f64) -> Self {
        Self { median: amount / self.median, min: amount / self.max, max: amount / self.min }
    }
}

impl Settings {
    /// Measures the seconds of one call: warm-up calls first, then each repeat separately.
    ///
    /// For calls of at least a microsecond, because the clock itself takes some 20 ns.
    pub fn time<T>(&self, mut call: impl FnMut() -> T) -> Spread {
        self.time_batch(1, || {
            black_box(call());
        })
    }

    /// Measures the seconds of one operation, if a call runs `operations` of them.
    ///
    /// For operations of a few nanoseconds, loop in the call, and pass its inputs and results
    /// through [`std::hint::black_box`]. Zero operations count as one.
    pub fn time_batch(&self, operations: u32, mut call: impl FnMut()) -> Spread {
        for _ in 0..self.warm_up {
            call();
        }
        let operations = f64::from(operations.max(1));
        let seconds: Vec<f64> = (0..self.repeats.max(1))
            .map(|_| {
                let started = Instant::now();
                call();
                started.elapsed().as_secs_f64() / operations
            })
            .collect();
        Spread::of(&seconds).unwrap_or(Spread::single(f64::NAN))
    }

    /// Measures a case and its baseline alternately, so that interference affects both equally.
    /// Returns seconds per call, the case first.
    ///
    /// Prefer it to two calls of [`time`](Self::time) if the ratio has a target.
    pub fn time_interleaved<T, U>(
        &self,
        mut case: impl FnMut() -> T,
        mut baseline: impl FnMut() -> U,
    ) -> (Spread, Spread) {
        let [case, baseline] = self
            .time_all_interleaved([&mut || drop(black_box(case())), &mut || {
                drop(black_box(baseline()))
            }]);
        (case, baseline)
    }

    /// Measures several calls alternately. Returns seconds per call, in the order of the calls.
    pub fn time_all_interleaved<const N: usize>(
        &self,
        mut calls: [&mut dyn FnMut(); N],
    ) -> [Spread; N] {
        let mut seconds = [const { Vec::new() }; N];
        for round in 0..self.warm_up + self.repeats.max(1) {
            for (call, seconds) in calls.iter_mut().zip(&mut seconds) {
                let started = Instant::now();
                call();
                let taken = started.elapsed().as_secs_f64();
                if round >= self.warm_up {
                    seconds.push(taken);
                }
            }
        }
        seconds.map(|seconds| Spread::of(&seconds).unwrap_or(Spread::single(f64::NAN)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_spread_has_the_median_and_the_extremes() {
        let odd = Spread::of(&[3.0, 1.0, 2.0]).unwrap();
        assert_eq!(odd, Spread { median: 2.0, min: 1.0, max: 3.0 });
        let even = Spread::of(&[4.0, 1.0, 2.0, 8.0]).unwrap();
        assert_eq!(even, Spread { median: 3.0, min: 1.0, max: 8.0 });
        assert_eq!(Spread::of(&[]), None);
    }

    #[test]
    fn a_rate_turns_the_extremes_around() {
        let seconds = Spread { median: 2.0, min: 1.0, max: 4.0 };
        assert_eq!(seconds.rate(8.0), Spread { median: 4.0, min: 2.0, max: 8.0 });
    }

    #[test]
    fn warm_up_calls_are_made_and_not_counted() {
        let settings = Settings { warm_up: 2, repeats: 3, ..Settings::default() };
        let mut calls = 0;
        let spread = settings.time(|| calls += 1);
        assert_eq!(calls, 5);
        assert!(spread.min <= spread.median && spread.median <= spread.max);
    }

    #[test]
    fn turns_alternate() {
        let settings = Settings { warm_up: 1, repeats: 2, ..Settings::default() };
        let order = std::cell::RefCell::new(String::new());
        settings.time_interleaved(|| order.borrow_mut().push('a'), || order.borrow_mut().push('b'));
        assert_eq!(order.into_inner(), "ababab");
    }
}
