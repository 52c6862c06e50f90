//! The memory that a layout needs: the regions, as parts of one base allocation.

mod padding;

use std::sync::Arc;

use terrane_core::convert::to_usize;
use terrane_core::{Alignment, ByteCount, Limits, Region, RegionRequest};

pub use padding::PaddingReport;

use crate::config::LayoutConfig;
use crate::config::field::LARGEST_LAYOUT;
use crate::error::{LayoutError, Part};
use crate::geometry::{Axis, Geometry};
use crate::kind::LayoutKind;

/// The smallest alignment of a planned region, 512 bytes: the sector size of most disks, and enough
/// for device copies.
pub const LEAST_REGION_ALIGNMENT: Alignment = Alignment::SECTOR;

/// The memory that a layout needs, before it exists.
///
/// A plan is a pure function of geometry and limits. It allocates nothing.
///
/// ```
/// use terrane_core::{ByteCount, Limits};
/// use terrane_layout::{BlockDimension, ElementFormat, LayoutConfig, LayoutKind, LayoutPlan};
///
/// # fn main() -> Result<(), terrane_layout::LayoutError> {
/// let config = LayoutConfig::builder()
///     .num_blocks(3)
///     .num_layers(2)
///     .outer_dim(2)
///     .page_size(10)
///     .inner_dim(5)
///     .element(ElementFormat::Width(2))
///     .build()?;
/// let kind = LayoutKind::LayerSeparate { block_dimension: BlockDimension::First };
/// let plan = LayoutPlan::new(&config, kind, Limits::NONE)?;
/// // Two regions of 3 · 2 · 100 bytes, each at a multiple of 512.
/// assert_eq!(plan.geometry().region_bytes(1), ByteCount::new(600));
/// assert_eq!(plan.region_offset(1), Some(ByteCount::new(1024)));
/// assert_eq!(plan.base_request().bytes, ByteCount::new(1624));
/// assert_eq!(plan.padding().region_padding, ByteCount::new(424));
/// # Ok(())
/// # }
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LayoutPlan {
    geometry: Geometry,
    limits: Limits,
    alignment: Alignment,
    /// The start of each region in the base allocation.
    offsets: Arc<[ByteCount]>,
    base_bytes: ByteCount,
    padding: PaddingReport,
}

impl LayoutPlan {
    /// Plans the regions of `config` in the order `kind` under `limits`.
    ///
    /// # Errors
    ///
    /// [`LayoutError::Overflow`] or [`LayoutError::TooLarge`] if regions and padding exceed
    /// [`LARGEST_LAYOUT`]. [`LayoutError::RegionTooLarge`] if one region exceeds the largest region
    /// of the limits.
    pub fn new(
        config: &LayoutConfig,
        kind: LayoutKind,
        limits: Limits,
    ) -> Result<Self, LayoutError> {
        Self::of(Geometry::new(config, kind)?, limits)
    }

    /// Plans the regions of `geometry` under `limits`.
    ///
    /// # Errors
    ///
    /// As from [`new`](Self::new).
    pub fn of(geometry: Geometry, limits: Limits) -> Result<Self, LayoutError> {
        let alignment =
            LEAST_REGION_ALIGNMENT.max(limits.alignment).max(geometry.block_alignment());
        let mut base_bytes = ByteCount::ZERO;
        let mut offsets = Vec::new();
        for region in 0..geometry.region_count() {
            // The last region has no padding after it.
            let begin = base_bytes.align_up(alignment)?;
            offsets.push(begin);
            base_bytes = begin.checked_add(geometry.region_bytes(region))?;
        }
        let base_bytes = base_bytes.align_up(limits.granule)?;
        if base_bytes > LARGEST_LAYOUT {
            return Err(LayoutError::TooLarge { bytes: base_bytes });
        }
        let padding = PaddingReport::new(&geometry, base_bytes);
        let plan =
            Self { geometry, limits, alignment, offsets: offsets.into(), base_bytes, padding };
        for region in 0..plan.geometry.region_count() {
            plan.check_size(Part::Region(region), plan.geometry.region_bytes(region))?;
        }
        Ok(plan)
    }

    /// The strides.
    #[must_use]
    pub const fn geometry(&self) -> &Geometry {
        &self.geometry
    }

    terrane_core::getters! {
        /// The limits of this plan.
        limits: Limits,
        /// The alignment of every region: the strictest of the limits, the block alignment and
        /// [`LEAST_REGION_ALIGNMENT`].
        alignment: Alignment,
        /// The bytes of the base allocation that holds all regions.
        base_bytes: ByteCount,
        /// The size of the padding.
        padding: PaddingReport,
    }

    /// The start of a region in the base allocation; `None` if there is no such region.
    #[must_use]
    pub fn region_offset(&self, region: u32) -> Option<ByteCount> {
        self.offsets.get(to_usize(region.into())).copied()
    }

