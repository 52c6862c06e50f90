//! The limits of a receiver for descriptions of a peer.

use std::fmt;

use terrane_core::ByteCount;

use crate::error::WireError;

/// The limits of a receiver. A value that exceeds its limit is refused before memory is allocated
/// for it.
///
/// ```
/// use terrane_core::ByteCount;
/// use terrane_wire::WireLimits;
///
/// // A peer whose agent registers with many backends sends more metadata.
/// let limits = WireLimits { metadata: ByteCount::mib(8), ..WireLimits::default() };
/// assert!(limits.metadata > WireLimits::default().metadata);
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct WireLimits {
    /// The length of the whole encoding, including the frame.
    pub bytes: ByteCount,
    /// The length of the agent's metadata.
    pub metadata: ByteCount,
    /// The length of the name of an agent or a backend.
    pub name: ByteCount,
    /// The number of blocks of a layout. A receiver may keep a few bytes of state for each block, so
    /// this bounds the cost of one description.
    pub blocks: u32,
    /// The number of sections of a block.
    pub sections: u32,
    /// The number of regions.
    pub regions: u32,
    /// The number of backends that accepted a region, and of different sets of such backends.
    pub backends: u32,
}

impl WireLimits {
    /// 4 MiB in total, 2 MiB of metadata, names of 255 bytes, 4,194,304 blocks, 16 sections,
    /// 4,096 regions, 32 backends.
    ///
    /// At this limit, blocks of 64 KiB make 256 GiB, and blocks of 1 MiB make 4 TiB. A layout has at
    /// most one region for each layer. The metadata of an agent with UCX has some hundred bytes, and
    /// some hundred more for each registration.
    pub const DEFAULT: Self = Self {
        bytes: ByteCount::mib(4),
        metadata: ByteCount::mib(2),
        name: ByteCount::new(255),
        blocks: 1 << 22,
        sections: 16,
        regions: 4096,
        backends: 32,
    };

    pub(crate) fn check(&self, what: Limited, actual: u64, limit: u64) -> Result<(), WireError> {
        if actual > limit { Err(WireError::OverLimit { what, actual, limit }) } else { Ok(()) }
    }
}

impl Default for WireLimits {
    fn default() -> Self {
        Self::DEFAULT
    }
}

/// A limited quantity.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Limited {
    /// The bytes of the whole encoding.
    Bytes,
    /// The bytes of the agent's metadata.
    Metadata,
    /// The bytes of a name.
    Name,
    /// The number of blocks.
    Blocks,
    /// The number of sections of a block.
    Sections,
    /// The number of regions.
    Regions,
    /// The number of backends in a set, or of sets.
    Backends,
}

impl fmt::Display for Limited {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Self::Bytes => "the encoding in bytes",
            Self::Metadata => "the agent's metadata in bytes",
            Self::Name => "a name in bytes",
            Self::Blocks => "the number of blocks",
            Self::Sections => "the number of sections",
            Self::Regions => "the number of regions",
            Self::Backends => "the number of backends",
        })
    }
}
