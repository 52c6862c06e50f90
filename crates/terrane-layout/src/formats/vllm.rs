//! vLLM: separate K and V (until 0.32), K and V packed in a row (`KVCacheLayout`), latents, padded
//! pages, and host rows of the offloading worker.

use terrane_core::ByteCount;

use super::shape::{Sizes, divide};
use crate::config::LayoutConfig;
use crate::element::ElementFormat;
use crate::error::LayoutError;
use crate::geometry::{Axis, AxisSteps, Geometry, GeometryError, Section, SectionName, Step};

/// Separate K and V, tokens first (`FlashAttentionBackend`, NHD): `L × [2, B, N, H, D]`.
///
/// # Errors
///
/// [`LayoutError`] as from [`Geometry::from_form`].
pub fn nhd(config: &LayoutConfig) -> Result<Geometry, LayoutError> {
    Sizes::of(config).geometry("L|2BNHD")
}

/// Separate K and V, heads first (`FlashAttentionBackend`, HND): `L × [2, B, H, N, D]`.
///
/// # Errors
///
/// [`LayoutError::HeadsNotStated`], and [`LayoutError`] as from [`Geometry::from_form`].
pub fn hnd(config: &LayoutConfig) -> Result<Geometry, LayoutError> {
    Sizes::of(config).geometry("L|2BHND")
}

/// All layers in one tensor, tokens first: `[B, L, 2, N, H, D]`.
///
/// # Errors
///
/// [`LayoutError`] as from [`Geometry::from_form`].
pub fn cross_layer(config: &LayoutConfig) -> Result<Geometry, LayoutError> {
    Sizes::of(config).geometry("BL2NHD")
}

/// All layers in one tensor, heads first (`FlashAttentionBackend`): `[B, H, L, 2, N, D]`.
///
/// # Errors
///
/// [`LayoutError::HeadsNotStated`], and [`LayoutError`] as from [`Geometry::from_form`].
pub fn cross_layer_hnd(config: &LayoutConfig) -> Result<Geometry, LayoutError> {
    Sizes::of(config).geometry("BHL2ND")
}

/// A latent (`MLACommonBackend`): `L × [B, N, D]`.
///
/// # Errors
///
/// [`GeometryError::Dimension`] if the config has K and V, and [`LayoutError`] as from
/// [`Geometry::from_form`].
pub fn mla(config: &LayoutConfig) -> Result<Geometry, LayoutError> {
    Sizes::of(config).of_outers(1)?.geometry("L|BNHD")
}

/// A latent of all layers in one tensor: `[B, L, N, D]`.
///
/// # Errors
///
/// As from [`mla`].
pub fn mla_cross_layer(config: &LayoutConfig) -> Result<Geometry, LayoutError> {
    Sizes::of(config).of_outers(1)?.geometry("BLNHD")
}

/// `kv_cache_dtype="fp8_ds_mla"`: `L × [B, N, 656]` bytes. A row has 512 values of 8 bits, 4 scales
/// of 32 bits and 64 values of 16 bits. It is never split.
///
/// # Errors
///
/// [`LayoutError`] as from [`LayoutConfigBuilder::build`](crate::LayoutConfigBuilder::build).
pub fn fp8_ds_mla(
    num_blocks: u32,
    num_layers: u32,
    page_size: u32,
) -> Result<Geometry, LayoutError> {
    let config = LayoutConfig::builder()
        .num_blocks(num_blocks)
        .num_layers(num_layers)
        .outer_dim(1)
        .page_size(page_size)
        .inner_dim(576)
        .element(ElementFormat::RowBytes(656))
        .build()?;
    mla(&config)
}

/// `KVCacheLayout`: the order of dimensions in a tensor whose rows hold K and V, `C = 2·D`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum PackedOrder {
    /// `[L, B, N, H, C]`.
    Lbnhc,
    /// `[L, B, H, N, C]`.
    Lbhnc,
    /// `[L, H, B, N, C]`.
    Lhbnc,
    /// `[B, L, N, H, C]`.
    Blnhc,
    /// `[B, L, H, N, C]`.
    Blhnc,
    /// `[B, H, L, N, C]`.
    Bhlnc,
}

