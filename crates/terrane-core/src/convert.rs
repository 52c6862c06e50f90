//! Conversions between `usize` and `u64`. They lose nothing: the crate builds for 64-bit targets
//! only.

/// The number as a `u64`.
///
/// ```
/// use terrane_core::convert::{to_u64, to_usize};
///
/// assert_eq!(to_u64(usize::MAX), u64::MAX);
/// assert_eq!(to_usize(to_u64(7)), 7);
/// ```
#[inline]
#[must_use]
pub const fn to_u64(number: usize) -> u64 {
    number as u64
}

/// The number as a `usize`.
#[inline]
#[must_use]
#[expect(
    clippy::cast_possible_truncation,
    reason = "lossless: the crate builds for 64-bit targets only"
)]
pub const fn to_usize(number: u64) -> usize {
    number as usize
}
