//! The order of a block's bytes for the checksum kernels: pure arithmetic.
//!
//! It is the canonical order of [`Geometry::canonical_spans`], as loops over the strides of each
//! section.

use std::ops::Range;

use terrane_layout::{Axis, AxisSteps, Geometry, Section};

use crate::kernels::schedule::Divisor;
use crate::kernels::sum_arguments::{
    MOST_LEVELS, MOST_SECTIONS, ROW_BYTES, SumLaunch, SumLevel, SumSection,
};
use crate::kernels::width::CopyWidth;

/// The sections of a block in canonical order.
#[derive(Clone, Debug)]
pub(crate) struct SumShape {
    pub(super) sections: Vec<PieceOrder>,
    /// The number of sections with layers, which come first.
    layered: usize,
    pub(super) layers: Range<u32>,
    /// The bytes of all sections with layers, in one layer.
    layer_bytes: u64,
    pub(super) block_bytes: u64,
}

/// The bytes of a section in one layer of a block.
#[derive(Clone, Debug)]
pub(crate) struct PieceOrder {
    pub(crate) section: Section,
    /// The offset of the first of the tokens in the piece.
    pub(crate) token_offset: u64,
    /// The bytes of the sections before it, in a layer or behind the last layer.
    bytes_before: u64,
    /// The bytes of a unit, which are adjacent.
    unit: u64,
    /// The loops over the units, the innermost first.
    levels: Vec<Level>,
    units: u64,
}

/// One loop over units.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Level {
    count: u32,
    first_index: u32,
    stride: u64,
}

/// The most bytes of a block. The kernels count words with signed 32-bit numbers, and read on for up
/// to a row after the block's end.
const MAX_BLOCK_BYTES: u64 = (1 << 31) - 4 * ROW_BYTES;

impl SumShape {
    /// Returns the order in which a kernel sums some layers and tokens of each block. `None` if the
    /// kernels cannot address them: rows over several regions, a region for each layer of each block,
    /// blocks of 2 GiB or more, or too many sections or axes.
    pub(crate) fn of(geometry: &Geometry, layers: Range<u32>, tokens: &Range<u32>) -> Option<Self> {
        let all = geometry.num_layers();
        let has_layers = |section: &&Section| all == 1 || section.steps(Axis::Layer).count() > 1;
        let mut by_name: Vec<&Section> = geometry.sections().iter().collect();
        by_name.sort_by_key(|section| section.name());
        let (layered, others): (Vec<&Section>, Vec<_>) = by_name.into_iter().partition(has_layers);
        // The others belong to the last layer.
        let others = if layers.contains(&all.wrapping_sub(1)) { others } else { Vec::new() };
        let mut sections = Vec::with_capacity(layered.len() + others.len());
        let mut add = |group: &[&Section]| {
            let mut bytes_before = 0_u64;
            for section in group {
                let piece = PieceOrder::of(section, tokens, bytes_before)?;
                bytes_before = bytes_before.checked_add(piece.bytes())?;
                sections.push(piece);
            }
            Some(bytes_before)
        };
        let (layer_bytes, last) = (add(&layered)?, add(&others)?);
        let count = u64::from(layers.end.checked_sub(layers.start)?);
        let block_bytes = layer_bytes.checked_mul(count)?.checked_add(last)?;
        let is_addressable = block_bytes <= MAX_BLOCK_BYTES && sections.len() <= MOST_SECTIONS;
        let layered = layered.len();
        is_addressable.then_some(Self { sections, layered, layers, layer_bytes, block_bytes })
    }

    pub(crate) fn layer_count(&self) -> u32 {
        self.layers.end - self.layers.start
    }

    /// The widest word that divides all lengths, all strides and these addresses.
    pub(crate) fn width(&self, addresses: impl Iterator<Item = u64>) -> CopyWidth {
        let numbers = self.sections.iter().flat_map(|piece| {
            let strides = piece.levels.iter().map(|level| level.stride);
            strides.chain([piece.bytes_before, piece.unit])
        });
        CopyWidth::of(numbers.chain(addresses).chain([self.layer_bytes, self.block_bytes]))
    }

