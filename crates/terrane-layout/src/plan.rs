//! What memory a layout needs: the regions, cut from one base allocation.

use terrane_core::{Alignment, ByteCount, Limits, Region, RegionRequest};

use crate::config::LARGEST_LAYOUT;
use crate::{Geometry, LayoutConfig, LayoutError, LayoutKind, Part};

/// The least alignment of a planned region, 512 bytes: the sector that most disks address, and
/// no less than what device copies want.
pub const LEAST_REGION_ALIGNMENT: Alignment = Alignment::SECTOR;

/// The memory that a layout needs, before any of it exists.
///
/// A pure function of config, kind and limits: it allocates nothing.
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
/// assert_eq!(plan.geometry().region_bytes(), ByteCount::new(600));
/// assert_eq!(plan.region_offset(1), Some(ByteCount::new(1024)));
/// assert_eq!(plan.base_request().bytes, ByteCount::new(1624));
/// assert_eq!(plan.padding().region_padding, ByteCount::new(424));
/// # Ok(())
/// # }
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LayoutPlan {
    geometry: Geometry,
    limits: Limits,
    alignment: Alignment,
    region_stride: ByteCount,
    base_bytes: ByteCount,
    padding: PaddingReport,
}

impl LayoutPlan {
    /// Plans the regions of `config` in the order `kind` under `limits`.
    ///
    /// # Errors
    ///
    /// [`LayoutError::Overflow`] or [`LayoutError::TooLarge`] if regions and padding exceed
    /// [`LARGEST_LAYOUT`], and [`LayoutError::RegionTooLarge`] if one region exceeds the largest
    /// that the limits allow.
    pub fn new(
        config: &LayoutConfig,
        kind: LayoutKind,
        limits: Limits,
    ) -> Result<Self, LayoutError> {
        let geometry = Geometry::new(config, kind)?;
        let region_bytes = geometry.region_bytes();
        let alignment = LEAST_REGION_ALIGNMENT.max(limits.alignment).max(config.block_alignment());
        let region_stride = region_bytes.align_up(alignment)?;
        // The last region is not followed by padding of its own.
        let base_bytes = region_stride
            .checked_mul("regions before the last", u64::from(geometry.region_count() - 1))?
            .checked_add(region_bytes)?
            .align_up(limits.granule)?;
        if base_bytes > LARGEST_LAYOUT {
            return Err(LayoutError::TooLarge { bytes: base_bytes });
        }
        let padding = PaddingReport::new(config, &geometry, base_bytes)?;
        let plan = Self { geometry, limits, alignment, region_stride, base_bytes, padding };
        plan.check_size(Part::Region(0), region_bytes)?;
        Ok(plan)
    }

    /// The strides.
    #[must_use]
    pub const fn geometry(&self) -> &Geometry {
        &self.geometry
    }

    /// The limits under which this was planned.
    #[must_use]
    pub const fn limits(&self) -> Limits {
        self.limits
    }

    /// What every region begins at a multiple of: the strictest of the limits, the block
    /// alignment and [`LEAST_REGION_ALIGNMENT`].
    #[must_use]
    pub const fn alignment(&self) -> Alignment {
        self.alignment
    }

    /// Where a region begins in the base allocation; `None` if there is no such region.
    #[must_use]
    pub fn region_offset(&self, region: u32) -> Option<ByteCount> {
        // The product is below `base_bytes`, which `new` computed with checks.
        (region < self.geometry.region_count())
            .then(|| ByteCount::new(self.region_stride.get() * u64::from(region)))
    }

