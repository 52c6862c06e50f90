//! The order of blocks, layers and outers in memory, and of tokens and heads within them.

/// The outermost dimensions in memory.
///
/// Formulas use B blocks, L layers, O outers and pieces of R bytes. Strides grow with the
/// [block alignment](crate::LayoutConfig::block_alignment).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum LayoutKind {
    /// One region in which each block is contiguous over all layers and outers:
    /// `base + b·L·O·R + l·O·R + o·R`. Host and disk tiers use it.
    FullyContiguous,
    /// One region for each layer, as in the device caches of engines.
    LayerSeparate {
        /// The place of the block dimension within a layer.
        block_dimension: BlockDimension,
    },
}

/// The place of the block dimension within a layer's region.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum BlockDimension {
    /// Block first, outer second: `base[l] + b·O·R + o·R`.
    First,
    /// Outer first, block second: `base[l] + o·B·R + b·R`. All K blocks precede all V blocks.
    Second,
}

/// Whether tokens or heads are outermost within a piece.
///
/// Formulas use T tokens per block, H heads and heads of h bytes. Other systems call the two orders
/// NHD and HND. Code that moves whole pieces does not distinguish the orders. A transfer between
/// the two orders rearranges every piece.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum TokenOrder {
    /// `[tokens][heads][dim]`, NHD: head `i` of token `t` at `(t·H + i)·h`.
    #[default]
    TokenMajor,
    /// `[heads][tokens][dim]`, HND: head `i` of token `t` at `(i·T + t)·h`. A range of heads is
    /// contiguous for all tokens. From a page with all heads, a tensor-parallel rank needs exactly
    /// such a range.
    HeadMajor,
}

impl TokenOrder {
    /// Every order.
    pub const ALL: [Self; 2] = [Self::TokenMajor, Self::HeadMajor];
}

terrane_core::display_names!(TokenOrder {
    Self::TokenMajor => "token-major",
    Self::HeadMajor => "head-major",
});

impl LayoutKind {
    /// Every kind.
    pub const ALL: [Self; 3] = [
        Self::FullyContiguous,
        Self::LayerSeparate { block_dimension: BlockDimension::First },
        Self::LayerSeparate { block_dimension: BlockDimension::Second },
    ];
}

terrane_core::display_names!(LayoutKind {
    Self::FullyContiguous => "fully contiguous",
    Self::LayerSeparate { block_dimension: BlockDimension::First } => "layer separate, block first",
    Self::LayerSeparate { block_dimension: BlockDimension::Second } => "layer separate, outer first",
});
