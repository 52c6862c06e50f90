//! Where every piece lies, relative to its region: pure arithmetic.

use std::fmt;

use terrane_core::{Alignment, ByteCount};

use crate::config::LARGEST_LAYOUT;
use crate::{BlockDimension, LayoutConfig, LayoutError, LayoutKind};

/// The strides of a layout: (block, layer, outer) to region and offset.
///
/// Made from a config and a kind alone, it is the same wherever the regions will lie.
///
/// # Why `offset` cannot overflow
///
/// [`Geometry::new`] computes the bytes of a region, `(outermost count) · (outermost stride)`,
/// and of all regions together, with checked arithmetic, and refuses more than
/// [`LARGEST_LAYOUT`]. A stride covers all that lies within it: each is at least the count times
/// the stride of the next dimension inwards, and the innermost is at least R. So for indices
/// below their bounds, `b·block_stride + l·layer_stride + o·outer_stride + R` is at most the
/// bytes of a region, and no term or partial sum can exceed it, as none is negative.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Geometry {
    kind: LayoutKind,
    num_blocks: u32,
    num_layers: u32,
    outer_dim: u32,
    /// 1 where each layer has its own region, 0 where all share one.
    regions_per_layer: u32,
    block_alignment: Alignment,
    piece_bytes: u64,
    block_stride: u64,
    /// 0 where each layer has its own region.
    layer_stride: u64,
    outer_stride: u64,
    region_bytes: u64,
}

impl Geometry {
    /// The geometry of `config` in the order `kind`.
    ///
    /// # Errors
    ///
    /// [`LayoutError::Overflow`] or [`LayoutError::TooLarge`] if the regions, with the padding of
    /// the block alignment, exceed [`LARGEST_LAYOUT`].
    pub fn new(config: &LayoutConfig, kind: LayoutKind) -> Result<Self, LayoutError> {
        let (piece, alignment) = (config.piece_bytes(), config.block_alignment());
        let blocks = u64::from(config.num_blocks());
        let layers = u64::from(config.num_layers());
        let outers = u64::from(config.outer_dim());
        let pieces_of_layer = piece.checked_mul("outer_dim", outers)?;

        let (regions_per_layer, block_stride, layer_stride, outer_stride, region_bytes);
        match kind {
            LayoutKind::FullyContiguous => {
                regions_per_layer = 0;
                block_stride = config.block_bytes().align_up(alignment)?;
                layer_stride = pieces_of_layer;
                outer_stride = piece;
                region_bytes = block_stride.checked_mul("num_blocks", blocks)?;
            }
            LayoutKind::LayerSeparate { block_dimension: BlockDimension::First } => {
                regions_per_layer = 1;
                block_stride = pieces_of_layer.align_up(alignment)?;
                layer_stride = ByteCount::ZERO;
                outer_stride = piece;
                region_bytes = block_stride.checked_mul("num_blocks", blocks)?;
            }
            LayoutKind::LayerSeparate { block_dimension: BlockDimension::Second } => {
                regions_per_layer = 1;
                block_stride = piece.align_up(alignment)?;
                layer_stride = ByteCount::ZERO;
                outer_stride = block_stride.checked_mul("num_blocks", blocks)?;
                region_bytes = outer_stride.checked_mul("outer_dim", outers)?;
            }
        }
        let regions = if regions_per_layer == 0 { 1 } else { layers };
        let bytes = region_bytes.checked_mul("regions", regions)?;
        if bytes > LARGEST_LAYOUT {
            return Err(LayoutError::TooLarge { bytes });
        }
        Ok(Self {
            kind,
            num_blocks: config.num_blocks(),
            num_layers: config.num_layers(),
            outer_dim: config.outer_dim(),
            regions_per_layer,
            block_alignment: alignment,
            piece_bytes: piece.get(),
            block_stride: block_stride.get(),
            layer_stride: layer_stride.get(),
            outer_stride: outer_stride.get(),
            region_bytes: region_bytes.get(),
        })
    }

