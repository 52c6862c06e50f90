//! The lengths of a layout's regions.

use std::sync::Arc;

use terrane_core::convert::to_usize;
use terrane_core::{ByteCount, SizeOverflow};

use super::axis::Axis;
use super::error::GeometryError;
use super::proof::{Nest, Proved};
use super::section::Section;

/// The most regions of a layout. It is limited because the length of each region is stored.
const MOST_REGIONS: u64 = 1 << 20;

/// The length of each region. Most layouts have regions of one length.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum RegionLengths {
    Equal { count: u32, bytes: u64 },
    Each(Arc<[u64]>),
}

impl RegionLengths {
    pub(super) fn each(lengths: &[ByteCount]) -> Self {
        Self::from_vec(lengths.iter().map(|bytes| bytes.get()).collect())
    }

    fn from_vec(lengths: Vec<u64>) -> Self {
        let count = u32::try_from(lengths.len()).unwrap_or(u32::MAX);
        match lengths.first() {
            Some(&bytes) if lengths.iter().all(|&other| other == bytes) => {
                Self::Equal { count, bytes }
            }
            _ => Self::Each(lengths.into()),
        }
    }

    /// Checks that the sections are within the `given` regions, or computes the lengths that they
    /// need.
    pub(super) fn of(
        sections: &[Section],
        proved: &[Proved],
        given: Option<Self>,
    ) -> Result<Self, GeometryError> {
        let mut needed: Vec<u64> = Vec::new();
        for (section, proved) in sections.iter().zip(proved) {
            let end = section.offset() + proved.bytes.span;
            let last = u64::from(section.first_region()) + proved.regions.span;
            if last > MOST_REGIONS {
                let axis = proved.regions.steps.last().map_or(Axis::Layer, |step| step.axis);
                return Err(GeometryError::TooLarge { section: section.name(), axis });
            }
            for_each(&proved.regions, section.first_region().into(), &mut |region| {
                let number = u32::try_from(region).unwrap_or(u32::MAX);
                // Checked first, so that a missing region costs no memory.
                if let Some(given) = &given
                    && given.get(number).get() < end
                {
                    return Err(GeometryError::OutOfRegion {
                        section: section.name(),
                        region: number,
                        end,
                        length: given.get(number).get(),
                    });
                }
                let index = to_usize(region);
                if needed.len() <= index {
                    needed.resize(index + 1, 0);
                }
                if let Some(needed) = needed.get_mut(index) {
                    *needed = end.max(*needed);
                }
                Ok(())
            })?;
        }
        let regions = match &given {
            Some(given) => to_usize(given.count().into()),
            None => needed.len(),
        };
        needed.resize(regions.max(needed.len()), 0);
        if let Some(region) = needed.iter().position(|&bytes| bytes == 0) {
            let region = u32::try_from(region).unwrap_or(u32::MAX);
            return Err(GeometryError::UnusedRegion { region, regions });
        }
        Ok(given.unwrap_or_else(|| Self::from_vec(needed)))
    }

    pub(super) fn count(&self) -> u32 {
        match self {
            Self::Equal { count, .. } => *count,
            Self::Each(lengths) => u32::try_from(lengths.len()).unwrap_or(u32::MAX),
        }
    }

    pub(super) fn get(&self, region: u32) -> ByteCount {
        ByteCount::new(match self {
            Self::Equal { count, bytes } if region < *count => *bytes,
            Self::Equal { .. } => 0,
            Self::Each(lengths) => lengths.get(to_usize(region.into())).copied().unwrap_or(0),
        })
    }

    pub(super) fn total(&self) -> Result<ByteCount, SizeOverflow> {
        match self {
            Self::Equal { count, bytes } => {
                ByteCount::new(*bytes).checked_mul("regions", (*count).into())
            }
            Self::Each(lengths) => lengths
                .iter()
                .try_fold(ByteCount::ZERO, |sum, &bytes| sum.checked_add(ByteCount::new(bytes))),
        }
    }
}

/// Calls `each` with every region of a section.
fn for_each(
    nest: &Nest,
    first: u64,
    each: &mut impl FnMut(u64) -> Result<(), GeometryError>,
) -> Result<(), GeometryError> {
    let count: u64 = nest.steps.iter().map(|step| step.count).product();
    (0..count).try_for_each(|index| {
        let (mut region, mut rest) = (first, index);
        for step in &nest.steps {
            region += step.stride * (rest % step.count);
            rest /= step.count;
        }
        each(region)
    })
}
