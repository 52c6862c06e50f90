//! Checks the proof against brute force: random strides, with every byte of each section marked.

use std::collections::HashMap;

use proptest::prelude::*;
use terrane_core::ByteCount;
use terrane_layout::{
    Axis, AxisSteps, Geometry, GeometryError, LayoutError, Section, SectionName, Step, verify,
};

use crate::oracle::indices;

/// One part of an axis. A split axis has two parts.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Part {
    axis: Axis,
    /// Whether it is the outer one of two parts.
    outer: bool,
    count: u32,
    stride: u64,
    /// Whether the stride counts regions.
    in_regions: bool,
}

/// A section as a list of its parts, innermost first.
#[derive(Clone, Debug)]
struct Drawn {
    name: &'static str,
    element_bytes: u32,
    region: u32,
    offset: u64,
    parts: Vec<Part>,
}

const NAMES: [&str; 3] = ["a", "b", "c"];

impl Drawn {
    fn section(&self) -> Section {
        let name = SectionName::new(self.name).unwrap();
        let section = Section::new(name, self.element_bytes).at(self.region, self.offset);
        Axis::ALL.into_iter().fold(section, |section, axis| {
            let part = |outer| self.parts.iter().find(|p| p.axis == axis && p.outer == outer);
            let step = |part: Option<&Part>| {
                part.map_or(Step::ONE, |part| Step::new(part.count, part.stride))
            };
            let inner = step(part(false));
            match part(true) {
                Some(outer) if outer.in_regions => {
                    let regions = u32::try_from(outer.stride).unwrap();
                    // A stride over one position has no meaning.
                    let single = Step::new(1, self.offset + 7);
                    let inner = if inner == Step::ONE { single } else { inner };
                    section.axis(axis, AxisSteps::spread(outer.count, regions, inner))
                }
                outer => section.axis(axis, AxisSteps::split(step(outer), inner)),
            }
        })
    }

    /// The rule: the stride of a part is at least the span of the next smaller part and of all
    /// parts inside it.
    fn is_nested(&self) -> bool {
        [false, true].into_iter().all(|in_regions| {
            let unit = if in_regions { 1 } else { u64::from(self.element_bytes) };
            let parts: Vec<&Part> =
                self.parts.iter().filter(|p| p.in_regions == in_regions && p.count > 1).collect();
            parts.iter().enumerate().all(|(number, part)| {
                let inside = parts
                    .iter()
                    .enumerate()
                    .filter(|&(other, inside)| (inside.stride, other) < (part.stride, number));
                let reach: u64 = inside.map(|(_, p)| p.stride * u64::from(p.count - 1)).sum();
                part.stride >= reach + unit
            })
        })
    }

    /// Counts the sections of each byte, by their requested position.
    fn mark(&self, marks: &mut HashMap<(u32, u64), u32>) {
        let total: u32 = self.parts.iter().map(|part| part.count).product();
        for position in 0..total {
            let (mut rest, mut region, mut offset) = (position, self.region, self.offset);
            for part in &self.parts {
                let here = u64::from(rest % part.count) * part.stride;
                rest /= part.count;
                if part.in_regions {
                    region += u32::try_from(here).unwrap();
                } else {
                    offset += here;
                }
            }
            for byte in 0..u64::from(self.element_bytes) {
                *marks.entry((region, offset + byte)).or_default() += 1;
            }
        }
    }
}

/// The parts of a section with `blocks` blocks and `layers` layers, shuffled: counts, and which are
/// split or spread over regions.
fn parts(blocks: u32, layers: u32) -> impl Strategy<Value = Vec<Part>> {
    let small = || prop::sample::select(vec![1_u32, 2, 2, 3]);
    let inside = [small(), small(), small()];
    (inside, prop::array::uniform5(0..8_u8), Just((blocks, layers)))
        .prop_map(|([heads, tokens, elements], how, (blocks, layers))| {
            let counts = [blocks, layers, heads, tokens, elements];
            let mut parts = Vec::new();
            for ((axis, count), how) in Axis::ALL.into_iter().zip(counts).zip(how) {
                let part =
                    |outer, count, in_regions| Part { axis, outer, count, stride: 0, in_regions };
                match how {
                    0 if count == 4 => {
                        parts.extend([part(true, 2, false), part(false, 2, false)]);
                    }
                    1 if count == 4 => parts.extend([part(true, 2, true), part(false, 2, false)]),
                    2 if count > 1 => parts.push(part(true, count, true)),
                    _ => parts.push(part(false, count, false)),
                }
            }
            parts
        })
        .prop_shuffle()
}

