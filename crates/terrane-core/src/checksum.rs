//! Checksums of bytes.

use crc_fast::CrcAlgorithm;

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
