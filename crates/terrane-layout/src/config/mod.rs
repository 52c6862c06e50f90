//! The dimensions of a KV cache, validated once.

mod builder;
pub(crate) mod field;

use terrane_core::{Alignment, ByteCount};

pub use builder::LayoutConfigBuilder;
pub use field::{Field, LARGEST_LAYOUT};

use crate::element::ElementFormat;
use crate::error::LayoutError;
use crate::kind::TokenOrder;

/// The dimensions of the KV blocks of one cache.
///
/// The cache has `num_blocks` blocks of `page_size` tokens. A block has one *piece* for each layer
/// and each outer (K and V, or one latent). A piece has `page_size · inner_dim` elements and is
/// contiguous in every [kind](crate::LayoutKind) of layout. If the
/// [heads](LayoutConfigBuilder::num_heads) are stated, the order of tokens and heads within a piece
/// is defined too. A value of this type has been validated: no dimension is zero, and all bytes
/// together are at most [`LARGEST_LAYOUT`].
///
/// ```
/// use terrane_core::ByteCount;
/// use terrane_layout::{ElementFormat, LayoutConfig};
///
/// # fn main() -> Result<(), terrane_layout::LayoutError> {
/// // Llama 3.1 8B: 32 layers, K and V, 8 heads of 128 elements in bfloat16.
/// let config = LayoutConfig::builder()
///     .num_blocks(1024)
///     .num_layers(32)
///     .outer_dim(2)
///     .page_size(16)
///     .inner_dim(8 * 128)
///     .element(ElementFormat::Width(2))
///     .build()?;
/// assert_eq!(config.piece_bytes(), ByteCount::kib(32));
/// assert_eq!(config.block_bytes(), ByteCount::mib(2));
/// # Ok(())
/// # }
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct LayoutConfig {
    num_blocks: u32,
    num_layers: u32,
    outer_dim: u32,
    page_size: u32,
    inner_dim: u32,
    element: ElementFormat,
    num_heads: Option<u32>,
    token_order: TokenOrder,
    block_alignment: Alignment,
    piece_bytes: ByteCount,
    block_bytes: ByteCount,
    total_bytes: ByteCount,
}

impl LayoutConfig {
    /// A builder without dimensions, and with a block alignment of one byte.
    #[must_use]
    pub fn builder() -> LayoutConfigBuilder {
        LayoutConfigBuilder::default()
    }

    terrane_core::getters! {
        /// The number of blocks, B.
        num_blocks: u32,
        /// The number of layers, L.
        num_layers: u32,
        /// The number of outers, O: 2 for K and V, 1 for a latent.
        outer_dim: u32,
        /// Tokens per block.
        page_size: u32,
        /// Elements per token, layer and outer.
        inner_dim: u32,
        /// The element format.
        element: ElementFormat,
        /// The heads of a token's row, if they are stated.
        num_heads: Option<u32>,
        /// The order of tokens and heads within a piece. Token-major if heads are not stated.
        token_order: TokenOrder,
        /// Block strides are rounded up to a multiple of this.
        block_alignment: Alignment,
        /// R: the bytes of one piece, that is, of one (block, layer, outer).
        piece_bytes: ByteCount,
        /// L·O·R: the bytes of one block over all layers and outers, without padding.
        block_bytes: ByteCount,
        /// B·L·O·R: the bytes of all blocks, without padding.
        total_bytes: ByteCount,
    }

    /// The elements of a head, if heads are stated.
    #[must_use]
    pub fn head_dim(&self) -> Option<u32> {
        self.inner_dim.checked_div(self.num_heads?)
    }

    /// The bytes of one head of one token, for one layer and outer, if heads are stated.
    #[must_use]
    pub fn head_bytes(&self) -> Option<ByteCount> {
        // The builder has checked that the heads divide the row.
        let parts = u64::from(self.page_size).checked_mul(self.num_heads?.into())?;
        self.piece_bytes.get().checked_div(parts).map(ByteCount::new)
    }

