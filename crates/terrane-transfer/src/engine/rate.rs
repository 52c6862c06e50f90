//! The rate of a path, learned from its copies.

use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::time::Duration;

use terrane_core::ByteCount;

/// The rate of one path of an engine: an estimate at first, then a moving average of measurements.
#[derive(Debug)]
pub struct Rate {
    /// Bytes a second, as the bits of a float.
    bytes_per_second: AtomicU64,
    /// The fixed time of each job.
    per_job: Duration,
    /// The fixed time of each run.
    per_run: Duration,
    /// The number of measured copies.
    learned: AtomicU32,
}

/// The weight of the latest measurement. Rates change with the machine's other work. A quarter
/// follows such changes within a few transfers, and limits the effect of one outlier.
const WEIGHT: f64 = 0.25;

/// Shorter copies measure latency rather than the rate.
const MIN_SAMPLE: ByteCount = ByteCount::mib(1);

impl Rate {
    /// Creates an estimate: the bytes per second, and the fixed time of each job and of each run.
    #[must_use]
    pub fn new(bytes_per_second: f64, per_job: Duration, per_run: Duration) -> Self {
        let bytes_per_second = AtomicU64::new(bytes_per_second.to_bits());
        Self { bytes_per_second, per_job, per_run, learned: AtomicU32::new(0) }
    }

    /// The predicted time for this many bytes in this many runs.
    #[must_use]
    pub fn predict(&self, bytes: ByteCount, runs: u64) -> Duration {
        // Relaxed here and below: an estimate, which orders nothing.
        let rate = f64::from_bits(self.bytes_per_second.load(Ordering::Relaxed));
        let seconds = bytes.get() as f64 / rate + self.per_run.as_secs_f64() * runs as f64;
        self.per_job + Duration::try_from_secs_f64(seconds).unwrap_or(Duration::MAX / 2)
    }

    /// Whether it has more than one measurement. A single one might be an outlier.
    #[must_use]
    pub fn is_known(&self) -> bool {
        self.learned.load(Ordering::Relaxed) > 1
    }

    /// Records a copy. A copy of less than a MiB measures latency, and is ignored.
    pub fn learn(&self, bytes: ByteCount, took: Duration) {
        if bytes < MIN_SAMPLE || took.is_zero() {
            return;
        }
        let latest = bytes.get() as f64 / took.as_secs_f64();
        let old = f64::from_bits(self.bytes_per_second.load(Ordering::Relaxed));
        // The first measurement replaces the estimate.
        let weight = if self.learned.fetch_add(1, Ordering::Relaxed) == 0 { 1.0 } else { WEIGHT };
        let new = old + (latest - old) * weight;
        // If two threads record at once, one measurement is lost, which is harmless.
        self.bytes_per_second.store(new.to_bits(), Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn predictions_follow_measurements() {
        let rate = Rate::new(1e9, Duration::ZERO, Duration::ZERO);
        let bytes = ByteCount::mib(64);
        let before = rate.predict(bytes, 1);
        for _ in 0..32 {
            rate.learn(bytes, before * 4);
        }
        let after = rate.predict(bytes, 1).as_secs_f64() / before.as_secs_f64();
        assert!((3.9..4.1).contains(&after), "{after}");
    }

    #[test]
    fn small_copies_do_not_change_the_rate() {
        let rate = Rate::new(1e9, Duration::ZERO, Duration::ZERO);
        let before = rate.predict(ByteCount::mib(1), 1);
        rate.learn(ByteCount::kib(4), Duration::from_secs(1));
        assert_eq!(rate.predict(ByteCount::mib(1), 1), before);
    }
}