impl PackedOrder {
    /// Every order.
    pub const ALL: [Self; 6] =
        [Self::Lbnhc, Self::Lbhnc, Self::Lhbnc, Self::Blnhc, Self::Blhnc, Self::Bhlnc];

    /// The dimensions outside the rows, outermost first.
    const fn axes(self) -> [Axis; 4] {
        use Axis::{Block, Head, Layer, Token};
        match self {
            Self::Lbnhc => [Layer, Block, Token, Head],
            Self::Lbhnc => [Layer, Block, Head, Token],
            Self::Lhbnc => [Layer, Head, Block, Token],
            Self::Blnhc => [Block, Layer, Token, Head],
            Self::Blhnc => [Block, Layer, Head, Token],
            Self::Bhlnc => [Block, Head, Layer, Token],
        }
    }
}

/// K and V packed in a row: one tensor `[…, C]` with `C = 2·D`, in the given order.
///
/// # Errors
///
/// [`LayoutError::HeadsNotStated`], [`GeometryError::Dimension`] for a latent, and [`LayoutError`]
/// as from [`Geometry::from_sections`].
pub fn packed(config: &LayoutConfig, order: PackedOrder) -> Result<Geometry, LayoutError> {
    let sizes = Sizes::of(config);
    rows(&sizes, order, &cells(&sizes, sizes.elements), None)
}

/// As [`packed`], with V rows of another length (`head_size_v`): `C = D + D′`, with
/// `value_elements` = D′.
///
/// # Errors
///
/// As from [`packed`].
pub fn packed_unequal(
    config: &LayoutConfig,
    order: PackedOrder,
    value_elements: u32,
) -> Result<Geometry, LayoutError> {
    let sizes = Sizes::of(config);
    rows(&sizes, order, &cells(&sizes, value_elements), None)
}

/// Like [`packed`], with a scale for each head of each token (`int8_per_token_head` and similar
/// types). A row is D values of K, the scale of K, D values of V and the scale of V.
///
/// In that cache, `scale_bytes` is 4, and an element of the config has 8 bits.
///
/// # Errors
///
/// As from [`packed`].
pub fn packed_with_scales(
    config: &LayoutConfig,
    order: PackedOrder,
    scale_bytes: u32,
) -> Result<Geometry, LayoutError> {
    let sizes = Sizes::of(config);
    let [keys, values] = cells(&sizes, sizes.elements);
    let scale = |name| Cell { name, elements: 1, element_bytes: scale_bytes };
    let row = [keys, scale(SectionName::K_SCALES), values, scale(SectionName::V_SCALES)];
    rows(&sizes, order, &row, None)
}

/// As [`packed`], with pages of `page_bytes` bytes (`page_size_padded`). A page is one block of one
/// layer. It is the stride of blocks in `[L, B, …]`, and of layers in `[B, L, …]`.
///
/// In hybrid models, groups whose pages have the same `page_bytes` share a tensor; see
/// [`model::state_pages`](super::model::state_pages).
///
/// # Errors
///
/// As from [`packed`]. [`GeometryError::Dimension`] if the order has heads outside blocks or
/// layers. [`GeometryError::NotNested`] or [`GeometryError::SectionsOverlap`] if a page does not
/// fit in `page_bytes`.
pub fn page_padded(
    config: &LayoutConfig,
    order: PackedOrder,
    page_bytes: u64,
) -> Result<Geometry, LayoutError> {
    if matches!(order, PackedOrder::Lhbnc | PackedOrder::Bhlnc) {
        let expected = "must be inside blocks and layers, because pages are padded";
        return Err(GeometryError::Dimension { dimension: "head", times: 1, expected }.into());
    }
    let sizes = Sizes::of(config);
    rows(&sizes, order, &cells(&sizes, sizes.elements), Some(page_bytes))
}

