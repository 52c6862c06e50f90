//! Limits of the numbers in a configuration, so that no product of them overflows.

/// The most layers that a configuration may state: about thirty times the deepest published models
/// (126). So a hostile number cannot cause a large allocation.
pub const LARGEST_LAYER_COUNT: u32 = 4096;

/// The most heads, and elements of a head, that a configuration may state. Their product fits in 32
/// bits. It is 512 times the largest published values (128 heads; heads of 512).
pub(super) const LARGEST_DIMENSION: u32 = (1 << 16) - 1;