    /// How many blocks, from block 0 on, lie wholly within the first `prefix` bytes of the base
    /// allocation: those that can be used while the rest of it still comes up.
    ///
    /// A block of a [`LayerSeparate`](LayoutKind::LayerSeparate) layout has a part in the last
    /// region, so that none is there before that; the blocks of a
    /// [`FullyContiguous`](LayoutKind::FullyContiguous) one come one after the other.
    #[must_use]
    pub fn blocks_within(&self, prefix: ByteCount) -> u32 {
        let geometry = &self.geometry;
        let last = geometry.offset(0, geometry.num_layers() - 1, geometry.outer_dim() - 1);
        let region = self.region_offset(last.region).unwrap_or(self.base_bytes);
        // Below `base_bytes`, as a layout has one block at least.
        let end = region.get() + last.offset + geometry.piece_bytes().get();
        let Some(beyond) = prefix.get().checked_sub(end) else { return 0 };
        let blocks = geometry.num_blocks();
        // Of the blocks behind the first one, of which there are `blocks - 1`.
        let others = u32::try_from(beyond / geometry.block_stride().get()).unwrap_or(u32::MAX);
        if others >= blocks { blocks } else { blocks.min(others + 1) }
    }

    /// The bytes of the base allocation that holds all regions.
    #[must_use]
    pub const fn base_bytes(&self) -> ByteCount {
        self.base_bytes
    }

    /// The request for the one base allocation.
    #[must_use]
    pub fn base_request(&self) -> RegionRequest {
        RegionRequest::new(self.base_bytes)
            .aligned_to(self.alignment)
            .in_units_of(self.unit())
            .labelled(format!("KV blocks, {}", self.geometry.kind()))
    }

    /// The requests for memory that is allocated region by region, to be adopted.
    pub fn requests(&self) -> impl ExactSizeIterator<Item = RegionRequest> + '_ {
        (0..self.geometry.region_count()).map(|region| {
            RegionRequest::new(self.geometry.region_bytes())
                .aligned_to(self.alignment)
                .in_units_of(self.geometry.block_stride())
                .labelled(match self.geometry.kind() {
                    LayoutKind::FullyContiguous => "KV blocks, all layers".to_owned(),
                    LayoutKind::LayerSeparate { .. } => format!("KV blocks, layer {region}"),
                })
        })
    }

    /// The bytes at whose multiples in the base allocation no block, or no block's part in a
    /// region, is split: the stride of blocks, or that of regions where padding between them
    /// moves the blocks of one region against those of the next.
    fn unit(&self) -> ByteCount {
        let block = self.geometry.block_stride();
        let is_moved = self.geometry.region_count() > 1
            && !self.region_stride.get().is_multiple_of(block.get());
        if is_moved { self.region_stride } else { block }
    }

    /// Whether the base allocation is within the limits.
    ///
    /// # Errors
    ///
    /// [`LayoutError::RegionTooLarge`] if not; then allocate each of
    /// [`requests`](Self::requests), and adopt them.
    pub fn check_base(&self) -> Result<(), LayoutError> {
        self.check_size(Part::Base, self.base_bytes)
    }

    /// What padding costs.
    #[must_use]
    pub const fn padding(&self) -> PaddingReport {
        self.padding
    }

    /// Cuts a base allocation into the planned regions.
    ///
    /// # Errors
    ///
    /// [`LayoutError::RegionTooSmall`] if the base has fewer than
    /// [`base_bytes`](Self::base_bytes), and [`LayoutError::RegionMisaligned`] if it does not
    /// begin at a multiple of [`alignment`](Self::alignment).
    pub fn cut(&self, base: &Region) -> Result<Vec<Region>, LayoutError> {
        Part::Base.check(base, self.base_bytes, self.alignment)?;
        (0..self.geometry.region_count())
            .map(|region| {
                let offset = ByteCount::new(self.region_stride.get() * u64::from(region));
                Ok(base.view(offset, self.geometry.region_bytes())?)
            })
            .collect()
    }

    /// Whether this many bytes are within the limits.
    pub(crate) fn check_size(&self, part: Part, bytes: ByteCount) -> Result<(), LayoutError> {
        match self.limits.largest_region {
            Some(largest) if bytes > largest => {
                Err(LayoutError::RegionTooLarge { part, bytes, largest })
            }
            _ => Ok(()),
        }
    }
}

