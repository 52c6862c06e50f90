//! Histograms with log-linear buckets.

use crate::convert::{to_u64, to_usize};

/// The exponent of the number of buckets in each doubling.
const STEP_BITS: u32 = 2;
const STEPS: u64 = 1 << STEP_BITS;

/// The largest exponent with buckets of its own. Larger values are counted in the last bucket. In
/// nanoseconds, this is about five hours.
const LARGEST: u64 = 44;

/// The number of buckets.
const BUCKETS: usize = to_usize(LARGEST << STEP_BITS);

/// The number of [counters](super::ShardedCounters) of a histogram: one for each bucket, and one
/// for the sum of the values.
pub const HISTOGRAM_CELLS: usize = BUCKETS + 1;

/// The bucket of a value.
#[inline]
pub(super) fn bucket_of(value: u64) -> usize {
    if value < STEPS {
        return to_usize(value);
    }
    let exponent = value.ilog2();
    if u64::from(exponent) > LARGEST {
        return BUCKETS - 1;
    }
    let step = (value >> (exponent - STEP_BITS)) & (STEPS - 1);
    to_usize((u64::from(exponent - STEP_BITS + 1) << STEP_BITS) | step)
}

/// The smallest value of a bucket.
fn least_of(bucket: usize) -> u64 {
    let bucket = to_u64(bucket);
    if bucket < STEPS {
        return bucket;
    }
    let (row, step) = ((bucket >> STEP_BITS) - 1, bucket & (STEPS - 1));
    (STEPS | step) << row
}

/// The values that a histogram has counted.
///
/// A doubling has four buckets, so the error of a [quantile](Self::quantile) is at most an eighth.
/// Values from 2^45 on share a bucket.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct HistogramSnapshot {
    /// The number of values.
    count: u64,
    /// The sum of the values.
    sum: u64,
    /// Empty if there are no values.
    buckets: Box<[u64]>,
}

impl HistogramSnapshot {
    /// Reads the counters of a histogram.
    pub(super) fn from_cells(cell: impl Fn(usize) -> u64) -> Self {
        let buckets: Box<[u64]> = (0..BUCKETS).map(&cell).collect();
        let count = buckets.iter().sum();
        let buckets = if count == 0 { Box::default() } else { buckets };
        Self { count, sum: cell(BUCKETS), buckets }
    }

    /// The number of values.
    #[must_use]
    pub fn count(&self) -> u64 {
        self.count
    }

    /// The sum of the values, modulo 2^64.
    #[must_use]
    pub fn sum(&self) -> u64 {
        self.sum
    }

    /// The mean; zero if there are no values.
    #[must_use]
    pub fn mean(&self) -> u64 {
        self.sum.checked_div(self.count).unwrap_or(0)
    }

    /// The number of values below 2 to the power of `exponent`, for exponents from 2 to 44.
    #[must_use]
    pub fn below_power(&self, exponent: u32) -> u64 {
        let below = 1_u64.checked_shl(exponent).map_or(BUCKETS, bucket_of);
        self.buckets.iter().take(below).sum()
    }

    /// A value that the share `part / whole` of all values does not exceed, such as `quantile(99,
    /// 100)`. `None` if there are no values. The result is the middle of a bucket.
    #[must_use]
    pub fn quantile(&self, part: u64, whole: u64) -> Option<u64> {
        let share = u128::from(self.count) * u128::from(part);
        let rank = share.div_ceil(u128::from(whole.max(1))).max(1);
        let mut total = 0_u128;
        for (bucket, &count) in self.buckets.iter().enumerate() {
            total += u128::from(count);
            if total >= rank {
                let (least, next) = (least_of(bucket), least_of(bucket + 1));
                return Some(least + (next - least) / 2);
            }
        }
        None
    }
}

#[cfg(test)]
mod tests {
    use super::super::ShardedCounters;
    use super::*;

    #[test]
    fn buckets_are_adjacent_and_hold_their_values() {
        for bucket in 0..BUCKETS {
            let (least, next) = (least_of(bucket), least_of(bucket + 1));
            assert!(least < next);
            assert_eq!(bucket_of(least), bucket);
            assert_eq!(bucket_of(next - 1), bucket);
            assert!(next - least <= (least / 4).max(1), "{least} to {next}");
        }
        assert_eq!(bucket_of(u64::MAX), BUCKETS - 1);
        assert_eq!(bucket_of(1 << 45), BUCKETS - 1);
    }

    #[test]
    fn quantiles_are_near_the_true_ones() {
        let counters = ShardedCounters::new(HISTOGRAM_CELLS);
        assert_eq!(counters.histogram(0).quantile(1, 2), None);
        (1..=1000).for_each(|value| counters.update(|shard| shard.record(0, value * 1000)));
        let histogram = counters.histogram(0);
        assert_eq!(
            (histogram.count(), histogram.sum(), histogram.mean()),
            (1000, 500_500_000, 500_500)
        );
        for (part, truth) in [(500, 500_000_u64), (990, 990_000), (1, 1000), (1000, 1_000_000)] {
            let quantile = histogram.quantile(part, 1000).unwrap();
            assert!(quantile.abs_diff(truth) <= truth / 8, "{part}: {quantile}");
        }
        assert_eq!(histogram.below_power(17), 131);
        assert_eq!(histogram.below_power(45), 1000);
    }
}
