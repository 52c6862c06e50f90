//! The caches that are moved: models as they are served, on one rank of a tensor-parallel group.

use anyhow::Result;
use terrane_core::ByteCount;
use terrane_layout::{BlockDimension, ElementFormat, LayoutConfig, LayoutKind, TokenOrder};

/// A cache of one model.
#[derive(Clone, Copy)]
pub struct Shape {
    pub name: &'static str,
    layers: u32,
    outer: u32,
    tokens: u32,
    /// The bytes of one token, layer and outer.
    row_bytes: u32,
    /// In a row; one that is no heads' counts as one.
    heads: u32,
}

/// The shape for the slowdown of the product: pieces of a usual length.
pub const USUAL: Shape = SHAPES[2];

/// By the length of their pieces: one of K or V of a layer for the tokens of a block.
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

/// Blocks that are one long piece at both ends.
pub const BLOCK_IS_PIECE: Shape =
    Shape { name: "one layer", layers: 1, outer: 1, tokens: 64, row_bytes: 32 << 10, heads: 1 };

/// All shapes; where only little is to be moved, one with K and V and one without.
pub fn shapes(is_smoke: bool) -> impl Iterator<Item = &'static Shape> {
    let all = if is_smoke { 0 } else { SHAPES.len() };
    SHAPES.iter().enumerate().filter(move |(n, _)| *n < all || [0, 3].contains(n)).map(|(_, s)| s)
}

/// K and V of a layer in one tensor each, as most engines have them.
pub const ON_DEVICE: LayoutKind =
    LayoutKind::LayerSeparate { block_dimension: BlockDimension::Second };
/// A block in one piece.
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

    /// As many blocks as have at least so many bytes.
    pub fn blocks_of(&self, bytes: ByteCount) -> Result<u32> {
        Ok(u32::try_from(bytes.get().div_ceil(self.block_bytes().get()).max(1))?)
    }

    /// Whether the order of tokens and heads makes a difference.
    pub const fn has_heads(&self) -> bool {
        self.heads > 1
    }

    /// The blocks with their heads stated, which lie one after the other if tokens do not.
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
