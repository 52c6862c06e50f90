//! Numbers of bytes, with checked arithmetic only.

use std::fmt;

use crate::bytes::alignment::Alignment;
use crate::convert;

/// A number of bytes: a length, a stride or an offset.
///
/// There is no `+` or `*`: every operation that can leave the range of 64 bits returns a
/// [`SizeOverflow`] that names its terms.
#[derive(Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ByteCount(u64);

impl ByteCount {
    /// No bytes.
    pub const ZERO: Self = Self(0);

    /// `bytes` bytes.
    #[inline]
    #[must_use]
    pub const fn new(bytes: u64) -> Self {
        Self(bytes)
    }

    /// `count` times 1,024 bytes. `count` has 32 bits, so no value overflows.
    #[must_use]
    pub const fn kib(count: u32) -> Self {
        Self(widen(count) << 10)
    }

    /// `count` times 1,024² bytes. `count` has 32 bits, so no value overflows.
    #[must_use]
    pub const fn mib(count: u32) -> Self {
        Self(widen(count) << 20)
    }

    /// `count` times 1,024³ bytes. `count` has 32 bits, so no value overflows.
    #[must_use]
    pub const fn gib(count: u32) -> Self {
        Self(widen(count) << 30)
    }

    /// A length in this address space.
    #[inline]
    #[must_use]
    pub const fn from_usize(bytes: usize) -> Self {
        Self(convert::to_u64(bytes))
    }

    /// The number as a plain integer.
    #[inline]
    #[must_use]
    pub const fn get(self) -> u64 {
        self.0
    }

    /// The number as a length in this address space.
    #[inline]
    #[must_use]
    pub const fn to_usize(self) -> usize {
        convert::to_usize(self.0)
    }

    /// Whether the count is zero.
    #[inline]
    #[must_use]
    pub const fn is_zero(self) -> bool {
        self.0 == 0
    }

    /// The product of named factors. Without factors, the product is 1.
    ///
    /// # Errors
    ///
    /// [`SizeOverflow`], with the name of every factor, if the product does not fit in 64 bits. If
    /// any factor is zero, the product is zero and does not overflow.
    pub fn product(factors: &[(&'static str, u64)]) -> Result<Self, SizeOverflow> {
        if factors.iter().any(|&(_, value)| value == 0) {
            return Ok(Self::ZERO);
        }
        factors
            .iter()
            .try_fold(1_u64, |product, &(_, value)| product.checked_mul(value))
            .map(Self)
            .ok_or_else(|| SizeOverflow::new('×', factors))
    }

    /// The sum of two counts.
    ///
    /// # Errors
    ///
    /// [`SizeOverflow`] if the sum does not fit in 64 bits.
    pub fn checked_add(self, other: Self) -> Result<Self, SizeOverflow> {
        self.0
            .checked_add(other.0)
            .map(Self)
            .ok_or_else(|| SizeOverflow::new('+', &[("bytes", self.0), ("bytes", other.0)]))
    }

    /// This count times a named number.
    ///
    /// # Errors
    ///
    /// [`SizeOverflow`] if the product does not fit in 64 bits.
    pub fn checked_mul(self, name: &'static str, count: u64) -> Result<Self, SizeOverflow> {
        Self::product(&[(name, count), ("bytes each", self.0)])
    }

    /// The difference of two counts, or `None` if `other` is larger.
    #[must_use]
    pub const fn checked_sub(self, other: Self) -> Option<Self> {
        match self.0.checked_sub(other.0) {
            Some(difference) => Some(Self(difference)),
            None => None,
        }
    }

    /// The smallest multiple of `alignment` that is at least this count.
    ///
    /// # Errors
    ///
    /// [`SizeOverflow`] if that multiple does not fit in 64 bits.
    pub fn align_up(self, alignment: Alignment) -> Result<Self, SizeOverflow> {
        self.0.checked_next_multiple_of(alignment.get()).map(Self).ok_or_else(|| {
            let terms = [("bytes", self.0), ("rounding up to", alignment.get())];
            SizeOverflow::new('+', &terms)
        })
    }

    /// Whether this count is a multiple of `alignment`.
    #[must_use]
    pub const fn is_aligned_to(self, alignment: Alignment) -> bool {
        self.0.is_multiple_of(alignment.get())
    }
}

/// `u64::from` is not `const`.
const fn widen(count: u32) -> u64 {
    count as u64
}

impl From<u64> for ByteCount {
    fn from(bytes: u64) -> Self {
        Self(bytes)
    }
}

impl FromIterator<ByteCount> for Result<ByteCount, SizeOverflow> {
    fn from_iter<I: IntoIterator<Item = ByteCount>>(counts: I) -> Self {
        counts.into_iter().try_fold(ByteCount::ZERO, ByteCount::checked_add)
    }
}

impl fmt::Debug for ByteCount {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} B", self.0)
    }
}

