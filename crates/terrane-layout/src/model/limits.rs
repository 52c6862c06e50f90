//! Bounds on the numbers of a configuration, so that no product of them overflows.

/// The most layers that a configuration may state: some thirty times as many as the deepest
/// published models have (126), so that a hostile number allocates nothing large.
pub const LARGEST_LAYER_COUNT: u32 = 4096;

/// The most heads and elements of a head that a configuration may state, so that their product
/// fits in 32 bits: 512 times the largest published ones (128 heads; heads of 512).
pub(super) const LARGEST_DIMENSION: u32 = (1 << 16) - 1;
