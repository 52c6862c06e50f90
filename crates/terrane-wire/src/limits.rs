//! What a receiver is prepared to take from a peer.

use std::fmt;

use terrane_core::ByteCount;

use crate::WireError;

/// The most that a receiver takes of each thing. Whatever exceeds its limit is refused before
/// memory is spent on it.
///
/// ```
/// use terrane_core::ByteCount;
/// use terrane_wire::WireLimits;
///
/// // A peer whose agent registers through many backends has more to say.
/// let limits = WireLimits { metadata: ByteCount::mib(8), ..WireLimits::default() };
/// assert!(limits.metadata > WireLimits::default().metadata);
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct WireLimits {
    /// The whole encoding, frame included.
    pub bytes: ByteCount,
    /// The metadata of the agent.
    pub metadata: ByteCount,
    /// The name of an agent or of a backend.
    pub name: ByteCount,
    /// The blocks of a layout. A receiver may keep a few bytes of state for each block, so this number
    /// bounds what one description costs it.
    pub blocks: u32,
    /// Sections of a block.
    pub sections: u32,
    /// Regions.
    pub regions: u32,
    /// Backends that took a region, and different sets of such backends.
    pub backends: u32,
}

impl WireLimits {
    /// 4 MiB in all, 2 MiB of metadata, names of 255 bytes, 4,194,304 blocks, 16 sections,
    /// 4,096 regions, 32 backends.
    ///
    /// Blocks of 64 KiB, which are small ones, make 256 GiB at this limit, and blocks of 1 MiB 4 TiB.
    /// A layout has a region a layer, so some dozens; the metadata of an agent over UCX is some
    /// hundred bytes, and as many more for each registration.
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

/// What there is a limit on.
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