/// What a layout takes beyond the bytes of its blocks.
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
    /// The report of `config` in regions of `geometry` that hold `base_bytes` in all.
    pub(crate) fn new(
        config: &LayoutConfig,
        geometry: &Geometry,
        base_bytes: ByteCount,
    ) -> Result<Self, LayoutError> {
        let regions = u64::from(geometry.region_count());
        let in_regions = geometry.region_bytes().checked_mul("regions", regions)?;
        // Regions hold the blocks, and the base holds the regions: no difference is negative.
        let difference = |a: ByteCount, b| a.checked_sub(b).unwrap_or(ByteCount::ZERO);
        Ok(Self {
            block_bytes: config.total_bytes(),
            block_padding: difference(in_regions, config.total_bytes()),
            region_padding: difference(base_bytes, in_regions),
        })
    }

    /// Padding as a share of the bytes of the blocks: 0.001 is 0.1 %.
    #[must_use]
    pub fn ratio(&self) -> f64 {
        let padding = self.block_padding.get() as f64 + self.region_padding.get() as f64;
        padding / self.block_bytes.get() as f64
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{BlockDimension, ElementFormat};

    fn config(alignment: Alignment) -> LayoutConfig {
        LayoutConfig::builder()
            .num_blocks(3)
            .num_layers(4)
            .outer_dim(2)
            .page_size(5)
            .inner_dim(7)
            .element(ElementFormat::Width(2))
            .block_alignment(alignment)
            .build()
            .unwrap()
    }

    const BLOCK_FIRST: LayoutKind =
        LayoutKind::LayerSeparate { block_dimension: BlockDimension::First };

    #[test]
    fn the_strictest_alignment_counts() {
        let plan = |block, limit| {
            let limits = Limits { alignment: limit, ..Limits::NONE };
            LayoutPlan::new(&config(block), BLOCK_FIRST, limits).unwrap().alignment()
        };
        assert_eq!(plan(Alignment::BYTE, Alignment::BYTE), Alignment::SECTOR);
        assert_eq!(plan(Alignment::PAGE, Alignment::BYTE), Alignment::PAGE);
        assert_eq!(plan(Alignment::PAGE, Alignment::HUGE_PAGE), Alignment::HUGE_PAGE);
    }

    #[test]
    fn the_base_is_rounded_to_the_granule_and_its_padding_is_reported() {
        let limits = Limits { granule: Alignment::PAGE, ..Limits::NONE };
        let plan = LayoutPlan::new(&config(Alignment::BYTE), BLOCK_FIRST, limits).unwrap();
        // Four regions of 3·2·70 = 420 bytes, at multiples of 512.
        assert_eq!(plan.base_bytes(), ByteCount::new(4096));
        let padding = plan.padding();
        assert_eq!(padding.block_bytes, ByteCount::new(1680));
        assert_eq!(padding.block_padding, ByteCount::ZERO);
        assert_eq!(padding.region_padding, ByteCount::new(4096 - 1680));
        assert!((padding.ratio() - 2416.0 / 1680.0).abs() < 1e-12);
    }

    #[test]
    fn a_region_beyond_the_limit_is_refused_and_a_base_beyond_it_can_be_asked() {
        let limits = |bytes| Limits { largest_region: Some(ByteCount::new(bytes)), ..Limits::NONE };
        let plan = |bytes| LayoutPlan::new(&config(Alignment::BYTE), BLOCK_FIRST, limits(bytes));
        assert!(matches!(
            plan(419),
            Err(LayoutError::RegionTooLarge { part: Part::Region(0), .. })
        ));
        let each_fits = plan(420).unwrap();
        let base = each_fits.check_base();
        assert!(matches!(base, Err(LayoutError::RegionTooLarge { part: Part::Base, .. })));
        assert_eq!(each_fits.requests().len(), 4);
        assert!(each_fits.requests().all(|request| request.bytes == ByteCount::new(420)));
        assert!(plan(1 << 20).unwrap().check_base().is_ok());
    }

    #[test]
    #[cfg_attr(miri, ignore = "takes minutes under Miri, and has no unsafe code")]
    fn blocks_within_a_prefix_have_all_their_pieces_in_it() {
        for kind in LayoutKind::ALL {
            for block in [Alignment::BYTE, Alignment::SECTOR] {
                let plan = LayoutPlan::new(&config(block), kind, Limits::NONE).unwrap();
                let geometry = plan.geometry();
                // Where the last byte of each block's pieces is, piece by piece.
                let end = |block| {
                    let pieces = (0..4).flat_map(|layer| (0..2).map(move |outer| (layer, outer)));
                    let ends = pieces.map(|(layer, outer)| {
                        let at = geometry.offset(block, layer, outer);
                        let region = plan.region_offset(at.region).unwrap().get();
                        region + at.offset + geometry.piece_bytes().get()
                    });
                    ends.max().unwrap()
                };
                for prefix in 0..=plan.base_bytes().get() {
                    let expected = (0..3).take_while(|&block| end(block) <= prefix).count();
                    let found = plan.blocks_within(ByteCount::new(prefix));
                    assert_eq!(usize::try_from(found).unwrap(), expected, "{kind}, {prefix}");
                }
                assert_eq!(plan.blocks_within(ByteCount::new(u64::MAX)), 3);
            }
        }
    }

    #[test]
    fn no_piece_lies_across_a_multiple_of_a_request_s_unit() {
        for kind in LayoutKind::ALL {
            for block in [Alignment::BYTE, Alignment::SECTOR] {
                let plan = LayoutPlan::new(&config(block), kind, Limits::NONE).unwrap();
                let geometry = plan.geometry();
                let (base, region) = (plan.base_request().unit.get(), plan.requests().next());
                let unit = region.unwrap().unit.get();
                for (block, layer, outer) in
                    (0..3).flat_map(|b| (0..4).flat_map(move |l| (0..2).map(move |o| (b, l, o))))
                {
                    let at = geometry.offset(block, layer, outer);
                    let last = geometry.piece_bytes().get() - 1;
                    let begin = plan.region_offset(at.region).unwrap().get() + at.offset;
                    assert_eq!(begin / base, (begin + last) / base, "{kind}");
                    assert_eq!(at.offset / unit, (at.offset + last) / unit, "{kind}");
                }
                // And no more than that is kept together.
                assert!(base <= plan.region_stride.get() && unit <= base, "{kind}");
            }
        }
        let units = |kind, block| {
            let plan = LayoutPlan::new(&config(block), kind, Limits::NONE).unwrap();
            (plan.base_request().unit, plan.geometry().block_stride(), plan.region_stride)
        };
        let (unit, block, _) = units(LayoutKind::FullyContiguous, Alignment::BYTE);
        assert_eq!(unit, block);
        let (unit, block, _) = units(BLOCK_FIRST, Alignment::SECTOR);
        assert_eq!(unit, block);
        let (unit, _, region) = units(BLOCK_FIRST, Alignment::BYTE);
        assert_eq!(unit, region, "420 bytes at multiples of 512");
    }

    #[test]
    fn regions_that_do_not_exist_have_no_offset() {
        let plan = LayoutPlan::new(&config(Alignment::BYTE), BLOCK_FIRST, Limits::NONE).unwrap();
        assert_eq!(plan.region_offset(3), Some(ByteCount::new(3 * 512)));
        assert_eq!(plan.region_offset(4), None);
    }

    #[test]
    fn an_alignment_that_overflows_is_an_error() {
        let alignment = Alignment::new(1 << 62).unwrap();
        for kind in LayoutKind::ALL {
            assert!(LayoutPlan::new(&config(alignment), kind, Limits::NONE).is_err(), "{kind}");
        }
    }
}