    /// A launch for blocks of this shape, without addresses and pairs.
    pub(crate) fn launch(&self, width: CopyWidth) -> SumLaunch {
        // Exact, and below 2³¹: the width divides all of them.
        let words = |bytes: u64| u32::try_from(bytes >> width.index()).unwrap_or(Divisor::MAX);
        let count = |number: usize| u32::try_from(number).unwrap_or(0);
        let layered_bytes = self.layer_bytes * u64::from(self.layer_count());
        let mut launch = SumLaunch {
            block_words: words(self.block_bytes),
            layered_words: words(layered_bytes),
            sections: count(self.sections.len()),
            layered_sections: count(self.layered),
            layers: self.layer_count(),
            layer_words: Divisor::new(words(self.layer_bytes)),
            ..SumLaunch::empty()
        };
        for (to, piece) in launch.section.iter_mut().zip(&self.sections) {
            *to = SumSection {
                first_word: words(piece.bytes_before),
                levels: count(piece.levels.len()),
                unit_words: Divisor::new(words(piece.unit)),
                ..SumSection::default()
            };
            for (to, level) in to.level.iter_mut().zip(&piece.levels) {
                let Level { count, first_index: first, stride } = *level;
                *to = SumLevel { count: Divisor::new(count), first, stride };
            }
        }
        launch
    }
}

impl PieceOrder {
    fn of(section: &Section, tokens: &Range<u32>, bytes_before: u64) -> Option<Self> {
        let [token, head, element] =
            [Axis::Token, Axis::Head, Axis::Element].map(|axis| section.steps(axis));
        // The place of a layer must not depend on the block.
        let is_spread = |axis| section.steps(axis).regions() > 0;
        let rows = [Axis::Token, Axis::Head, Axis::Element].into_iter().any(is_spread);
        if rows || (is_spread(Axis::Block) && is_spread(Axis::Layer)) {
            return None;
        }
        let mut levels = Vec::with_capacity(MOST_LEVELS);
        [element, head].into_iter().for_each(|steps| add_axis(&mut levels, steps));
        let count = u32::try_from(token.count()).ok()?;
        // A section that lacks the axis has the same bytes for any number of tokens.
        let tokens = if count > 1 { tokens.start..tokens.end.min(count) } else { 0..count };
        let copied = tokens.end.checked_sub(tokens.start)?;
        let mut token_offset = 0;
        if copied == count {
            add_axis(&mut levels, token);
        } else if token.outer().count == 1 || token.inner().count <= 1 {
            token_offset = token.place(tokens.start).offset;
            let step = if token.outer().count == 1 { token.inner() } else { token.outer() };
            levels.push(Level { count: copied, first_index: 0, stride: step.stride });
        } else {
            let (inner, outer) = (token.inner(), token.outer());
            levels.push(Level {
                count: inner.count,
                first_index: tokens.start,
                stride: inner.stride,
            });
            levels.push(Level { count: outer.count, first_index: 0, stride: outer.stride });
        }
        let mut piece =
            Self { section: *section, token_offset, bytes_before, unit: 0, levels, units: 0 };
        let of_head = [element, head].map(AxisSteps::count).into_iter();
        let mut all = of_head.chain([copied.into()]);
        let bytes = all.try_fold(u64::from(section.shape().element_bytes), u64::checked_mul)?;
        piece.join(section.shape().element_bytes.into());
        piece.units = bytes / piece.unit.max(1);
        Some(piece)
    }

    /// The bytes in one layer of a block.
    fn bytes(&self) -> u64 {
        self.unit * self.units
    }

    /// Joins adjacent units to longer ones, and adjacent loops to one.
    fn join(&mut self, element_bytes: u64) {
        self.unit = element_bytes;
        let levels = std::mem::take(&mut self.levels);
        for level in levels {
            let is_joined = self.levels.is_empty() && level.first_index == 0;
            match self.levels.last_mut() {
                _ if level.count == 1 && level.first_index == 0 => {}
                _ if is_joined && level.stride == self.unit => self.unit *= u64::from(level.count),
                Some(last) if last.spans(&level) => last.count *= level.count,
                _ => self.levels.push(level),
            }
        }
    }
}

impl Level {
    /// Whether the loop around this one continues it.
    fn spans(&self, outer: &Self) -> bool {
        self.first_index == 0
            && outer.first_index == 0
            && self.stride.checked_mul(self.count.into()) == Some(outer.stride)
            && self.count.checked_mul(outer.count).is_some_and(|count| count <= Divisor::MAX)
    }
}

