//! Repeatable pseudo-random numbers: the same for the same seed.

/// A generator of numbers (SplitMix64: Steele, Lea and Flood, OOPSLA 2014).
#[derive(Clone, Debug)]
pub struct Random(u64);

impl Random {
    pub const fn new(seed: u64) -> Self {
        Self(seed)
    }

    pub const fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut mixed = self.0;
        mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        mixed ^ (mixed >> 31)
    }

    /// A number below `bound`; 0 if the bound is 0.
    pub fn below(&mut self, bound: u64) -> u64 {
        self.next().checked_rem(bound).unwrap_or(0)
    }

    /// An index below `count`; `None` if the count is 0.
    pub fn pick(&mut self, count: usize) -> Option<usize> {
        let bound = u64::try_from(count).ok().filter(|&bound| bound > 0)?;
        usize::try_from(self.below(bound)).ok()
    }

    pub fn coin(&mut self) -> bool {
        self.next() >> 63 == 1
    }
}