/// One to three nested sections: one after another, or within the rows of another section.
fn layouts() -> impl Strategy<Value = Vec<Drawn>> {
    let sizes =
        (prop::sample::select(vec![1_u32, 2, 3, 4]), prop::sample::select(vec![1_u32, 2, 4]));
    sizes.prop_flat_map(|(blocks, layers)| {
        let section = (
            parts(blocks, layers),
            1..4_u32,
            0..5_u64,
            prop::collection::vec(0..4_u64, 10),
            prop::bool::weighted(0.2),
        );
        prop::collection::vec(section, 1..=3).prop_map(|drawn| {
            // Each section begins after the end of the previous ones, in every region.
            let mut end = 0;
            NAMES
                .into_iter()
                .zip(drawn)
                .map(|(name, (mut parts, element_bytes, gap, padding, dense))| {
                    let (mut span, mut regions) = (u64::from(element_bytes), 1);
                    for (part, padding) in parts.iter_mut().zip(padding) {
                        let padding = if dense { 0 } else { padding };
                        if part.in_regions {
                            part.stride = regions;
                            regions *= u64::from(part.count);
                        } else {
                            part.stride = span + padding;
                            span += part.stride * u64::from(part.count - 1);
                        }
                    }
                    let offset = end + gap;
                    end = offset + span;
                    Drawn { name, element_bytes, region: 0, offset, parts }
                })
                .collect()
        })
    })
}

fn build(drawn: &[Drawn]) -> Result<Geometry, LayoutError> {
    Geometry::from_sections(drawn.iter().map(Drawn::section))
}

/// All marks, and whether a byte belongs to two elements.
fn marked(drawn: &[Drawn]) -> (bool, HashMap<(u32, u64), u32>) {
    let mut marks = HashMap::new();
    drawn.iter().for_each(|section| section.mark(&mut marks));
    (marks.values().any(|&times| times > 1), marks)
}

/// Checks that an accepted geometry uses no byte twice and is within its regions, and that `verify`
/// counts the same bytes.
fn check_accepted(geometry: &Geometry, drawn: &[Drawn]) -> Result<(), TestCaseError> {
    let (overlaps, marks) = marked(drawn);
    prop_assert!(!overlaps, "a byte of an accepted geometry is used twice");
    for &(region, offset) in marks.keys() {
        prop_assert!(offset < geometry.region_bytes(region).get());
    }
    // `place` finds the same bytes.
    let mut found: HashMap<(u32, u64), u32> = HashMap::new();
    for section in geometry.sections() {
        for (outside, inside) in indices(geometry.num_blocks(), section) {
            let at = section.place(outside, inside);
            for byte in 0..section.element_bytes().get() {
                *found.entry((at.region, at.offset + byte)).or_default() += 1;
            }
        }
    }
    prop_assert_eq!(&found, &marks);
    prop_assert_eq!(geometry.total_bytes().to_usize(), marks.len());
    let regions: Vec<ByteCount> =
        (0..geometry.region_count()).map(|region| geometry.region_bytes(region)).collect();
    let report =
        verify(geometry, &regions).map_err(|found| TestCaseError::fail(found.to_string()))?;
    let stretches: u64 = geometry
        .sections()
        .iter()
        .map(|section| {
            let each = terrane_layout::Stretches::of(section).count();
            each * u64::from(geometry.num_blocks()) * u64::from(section.shape().layers)
        })
        .sum();
    prop_assert_eq!(report.pieces, stretches);
    let all: u64 = regions.iter().map(|bytes| bytes.get()).sum();
    let gaps = report.padding.get() + report.tail.get();
    prop_assert_eq!(gaps + geometry.total_bytes().get(), all);
    check_unit_and_alignment(geometry, &marks)
}