/// Exact for small counts (`512 B`), two decimals in binary units for large ones (`1.07 MiB`).
impl fmt::Display for ByteCount {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        const UNITS: [(&str, u64); 5] =
            [("TiB", 1 << 40), ("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10), ("B", 1)];
        let (unit, size) = UNITS.into_iter().find(|&(_, size)| self.0 >= size).unwrap_or(("B", 1));
        let text = if self.0.is_multiple_of(size) {
            format!("{} {unit}", self.0 / size)
        } else {
            format!("{:.2} {unit}", self.0 as f64 / size as f64)
        };
        f.pad(&text)
    }
}

/// A size that does not fit in 64 bits, with its terms.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("a size does not fit in 64 bits: {}; make one of these numbers smaller", describe(*.operator, .terms))]
pub struct SizeOverflow {
    operator: char,
    terms: Box<[(&'static str, u64)]>,
}

impl SizeOverflow {
    fn new(operator: char, terms: &[(&'static str, u64)]) -> Self {
        Self { operator, terms: terms.into() }
    }

    /// The named terms whose sum or product overflowed.
    #[must_use]
    pub fn terms(&self) -> &[(&'static str, u64)] {
        &self.terms
    }
}

fn describe(operator: char, terms: &[(&'static str, u64)]) -> String {
    let terms: Vec<_> = terms.iter().map(|(name, value)| format!("{name} {value}")).collect();
    terms.join(&format!(" {operator} "))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn product_names_its_factors_on_overflow() {
        let factors = [("num_blocks", 1 << 40), ("page_size", 1 << 30)];
        let error = ByteCount::product(&factors).unwrap_err();
        assert_eq!(error.terms(), factors);
        let text = error.to_string();
        assert!(text.contains("num_blocks 1099511627776 × page_size 1073741824"), "{text}");
    }

    #[test]
    fn zero_wins_over_overflow() {
        let factors = [("a", u64::MAX), ("b", u64::MAX), ("c", 0)];
        assert_eq!(ByteCount::product(&factors), Ok(ByteCount::ZERO));
    }

    #[test]
    fn align_up_at_the_end_of_the_range() {
        let last = ByteCount::new(u64::MAX - 511);
        assert_eq!(last.align_up(Alignment::SECTOR), Ok(last));
        assert!(ByteCount::new(u64::MAX).align_up(Alignment::SECTOR).is_err());
    }

    #[test]
    fn displays_in_binary_units() {
        assert_eq!(ByteCount::new(512).to_string(), "512 B");
        assert_eq!(ByteCount::mib(3).to_string(), "3 MiB");
        assert_eq!(ByteCount::new(1_124_352).to_string(), "1.07 MiB");
        assert_eq!(ByteCount::ZERO.to_string(), "0 B");
    }

    #[test]
    fn sums_are_checked() {
        let counts = [ByteCount::new(u64::MAX), ByteCount::new(1)];
        assert!(counts.into_iter().collect::<Result<ByteCount, SizeOverflow>>().is_err());
    }
}
