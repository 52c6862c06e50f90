//! Proves that sections are within their regions and share no byte.
//!
//! The steps of a section, sorted by stride, must be nested: each stride is at least the span of
//! all steps inside it. Then no two elements share a byte. The check takes a few operations for
//! each step, for any number of blocks.

use super::axis::Axis;
use super::error::GeometryError;
use super::section::Section;
use super::steps::Step;
use crate::config::field::LARGEST_LAYOUT;

/// A section may be within at most this many positions of an outer step of another section. Nested
/// sections need two.
const MOST_MEETINGS: u64 = 4;

/// The most comparisons for two sections. Nested sections need a few dozen. Hostile strides of ten
/// steps each would need millions.
const MOST_COMPARISONS: u32 = 4096;

/// One step of a section, and the axis of the step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct NestedStep {
    pub(crate) axis: Axis,
    pub(crate) count: u64,
    pub(crate) stride: u64,
}

/// Steps in ascending order of their strides. They repeat a unit that is never split.
#[derive(Clone, Debug)]
pub(crate) struct Nest {
    pub(crate) steps: Vec<NestedStep>,
    /// From the first byte to the end of the last one.
    pub(crate) span: u64,
}

/// The result of the check of a section.
#[derive(Clone, Debug)]
pub(crate) struct Proved {
    /// The section's bytes within each of its regions.
    pub(crate) bytes: Nest,
    /// The regions of the section, counted from its first region.
    pub(crate) regions: Nest,
}

/// Checks one section.
pub(crate) fn prove(section: &Section) -> Result<Proved, GeometryError> {
    let name = section.name();
    if section.element_bytes().get() == 0 {
        return Err(GeometryError::Zero { section: name, axis: Axis::Element });
    }
    let (mut bytes, mut regions) = (Vec::new(), Vec::new());
    for axis in Axis::ALL {
        let steps = section.steps(axis);
        if steps.count() == 0 || steps.outer().count == 0 {
            return Err(GeometryError::Zero { section: name, axis });
        }
        if u32::try_from(steps.count()).is_err() {
            return Err(GeometryError::TooLarge { section: name, axis });
        }
        let nested = |step: Step, stride| NestedStep { axis, count: step.count.into(), stride };
        bytes.push(nested(steps.inner(), steps.inner().stride));
        match steps.regions() {
            0 => bytes.push(nested(steps.outer(), steps.outer().stride)),
            each => regions.push(nested(steps.outer(), each.into())),
        }
    }
    let bytes = nest(section, bytes, section.element_bytes().get(), "byte")?;
    let regions = nest(section, regions, 1, "region")?;
    let end = section.offset().checked_add(bytes.span);
    if end.is_none_or(|end| end > LARGEST_LAYOUT.get()) {
        let axis = bytes.steps.last().map_or(Axis::Element, |step| step.axis);
        return Err(GeometryError::TooLarge { section: name, axis });
    }
    Ok(Proved { bytes, regions })
}

/// Sorts steps by stride and checks that they are nested.
fn nest(
    section: &Section,
    mut steps: Vec<NestedStep>,
    unit: u64,
    named: &'static str,
) -> Result<Nest, GeometryError> {
    steps.retain(|step| step.count > 1);
    steps.sort_by_key(|step| step.stride);
    let (mut span, mut inner) = (unit, Axis::Element);
    for (number, step) in steps.iter().enumerate() {
        if step.stride < span {
            let start =
                if named == "byte" { section.offset() } else { section.first_region().into() };
            let inside = steps.get(..number).unwrap_or_default();
            let address = first_shared(Placed { start: start.into(), span, steps: inside }, *step);
            return Err(GeometryError::NotNested {
                section: section.name(),
                outer: step.axis,
                inner,
                stride: step.stride,
                span,
                unit: named,
                address: address.unwrap_or_else(|| start.saturating_add(step.stride)),
            });
        }
        let most = if named == "byte" { LARGEST_LAYOUT.get() } else { u64::from(u32::MAX) };
        let reach = step.stride.checked_mul(step.count - 1).and_then(|far| far.checked_add(span));
        span = reach
            .filter(|&reach| reach <= most)
            .ok_or(GeometryError::TooLarge { section: section.name(), axis: step.axis })?;
        inner = step.axis;
    }
    Ok(Nest { steps, span })
}