/// Elements of one section within a row.
#[derive(Clone, Copy, Debug)]
struct Cell {
    name: SectionName,
    elements: u32,
    element_bytes: u32,
}

/// A row of K and V.
fn cells(sizes: &Sizes, value_elements: u32) -> [Cell; 2] {
    let cell = |name, elements| Cell { name, elements, element_bytes: sizes.element_bytes };
    [cell(SectionName::K, sizes.elements), cell(SectionName::V, value_elements)]
}

/// One tensor of rows. Each row has all cells in order.
fn rows(
    sizes: &Sizes,
    order: PackedOrder,
    cells: &[Cell],
    page_bytes: Option<u64>,
) -> Result<Geometry, LayoutError> {
    let heads = sizes.of_outers(2)?.stated_heads()?;
    let mut sections = Vec::with_capacity(cells.len());
    let mut stride = ByteCount::ZERO;
    for cell in cells {
        let row = AxisSteps::new(cell.elements, cell.element_bytes.into());
        let section = Section::new(cell.name, cell.element_bytes).at(0, stride.get());
        sections.push(section.axis(Axis::Element, row));
        let bytes = u64::from(cell.elements) * u64::from(cell.element_bytes);
        stride = stride.checked_add(ByteCount::new(bytes))?;
    }
    for (position, axis) in order.axes().into_iter().enumerate().rev() {
        if let Some(page) = page_bytes.filter(|_| position == 1) {
            stride = ByteCount::new(page);
        }
        let count = match axis {
            Axis::Block => sizes.blocks,
            Axis::Layer => sizes.layers,
            Axis::Head => heads,
            _ => sizes.tokens,
        };
        for section in &mut sections {
            *section = section.axis(axis, AxisSteps::new(count, stride.get()));
        }
        stride = stride.checked_mul("dimension", count.into())?;
    }
    Geometry::from_sections_in(sections, &[stride])
}

/// The host rows of the offloading worker (`SharedOffloadRegion`). A row holds `blocks_per_chunk`
/// blocks of every layer, layer by layer. It is `[B / b, L, b, N, H, C]`, or heads first,
/// `[B / b, L, b, H, N, C]`, with `C = 2·D`.
///
/// Only the order of tokens and heads in `order`, the order of the device tensors, is used. If
/// several workers share rows, `row_bytes` is the stride of rows, and the region begins with the
/// first cell of this worker.
///
/// # Errors
///
/// [`GeometryError::NotDivided`] if the number of blocks is not a multiple of `blocks_per_chunk`,
/// and [`LayoutError`] as from [`packed`].
pub fn offload_rows(
    config: &LayoutConfig,
    order: PackedOrder,
    blocks_per_chunk: u32,
    row_bytes: Option<u64>,
) -> Result<Geometry, LayoutError> {
    let sizes = Sizes::of(config);
    let chunks = divide("num_blocks", sizes.blocks, blocks_per_chunk)?;
    // A page has the size that it has on the device: one block of one layer.
    let one_page = Sizes { blocks: 1, layers: 1, ..sizes };
    let page = rows(&one_page, order, &cells(&sizes, sizes.elements), None)?;
    let bytes = page.block_bytes();
    let layer = bytes.checked_mul("blocks_per_chunk", blocks_per_chunk.into())?;
    let row = layer.checked_mul("num_layers", sizes.layers.into())?;
    let row = row_bytes.map_or(row, ByteCount::new);
    let block =
        AxisSteps::split(Step::new(chunks, row.get()), Step::new(blocks_per_chunk, bytes.get()));
    let layer = AxisSteps::new(sizes.layers, layer.get());
    let sections = page.sections().iter();
    Geometry::from_sections(
        sections.map(|section| section.axis(Axis::Block, block).axis(Axis::Layer, layer)),
    )
}
