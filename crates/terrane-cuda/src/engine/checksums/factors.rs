//! A cache of the segments' factors: computing a factor takes the host about 60 ns.

use std::collections::BTreeMap;
use std::sync::Mutex;

use terrane_core::checksum::Crc64Shift;
use terrane_core::sync::lock;

use crate::kernels::sum_arguments::ONE;

/// The factors by the bytes of a segment, those of the last segment of a block first.
#[derive(Debug, Default)]
pub(crate) struct FactorCache(Mutex<BTreeMap<u64, Vec<u64>>>);

/// The maximum number of cached lengths, with at most 8 KiB of factors each. Blocks of up to 16 MiB
/// have fewer different segment lengths.
const MAX_CACHED_LENGTHS: usize = 64;
/// The bytes of a CRC-64: a shift by them multiplies by x⁶⁴.
const SUM_BYTES: u64 = 8;

impl FactorCache {
    /// Appends the factors of `count` segments of this length: for each, x to the power of the bits
    /// behind it, times x⁶⁴.
    pub(crate) fn extend(&self, numbers: &mut Vec<u64>, segment_bytes: u64, count: usize) {
        let mut cached = lock(&self.0);
        if cached.len() >= MAX_CACHED_LENGTHS && !cached.contains_key(&segment_bytes) {
            cached.clear();
        }
        let factors = cached.entry(segment_bytes).or_default();
        let of_segment = Crc64Shift::of(segment_bytes);
        while factors.len() < count {
            let next = match factors.last() {
                Some(&factor) => of_segment.apply(factor),
                None => Crc64Shift::of(SUM_BYTES).apply(ONE),
            };
            factors.push(next);
        }
        numbers.extend(factors.iter().take(count).rev());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn factors_are_the_powers_behind_each_segment_whatever_is_cached() {
        let cache = FactorCache::default();
        for (bytes, count) in [(2048, 3), (2048, 1), (512, 2), (2048, 7), (2048, 7)] {
            let mut numbers = vec![5];
            cache.extend(&mut numbers, bytes, count);
            let behind = |segment: usize| {
                let segments = u64::try_from(count - 1 - segment).unwrap();
                Crc64Shift::of(segments * bytes + SUM_BYTES).apply(ONE)
            };
            let expected: Vec<u64> = [5].into_iter().chain((0..count).map(behind)).collect();
            assert_eq!(numbers, expected, "{count} of {bytes}");
        }
        for bytes in 1..1000 {
            cache.extend(&mut Vec::new(), bytes * 512, 1);
        }
        assert!(lock(&cache.0).len() <= MAX_CACHED_LENGTHS);
    }
}
