//! Lists the bytes of a block in an order that does not depend on strides.

use std::ops::Range;

use terrane_core::convert::to_u64;

use super::{Axis, Geometry, RegionOffset, Section};

impl Geometry {
    /// Calls `each` with the start and the length in bytes of a block's spans in canonical order.
    ///
    /// Canonical order is layer, section by its name, token, head, element. Sections without layers
    /// follow the last layer. Padding is omitted. Two geometries of equal sections list the same
    /// bytes of a block in the same order. So a checksum over these spans identifies the block's
    /// contents in any layout.
    ///
    /// In sections with tokens, only the first `tokens` tokens are listed. Adjacent spans are
    /// joined. `block` is not checked; beyond its bound the spans are meaningless.
    pub fn canonical_spans(
        &self,
        block: u32,
        tokens: u32,
        each: &mut impl FnMut(RegionOffset, u64),
    ) {
        self.canonical_spans_of(block, 0..self.num_layers, 0..tokens, each);
    }

    /// Like [`canonical_spans`](Self::canonical_spans), for some layers and some tokens of a block.
    ///
    /// The spans of consecutive ranges of layers, joined, are the spans of the block. Sections
    /// without layers belong to the last layer.
    pub fn canonical_spans_of(
        &self,
        block: u32,
        layers: Range<u32>,
        tokens: Range<u32>,
        each: &mut impl FnMut(RegionOffset, u64),
    ) {
        let mut open: Option<(RegionOffset, u64)> = None;
        let mut add = |at: RegionOffset, bytes: u64| match &mut open {
            Some((start, length)) if start.plus(RegionOffset::within(*length)) == at => {
                *length += bytes;
            }
            _ => {
                if let Some((start, length)) = open.replace((at, bytes)) {
                    each(start, length);
                }
            }
        };
        let mut by_name: Vec<&Section> = self.sections.iter().collect();
        by_name.sort_by_key(|section| section.name());
        let has_layers =
            |section: &&Section| self.num_layers == 1 || section.steps(Axis::Layer).count() > 1;
        let (layered, others): (Vec<&Section>, Vec<_>) = by_name.into_iter().partition(has_layers);
        let has_last = layers.contains(&self.num_layers.wrapping_sub(1));
        for layer in layers {
            layered.iter().for_each(|section| section.rows([block, layer], &tokens, &mut add));
        }
        if has_last {
            others.iter().for_each(|section| section.rows([block, 0], &tokens, &mut add));
        }
        if let Some((start, length)) = open {
            each(start, length);
        }
    }
}

impl Section {
    /// Calls `add` with the rows of a block and a layer, in the order token, head, element.
    fn rows(
        &self,
        [block, layer]: [u32; 2],
        tokens: &Range<u32>,
        add: &mut impl FnMut(RegionOffset, u64),
    ) {
        let begin = self.begin(block, layer);
        let mut unit = u64::from(self.shape().element_bytes);
        let [[a, b], [c, d]] = [Axis::Element, Axis::Head].map(|axis| self.steps(axis).parts());
        let all = [a, b, c, d];
        let mut levels = &all[..];
        // Adjacent positions form one span.
        while let Some((&(count, step), outer)) = levels.split_first()
            && (count == 1 || step == RegionOffset::within(unit))
        {
            unit *= u64::from(count);
            levels = outer;
        }
        let of_tokens = self.steps(Axis::Token);
        let count = u32::try_from(of_tokens.count()).unwrap_or(u32::MAX);
        // A section that lacks the axis has the same bytes for any number of tokens.
        let tokens = if count > 1 { tokens.start..tokens.end.min(count) } else { 0..count };
        let is_one_span = levels.is_empty()
            && of_tokens.outer().count == 1
            && (tokens.len() <= 1 || of_tokens.inner().stride == unit);
        if is_one_span && !tokens.is_empty() {
            let begin = begin.plus(of_tokens.place(tokens.start));
            return add(begin, unit * to_u64(tokens.len()));
        }
        for token in tokens {
            walk(begin.plus(of_tokens.place(token)), levels, unit, add);
        }
    }
}

