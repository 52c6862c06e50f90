//! The positions of the tensors in a list, as counts and strides.

use smallvec::{SmallVec, smallvec};
use terrane_layout::{RegionOffset, Step};

/// A part of an axis: a number of positions, and their distance in bytes or in regions.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum AxisPart {
    Bytes(Step),
    Regions { count: u32, regions: u32 },
}

impl AxisPart {
    pub(super) const fn count(&self) -> u32 {
        match self {
            Self::Bytes(step) => step.count,
            Self::Regions { count, .. } => *count,
        }
    }
}

/// The offset of a position in a list of tensors; `None` on overflow.
pub(super) fn moved(from: RegionOffset, parts: &[AxisPart], position: u64) -> Option<RegionOffset> {
    let (mut at, mut rest) = (from, position);
    for part in parts.iter().rev() {
        let index = rest.checked_rem(part.count().into())?;
        rest = rest.checked_div(part.count().into())?;
        match part {
            AxisPart::Bytes(step) => {
                at.offset = at.offset.checked_add(index.checked_mul(step.stride)?)?;
            }
            AxisPart::Regions { regions, .. } => {
                let ahead = u32::try_from(index).ok()?.checked_mul(*regions)?;
                at.region = at.region.checked_add(ahead)?;
            }
        }
    }
    Some(at)
}

/// The counts and strides between the positions: one part, or two. `None` if the positions are not
/// in ascending order at equal distances.
pub(super) fn along(places: &[RegionOffset]) -> Option<SmallVec<[AxisPart; 4]>> {
    let &first = places.first()?;
    let count = places.len();
    // The longest groups first, because one part is better than two.
    for inner in (1..=count).rev().filter(|inner| count.is_multiple_of(*inner)) {
        let step = |to: usize, count: usize| part(first, *places.get(to)?, count);
        let inside = if inner == 1 { None } else { Some(step(1, inner)?) };
        let outside = if inner == count { None } else { step(inner, count / inner) };
        if inner != count && outside.is_none() {
            continue;
        }
        let parts: SmallVec<[AxisPart; 4]> = outside.into_iter().chain(inside).collect();
        let mut expected = (0_u64..).zip(places);
        if expected.all(|(position, &place)| moved(first, &parts, position) == Some(place)) {
            return Some(if parts.is_empty() { smallvec![] } else { parts });
        }
    }
    None
}

fn part(from: RegionOffset, to: RegionOffset, count: usize) -> Option<AxisPart> {
    let count = u32::try_from(count).ok()?;
    if from.region == to.region {
        let stride = to.offset.checked_sub(from.offset)?;
        return Some(AxisPart::Bytes(Step::new(count, stride)));
    }
    let regions = to.region.checked_sub(from.region)?;
    (from.offset == to.offset).then_some(AxisPart::Regions { count, regions })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn places(places: &[(u32, u64)]) -> Option<SmallVec<[AxisPart; 4]>> {
        let places: Vec<_> =
            places.iter().map(|&(region, offset)| RegionOffset { region, offset }).collect();
        along(&places)
    }

    #[test]
    fn equal_distances_are_found() {
        let bytes = |count, stride| AxisPart::Bytes(Step::new(count, stride));
        let regions = |count, regions| AxisPart::Regions { count, regions };
        assert_eq!(places(&[(3, 5)]).unwrap().as_slice(), []);
        assert_eq!(places(&[(0, 0), (0, 8), (0, 16)]).unwrap().as_slice(), [bytes(3, 8)]);
        assert_eq!(places(&[(1, 4), (3, 4)]).unwrap().as_slice(), [regions(2, 2)]);
        assert_eq!(
            places(&[(0, 0), (0, 8), (1, 0), (1, 8)]).unwrap().as_slice(),
            [regions(2, 1), bytes(2, 8)]
        );
        assert_eq!(
            places(&[(0, 0), (0, 8), (0, 20), (0, 28)]).unwrap().as_slice(),
            [bytes(2, 20), bytes(2, 8)]
        );
        for uneven in [
            &[(0, 0), (0, 16), (0, 8)][..],
            &[(0, 8), (0, 0)],
            &[(0, 0), (1, 4)],
            &[(1, 0), (0, 0)],
            &[(0, 0), (1, 0), (3, 0)],
            &[],
        ] {
            assert_eq!(places(uneven), None, "{uneven:?}");
        }
    }
}
