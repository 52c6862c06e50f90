//! The orders in which blocks, layers and outers are laid out, and tokens and heads within them.

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

/// Which of tokens and heads is outermost within a piece.
///
/// With T tokens a block, H heads and heads of h bytes; other systems know the two as NHD and HND.
/// To everything that moves whole pieces they are the same; a transfer between the two re-lays
/// every piece.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum TokenOrder {
    /// `[tokens][heads][dim]`, NHD: head `i` of token `t` at `(t·H + i)·h`.
    #[default]
    TokenMajor,
    /// `[heads][tokens][dim]`, HND: head `i` of token `t` at `(i·T + t)·h`. Some heads of all
    /// tokens are contiguous in it, which is what a tensor-parallel rank has of a page that holds
    /// all heads.
    HeadMajor,
}

impl TokenOrder {
    /// Every order.
    pub const ALL: [Self; 2] = [Self::TokenMajor, Self::HeadMajor];
}

impl fmt::Display for TokenOrder {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Self::TokenMajor => "token-major",
            Self::HeadMajor => "head-major",
        })
    }
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