/// No block crosses a multiple of the unit, and stretches begin at multiples of the alignment.
fn check_unit_and_alignment(
    geometry: &Geometry,
    marks: &HashMap<(u32, u64), u32>,
) -> Result<(), TestCaseError> {
    let alignment = geometry.alignment_class().get();
    for section in geometry.sections() {
        let stretches = terrane_layout::Stretches::of(section);
        prop_assert_eq!(stretches.bytes() % alignment, 0);
        for block in 0..geometry.num_blocks() {
            for layer in 0..section.shape().layers {
                let begin = section.begin(block, layer);
                for stretch in 0..stretches.count() {
                    let at = stretches.place(stretch);
                    let (region, offset) = (begin.region + at.region, begin.offset + at.offset);
                    prop_assert_eq!(offset % alignment, 0);
                    let bytes = offset..offset + stretches.bytes();
                    prop_assert!(bytes.into_iter().all(|byte| marks.contains_key(&(region, byte))));
                }
            }
        }
    }
    let Some(unit) = geometry.block_unit() else { return Ok(()) };
    for section in geometry.sections() {
        let mut parts: HashMap<(u32, u32, u64), u32> = HashMap::new();
        for ([block, layer], inside) in indices(geometry.num_blocks(), section) {
            let at = section.place([block, layer], inside);
            let last = at.offset + section.element_bytes().get() - 1;
            prop_assert_eq!(at.offset / unit.get(), last / unit.get());
            // A unit of a region has the bytes of one block.
            let other = *parts.entry((layer, at.region, at.offset / unit.get())).or_insert(block);
            prop_assert_eq!(other, block);
        }
    }
    Ok(())
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(400))]

    #[test]
    fn nested_strides_are_accepted(drawn in layouts()) {
        prop_assert!(drawn.iter().all(Drawn::is_nested));
        let geometry = match build(&drawn) {
            Ok(geometry) => geometry,
            // Sections that skip some regions leave gaps between region numbers.
            Err(LayoutError::Geometry(GeometryError::UnusedRegion { .. })) => return Ok(()),
            Err(error) => return Err(TestCaseError::fail(error.to_string())),
        };
        check_accepted(&geometry, &drawn)?;
    }

    /// One stride is changed: by a byte, to zero, or to the stride of another part.
    #[test]
    fn mutated_strides_are_accepted_where_they_are_nested(
        drawn in layouts(),
        which in any::<prop::sample::Index>(),
        part in any::<prop::sample::Index>(),
        mutation in 0..6_u8,
    ) {
        let mut drawn = drawn;
        let number = which.index(drawn.len());
        let parts = &mut drawn[number].parts;
        let (at, other) = (part.index(parts.len()), part.index(parts.len() * 7) % parts.len());
        let stride = parts[at].stride;
        parts[at].stride = match mutation {
            0 | 1 => stride.saturating_sub(1),
            2 => stride + 1,
            3 => 0,
            4 => stride / 2,
            _ => parts[other].stride,
        };
        if parts[at].in_regions && parts[at].stride == 0 {
            // An axis that is spread over no regions has no stride in bytes.
            parts[at].in_regions = false;
        }
        let is_nested = drawn.iter().all(Drawn::is_nested);
        match build(&drawn) {
            Ok(geometry) => {
                prop_assert!(is_nested);
                check_accepted(&geometry, &drawn)?;
            }
            Err(LayoutError::Geometry(error)) => {
                let of_one = matches!(error, GeometryError::NotNested { .. });
                prop_assert_eq!(of_one, !is_nested, "{}", error);
                if let GeometryError::NotNested { unit: "byte", address, stride, span, .. } = error {
                    prop_assert!(stride < span);
                    let ends = drawn.iter().any(|each| address < each.offset + stride + span);
                    prop_assert!(ends);
                }
            }
            Err(error) => return Err(TestCaseError::fail(error.to_string())),
        }
    }

    /// Shifted sections are accepted only if they share no byte.
    #[test]
    fn moved_sections_never_share_a_byte(
        drawn in layouts(),
        moves in prop::array::uniform3((0..60_u64, 0..2_u32)),
    ) {
        let mut drawn = drawn;
        for (section, (offset, region)) in drawn.iter_mut().zip(moves) {
            (section.offset, section.region) = (offset, region);
        }
        match build(&drawn) {
            Ok(geometry) => check_accepted(&geometry, &drawn)?,
            Err(LayoutError::Geometry(
                GeometryError::SectionsOverlap { .. } | GeometryError::UnusedRegion { .. },
            )) => {}
            Err(error) => return Err(TestCaseError::fail(error.to_string())),
        }
    }

    /// Rows that sections share, each at its own position: K and V packed, in any order.
    #[test]
    fn sections_interleaved_by_rows_are_accepted(
        drawn in layouts(),
        lengths in prop::array::uniform3(1..5_u32),
        gap in 0..3_u64,
    ) {
        let Some(first) = drawn.first() else { return Ok(()) };
        let row: u64 = lengths.iter().map(|&length| u64::from(length) + gap).sum();
        let (mut span, mut at) = (row, 0);
        let parts: Vec<Part> = first
            .parts
            .iter()
            .filter(|part| part.axis != Axis::Element && !part.in_regions)
            .map(|part| {
                let part = Part { stride: span, ..*part };
                span += part.stride * u64::from(part.count - 1);
                part
            })
            .collect();
        let drawn: Vec<Drawn> = NAMES
            .into_iter()
            .zip(lengths)
            .map(|(name, length)| {
                let row = Part {
                    axis: Axis::Element,
                    outer: false,
                    count: length,
                    stride: 1,
                    in_regions: false,
                };
                let offset = at;
                at += u64::from(length) + gap;
                let parts = [row].into_iter().chain(parts.iter().copied()).collect();
                Drawn { name, element_bytes: 1, region: 0, offset, parts }
            })
            .collect();
        let geometry = build(&drawn).map_err(|error| TestCaseError::fail(error.to_string()))?;
        check_accepted(&geometry, &drawn)?;
        // One byte longer, the first section overlaps the second one.
        let mut longer = drawn;
        let grow = u32::try_from(gap).unwrap() + 1;
        longer[0].parts[0].count += grow;
        prop_assert!(build(&longer).is_err());
    }
}
