//! Blocks that are pages: each is separate from all others, as a whole or section by section.

use super::axis::Axis;
use super::proof::Nest;
use super::section::Section;

/// The parts of one region that belong to one block alone.
///
/// Part `p` of block `b` begins at `offset + p · part_stride + b · stride` of region 0, and spans
/// `bytes` there.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Page {
    offset: u64,
    stride: u64,
    bytes: u64,
    parts: u32,
    part_stride: u64,
}

impl Page {
    /// The pages, if there is one region and blocks are the outermost axis of every section. A page
    /// is a whole block. If all K precedes all V, it is a part for each section.
    pub(super) fn of(sections: &[Section], nests: &[Nest]) -> Option<Self> {
        let first = sections.first()?;
        let steps = first.steps(Axis::Block);
        let stride = steps.inner().stride;
        let offset = sections.iter().map(Section::offset).min()?;
        let (mut end, mut spans) = (0, (u64::MAX, 0));
        for (section, nest) in sections.iter().zip(nests) {
            let in_one_region = section.first_region() == 0
                && Axis::ALL.iter().all(|&axis| section.steps(axis).regions() == 0);
            let blocks = section.steps(Axis::Block);
            if !in_one_region || blocks.outer().count > 1 || blocks.inner().stride != stride {
                return None;
            }
            let is_outermost = |step: &super::proof::NestedStep| step.axis == Axis::Block;
            let span = match nest.steps.split_last() {
                Some((last, _)) if is_outermost(last) => nest.span - last.stride * (last.count - 1),
                Some((_, others)) if others.iter().any(is_outermost) => return None,
                _ => nest.span,
            };
            end = end.max(section.offset() - offset + span);
            spans = (span.min(spans.0), span.max(spans.1));
        }
        if steps.inner().count == 1 || end <= stride {
            return Some(Self { offset, stride, bytes: end, parts: 1, part_stride: 0 });
        }
        // Sections of equal spans at equal distances, each with its blocks in order.
        let (least, bytes) = spans;
        let second = sections.get(1)?.offset();
        let part_stride = second.checked_sub(first.offset())?;
        let is_even = sections.windows(2).all(|pair| match pair {
            [a, b] => b.offset().checked_sub(a.offset()) == Some(part_stride),
            _ => false,
        });
        let parts = u32::try_from(sections.len()).ok()?;
        let is_apart = least == bytes && bytes <= stride && is_even && part_stride > stride;
        is_apart.then_some(Self { offset, stride, bytes, parts, part_stride })
    }

    /// Whether each block is in one part.
    #[must_use]
    pub const fn is_whole(&self) -> bool {
        self.parts == 1
    }

    terrane_core::getters! {
        /// The parts of a block.
        parts: u32,
        /// Bytes from one part of a block to the next; zero if a block is one part.
        part_stride: u64,
        /// The start of block 0, in bytes from the start of the region.
        offset: u64,
        /// Bytes from one block to the next. It has no meaning for a layout of one block.
        stride: u64,
        /// Bytes from the start of a part to its end.
        bytes: u64,
    }
}