/// The first address that two positions of `step` share, including everything inside the step.
/// `None` if the positions interleave, or if only distant positions share an address.
fn first_shared(inside: Placed<'_>, step: NestedStep) -> Option<u64> {
    let (mut left, mut found) = (MOST_COMPARISONS, None);
    for ahead in 1..step.count.min(MOST_MEETINGS + 1) {
        let start = inside.start + i128::from(ahead) * i128::from(step.stride);
        found = least(found, meeting(inside, Placed { start, ..inside }, &mut left));
    }
    found.and_then(|address| u64::try_from(address).ok())
}

/// Checks that two sections share no byte.
pub(crate) fn prove_apart(
    (first, a): (&Section, &Proved),
    (second, b): (&Section, &Proved),
) -> Result<(), GeometryError> {
    let regions = |section: &Section, nest| Placed::new(section.first_region().into(), nest);
    let bytes = |section: &Section, nest| Placed::new(section.offset(), nest);
    let met = |a, b| meeting(a, b, &mut { MOST_COMPARISONS });
    if let Some(region) = met(regions(first, &a.regions), regions(second, &b.regions))
        && let Some(address) = met(bytes(first, &a.bytes), bytes(second, &b.bytes))
    {
        return Err(GeometryError::SectionsOverlap {
            first: first.name(),
            second: second.name(),
            region: u32::try_from(region).unwrap_or(u32::MAX),
            address: u64::try_from(address).unwrap_or(0),
        });
    }
    Ok(())
}

/// Nested steps from a start position. Positions are signed, because either section may begin
/// first.
#[derive(Clone, Copy)]
struct Placed<'a> {
    start: i128,
    span: u64,
    steps: &'a [NestedStep],
}

impl<'a> Placed<'a> {
    fn new(start: u64, nest: &'a Nest) -> Self {
        Self { start: start.into(), span: nest.span, steps: &nest.steps }
    }

    fn end(&self) -> i128 {
        self.start + i128::from(self.span)
    }

    /// One position of the outermost step.
    fn at(&self, index: i128) -> Option<(Self, NestedStep)> {
        let (&top, steps) = self.steps.split_last()?;
        let span = self.span - top.stride * (top.count - 1);
        Some((Self { start: self.start + index * i128::from(top.stride), span, steps }, top))
    }
}

/// The first byte that both may use, or `None` if they are proved to be separate. Each comparison
/// decrements `left`; at zero, the two are treated as overlapping.
fn meeting(a: Placed<'_>, b: Placed<'_>, left: &mut u32) -> Option<i128> {
    if a.start >= b.end() || b.start >= a.end() {
        return None;
    }
    let first = a.start.max(b.start);
    let Some(remaining) = left.checked_sub(1) else { return Some(first) };
    *left = remaining;
    match (a.at(0), b.at(0)) {
        (None, None) => Some(first),
        (Some((_, top)), Some((_, other))) if top.stride == other.stride => {
            // Both have the same period, so only neighbouring positions can overlap.
            let period = i128::from(top.stride);
            let ahead = (b.start - a.start).div_euclid(period);
            let (counts, mut found) = ((i128::from(top.count), i128::from(other.count)), None);
            for shift in [ahead, ahead + 1] {
                // Position `i` of `a` is near position `i - shift` of `b`.
                let i = shift.max(0);
                if i < counts.0 && i - shift < counts.1 {
                    let (a, _) = a.at(i)?;
                    let (b, _) = b.at(i - shift)?;
                    found = least(found, meeting(a, b, left));
                }
            }
            found
        }
        (Some((_, top)), Some((_, other))) if top.stride < other.stride => within(b, a, left),
        (None, Some(_)) => within(b, a, left),
        (Some(_), _) => within(a, b, left),
    }
}

/// Finds the positions of `coarse`, which has the larger stride, that overlap `fine`.
fn within(coarse: Placed<'_>, fine: Placed<'_>, left: &mut u32) -> Option<i128> {
    let (zero, top) = coarse.at(0)?;
    let stride = i128::from(top.stride);
    let lowest = ((fine.start - zero.end()).div_euclid(stride) + 1).max(0);
    let highest = (fine.end() - 1 - zero.start).div_euclid(stride).min(i128::from(top.count) - 1);
    if highest - lowest >= i128::from(MOST_MEETINGS) {
        return Some(coarse.start.max(fine.start));
    }
    let mut found = None;
    for index in lowest..=highest {
        let (position, _) = coarse.at(index)?;
        found = least(found, meeting(position, fine, left));
    }
    found
}

fn least(a: Option<i128>, b: Option<i128>) -> Option<i128> {
    a.into_iter().chain(b).min()
}
