//! Runs of bytes that are contiguous at both ends.

use terrane_core::ByteCount;
use terrane_layout::RegionOffset;

use crate::side::Side;

/// A run of bytes that is contiguous at both ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CopyRun {
    pub(crate) source_region: u32,
    pub(crate) destination_region: u32,
    pub(crate) source_offset: u64,
    pub(crate) destination_offset: u64,
    pub(crate) bytes: u64,
}

impl CopyRun {
    pub(crate) const fn new([from, to]: [RegionOffset; 2], bytes: u64) -> Self {
        Self {
            source_region: from.region,
            destination_region: to.region,
            source_offset: from.offset,
            destination_offset: to.offset,
            bytes,
        }
    }

    /// Its start in the source.
    #[inline]
    #[must_use]
    pub const fn source(&self) -> RegionOffset {
        RegionOffset { region: self.source_region, offset: self.source_offset }
    }

    /// Its start in the destination.
    #[inline]
    #[must_use]
    pub const fn destination(&self) -> RegionOffset {
        RegionOffset { region: self.destination_region, offset: self.destination_offset }
    }

    /// Its start at one end.
    #[inline]
    #[must_use]
    pub const fn at(&self, side: Side) -> RegionOffset {
        match side {
            Side::Source => self.source(),
            Side::Destination => self.destination(),
        }
    }

    /// Its length.
    #[inline]
    #[must_use]
    pub const fn bytes(&self) -> ByteCount {
        ByteCount::new(self.bytes)
    }

    /// The bytes from `offset` on; all of them if the run is shorter than that.
    pub(crate) const fn rest(&self, offset: ByteCount) -> Self {
        let skipped = if offset.get() < self.bytes { offset.get() } else { 0 };
        Self {
            source_offset: self.source_offset + skipped,
            destination_offset: self.destination_offset + skipped,
            bytes: self.bytes - skipped,
            ..*self
        }
    }

    /// The run moved by these distances. Distances may be negative, so they wrap.
    pub(crate) const fn moved(&self, by: &Distance) -> Self {
        let [from, to] = by.0;
        Self {
            source_region: self.source_region.wrapping_add(from.region),
            destination_region: self.destination_region.wrapping_add(to.region),
            source_offset: self.source_offset.wrapping_add(from.offset),
            destination_offset: self.destination_offset.wrapping_add(to.offset),
            bytes: self.bytes,
        }
    }
}

/// The distance between two positions, at the source and at the destination. Values wrap.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Distance(pub(crate) [RegionOffset; 2]);

impl Distance {
    pub(crate) const ZERO: Self = Self([RegionOffset { region: 0, offset: 0 }; 2]);

    /// The same distance at both ends.
    pub(crate) const fn of(at: RegionOffset) -> Self {
        Self([at, at])
    }

    pub(crate) const fn between(from: &[RegionOffset; 2], to: &[RegionOffset; 2]) -> Self {
        let [a, b] = [Self::one(from[0], to[0]), Self::one(from[1], to[1])];
        Self([a, b])
    }

    const fn one(from: RegionOffset, to: RegionOffset) -> RegionOffset {
        RegionOffset {
            region: to.region.wrapping_sub(from.region),
            offset: to.offset.wrapping_sub(from.offset),
        }
    }

    pub(crate) fn times(&self, count: u64) -> Self {
        // Counts of levels are products of 32-bit numbers; only valid positions are requested.
        let regions = u32::try_from(count).unwrap_or(u32::MAX);
        Self(self.0.map(|each| RegionOffset {
            region: each.region.wrapping_mul(regions),
            offset: each.offset.wrapping_mul(count),
        }))
    }

    pub(crate) fn plus(&self, other: &Self) -> Self {
        let add = |a: RegionOffset, b: RegionOffset| RegionOffset {
            region: a.region.wrapping_add(b.region),
            offset: a.offset.wrapping_add(b.offset),
        };
        let ([a, b], [c, d]) = (self.0, other.0);
        Self([add(a, c), add(b, d)])
    }

    /// Whether both ends stay in their regions and advance by `bytes`.
    pub(crate) fn is_step_of(&self, bytes: u64) -> bool {
        self.0.iter().all(|each| each.region == 0 && each.offset == bytes)
    }
}