    /// Where the piece of (`block`, `layer`, `outer`) begins.
    ///
    /// No index is checked: beyond its bound the answer means nothing, though asking is safe and
    /// never panics. For indices from elsewhere, there is [`try_offset`](Self::try_offset).
    #[inline]
    #[must_use]
    pub fn offset(&self, block: u32, layer: u32, outer: u32) -> RegionOffset {
        // Wrapping, as the indices are not checked; for those within bounds nothing wraps (see
        // the type's documentation).
        let offset = u64::from(block)
            .wrapping_mul(self.block_stride)
            .wrapping_add(u64::from(layer).wrapping_mul(self.layer_stride))
            .wrapping_add(u64::from(outer).wrapping_mul(self.outer_stride));
        RegionOffset { region: self.region_of(layer), offset }
    }

    /// Where the piece of (`block`, `layer`, `outer`) begins.
    ///
    /// # Errors
    ///
    /// [`IndexOutOfRange`] names the first index that is out of range, with its value and its
    /// bound.
    #[inline]
    pub fn try_offset(
        &self,
        block: u32,
        layer: u32,
        outer: u32,
    ) -> Result<RegionOffset, IndexOutOfRange> {
        let in_range = block < self.num_blocks && layer < self.num_layers && outer < self.outer_dim;
        if in_range {
            Ok(self.offset(block, layer, outer))
        } else {
            Err(self.out_of_range(block, layer, outer))
        }
    }

    /// The region that holds the pieces of `layer`, which is not checked.
    #[inline]
    #[must_use]
    pub fn region_of(&self, layer: u32) -> u32 {
        layer.wrapping_mul(self.regions_per_layer)
    }

    /// Which order this is.
    #[must_use]
    pub const fn kind(&self) -> LayoutKind {
        self.kind
    }

    /// The number of blocks, B.
    #[inline]
    #[must_use]
    pub const fn num_blocks(&self) -> u32 {
        self.num_blocks
    }

    /// The number of layers, L.
    #[inline]
    #[must_use]
    pub const fn num_layers(&self) -> u32 {
        self.num_layers
    }

    /// The number of outers, O.
    #[inline]
    #[must_use]
    pub const fn outer_dim(&self) -> u32 {
        self.outer_dim
    }

    /// R: the bytes of one piece.
    #[inline]
    #[must_use]
    pub const fn piece_bytes(&self) -> ByteCount {
        ByteCount::new(self.piece_bytes)
    }

    /// The distance from a block to the next, at fixed layer and outer.
    #[inline]
    #[must_use]
    pub const fn block_stride(&self) -> ByteCount {
        ByteCount::new(self.block_stride)
    }

    /// The distance from a layer to the next, at fixed block and outer; zero where each layer has
    /// its own region.
    #[inline]
    #[must_use]
    pub const fn layer_stride(&self) -> ByteCount {
        ByteCount::new(self.layer_stride)
    }

    /// The distance from an outer to the next, at fixed block and layer.
    #[inline]
    #[must_use]
    pub const fn outer_stride(&self) -> ByteCount {
        ByteCount::new(self.outer_stride)
    }

    /// What block strides were rounded up to a multiple of.
    #[must_use]
    pub const fn block_alignment(&self) -> Alignment {
        self.block_alignment
    }

    /// The number of regions: one, or one a layer.
    #[inline]
    #[must_use]
    pub const fn region_count(&self) -> u32 {
        if self.regions_per_layer == 0 { 1 } else { self.num_layers }
    }

    /// The bytes of each region, block padding included; all are of one size.
    #[inline]
    #[must_use]
    pub const fn region_bytes(&self) -> ByteCount {
        ByteCount::new(self.region_bytes)
    }

