//! Indices of pieces, and positions in regions.

/// A position: the region, and the distance from its start.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct RegionOffset {
    /// The region, counted from 0.
    pub region: u32,
    /// Bytes from the region's start.
    pub offset: u64,
}

/// Nothing overflows within the bounds that a [`Geometry`](crate::Geometry) has proved. Beyond
/// them, the results wrap and are meaningless.
impl RegionOffset {
    /// The start of region 0, or no distance.
    pub const ZERO: Self = Self { region: 0, offset: 0 };

    /// A distance within one region.
    #[inline]
    #[must_use]
    pub const fn within(bytes: u64) -> Self {
        Self { region: 0, offset: bytes }
    }

    /// The position at a distance from this one.
    #[inline]
    #[must_use]
    pub const fn plus(self, distance: Self) -> Self {
        Self {
            region: self.region.wrapping_add(distance.region),
            offset: self.offset.wrapping_add(distance.offset),
        }
    }

    /// The distance of this position from another one.
    #[inline]
    #[must_use]
    pub const fn minus(self, other: Self) -> Self {
        Self {
            region: self.region.wrapping_sub(other.region),
            offset: self.offset.wrapping_sub(other.offset),
        }
    }

    /// `count` times this distance.
    #[inline]
    #[must_use]
    pub fn times(self, count: u64) -> Self {
        let regions = u32::try_from(count).unwrap_or(u32::MAX);
        Self { region: self.region.wrapping_mul(regions), offset: self.offset.wrapping_mul(count) }
    }
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

terrane_core::display_names!(Index {
    Self::Block => "block",
    Self::Layer => "layer",
    Self::Section => "section",
});

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