    /// The same cache with another number of blocks, for another tier.
    ///
    /// # Errors
    ///
    /// [`LayoutError`] as from [`LayoutConfigBuilder::build`].
    pub fn with_num_blocks(&self, num_blocks: u32) -> Result<Self, LayoutError> {
        LayoutConfigBuilder::from(*self).num_blocks(num_blocks).build()
    }

    /// The same cache with another number of layers, for example those of a pipeline stage.
    ///
    /// # Errors
    ///
    /// [`LayoutError`] as from [`LayoutConfigBuilder::build`].
    pub fn with_num_layers(&self, num_layers: u32) -> Result<Self, LayoutError> {
        LayoutConfigBuilder::from(*self).num_layers(num_layers).build()
    }

    /// The same cache with another block alignment, for another tier.
    ///
    /// # Errors
    ///
    /// [`LayoutError`] as from [`LayoutConfigBuilder::build`].
    pub fn with_block_alignment(&self, alignment: Alignment) -> Result<Self, LayoutError> {
        LayoutConfigBuilder::from(*self).block_alignment(alignment).build()
    }

    /// The same cache with another order of tokens and heads, for another tier.
    ///
    /// # Errors
    ///
    /// [`LayoutError::HeadsNotStated`] if the order is head-major and this config states no heads.
    pub fn with_token_order(&self, order: TokenOrder) -> Result<Self, LayoutError> {
        LayoutConfigBuilder::from(*self).token_order(order).build()
    }

    /// The same cache with another number of heads, and proportionally more or fewer elements in a
    /// row. A tier needs it if its pages contain the heads of all tensor-parallel ranks.
    ///
    /// # Errors
    ///
    /// [`LayoutError::HeadsNotStated`] if this config states no heads, and [`LayoutError`] as from
    /// [`LayoutConfigBuilder::build`].
    pub fn with_num_heads(&self, num_heads: u32) -> Result<Self, LayoutError> {
        let (Some(old), Some(head_dim)) = (self.num_heads, self.head_dim()) else {
            return Err(LayoutError::HeadsNotStated);
        };
        let times = |field: &'static str, each: u32| {
            let factors = [(field, each.into()), ("num_heads", num_heads.into())];
            let product = ByteCount::product(&factors)?;
            u32::try_from(product.get()).map_err(|_| LayoutError::TooLarge { bytes: product })
        };
        let element = match self.element {
            ElementFormat::RowBytes(bytes) => {
                ElementFormat::RowBytes(times("bytes a head", bytes / old)?)
            }
            other => other,
        };
        LayoutConfigBuilder::from(*self)
            .num_heads(num_heads)
            .inner_dim(times("head_dim", head_dim)?)
            .element(element)
            .build()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn builder() -> LayoutConfigBuilder {
        LayoutConfig::builder()
            .num_blocks(4)
            .num_layers(3)
            .outer_dim(2)
            .page_size(5)
            .inner_dim(7)
            .element(ElementFormat::Width(3))
    }

    #[test]
    fn products() {
        let config = builder().build().unwrap();
        assert_eq!(config.piece_bytes(), ByteCount::new(5 * 7 * 3));
        assert_eq!(config.block_bytes(), ByteCount::new(3 * 2 * 5 * 7 * 3));
        assert_eq!(config.total_bytes(), ByteCount::new(4 * 3 * 2 * 5 * 7 * 3));
    }

    #[test]
    fn every_zero_is_refused_by_name_and_value() {
        for (broken, name) in [
            (builder().num_blocks(0), "num_blocks"),
            (builder().num_layers(0), "num_layers"),
            (builder().outer_dim(0), "outer_dim"),
            (builder().page_size(0), "page_size"),
            (builder().inner_dim(0), "inner_dim"),
        ] {
            let text = broken.build().unwrap_err().to_string();
            assert!(text.contains(name) && text.contains('0'), "{text}");
        }
        let text = builder().outer_dim(3).build().unwrap_err().to_string();
        assert!(text.contains("outer_dim is 3"), "{text}");
    }

    #[test]
    fn a_missing_field_is_named() {
        let error = LayoutConfig::builder().num_blocks(1).build().unwrap_err();
        assert!(matches!(error, LayoutError::MissingField { field: Field::NumLayers }));
    }

