//! Frames around arbitrary payloads, with the right checksum.

use terrane_core::checksum::crc64;

pub const HEADER: usize = 16;
pub const CHECKSUM: usize = 8;

/// A frame of this magic and version around `payload`.
pub fn frame(magic: &[u8; 8], version: u32, payload: &[u8]) -> Vec<u8> {
    let length = u32::try_from(payload.len()).unwrap();
    let mut bytes = magic.to_vec();
    bytes.extend(version.to_le_bytes());
    bytes.extend(length.to_le_bytes());
    bytes.extend(payload);
    let sum = crc64(&bytes);
    bytes.extend(sum.to_le_bytes());
    bytes
}

/// A layout's frame around `payload`.
pub fn layout_frame(payload: &[u8]) -> Vec<u8> {
    frame(b"TerraneL", 2, payload)
}

/// The payload of a frame.
pub fn payload(bytes: &[u8]) -> &[u8] {
    &bytes[HEADER..bytes.len() - CHECKSUM]
}
