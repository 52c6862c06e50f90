//! Checksums of bytes.

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

/// A CRC-64/NVME that is computed piece by piece.
///
/// ```
/// use terrane_core::checksum::{Crc64, crc64};
///
/// let mut sum = Crc64::new();
/// sum.update(b"12345");
/// sum.update(b"6789");
/// assert_eq!(sum.finish(), crc64(b"123456789"));
/// ```
#[derive(Clone, Copy, Debug)]
pub struct Crc64(Digest);

impl Crc64 {
    /// The checksum of no bytes.
    #[must_use]
    pub fn new() -> Self {
        Self(Digest::new(CrcAlgorithm::Crc64Nvme))
    }

    /// Adds the next bytes.
    pub fn update(&mut self, bytes: &[u8]) {
        self.0.update(bytes);
    }

    /// The checksum of all bytes that were added.
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
