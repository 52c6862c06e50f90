//! Blocks that are pages: each lies apart from all others.

use super::axis::Axis;
use super::proof::Nest;
use super::section::Section;

/// The part of one region that one block has to itself.
///
/// Block `b` lies at `offset + b · stride` of region 0, and spans `bytes` there.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Page {
    offset: u64,
    stride: u64,
    bytes: u64,
}

impl Page {
    /// The pages, if there is one region and blocks are the outermost axis of every section.
    pub(super) fn of(sections: &[Section], nests: &[Nest]) -> Option<Self> {
        let first = sections.first()?;
        let steps = first.steps(Axis::Block);
        let stride = steps.inner().stride;
        let offset = sections.iter().map(Section::offset).min()?;
        let mut end = 0;
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
        }
        let is_apart = steps.inner().count == 1 || end <= stride;
        is_apart.then_some(Self { offset, stride, bytes: end })
    }

    /// Where block 0 begins, in bytes from the beginning of the region.
    #[must_use]
    pub const fn offset(&self) -> u64 {
        self.offset
    }

    /// Bytes from a block to the next one. It has no meaning for a layout of one block.
    #[must_use]
    pub const fn stride(&self) -> u64 {
        self.stride
    }

    /// Bytes from the first byte of a block to behind its last one.
    #[must_use]
    pub const fn bytes(&self) -> u64 {
        self.bytes
    }
}
