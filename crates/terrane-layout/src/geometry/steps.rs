//! The distances between the positions of an axis.

use super::index::RegionOffset;

/// `count` positions, `stride` bytes from one to the next.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Step {
    /// The number of positions, at least 1.
    pub count: u32,
    /// Bytes from one position to the next. It has no meaning if the count is 1.
    pub stride: u64,
}

impl Step {
    /// One position.
    pub const ONE: Self = Self { count: 1, stride: 0 };

    /// `count` positions, `stride` bytes apart.
    #[must_use]
    pub const fn new(count: u32, stride: u64) -> Self {
        Self { count, stride }
    }
}

/// The strides of one axis, which may be split in two.
///
/// Position `i` is at `(i / inner.count) · outer.stride + (i % inner.count) · inner.stride`. If the
/// axis is spread over regions, its outer part selects a region instead.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct AxisSteps {
    outer: Step,
    inner: Step,
    /// Regions from one outer position to the next; 0 if all positions are in one region.
    regions: u32,
}

impl AxisSteps {
    /// The axis of a section that lacks it: one position.
    pub const ABSENT: Self = Self::new(1, 0);

    /// `count` positions, `stride` bytes apart.
    #[must_use]
    pub const fn new(count: u32, stride: u64) -> Self {
        Self { outer: Step::ONE, inner: Step::new(count, stride), regions: 0 }
    }

    /// An axis in two parts: `outer.count` groups of `inner.count` positions.
    ///
    /// If one stride is enough for both parts, this equals [`new`](Self::new). So axes with equal
    /// positions are equal values.
    #[must_use]
    pub fn split(outer: Step, inner: Step) -> Self {
        if outer.count == 1 || inner.count == 1 {
            let step = if outer.count == 1 { inner } else { outer };
            return Self::new(step.count, step.stride);
        }
        let is_one_step = inner.stride.checked_mul(inner.count.into()) == Some(outer.stride);
        match outer.count.checked_mul(inner.count).filter(|_| is_one_step) {
            Some(count) => Self::new(count, inner.stride),
            None => Self { outer, inner, regions: 0 },
        }
    }

    /// `count` groups of positions, each in its own region, `regions` regions apart. The positions
    /// of a group are `inner`; with [`Step::ONE`], a group is one position.
    #[must_use]
    pub const fn spread(count: u32, regions: u32, inner: Step) -> Self {
        // A stride over one position has no meaning.
        let inner = if inner.count == 1 { Step::ONE } else { inner };
        if count == 1 {
            return Self { outer: Step::ONE, inner, regions: 0 };
        }
        Self { outer: Step { count, stride: 0 }, inner, regions }
    }

    /// An axis from the parts of an encoding, which need not be [normal](Self::normal).
    pub(super) const fn of_parts(outer: Step, inner: Step, regions: u32) -> Self {
        Self { outer, inner, regions }
    }

    /// The same positions, in the only form without meaningless parts.
    #[must_use]
    pub(super) const fn normal(self) -> Self {
        let Self { mut outer, mut inner, mut regions } = self;
        if outer.count == 1 {
            (outer, regions) = (Step::ONE, 0);
        } else if regions > 0 {
            outer.stride = 0;
        } else if inner.count == 1 {
            (outer, inner) = (Step::ONE, outer);
        }
        if inner.count == 1 {
            inner = Step::ONE;
        }
        Self { outer, inner, regions }
    }

    terrane_core::getters! {
        /// The groups of positions.
        outer: Step,
        /// The positions of a group.
        inner: Step,
        /// Regions from one group to the next; 0 if all groups are in one region.
        regions: u32,
    }

    /// The two parts, the inner one first: its number of positions, and the distance from one to
    /// the next.
    #[must_use]
    pub const fn parts(&self) -> [(u32, RegionOffset); 2] {
        let Self { outer, inner, regions } = *self;
        [
            (inner.count, RegionOffset::within(inner.stride)),
            (outer.count, RegionOffset { region: regions, offset: outer.stride }),
        ]
    }

    /// The number of positions.
    #[must_use]
    pub fn count(&self) -> u64 {
        u64::from(self.outer.count) * u64::from(self.inner.count)
    }

    /// The distance of a position from position 0.
    ///
    /// The position is not checked. Nothing overflows within the bounds that a layout has proved.
    /// For a position out of bounds, the result is meaningless.
    #[inline]
    #[must_use]
    pub fn place(&self, position: u32) -> RegionOffset {
        let (group, within) = if self.outer.count == 1 {
            (0, position)
        } else if self.inner.count <= 1 {
            (position, 0)
        } else {
            (position / self.inner.count, position % self.inner.count)
        };
        let offset = u64::from(group)
            .wrapping_mul(self.outer.stride)
            .wrapping_add(u64::from(within).wrapping_mul(self.inner.stride));
        RegionOffset { region: group.wrapping_mul(self.regions), offset }
    }
}
