//! Alignments: powers of two, checked on construction.

use std::fmt;
use std::num::NonZeroU64;

/// A power of two. An address, an offset or a length must be a multiple of it.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Alignment(NonZeroU64);

impl Alignment {
    /// No constraint.
    pub const BYTE: Self = Self::power_of_two(0);
    /// 512 bytes: the sector size of most disks, and the minimum alignment of a planned region.
    pub const SECTOR: Self = Self::power_of_two(9);
    /// 4 KiB: the smallest page of x86-64 and of most aarch64 systems.
    pub const PAGE: Self = Self::power_of_two(12);
    /// 2 MiB: the huge page of x86-64 and of aarch64 with 4 KiB base pages.
    pub const HUGE_PAGE: Self = Self::power_of_two(21);

    /// An alignment of `bytes` bytes.
    ///
    /// # Errors
    ///
    /// [`InvalidAlignment`] if `bytes` is not a power of two.
    pub const fn new(bytes: u64) -> Result<Self, InvalidAlignment> {
        match NonZeroU64::new(bytes) {
            Some(nonzero) if nonzero.is_power_of_two() => Ok(Self(nonzero)),
            _ => Err(InvalidAlignment { bytes }),
        }
    }

    /// The largest alignment that divides `bytes`. For zero, this is 2^63.
    #[must_use]
    pub const fn of(bytes: u64) -> Self {
        let zeros = bytes.trailing_zeros();
        Self::power_of_two(if zeros > 63 { 63 } else { zeros })
    }

    /// 2^`exponent`. Callers pass an exponent below 64.
    const fn power_of_two(exponent: u32) -> Self {
        match NonZeroU64::new(1 << exponent) {
            Some(bytes) => Self(bytes),
            None => Self(NonZeroU64::MIN),
        }
    }

    /// The alignment in bytes.
    #[must_use]
    pub const fn get(self) -> u64 {
        self.0.get()
    }

    /// The exponent: the alignment is 2 to this power.
    #[must_use]
    pub const fn log2(self) -> u32 {
        self.0.trailing_zeros()
    }

    /// The stricter of two alignments. A multiple of it is a multiple of both.
    #[must_use]
    pub fn max(self, other: Self) -> Self {
        Ord::max(self, other)
    }
}

impl Default for Alignment {
    fn default() -> Self {
        Self::BYTE
    }
}

impl fmt::Debug for Alignment {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} B", self.0)
    }
}

impl fmt::Display for Alignment {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(&crate::ByteCount::new(self.get()), f)
    }
}

/// A number that is not a power of two.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("an alignment of {bytes} bytes is not a power of two; use 1, 2, 4, … up to 2^63")]
pub struct InvalidAlignment {
    /// The number that was given.
    pub bytes: u64,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_powers_of_two() {
        assert_eq!(Alignment::new(4096), Ok(Alignment::PAGE));
        assert_eq!(Alignment::new(0), Err(InvalidAlignment { bytes: 0 }));
        assert_eq!(Alignment::new(4097), Err(InvalidAlignment { bytes: 4097 }));
        assert!(Alignment::new(1 << 63).is_ok());
    }

    #[test]
    fn alignment_of_a_number() {
        assert_eq!(Alignment::of(18_432).get(), 2048);
        assert_eq!(Alignment::of(1), Alignment::BYTE);
        assert_eq!(Alignment::of(0).log2(), 63);
    }

    #[test]
    fn the_stricter_satisfies_both() {
        assert_eq!(Alignment::SECTOR.max(Alignment::PAGE), Alignment::PAGE);
    }
}
