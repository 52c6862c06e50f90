//! Checksums of bytes.

use std::fmt;

use crc_fast::{CrcAlgorithm, Digest};

/// The CRC-64/NVME of `bytes`. It detects damage, not forgery.
///
/// ```
/// use terrane_core::checksum::crc64;
///
/// assert_eq!(crc64(b"123456789"), 0xae8b_1486_0a79_9888);
/// ```
#[must_use]
pub fn crc64(bytes: &[u8]) -> u64 {
    crc_fast::checksum(CrcAlgorithm::Crc64Nvme, bytes)
}

/// The [`crc64`] of bytes that come in several pieces, in their order.
///
/// ```
/// use terrane_core::checksum::{Crc64, crc64};
///
/// let mut sum = Crc64::new();
/// sum.update(b"1234");
/// sum.update(b"56789");
/// assert_eq!(sum.finish(), crc64(b"123456789"));
/// ```
#[derive(Clone)]
pub struct Crc64(Digest);

impl Crc64 {
    /// The sum of no bytes.
    #[must_use]
    pub fn new() -> Self {
        Self(Digest::new(CrcAlgorithm::Crc64Nvme))
    }

    /// Adds the next bytes.
    #[inline]
    pub fn update(&mut self, bytes: &[u8]) {
        self.0.update(bytes);
    }

    /// The sum of all bytes.
    #[must_use]
    pub fn finish(&self) -> u64 {
        self.0.finalize()
    }
}

impl Default for Crc64 {
    fn default() -> Self {
        Self::new()
    }
}

impl fmt::Debug for Crc64 {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Crc64({:#018x})", self.finish())
    }
}

/// The [`crc64`] of some bytes and those behind them, from the sum of each, and the length of the
/// second part.
///
/// ```
/// use terrane_core::checksum::{combine, crc64};
///
/// assert_eq!(combine(crc64(b"1234"), crc64(b"56789"), 5), crc64(b"123456789"));
/// ```
#[must_use]
pub fn combine(first: u64, second: u64, second_bytes: u64) -> u64 {
    crc_fast::checksum_combine(CrcAlgorithm::Crc64Nvme, first, second, second_bytes)
}
