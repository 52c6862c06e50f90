//! The fields of a config and the largest layout, as errors name them.

use terrane_core::ByteCount;

use crate::error::LayoutError;

/// The largest layout, 2^63 − 1 bytes. No file offset and no distance in memory is larger.
pub const LARGEST_LAYOUT: ByteCount = ByteCount::new(u64::MAX >> 1);

/// A field of a [`LayoutConfig`](super::LayoutConfig), for error messages.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Field {
    /// `num_blocks`.
    NumBlocks,
    /// `num_layers`.
    NumLayers,
    /// `outer_dim`.
    OuterDim,
    /// `page_size`.
    PageSize,
    /// `inner_dim`.
    InnerDim,
    /// `element`.
    Element,
    /// `num_heads`.
    NumHeads,
    /// The width of an element.
    ElementWidth,
    /// The number of elements that share a scale.
    GroupElements,
    /// The bytes of a group of elements that share a scale.
    GroupBytes,
    /// The bytes of a token's row.
    RowBytes,
}

terrane_core::display_names!(Field {
    Self::NumBlocks => "num_blocks",
    Self::NumLayers => "num_layers",
    Self::OuterDim => "outer_dim",
    Self::PageSize => "page_size",
    Self::InnerDim => "inner_dim",
    Self::Element => "element",
    Self::NumHeads => "num_heads",
    Self::ElementWidth => "element (width in bytes)",
    Self::GroupElements => "element (elements per group)",
    Self::GroupBytes => "element (bytes per group)",
    Self::RowBytes => "element (bytes per token row)",
});

/// Checks the value of a field against its range.
pub(crate) fn in_range(
    field: Field,
    value: Option<u32>,
    least: u32,
    largest: u32,
) -> Result<u32, LayoutError> {
    let value = value.ok_or(LayoutError::MissingField { field })?;
    if (least..=largest).contains(&value) {
        Ok(value)
    } else {
        Err(LayoutError::FieldOutOfRange { field, value, least, largest })
    }
}
