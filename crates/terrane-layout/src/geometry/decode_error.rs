//! Why bytes could not be decoded to a geometry.

use super::axis::InvalidSectionName;
use super::encoding::VERSION;
use crate::error::LayoutError;

/// Why bytes were refused by [`Geometry::decode`](crate::Geometry::decode).
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum DecodeError {
    /// The encoding has another version.
    #[error(
        "the layout is encoded in version {version}, and this library reads version {VERSION}; run \
         the same release on both sides and encode it again"
    )]
    Version {
        /// The version.
        version: u8,
    },
    /// The bytes end too early.
    #[error(
        "the layout needs {needed} bytes from byte {offset} on, and {actual} are left; send all of \
         it"
    )]
    Truncated {
        /// The start of the missing part.
        offset: usize,
        /// The bytes of that part.
        needed: usize,
        /// The bytes that are left.
        actual: usize,
    },
    /// Bytes follow the end.
    #[error("{extra} bytes follow the end of the layout at byte {offset}; pass the layout alone")]
    TrailingBytes {
        /// The end of the layout.
        offset: usize,
        /// The number of bytes that follow.
        extra: usize,
    },
    /// A count exceeds the reader's limit.
    #[error(
        "the number of {what} is {count}, and the limit is {limit}; raise the limit if you expect that many"
    )]
    OverLimit {
        /// The counted things.
        what: EncodedCount,
        /// The count.
        count: u64,
        /// The largest accepted count.
        limit: u64,
    },
    /// A flag is neither 0 nor 1.
    #[error("byte {offset} of the layout is {value}; a flag is 0 or 1")]
    Flag {
        /// The position of the flag.
        offset: usize,
        /// Its value.
        value: u8,
    },
    /// The bytes are not the canonical encoding of their layout, which is the only accepted one.
    #[error(
        "the layout is not in its one encoding at byte {offset}; encode it again with \
         Geometry::encode"
    )]
    NotCanonical {
        /// The start of the strides or the run.
        offset: usize,
    },
    /// A section has an invalid name.
    #[error(transparent)]
    Name(#[from] InvalidSectionName),
    /// An alignment does not fit in 64 bits.
    #[error("the block alignment is 2^{exponent}; the maximum is 2^63")]
    NoSuchAlignment {
        /// The exponent.
        exponent: u8,
    },
    /// The strides are not nested, or exceed their regions.
    #[error(transparent)]
    Layout(#[from] LayoutError),
}

/// The things that an encoding counts.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum EncodedCount {
    /// Blocks.
    Blocks,
    /// Sections of a block.
    Sections,
    /// Regions.
    Regions,
}

terrane_core::display_names!(EncodedCount {
    Self::Blocks => "blocks",
    Self::Sections => "sections",
    Self::Regions => "regions",
});
