//! The frame around every encoding: content, version, length and checksum.
//!
//! | bytes | field |
//! |---|---|
//! | 0–7 | magic: `Terrane`, and a letter for the content |
//! | 8–11 | version of the payload, little-endian |
//! | 12–15 | length of the payload in bytes, little-endian |
//! | 16–… | payload |
//! | 8 more | CRC-64/NVME of all bytes before, little-endian |
//!
//! The frame is the same in every version, so a future version can be distinguished from damage.

pub(crate) mod input;

use terrane_core::ByteCount;
use terrane_core::checksum::crc64;
use terrane_core::convert::to_u64;

use crate::error::WireError;
use crate::limits::{Limited, WireLimits};

const MAGIC_BYTES: usize = 8;
pub(crate) const HEADER_BYTES: usize = MAGIC_BYTES + 4 + 4;
const CHECKSUM_BYTES: usize = 8;

/// The content of a frame.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Content {
    /// A [`LayoutDescriptor`](crate::LayoutDescriptor).
    Layout,
    /// A [`RegionDescriptor`](crate::RegionDescriptor).
    Region,
}

impl Content {
    /// The version that is written. [`open`] accepts no other.
    const fn version(self) -> u32 {
        match self {
            Self::Layout => 2,
            Self::Region => 1,
        }
    }

    const fn magic(self) -> [u8; MAGIC_BYTES] {
        match self {
            Self::Layout => *b"TerraneL",
            Self::Region => *b"TerraneR",
        }
    }
}

impl std::fmt::Display for Content {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.pad(match self {
            Self::Layout => "layout",
            Self::Region => "region",
        })
    }
}

/// The contents of a frame, without the header and the checksum.
pub(crate) struct FramePayload<'a> {
    pub(crate) bytes: &'a [u8],
    /// The offset of the payload in the frame.
    pub(crate) offset: usize,
}

/// Puts a frame of the content's version around what `write` appends.
pub(crate) fn seal(
    content: Content,
    write: impl FnOnce(Vec<u8>) -> Result<Vec<u8>, WireError>,
) -> Result<Vec<u8>, WireError> {
    let mut frame = Vec::with_capacity(512);
    frame.extend(content.magic());
    frame.extend(content.version().to_le_bytes());
    frame.extend([0; 4]);
    let mut frame = write(frame)?;
    let payload = frame.get(HEADER_BYTES..).map_or(0, <[u8]>::len);
    let Ok(length) = u32::try_from(payload) else {
        return Err(WireError::OverLimit {
            what: Limited::Bytes,
            actual: to_u64(payload),
            limit: u32::MAX.into(),
        });
    };
    if let Some(field) = frame.get_mut(HEADER_BYTES - 4..HEADER_BYTES) {
        field.copy_from_slice(&length.to_le_bytes());
    }
    let sum = crc64(&frame);
    frame.extend(sum.to_le_bytes());
    Ok(frame)
}

/// Opens the frame that `bytes` consist of.
pub(crate) fn open<'a>(
    content: Content,
    bytes: &'a [u8],
    limits: &WireLimits,
) -> Result<FramePayload<'a>, WireError> {
    let actual = ByteCount::from_usize(bytes.len());
    limits.check(Limited::Bytes, actual.get(), limits.bytes.get())?;
    let truncated = |expected: usize| WireError::Truncated {
        content,
        expected: ByteCount::from_usize(expected),
        actual,
    };
    let too_short = || truncated(HEADER_BYTES + CHECKSUM_BYTES);
    let (&magic, rest) = bytes.split_first_chunk::<MAGIC_BYTES>().ok_or_else(too_short)?;
    if magic != content.magic() {
        return Err(WireError::WrongMagic { content, expected: content.magic(), found: magic });
    }
    let (&version, rest) = rest.split_first_chunk::<4>().ok_or_else(too_short)?;
    let (&length, rest) = rest.split_first_chunk::<4>().ok_or_else(too_short)?;
    let version = u32::from_le_bytes(version);
    let length = ByteCount::new(u32::from_le_bytes(length).into()).to_usize();
    // No overflow: a 32-bit number and some bytes fit into 64 bits.
    let whole = HEADER_BYTES + length + CHECKSUM_BYTES;
    if bytes.len() < whole {
        return Err(truncated(whole));
    }
    if bytes.len() > whole {
        let extra = ByteCount::from_usize(bytes.len() - whole);
        return Err(WireError::TrailingBytes { offset: whole, extra });
    }
    let (payload, stated) = rest.split_at_checked(length).ok_or_else(too_short)?;
    let (&stated, _) = stated.split_first_chunk::<CHECKSUM_BYTES>().ok_or_else(too_short)?;
    let stated = u64::from_le_bytes(stated);
    let summed = bytes.get(..HEADER_BYTES + length).ok_or_else(too_short)?;
    let computed = crc64(summed);
    if stated != computed {
        return Err(WireError::Checksum { content, stated, computed });
    }
    match (content, version) {
        (_, version) if version == content.version() => {}
        (Content::Layout, 1) => return Err(WireError::Version1),
        _ => {
            let known = content.version();
            return Err(WireError::UnknownVersion { content, version, known });
        }
    }
    Ok(FramePayload { bytes: payload, offset: HEADER_BYTES })
}
