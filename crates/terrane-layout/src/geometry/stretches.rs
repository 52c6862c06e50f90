//! The contiguous stretches of a section.

use super::axis::Axis;
use super::index::RegionOffset;
use super::section::Section;

/// The stretches of one block and layer of a section. A stretch is contiguous and as long as the
/// strides permit. Positions are relative to [`Section::begin`].
#[derive(Clone, Debug)]
pub struct Stretches {
    bytes: u64,
    /// The number of positions, and the distance from one to the next; the innermost first.
    steps: Vec<(u64, RegionOffset)>,
}

impl Stretches {
    /// The stretches of a section.
    #[must_use]
    pub fn of(section: &Section) -> Self {
        let axes = [Axis::Head, Axis::Token, Axis::Element].map(|axis| section.steps(axis));
        let parts = axes.into_iter().flat_map(|steps| steps.parts());
        let mut steps: Vec<(u64, RegionOffset)> = parts
            .filter(|&(count, _)| count > 1)
            .map(|(count, step)| (count.into(), step))
            .collect();
        steps.sort_by_key(|&(_, step)| step);
        let mut bytes = section.element_bytes().get();
        let mut joined = 0;
        for &(count, step) in &steps {
            if step != RegionOffset::within(bytes) {
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
        self.steps.iter().map(|&(count, _)| count).product()
    }

    /// The strides in bytes, from the innermost positions outwards.
    pub fn strides(&self) -> impl Iterator<Item = u64> + '_ {
        self.steps.iter().map(|&(_, step)| step.offset)
    }

    /// The start of a stretch, relative to [`Section::begin`] in regions and bytes.
    #[must_use]
    pub fn place(&self, index: u64) -> RegionOffset {
        let (mut index, mut at) = (index, RegionOffset::ZERO);
        for &(count, step) in &self.steps {
            at = at.plus(step.times(index % count));
            index /= count;
        }
        at
    }
}
