//! Indices of pieces, and positions in regions.

use std::fmt;

/// A position: the region, and the distance from its start.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct RegionOffset {
    /// The region, counted from 0.
    pub region: u32,
    /// Bytes from the region's start.
    pub offset: u64,
}

/// An index of a piece.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Index {
    /// The block id.
    Block,
    /// The layer.
    Layer,
    /// The section, for example K or V.
    Section,
}

impl fmt::Display for Index {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Self::Block => "block",
            Self::Layer => "layer",
            Self::Section => "section",
        })
    }
}

/// An index past the end of its dimension.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{index} {value} is out of range; the layout has {bound}, counted from 0")]
pub struct IndexOutOfRange {
    /// Which index.
    pub index: Index,
    /// Its value.
    pub value: u32,
    /// The number of valid indices.
    pub bound: u32,
}