    /// The number of pieces, B·L·O. More than 64 bits cannot come out, as each piece has a byte.
    #[must_use]
    pub fn piece_count(&self) -> u64 {
        u64::from(self.num_blocks) * u64::from(self.num_layers) * u64::from(self.outer_dim)
    }

    /// How much of one block is contiguous, which is what a copy can move at once.
    #[must_use]
    pub fn contiguous_unit(&self) -> ContiguousUnit {
        let outers_adjacent = self.outer_dim == 1 || self.outer_stride == self.piece_bytes;
        // Within what `new` proved, so that this product does not overflow.
        let layer_bytes = self.piece_bytes * u64::from(self.outer_dim);
        let layers_adjacent = self.num_layers == 1 || self.layer_stride == layer_bytes;
        if !outers_adjacent {
            ContiguousUnit::Piece
        } else if layers_adjacent {
            ContiguousUnit::Block
        } else {
            ContiguousUnit::Layer
        }
    }

    /// The bytes of [`contiguous_unit`](Self::contiguous_unit): R, O·R or L·O·R.
    #[must_use]
    pub fn contiguous_unit_bytes(&self) -> ByteCount {
        let pieces = match self.contiguous_unit() {
            ContiguousUnit::Piece => 1,
            ContiguousUnit::Layer => u64::from(self.outer_dim),
            ContiguousUnit::Block => u64::from(self.outer_dim) * u64::from(self.num_layers),
        };
        // At most the bytes of a block, which `LayoutConfig` proved to fit.
        ByteCount::new(self.piece_bytes * pieces)
    }

    /// Whether the contiguous unit of a block touches that of the block with the next id, so that
    /// runs of ids coalesce further.
    #[must_use]
    pub fn blocks_adjacent(&self) -> bool {
        self.contiguous_unit_bytes() == self.block_stride()
    }

    /// The largest power of two that divides R and the offset of every piece in its region.
    ///
    /// With regions that begin at multiples of it, every piece begins and ends at one.
    #[must_use]
    pub fn alignment_class(&self) -> Alignment {
        let strides = [
            (self.num_blocks, self.block_stride),
            (self.num_layers, self.layer_stride),
            (self.outer_dim, self.outer_stride),
        ];
        // A stride over a dimension of one never counts. Or-ing keeps the lowest bit of all.
        let bits = strides
            .into_iter()
            .filter(|&(count, _)| count > 1)
            .fold(self.piece_bytes, |bits, (_, stride)| bits | stride);
        Alignment::of(bits)
    }

    #[cold]
    fn out_of_range(&self, block: u32, layer: u32, outer: u32) -> IndexOutOfRange {
        let (index, value, bound) = if block >= self.num_blocks {
            (Index::Block, block, self.num_blocks)
        } else if layer >= self.num_layers {
            (Index::Layer, layer, self.num_layers)
        } else {
            (Index::Outer, outer, self.outer_dim)
        };
        IndexOutOfRange { index, value, bound }
    }
}

/// Where something lies: which region, and how far from its beginning.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct RegionOffset {
    /// The region, counted from 0.
    pub region: u32,
    /// Bytes from the region's beginning.
    pub offset: u64,
}

/// How much of one block is contiguous.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum ContiguousUnit {
    /// One piece, R bytes.
    Piece,
    /// All outers of one layer, O·R bytes.
    Layer,
    /// All layers and outers, L·O·R bytes.
    Block,
}

/// An index of a piece.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Index {
    /// The block id.
    Block,
    /// The layer.
    Layer,
    /// The outer: K or V.
    Outer,
}

impl fmt::Display for Index {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Self::Block => "block",
            Self::Layer => "layer",
            Self::Outer => "outer",
        })
    }
}

/// An index past the end of its dimension.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{index} {value} is out of range: the layout has {bound}, counted from 0")]
pub struct IndexOutOfRange {
    /// Which index.
    pub index: Index,
    /// Its value.
    pub value: u32,
    /// How many there are.
    pub bound: u32,
}