fn add_axis(levels: &mut Vec<Level>, steps: &AxisSteps) {
    for step in [steps.inner(), steps.outer()] {
        if step.count > 1 {
            levels.push(Level { count: step.count, first_index: 0, stride: step.stride });
        }
    }
}

#[cfg(test)]
mod tests {
    use terrane_core::convert::to_u64;
    use terrane_testkit::conformance::formats::geometries;

    use super::*;

    /// The offset of a byte in its region, as the kernel computes it.
    fn place(shape: &SumShape, block: u32, byte: u64) -> (u32, u64) {
        let layered = shape.layer_bytes * u64::from(shape.layer_count());
        let (layer, byte, sections) = if byte < layered {
            let layer = u32::try_from(byte / shape.layer_bytes).unwrap();
            (shape.layers.start + layer, byte % shape.layer_bytes, &shape.sections[..shape.layered])
        } else {
            (0, byte - layered, &shape.sections[shape.layered..])
        };
        let piece = sections.iter().rfind(|piece| piece.bytes_before <= byte).unwrap();
        let begin = piece.section.begin(block, layer);
        let (mut number, within) =
            ((byte - piece.bytes_before) / piece.unit, (byte - piece.bytes_before) % piece.unit);
        let mut offset = begin.offset + piece.token_offset + within;
        for level in &piece.levels {
            number += u64::from(level.first_index);
            offset += number % u64::from(level.count) * level.stride;
            number /= u64::from(level.count);
        }
        assert_eq!(number, 0);
        (begin.region, offset)
    }

    #[test]
    fn bytes_are_in_canonical_order_in_every_format() {
        let mut checked = 0;
        for (name, geometry) in geometries() {
            let last = geometry.num_layers();
            let parts = [(0..last, 0..u32::MAX), (0..1, 1..3), (1.min(last - 1)..last, 2..5)];
            for (layers, tokens) in parts.into_iter().chain([(0..last, 0..1), (0..last, 5..6)]) {
                let shape = SumShape::of(&geometry, layers.clone(), &tokens).expect(name);
                let (block, mut number) = (geometry.num_blocks() - 1, 0);
                geometry.canonical_spans_of(block, layers, tokens.clone(), &mut |at, bytes| {
                    for byte in 0..bytes {
                        let expected = (at.region, at.offset + byte);
                        assert_eq!(place(&shape, block, number), expected, "{name} {tokens:?}");
                        number += 1;
                        checked += 1;
                    }
                });
                assert_eq!(number, shape.block_bytes, "{name} {tokens:?}");
            }
        }
        assert!(checked > 10_000, "{checked}");
    }

    #[test]
    fn blocks_that_the_kernels_cannot_number_have_no_shape() {
        for (bytes, has_one) in
            [(MAX_BLOCK_BYTES, true), (MAX_BLOCK_BYTES + 1, false), (1 << 31, false)]
        {
            let geometry = Geometry::opaque(1, u32::try_from(bytes).unwrap()).unwrap();
            assert_eq!(SumShape::of(&geometry, 0..1, &(0..u32::MAX)).is_some(), has_one, "{bytes}");
        }
    }

    #[test]
    fn adjacent_rows_are_one_unit() {
        for (name, geometry) in geometries() {
            let layers = 0..geometry.num_layers();
            let shape = SumShape::of(&geometry, layers, &(0..u32::MAX)).unwrap();
            for piece in &shape.sections {
                let all = piece.section.shape().piece_bytes();
                assert_eq!(piece.bytes(), all, "{name}");
                let is_adjacent = geometry.pieces().is_some() && name.contains("fully_contiguous");
                assert!(!is_adjacent || piece.levels.is_empty(), "{name}: {piece:?}");
                assert!(piece.levels.len() <= MOST_LEVELS);
            }
            let width = shape.width([64].into_iter());
            let launch = shape.launch(width);
            let words = u64::from(launch.block_words) * u64::from(width.bytes());
            assert_eq!(words, shape.block_bytes, "{name}");
            assert_eq!(to_u64(shape.sections.len()), u64::from(launch.sections));
        }
    }
}
