//! Sets and checks the dimensions of a cache.

use terrane_core::{Alignment, ByteCount};

use super::LayoutConfig;
use super::field::{Field, LARGEST_LAYOUT, in_range};
use crate::element::ElementFormat;
use crate::error::LayoutError;
use crate::kind::TokenOrder;

/// Sets the dimensions of a [`LayoutConfig`], in any order; [`build`](Self::build) checks them.
#[derive(Clone, Copy, Debug, Default)]
pub struct LayoutConfigBuilder {
    num_blocks: Option<u32>,
    num_layers: Option<u32>,
    outer_dim: Option<u32>,
    page_size: Option<u32>,
    inner_dim: Option<u32>,
    element: Option<ElementFormat>,
    num_heads: Option<u32>,
    token_order: TokenOrder,
    block_alignment: Alignment,
}

impl LayoutConfigBuilder {
    /// The number of blocks; at least 1.
    #[must_use]
    pub fn num_blocks(self, num_blocks: u32) -> Self {
        Self { num_blocks: Some(num_blocks), ..self }
    }

    /// The number of layers; at least 1.
    #[must_use]
    pub fn num_layers(self, num_layers: u32) -> Self {
        Self { num_layers: Some(num_layers), ..self }
    }

    /// The number of outers: 2 for K and V, 1 for a latent that serves as both. Any other number is
    /// refused: no cache has it, and it is usually a swapped dimension.
    #[must_use]
    pub fn outer_dim(self, outer_dim: u32) -> Self {
        Self { outer_dim: Some(outer_dim), ..self }
    }

    /// Tokens per block; at least 1. It need not be a power of two.
    #[must_use]
    pub fn page_size(self, page_size: u32) -> Self {
        Self { page_size: Some(page_size), ..self }
    }

    /// Elements per token, layer and outer (heads on this rank · head dimension); at least 1.
    #[must_use]
    pub fn inner_dim(self, inner_dim: u32) -> Self {
        Self { inner_dim: Some(inner_dim), ..self }
    }

    /// The element format.
    #[must_use]
    pub fn element(self, element: ElementFormat) -> Self {
        Self { element: Some(element), ..self }
    }

    /// The heads of a token's row; at least 1, and a divisor of the inner dimension. Each head has
    /// an equal number of whole bytes of the row. A block-scaled group must not extend over two
    /// heads. With [`ElementFormat::RowBytes`], this states that the bytes of each head are
    /// adjacent.
    ///
    /// It is optional. Without it, transfers cannot copy heads separately.
    #[must_use]
    pub fn num_heads(self, num_heads: u32) -> Self {
        Self { num_heads: Some(num_heads), ..self }
    }

    /// Whether tokens or heads are outermost within a piece; token-major by default. Head-major
    /// needs [`num_heads`](Self::num_heads).
    #[must_use]
    pub fn token_order(self, token_order: TokenOrder) -> Self {
        Self { token_order, ..self }
    }

    /// Block strides are rounded up to a multiple of this. The default of one byte adds no padding.
    #[must_use]
    pub fn block_alignment(self, block_alignment: Alignment) -> Self {
        Self { block_alignment, ..self }
    }

    /// Checks every dimension and all their products.
    ///
    /// # Errors
    ///
    /// - [`LayoutError::MissingField`] and [`LayoutError::FieldOutOfRange`] name the field, and
    ///   the value with its bounds.
    /// - [`LayoutError::InnerDimNotGrouped`] if the inner dimension is not a multiple of a group of
    ///   block-scaled elements.
    /// - [`LayoutError::HeadsNotDivided`] if the heads do not divide the inner dimension.
    ///   [`LayoutError::HeadNotWhole`] if a head is not a whole number of bytes.
    ///   [`LayoutError::HeadsNotStated`] if the order is head-major and no heads are stated.
    /// - [`LayoutError::Overflow`] and [`LayoutError::TooLarge`] if all bytes together exceed
    ///   [`LARGEST_LAYOUT`]. The former names every factor.
    pub fn build(self) -> Result<LayoutConfig, LayoutError> {
        let num_blocks = in_range(Field::NumBlocks, self.num_blocks, 1, u32::MAX)?;
        let num_layers = in_range(Field::NumLayers, self.num_layers, 1, u32::MAX)?;
        let outer_dim = in_range(Field::OuterDim, self.outer_dim, 1, 2)?;
        let page_size = in_range(Field::PageSize, self.page_size, 1, u32::MAX)?;
        let inner_dim = in_range(Field::InnerDim, self.inner_dim, 1, u32::MAX)?;
        let element = self.element.ok_or(LayoutError::MissingField { field: Field::Element })?;
        let row_bytes = element.row_bytes(inner_dim)?;
        self.check_heads(inner_dim, element)?;

        let factors = [
            ("num_blocks", u64::from(num_blocks)),
            ("num_layers", u64::from(num_layers)),
            ("outer_dim", u64::from(outer_dim)),
            ("page_size", u64::from(page_size)),
            ("bytes per token row", row_bytes.get()),
        ];
        let total_bytes = ByteCount::product(&factors)?;
        if total_bytes > LARGEST_LAYOUT {
            return Err(LayoutError::TooLarge { bytes: total_bytes });
        }
        let (_, of_block) = factors.split_at(1);
        let (_, of_piece) = factors.split_at(3);
        Ok(LayoutConfig {
            num_blocks,
            num_layers,
            outer_dim,
            page_size,
            inner_dim,
            element,
            num_heads: self.num_heads,
            token_order: self.token_order,
            block_alignment: self.block_alignment,
            piece_bytes: ByteCount::product(of_piece)?,
            block_bytes: ByteCount::product(of_block)?,
            total_bytes,
        })
    }

    fn check_heads(&self, inner_dim: u32, element: ElementFormat) -> Result<(), LayoutError> {
        if self.num_heads.is_none() {
            return match self.token_order {
                TokenOrder::TokenMajor => Ok(()),
                TokenOrder::HeadMajor => Err(LayoutError::HeadsNotStated),
            };
        }
        let num_heads = in_range(Field::NumHeads, self.num_heads, 1, u32::MAX)?;
        if !inner_dim.is_multiple_of(num_heads) {
            return Err(LayoutError::HeadsNotDivided { inner_dim, num_heads });
        }
        let is_whole = match element {
            ElementFormat::Width(_) => true,
            ElementFormat::BlockScaled { elements, .. } => {
                (inner_dim / num_heads).is_multiple_of(elements)
            }
            ElementFormat::RowBytes(bytes) => bytes.is_multiple_of(num_heads),
        };
        if is_whole { Ok(()) } else { Err(LayoutError::HeadNotWhole { num_heads, element }) }
    }
}

impl From<LayoutConfig> for LayoutConfigBuilder {
    fn from(config: LayoutConfig) -> Self {
        Self {
            num_blocks: Some(config.num_blocks),
            num_layers: Some(config.num_layers),
            outer_dim: Some(config.outer_dim),
            page_size: Some(config.page_size),
            inner_dim: Some(config.inner_dim),
            element: Some(config.element),
            num_heads: config.num_heads,
            token_order: config.token_order,
            block_alignment: config.block_alignment,
        }
    }
}
