//! The orders in which blocks, layers and outers are laid out.

use std::fmt;

/// Which dimensions are outermost in memory.
///
/// With B blocks, L layers, O outers and pieces of R bytes; strides grow with the
/// [block alignment](crate::LayoutConfig::block_alignment).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum LayoutKind {
    /// One region in which each block is contiguous over all layers and outers:
    /// `base + b·L·O·R + l·O·R + o·R`. The kind of host and disk tiers.
    FullyContiguous,
    /// One region a layer, as engines hold their caches on the device.
    LayerSeparate {
        /// Where the block dimension stands within a layer.
        block_dimension: BlockDimension,
    },
}

/// The place of the block dimension within a layer's region.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum BlockDimension {
    /// Block first, outer second: `base[l] + b·O·R + o·R`.
    First,
    /// Outer first, block second: `base[l] + o·B·R + b·R`; all K blocks lie before all V blocks.
    Second,
}

impl LayoutKind {
    /// Every kind.
    pub const ALL: [Self; 3] = [
        Self::FullyContiguous,
        Self::LayerSeparate { block_dimension: BlockDimension::First },
        Self::LayerSeparate { block_dimension: BlockDimension::Second },
    ];
}

impl fmt::Display for LayoutKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Self::FullyContiguous => "fully contiguous",
            Self::LayerSeparate { block_dimension: BlockDimension::First } => {
                "layer separate, block first"
            }
            Self::LayerSeparate { block_dimension: BlockDimension::Second } => {
                "layer separate, outer first"
            }
        })
    }
}
