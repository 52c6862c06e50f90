//! The state of a key, without I/O.

use std::fmt;

/// A tier of a store: its index, the fastest tier first. The disk tier is the last one.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct TierId(u8);

impl TierId {
    /// The tier with this index.
    #[must_use]
    pub const fn new(index: u8) -> Self {
        Self(index)
    }

    /// The index.
    #[must_use]
    pub const fn get(self) -> u8 {
        self.0
    }

    pub(crate) fn index(self) -> usize {
        usize::from(self.0)
    }
}

impl fmt::Display for TierId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "tier {}", self.0)
    }
}

/// The state of a key.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Presence {
    /// No tier has the block.
    #[default]
    Absent,
    /// A put writes the block. No tier has it yet. A get waits for the put.
    Writing,
    /// A tier has the block.
    Ready {
        /// The fastest tier that has it.
        tier: TierId,
        /// Its length in bytes.
        length: u32,
    },
    /// As [`Ready`](Self::Ready), and a copy into a faster tier is on its way.
    Loading {
        /// The fastest tier that has it now.
        tier: TierId,
        /// Its length in bytes.
        length: u32,
    },
}

impl Presence {
    /// Whether a get finds the block now.
    #[must_use]
    pub const fn is_ready(self) -> bool {
        matches!(self, Self::Ready { .. } | Self::Loading { .. })
    }
}
