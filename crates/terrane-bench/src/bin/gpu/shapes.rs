//! The shapes of the copied caches: models in usual deployments, one rank of a tensor-parallel
//! group each.

use anyhow::Result;
use terrane_core::ByteCount;
use terrane_layout::{BlockDimension, ElementFormat, LayoutConfig, LayoutKind, TokenOrder};

/// The cache of one model.
#[derive(Clone, Copy)]
pub struct Shape {
    pub name: &'static str,
    layers: u32,
    outer: u32,
    tokens: u32,
    /// The bytes of one token, layer and outer index.
    row_bytes: u32,
    /// The heads in a row; 1 for a row without heads.
    heads: u32,
}

/// The shape of the measurements of slowdown, with pieces of a usual length.
pub const USUAL: Shape = SHAPES[2];

/// The shapes, ordered by the length of their pieces. A piece is K or V of a layer for the tokens
/// of a block.
const SHAPES: [Shape; 6] = [
    Shape { name: "GLM-4.6 fp8 TP8", layers: 92, outer: 2, tokens: 16, row_bytes: 128, heads: 1 },
    Shape { name: "Qwen3-235B TP4", layers: 94, outer: 2, tokens: 16, row_bytes: 256, heads: 1 },
    Shape { name: "Llama-70B TP4", layers: 80, outer: 2, tokens: 16, row_bytes: 512, heads: 2 },
    Shape {
        name: "DeepSeek-V3 latent",
        layers: 61,
        outer: 1,
        tokens: 16,
        row_bytes: 1152,
        heads: 1,
    },
    Shape { name: "Llama-8B", layers: 32, outer: 2, tokens: 16, row_bytes: 2048, heads: 8 },
    Shape {
        name: "Llama-8B, 64 tokens",
        layers: 32,
        outer: 2,
        tokens: 64,
        row_bytes: 2048,
        heads: 8,
    },
];

/// Blocks that have one long piece at both ends.
pub const BLOCK_IS_PIECE: Shape =
    Shape { name: "one layer", layers: 1, outer: 1, tokens: 64, row_bytes: 32 << 10, heads: 1 };

/// All shapes. In a smoke run, one shape with K and V and one without.
pub fn shapes(is_smoke: bool) -> impl Iterator<Item = &'static Shape> {
    let all = if is_smoke { 0 } else { SHAPES.len() };
    SHAPES.iter().enumerate().filter(move |(n, _)| *n < all || [0, 3].contains(n)).map(|(_, s)| s)
}

/// One tensor for each layer, with K and V, as in most engines.
pub const ON_DEVICE: LayoutKind =
    LayoutKind::LayerSeparate { block_dimension: BlockDimension::Second };
/// Each block in one piece.
pub const ON_HOST: LayoutKind = LayoutKind::FullyContiguous;
/// K and V of a block and layer side by side.
pub const BLOCK_FIRST: LayoutKind =
    LayoutKind::LayerSeparate { block_dimension: BlockDimension::First };

impl Shape {
    /// The name with the length of the pieces.
    pub fn title(&self) -> String {
        format!("{} ({})", self.name, self.piece_bytes())
    }

    pub fn piece_bytes(&self) -> ByteCount {
        ByteCount::new(u64::from(self.tokens) * u64::from(self.row_bytes))
    }

    pub fn block_bytes(&self) -> ByteCount {
        let pieces = u64::from(self.layers) * u64::from(self.outer);
        ByteCount::new(self.piece_bytes().get() * pieces)
    }

    /// The smallest number of blocks with at least this number of bytes.
    pub fn blocks_of(&self, bytes: ByteCount) -> Result<u32> {
        Ok(u32::try_from(bytes.get().div_ceil(self.block_bytes().get()).max(1))?)
    }

    /// Whether the order of tokens and heads changes the layout.
    pub const fn has_heads(&self) -> bool {
        self.heads > 1
    }

    /// The layout with its heads in this order. With `HeadMajor`, the tokens of a head are
    /// adjacent.
    pub fn in_order(&self, blocks: u32, order: TokenOrder) -> Result<LayoutConfig> {
        let config = LayoutConfig::builder()
            .num_blocks(blocks)
            .num_layers(self.layers)
            .outer_dim(self.outer)
            .page_size(self.tokens)
            .inner_dim(self.row_bytes)
            .num_heads(self.heads)
            .token_order(order)
            .element(ElementFormat::Width(1))
            .build()?;
        Ok(config)
    }

    pub fn config(&self, blocks: u32) -> Result<LayoutConfig> {
        let config = LayoutConfig::builder()
            .num_blocks(blocks)
            .num_layers(self.layers)
            .outer_dim(self.outer)
            .page_size(self.tokens)
            .inner_dim(self.row_bytes)
            .element(ElementFormat::Width(1))
            .build()?;
        Ok(config)
    }
}
