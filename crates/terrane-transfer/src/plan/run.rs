//! Runs of bytes that are contiguous at both ends.

use terrane_core::ByteCount;
use terrane_layout::RegionOffset;

use crate::side::{Ends, Side};

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
    pub(crate) const fn new(at: &Ends<RegionOffset>, bytes: u64) -> Self {
        Self {
            source_region: at.source.region,
            destination_region: at.destination.region,
            source_offset: at.source.offset,
            destination_offset: at.destination.offset,
            bytes,
        }
    }

    /// The run's start in the source.
    #[inline]
    #[must_use]
    pub const fn source(&self) -> RegionOffset {
        RegionOffset { region: self.source_region, offset: self.source_offset }
    }

    /// The run's start in the destination.
    #[inline]
    #[must_use]
    pub const fn destination(&self) -> RegionOffset {
        RegionOffset { region: self.destination_region, offset: self.destination_offset }
    }

    /// The run's start at one end.
    #[inline]
    #[must_use]
    pub const fn at(&self, side: Side) -> RegionOffset {
        match side {
            Side::Source => self.source(),
            Side::Destination => self.destination(),
        }
    }

    /// The run's length.
    #[inline]
    #[must_use]
    pub const fn bytes(&self) -> ByteCount {
        ByteCount::new(self.bytes)
    }

    /// The bytes from `offset` on; the whole run if it is shorter.
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
        let Ends { source, destination } = by.0;
        Self {
            source_region: self.source_region.wrapping_add(source.region),
            destination_region: self.destination_region.wrapping_add(destination.region),
            source_offset: self.source_offset.wrapping_add(source.offset),
            destination_offset: self.destination_offset.wrapping_add(destination.offset),
            bytes: self.bytes,
        }
    }
}

/// The distance between two positions, at each end. Values wrap.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Distance(pub(crate) Ends<RegionOffset>);

impl Distance {
    pub(crate) const ZERO: Self =
        Self(Ends { source: RegionOffset::ZERO, destination: RegionOffset::ZERO });

    pub(crate) fn between(first: Ends<RegionOffset>, second: Ends<RegionOffset>) -> Self {
        Self(first.zip(second).map(|(first, second)| second.minus(first)))
    }

    pub(crate) fn times(&self, count: u64) -> Self {
        // Counts of levels are products of 32-bit numbers; only valid positions are requested.
        Self(self.0.map(|each| each.times(count)))
    }

    pub(crate) fn plus(&self, other: &Self) -> Self {
        Self(self.0.zip(other.0).map(|(one, other)| one.plus(other)))
    }

    /// Whether both ends stay in their regions and advance by `bytes`.
    pub(crate) fn is_step_of(&self, bytes: u64) -> bool {
        self.0.into_iter().all(|each| each == RegionOffset::within(bytes))
    }
}
