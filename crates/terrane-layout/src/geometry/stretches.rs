//! The contiguous stretches of a section.

use super::axis::Axis;
use super::index::RegionOffset;
use super::section::Section;

/// The stretches of one block and layer of a section. A stretch is contiguous and as long as the
/// strides permit. Positions are relative to [`Section::begin`].
#[derive(Clone, Debug)]
pub struct Stretches {
    bytes: u64,
    /// Count, bytes and regions from one position to the next; the innermost first.
    steps: Vec<(u64, u64, u64)>,
}

impl Stretches {
    /// The stretches of a section.
    #[must_use]
    pub fn of(section: &Section) -> Self {
        let axes = [Axis::Head, Axis::Token, Axis::Element].map(|axis| section.steps(axis));
        let mut steps: Vec<(u64, u64, u64)> = axes
            .into_iter()
            .flat_map(|steps| {
                let (inner, outer) = (steps.inner(), steps.outer());
                [
                    (u64::from(inner.count), inner.stride, 0),
                    (u64::from(outer.count), outer.stride, u64::from(steps.regions())),
                ]
            })
            .filter(|&(count, ..)| count > 1)
            .collect();
        steps.sort_by_key(|&(_, stride, regions)| (regions, stride));
        let mut bytes = section.element_bytes().get();
        let mut joined = 0;
        for &(count, stride, regions) in &steps {
            if regions > 0 || stride != bytes {
                break;
            }
            bytes *= count;
            joined += 1;
        }
        steps.drain(..joined);
        Self { bytes, steps }
    }

    /// The length of each stretch.
    #[must_use]
    pub const fn bytes(&self) -> u64 {
        self.bytes
    }

    /// The number of stretches of one block and layer.
    #[must_use]
    pub fn count(&self) -> u64 {
        self.steps.iter().map(|&(count, ..)| count).product()
    }

    /// The strides in bytes, from the innermost positions outwards.
    pub fn strides(&self) -> impl Iterator<Item = u64> + '_ {
        self.steps.iter().map(|&(_, stride, _)| stride)
    }

    /// The start of a stretch, relative to [`Section::begin`] in regions and bytes.
    #[must_use]
    pub fn place(&self, index: u64) -> RegionOffset {
        let (mut index, mut at) = (index, RegionOffset { region: 0, offset: 0 });
        for &(count, stride, regions) in &self.steps {
            let position = index % count;
            index /= count;
            at.offset = at.offset.wrapping_add(position.wrapping_mul(stride));
            let regions = u32::try_from(position.wrapping_mul(regions)).unwrap_or(u32::MAX);
            at.region = at.region.wrapping_add(regions);
        }
        at
    }
}
