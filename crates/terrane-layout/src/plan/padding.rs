//! The bytes of a layout that are not in blocks.

use terrane_core::ByteCount;

use crate::geometry::Geometry;

/// The bytes of a layout that are not in blocks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PaddingReport {
    /// The bytes of the blocks themselves.
    pub block_bytes: ByteCount,
    /// Bytes between blocks, from the block alignment.
    pub block_padding: ByteCount,
    /// Bytes between regions and at the end, from the alignment and the granule of the limits.
    pub region_padding: ByteCount,
}

impl PaddingReport {
    /// The report for the regions of `geometry`, whose base allocation has `base_bytes`.
    pub(crate) fn new(geometry: &Geometry, base_bytes: ByteCount) -> Self {
        let (in_regions, in_blocks) = (geometry.all_region_bytes(), geometry.total_bytes());
        // Blocks are within regions, and regions within the base, so no difference is negative.
        let difference = |a: ByteCount, b| a.checked_sub(b).unwrap_or(ByteCount::ZERO);
        Self {
            block_bytes: in_blocks,
            block_padding: difference(in_regions, in_blocks),
            region_padding: difference(base_bytes, in_regions),
        }
    }

    /// Padding as a share of the bytes of the blocks: 0.001 is 0.1 %.
    #[must_use]
    pub fn ratio(&self) -> f64 {
        let padding = self.block_padding.get() as f64 + self.region_padding.get() as f64;
        padding / self.block_bytes.get() as f64
    }
}
