//! The sections of the three orders of a config.

use terrane_core::ByteCount;

use super::axis::{Axis, SectionName};
use super::section::Section;
use super::steps::{AxisSteps, Step};
use crate::config::LayoutConfig;
use crate::element::ElementFormat;
use crate::error::LayoutError;
use crate::kind::{BlockDimension, LayoutKind, TokenOrder};

/// The sections of `config` in the order `kind`, and the bytes of each region.
pub(super) fn sections(
    config: &LayoutConfig,
    kind: LayoutKind,
) -> Result<(Vec<Section>, ByteCount), LayoutError> {
    let (piece, alignment) = (config.piece_bytes(), config.block_alignment());
    let blocks = u64::from(config.num_blocks());
    let outers = u64::from(config.outer_dim());
    let pieces_of_layer = piece.checked_mul("outer_dim", outers)?;
    let one_region = |stride: ByteCount| AxisSteps::new(config.num_layers(), stride.get());
    let a_region_each = AxisSteps::spread(config.num_layers(), 1, Step::ONE);

    let (block_stride, outer_stride, layer, region_bytes);
    match kind {
        LayoutKind::FullyContiguous => {
            block_stride = config.block_bytes().align_up(alignment)?;
            outer_stride = piece;
            layer = one_region(pieces_of_layer);
            region_bytes = block_stride.checked_mul("num_blocks", blocks)?;
        }
        LayoutKind::LayerSeparate { block_dimension: BlockDimension::First } => {
            block_stride = pieces_of_layer.align_up(alignment)?;
            outer_stride = piece;
            layer = a_region_each;
            region_bytes = block_stride.checked_mul("num_blocks", blocks)?;
        }
        LayoutKind::LayerSeparate { block_dimension: BlockDimension::Second } => {
            block_stride = piece.align_up(alignment)?;
            outer_stride = block_stride.checked_mul("num_blocks", blocks)?;
            layer = a_region_each;
            region_bytes = outer_stride.checked_mul("outer_dim", outers)?;
        }
    }
    let names: &[SectionName] = match config.outer_dim() {
        1 => &[SectionName::LATENT],
        _ => &[SectionName::K, SectionName::V],
    };
    let block = AxisSteps::new(config.num_blocks(), block_stride.get());
    let sections = (0..).zip(names).map(|(outer, &name)| {
        let offset = outer_stride.checked_mul("outer", outer)?;
        let section = rows(config, name)
            .at(0, offset.get())
            .axis(Axis::Block, block)
            .axis(Axis::Layer, layer);
        Ok::<_, LayoutError>(section)
    });
    Ok((sections.collect::<Result<_, _>>()?, region_bytes))
}

/// A section with the rows of one piece, in the order of tokens or heads.
fn rows(config: &LayoutConfig, name: SectionName) -> Section {
    let (element_bytes, row_elements) = element_bytes_and_count(config);
    let tokens = config.page_size();
    let row = u64::from(element_bytes) * u64::from(row_elements);
    let section = Section::new(name, element_bytes);
    let Some(heads) = config.num_heads() else {
        return section
            .axis(Axis::Token, AxisSteps::new(tokens, row))
            .axis(Axis::Element, AxisSteps::new(row_elements, element_bytes.into()));
    };
    let elements = row_elements / heads;
    let head = u64::from(elements) * u64::from(element_bytes);
    // Products of two numbers of 32 bits; the config has checked that a piece fits.
    let (token_stride, head_stride) = match config.token_order() {
        TokenOrder::TokenMajor => (row, head),
        TokenOrder::HeadMajor => (head, head * u64::from(tokens)),
    };
    section
        .axis(Axis::Token, AxisSteps::new(tokens, token_stride))
        .axis(Axis::Head, AxisSteps::new(heads, head_stride))
        .axis(Axis::Element, AxisSteps::new(elements, element_bytes.into()))
}

/// The bytes of an element that is never split, and the number of such elements in a row.
pub(crate) fn element_bytes_and_count(config: &LayoutConfig) -> (u32, u32) {
    match config.element() {
        ElementFormat::Width(width) => (width.into(), config.inner_dim()),
        ElementFormat::BlockScaled { elements, bytes } => (bytes, config.inner_dim() / elements),
        // The bytes of a head are adjacent, in an unknown order.
        ElementFormat::RowBytes(bytes) => match config.num_heads() {
            Some(heads) => (bytes / heads, heads),
            None => (bytes, 1),
        },
    }
}
