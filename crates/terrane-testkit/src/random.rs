//! Repeatable pseudo-random numbers: the same for the same seed.

/// A generator of numbers (SplitMix64: Steele, Lea and Flood, OOPSLA 2014). It is small and fast,
/// and good enough to change orders.
#[derive(Clone, Debug)]
pub struct Seeded(u64);

impl Seeded {
    /// Creates the generator of this seed.
    #[must_use]
    pub const fn new(seed: u64) -> Self {
        Self(seed)
    }

    /// The next number.
    pub const fn next_u64(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(STEP);
        mix(self.0)
    }

    /// A number below `bound`; 0 if the bound is 0.
    pub fn below(&mut self, bound: usize) -> usize {
        let bound = u64::try_from(bound).expect("a length fits in 64 bits");
        let number = self.next_u64().checked_rem(bound).unwrap_or(0);
        usize::try_from(number).expect("smaller than a length")
    }

    /// Returns a number below `bound`, or 0 if that is 0. The bias is below `bound` / 2^64.
    pub fn below_u64(&mut self, bound: u64) -> u64 {
        let wide = u128::from(self.next_u64()) * u128::from(bound);
        // The high half of a product with `bound` is below it.
        u64::try_from(wide >> 64).unwrap_or(0)
    }

    /// True once in `times` calls, on average.
    pub fn once_in(&mut self, times: usize) -> bool {
        self.below(times) == 0
    }

    /// Puts `items` into a random order (Fisher and Yates).
    pub fn shuffle<T>(&mut self, items: &mut [T]) {
        for last in (1..items.len()).rev() {
            items.swap(last, self.below(last + 1));
        }
    }
}

/// The step of SplitMix64: 2^64 divided by the golden ratio.
pub(crate) const STEP: u64 = 0x9E37_79B9_7F4A_7C15;

/// The finaliser of SplitMix64: every bit of the result depends on every bit of the input.
pub(crate) const fn mix(mut bits: u64) -> u64 {
    bits = (bits ^ (bits >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    bits = (bits ^ (bits >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    bits ^ (bits >> 31)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn equal_seeds_shuffle_equally_and_keep_every_item() {
        let shuffled = |seed| {
            let mut items: Vec<_> = (0..100).collect();
            Seeded::new(seed).shuffle(&mut items);
            items
        };
        assert_eq!(shuffled(7), shuffled(7));
        assert_ne!(shuffled(7), shuffled(8));
        let mut sorted = shuffled(7);
        sorted.sort_unstable();
        assert_eq!(sorted, (0..100).collect::<Vec<_>>());
    }
}