/// Calls `add` with a span of `unit` bytes for each position, the last level outermost.
fn walk(
    mut at: RegionOffset,
    levels: &[(u32, RegionOffset)],
    unit: u64,
    add: &mut impl FnMut(RegionOffset, u64),
) {
    let Some((&(count, step), inner)) = levels.split_last() else { return add(at, unit) };
    for _ in 0..count {
        walk(at, inner, unit, add);
        // The step after the last position may wrap, but is never used.
        at = at.plus(step);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{AxisSteps, SectionName, Step};

    /// Every element separately, from the definition.
    fn elements(geometry: &Geometry, block: u32, tokens: u32) -> Vec<(u32, u64)> {
        let mut bytes = Vec::new();
        let mut add = |section: &Section, layer: u32| {
            let shape = section.shape();
            let tokens = if shape.tokens > 1 { shape.tokens.min(tokens) } else { 1 };
            for token in 0..tokens {
                for head in 0..shape.heads.unwrap_or(1) {
                    for element in 0..shape.elements {
                        let at = section.place([block, layer], [head, token, element]);
                        let span = at.offset..at.offset + u64::from(shape.element_bytes);
                        bytes.extend(span.map(|offset| (at.region, offset)));
                    }
                }
            }
        };
        let layers = geometry.num_layers();
        let is_in_layers = |section: &Section| layers == 1 || section.shape().layers > 1;
        let mut sections = geometry.sections().to_vec();
        sections.sort_by_key(|section| section.name().as_str().to_owned());
        for layer in 0..layers {
            let sections = sections.iter().filter(|section| is_in_layers(section));
            sections.for_each(|section| add(section, layer));
        }
        let others = sections.iter().filter(|section| !is_in_layers(section));
        others.for_each(|section| add(section, 0));
        bytes
    }

    fn check(geometry: &Geometry) {
        for block in 0..geometry.num_blocks() {
            for tokens in [0, 1, 3, u32::MAX] {
                let mut found = Vec::new();
                let mut last = None;
                geometry.canonical_spans(block, tokens, &mut |at, bytes| {
                    assert_ne!(last, Some((at.region, at.offset)), "two adjacent spans");
                    last = Some((at.region, at.offset + bytes));
                    let span = at.offset..at.offset + bytes;
                    found.extend(span.map(|offset| (at.region, offset)));
                });
                assert_eq!(found, elements(geometry, block, tokens), "{geometry:?}");
            }
        }
    }

    fn section(name: SectionName, axes: [AxisSteps; 5], element_bytes: u32) -> Section {
        let [block, layer, head, token, element] = axes;
        Section::new(name, element_bytes)
            .axis(Axis::Block, block)
            .axis(Axis::Layer, layer)
            .axis(Axis::Head, head)
            .axis(Axis::Token, token)
            .axis(Axis::Element, element)
    }

    #[test]
    fn canonical_spans_are_the_elements_in_the_defined_order() {
        let step = AxisSteps::new;
        // One piece per layer: token, head, element. 2 blocks, 3 layers, 4 tokens, 2 heads, 8
        // elements.
        let contiguous = section(
            SectionName::K,
            [step(2, 384), step(3, 128), step(2, 16), step(4, 32), step(8, 2)],
            2,
        );
        // Heads outside tokens, and elements split around tokens.
        let head_major = section(
            SectionName::V,
            [step(2, 384), step(3, 128), step(2, 64), step(4, 16), step(8, 2)],
            2,
        )
        .at(1, 0);
        let split = section(
            SectionName::VALUES,
            [
                step(2, 384),
                step(3, 128),
                step(2, 64),
                step(4, 8),
                AxisSteps::split(Step::new(2, 32), Step::new(4, 2)),
            ],
            2,
        )
        .at(2, 0);
        let spread_layers = section(
            SectionName::SCALES,
            [
                step(2, 16),
                AxisSteps::spread(3, 1, Step::ONE),
                AxisSteps::ABSENT,
                step(4, 4),
                AxisSteps::ABSENT,
            ],
            4,
        )
        .at(3, 0);
        let without_layers = Section::new(SectionName::new("state").unwrap(), 1)
            .at(6, 5)
            .axis(Axis::Block, step(2, 100))
            .axis(Axis::Element, step(9, 1));
        check(&Geometry::from_sections([contiguous]).unwrap());
        check(&Geometry::from_sections([contiguous, head_major]).unwrap());
        let all = [contiguous, head_major, split, spread_layers, without_layers];
        check(&Geometry::from_sections(all).unwrap());
    }

    #[test]
    fn ranges_of_layers_and_tokens_are_parts_of_a_block() {
        let step = AxisSteps::new;
        let axes = [step(2, 384), step(3, 128), step(2, 64), step(4, 16), step(8, 2)];
        let head_major = section(SectionName::V, axes, 2);
        let without_layers = Section::new(SectionName::new("state").unwrap(), 1)
            .at(1, 5)
            .axis(Axis::Block, step(2, 100))
            .axis(Axis::Element, step(9, 1));
        let geometry = Geometry::from_sections([head_major, without_layers]).unwrap();
        let spans = |layers: Range<u32>, tokens: Range<u32>| {
            let mut bytes = Vec::new();
            geometry.canonical_spans_of(1, layers, tokens, &mut |at, length| {
                bytes.extend((at.offset..at.offset + length).map(|offset| (at.region, offset)));
            });
            bytes
        };
        let parts = [0..1, 1..1, 1..3].map(|layers| spans(layers, 0..4)).concat();
        assert_eq!(parts, elements(&geometry, 1, 4));
        let row = |token, head| {
            let at = head_major.place([1, 2], [head, token, 0]).offset;
            (at..at + 16).map(|offset| (0, offset)).collect::<Vec<_>>()
        };
        let rows = [row(1, 0), row(1, 1), row(2, 0), row(2, 1)].concat();
        assert_eq!(spans(2..3, 1..3)[..rows.len()], rows);
        assert_eq!(spans(2..3, 1..3).len(), rows.len() + 9);
    }

    #[test]
    fn a_contiguous_block_is_one_span() {
        let step = AxisSteps::new;
        let axes = [step(5, 384), step(3, 128), step(2, 16), step(4, 32), step(8, 2)];
        let geometry = Geometry::from_sections([section(SectionName::K, axes, 2)]).unwrap();
        let mut spans = Vec::new();
        geometry.canonical_spans(3, u32::MAX, &mut |at, bytes| spans.push((at.offset, bytes)));
        assert_eq!(spans, [(3 * 384, 384)]);
    }
}
