//! Sections of contiguous pieces at equal distances, as in most caches.

use terrane_core::ByteCount;

use super::axis::Axis;
use super::index::RegionOffset;
use super::section::Section;
use super::stretches::Stretches;

/// The strides of a regular layout: every (block, layer, section) is one contiguous piece, all
/// pieces have one length, and sections are at equal distances.
///
/// The piece of (`block`, `layer`, `outer`) begins at
/// `block · block_stride + layer · layer_stride + outer · outer_stride` of region
/// `layer · regions_per_layer`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct PieceStrides {
    block: u64,
    layer: u64,
    outer: u64,
    regions_per_layer: u32,
    bytes: u64,
}

impl PieceStrides {
    /// The strides of these sections, if they are regular.
    pub(super) fn of(sections: &[Section]) -> Option<Self> {
        let (first, others) = sections.split_first()?;
        let outer = match others {
            [] => first.shape().piece_bytes(),
            [second] => second.offset().checked_sub(first.offset())?,
            _ => return None,
        };
        let (block, layer) = (first.steps(Axis::Block), first.steps(Axis::Layer));
        let bytes = first.shape().piece_bytes();
        let is_single = |steps: &super::AxisSteps| steps.outer().count == 1 || steps.regions() > 0;
        let is_alike = |section: &Section| {
            let same_steps = Axis::ALL.iter().all(|&axis| section.steps(axis) == first.steps(axis));
            same_steps && section.shape() == first.shape() && section.first_region() == 0
        };
        // The layer axis may be spread over regions, one for each layer.
        let layers_fit = is_single(layer) && (layer.outer().count == 1 || layer.inner().count == 1);
        let regular = first.offset() == 0
            && block.outer().count == 1
            && layers_fit
            && Stretches::of(first).bytes() == bytes
            && sections.iter().all(is_alike);
        regular.then(|| Self {
            block: block.inner().stride,
            // With a region for each layer, the inner part is one position, without a stride.
            layer: if layer.regions() > 0 { 0 } else { layer.inner().stride },
            outer,
            regions_per_layer: layer.regions(),
            bytes,
        })
    }

    /// The start of a piece. Indices are not checked; for an index out of bounds, the result is
    /// meaningless.
    #[inline]
    #[must_use]
    pub fn offset(&self, block: u32, layer: u32, outer: u32) -> RegionOffset {
        let offset = u64::from(block)
            .wrapping_mul(self.block)
            .wrapping_add(u64::from(layer).wrapping_mul(self.layer))
            .wrapping_add(u64::from(outer).wrapping_mul(self.outer));
        RegionOffset { region: layer.wrapping_mul(self.regions_per_layer), offset }
    }

    /// The bytes of one piece.
    #[inline]
    #[must_use]
    pub const fn piece_bytes(&self) -> ByteCount {
        ByteCount::new(self.bytes)
    }

    /// Bytes from one block to the next, in the same layer and section.
    #[inline]
    #[must_use]
    pub const fn block_stride(&self) -> ByteCount {
        ByteCount::new(self.block)
    }

    /// Bytes from one layer to the next; zero if each layer has its own region.
    #[inline]
    #[must_use]
    pub const fn layer_stride(&self) -> ByteCount {
        ByteCount::new(self.layer)
    }

    /// Bytes from one section to the next; the bytes of a piece if there is one section.
    #[inline]
    #[must_use]
    pub const fn outer_stride(&self) -> ByteCount {
        ByteCount::new(self.outer)
    }

    /// Regions from one layer to the next: 0 or 1.
    #[must_use]
    pub const fn regions_per_layer(&self) -> u32 {
        self.regions_per_layer
    }
}