    #[test]
    fn overflow_names_the_factors() {
        let huge = builder().num_blocks(u32::MAX).num_layers(u32::MAX).page_size(u32::MAX);
        let LayoutError::Overflow(overflow) = huge.build().unwrap_err() else {
            panic!("no overflow")
        };
        assert!(overflow.terms().contains(&("num_layers", u64::from(u32::MAX))));
    }

    #[test]
    fn more_than_an_offset_can_hold_is_refused() {
        // 2^31 · 2^31 · 2 · 1 bytes: fits in 64 bits, but not in 63.
        let config = LayoutConfig::builder()
            .num_blocks(1 << 31)
            .num_layers(1 << 31)
            .outer_dim(2)
            .page_size(1)
            .inner_dim(1)
            .element(ElementFormat::Width(1));
        assert!(matches!(config.build(), Err(LayoutError::TooLarge { .. })));
    }

    #[test]
    fn the_same_cache_on_another_tier() {
        let config = builder().build().unwrap();
        let other = config.with_num_blocks(9).unwrap();
        assert_eq!(other.num_blocks(), 9);
        assert_eq!(other.block_bytes(), config.block_bytes());
        assert!(config.with_num_blocks(0).is_err());
    }

    #[test]
    fn heads_divide_the_row() {
        let config = builder().inner_dim(12).num_heads(4).build().unwrap();
        assert_eq!((config.head_dim(), config.token_order()), (Some(3), TokenOrder::TokenMajor));
        assert_eq!(config.head_bytes(), Some(ByteCount::new(9)));
        let error = builder().num_heads(4).build().unwrap_err();
        assert!(matches!(error, LayoutError::HeadsNotDivided { inner_dim: 7, num_heads: 4 }));
        let text = builder().num_heads(0).build().unwrap_err().to_string();
        assert!(text.contains("num_heads is 0"), "{text}");
        let plain = builder().build().unwrap();
        assert_eq!((plain.num_heads(), plain.head_dim(), plain.head_bytes()), (None, None, None));
    }

    #[test]
    fn heads_of_grouped_elements_are_whole() {
        let scaled = builder().inner_dim(128).element(ElementFormat::MXFP4);
        assert_eq!(scaled.num_heads(4).build().unwrap().head_bytes(), Some(ByteCount::new(17)));
        let error = scaled.num_heads(8).build().unwrap_err();
        assert!(matches!(error, LayoutError::HeadNotWhole { num_heads: 8, .. }), "{error}");
        let rows = builder().inner_dim(128).element(ElementFormat::RowBytes(132));
        assert_eq!(rows.num_heads(4).build().unwrap().head_bytes(), Some(ByteCount::new(33)));
        assert!(matches!(rows.num_heads(8).build(), Err(LayoutError::HeadNotWhole { .. })));
    }

    #[test]
    fn head_major_needs_heads() {
        let order = TokenOrder::HeadMajor;
        assert!(matches!(builder().token_order(order).build(), Err(LayoutError::HeadsNotStated)));
        let config = builder().num_heads(7).token_order(order).build().unwrap();
        assert_eq!(config.token_order(), order);
        let plain = builder().build().unwrap();
        assert!(matches!(plain.with_token_order(order), Err(LayoutError::HeadsNotStated)));
        assert!(matches!(plain.with_num_heads(2), Err(LayoutError::HeadsNotStated)));
    }

    #[test]
    fn pages_of_all_heads() {
        for element in [ElementFormat::Width(2), ElementFormat::MXFP4, ElementFormat::RowBytes(34)]
        {
            let rank = builder().inner_dim(64).element(element).num_heads(2).build().unwrap();
            let all = rank.with_num_heads(8).unwrap();
            assert_eq!((all.inner_dim(), all.num_heads()), (256, Some(8)), "{element}");
            assert_eq!(all.head_bytes(), rank.head_bytes(), "{element}");
            assert_eq!(all.with_num_heads(2).unwrap(), rank);
        }
        let rank = builder().inner_dim(64).num_heads(2).build().unwrap();
        assert!(matches!(rank.with_num_heads(1 << 28), Err(LayoutError::TooLarge { .. })));
    }
}