    /// The number of blocks, from block 0 on, that are entirely within the first `prefix` bytes of
    /// the base allocation. They can be used while the rest is still being allocated.
    ///
    /// A block of a [`LayerSeparate`](LayoutKind::LayerSeparate) layout has a part in the last
    /// region, so it is available only when that region is. The blocks of a
    /// [`FullyContiguous`](LayoutKind::FullyContiguous) layout become available one after another.
    #[must_use]
    pub fn blocks_within(&self, prefix: ByteCount) -> u32 {
        let fits = |block| self.end_of(block) <= prefix.get();
        // The ends ascend, because each is the end of all blocks up to one.
        let (mut fitting, mut end) = (0, self.geometry.num_blocks());
        while fitting < end {
            let middle = fitting + (end - fitting) / 2;
            if fits(middle) {
                fitting = middle + 1;
            } else {
                end = middle;
            }
        }
        fitting
    }

    /// The end of the last byte of all blocks up to `block` in the base allocation.
    fn end_of(&self, block: u32) -> u64 {
        let ends = self.geometry.sections().iter().flat_map(|section| {
            // Blocks of a split axis may not be in the order of their numbers. Among earlier
            // blocks, the last block of the previous group has the highest end.
            let group = section.steps(Axis::Block).inner().count.max(1);
            let before = block.checked_sub(block % group + 1);
            before.into_iter().chain([block]).map(|block| {
                let (at, span) = self.geometry.last_element(section, block);
                // The sum is below `base_bytes`, because the geometry proved that sections are
                // within regions.
                self.region_offset(at.region).unwrap_or(self.base_bytes).get() + at.offset + span
            })
        });
        ends.max().unwrap_or(0)
    }

    /// The request for the one base allocation.
    #[must_use]
    pub fn base_request(&self) -> RegionRequest {
        RegionRequest::new(self.base_bytes)
            .aligned_to(self.alignment)
            .in_units_of(self.unit())
            .labelled(format!("KV blocks, {}", self.geometry.label()))
    }

    /// The requests for memory that is allocated region by region and then adopted.
    pub fn requests(&self) -> impl ExactSizeIterator<Item = RegionRequest> + '_ {
        (0..self.geometry.region_count()).map(|region| {
            let bytes = self.geometry.region_bytes(region);
            RegionRequest::new(bytes)
                .aligned_to(self.alignment)
                .in_units_of(self.geometry.block_unit().unwrap_or(bytes))
                .labelled(match self.geometry.region_count() {
                    1 => "KV blocks, all layers".to_owned(),
                    count if count == self.geometry.num_layers() => {
                        format!("KV blocks, layer {region}")
                    }
                    _ => format!("KV blocks, region {region}"),
                })
        })
    }

    /// The unit for the base allocation: no block, and no part of a block in a region, crosses a
    /// multiple of it. It is the stride of blocks. If padding between regions shifts the blocks of
    /// the next region, it is the stride of regions.
    fn unit(&self) -> ByteCount {
        let Some(block) = self.geometry.block_unit() else { return self.base_bytes };
        let is_multiple =
            |stride: ByteCount| self.offsets.iter().all(|at| at.get() % stride.get() == 0);
        let second = self.offsets.get(1).copied();
        [Some(block), second]
            .into_iter()
            .flatten()
            .find(|&stride| is_multiple(stride))
            .unwrap_or(self.base_bytes)
    }

    /// Checks that the base allocation is within the limits.
    ///
    /// # Errors
    ///
    /// [`LayoutError::RegionTooLarge`] if the base allocation exceeds the limits. In that case,
    /// allocate each of the [`requests`](Self::requests) and adopt the memory.
    pub fn check_base(&self) -> Result<(), LayoutError> {
        self.check_size(Part::Base, self.base_bytes)
    }

    /// Splits a base allocation into the planned regions.
    ///
    /// # Errors
    ///
    /// [`LayoutError::RegionTooSmall`] if the base has fewer bytes than
    /// [`base_bytes`](Self::base_bytes). [`LayoutError::RegionMisaligned`] if it does not begin at
    /// a multiple of [`alignment`](Self::alignment).
    pub fn cut(&self, base: &Region) -> Result<Vec<Region>, LayoutError> {
        Part::Base.check(base, self.base_bytes, self.alignment)?;
        (0..self.geometry.region_count())
            .map(|region| {
                let offset = self.region_offset(region).unwrap_or(self.base_bytes);
                Ok(base.view(offset, self.geometry.region_bytes(region))?)
            })
            .collect()
    }

    /// Checks that this number of bytes is within the limits.
    pub(crate) fn check_size(&self, part: Part, bytes: ByteCount) -> Result<(), LayoutError> {
        match self.limits.largest_region {
            Some(largest) if bytes > largest => {
                Err(LayoutError::RegionTooLarge { part, bytes, largest })
            }
            _ => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests;
