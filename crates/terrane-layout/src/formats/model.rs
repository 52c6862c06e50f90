//! Caches of one kind of model, independent of the engine.

use terrane_core::ByteCount;

use super::shape::{Sizes, divide};
use crate::config::LayoutConfig;
use crate::error::LayoutError;
use crate::geometry::{Axis, AxisSteps, Geometry, Section, SectionName, Step};

/// DeepSeek-V3.2's indexer (`index_k_with_scale_buffer`, `DeepseekV32IndexerCache`):
/// `L × [B, N·132]` bytes. A block has N rows of 128 bytes, then N scales of 4 bytes.
///
/// In that cache, `value_bytes` is 128 and `scale_bytes` is 4.
///
/// # Errors
///
/// [`LayoutError`] as from [`Geometry::from_sections`].
pub fn indexer(
    [num_blocks, num_layers, page_size]: [u32; 3],
    value_bytes: u32,
    scale_bytes: u32,
) -> Result<Geometry, LayoutError> {
    let values = u64::from(page_size) * u64::from(value_bytes);
    let scales = u64::from(page_size) * u64::from(scale_bytes);
    let block = ByteCount::new(values).checked_add(ByteCount::new(scales))?;
    let section = |name, element_bytes, offset| {
        Section::new(name, element_bytes)
            .at(0, offset)
            .axis(Axis::Block, AxisSteps::new(num_blocks, block.get()))
            .axis(Axis::Layer, AxisSteps::spread(num_layers, 1, Step::ONE))
    };
    Geometry::from_sections([
        section(SectionName::VALUES, 1, 0)
            .axis(Axis::Token, AxisSteps::new(page_size, value_bytes.into()))
            .axis(Axis::Element, AxisSteps::new(value_bytes, 1)),
        section(SectionName::SCALES, scale_bytes, values)
            .axis(Axis::Token, AxisSteps::new(page_size, scale_bytes.into())),
    ])
}

/// Quantised K and V with separate scales: `L × [2, B, N, H, D]`, and scales
/// `L × [2, B, N, H, D/g]`. `group` = g is the number of elements per scale. The regions are K and
/// V of all layers, then their scales.
///
/// An int8 or fp8 cache with one scale per head has g = D. NVFP4 has g = 16: an element of the
/// config is then a byte of two values, and `group` is 8.
///
/// # Errors
///
/// [`GeometryError::NotDivided`](crate::GeometryError::NotDivided) if `group` does not divide D,
/// [`LayoutError::HeadsNotStated`], and [`LayoutError`] as from [`Geometry::from_form`].
pub fn scales_beside(
    config: &LayoutConfig,
    group: u32,
    scale_bytes: u32,
) -> Result<Geometry, LayoutError> {
    let sizes = Sizes::of(config).of_outers(2)?;
    sizes.stated_heads()?;
    let groups = divide("head_dim", sizes.elements, group)?;
    let scales = Sizes { elements: groups, element_bytes: scale_bytes, ..sizes };
    let mut sections = sizes.form("L|2BNHD")?.sections()?;
    let names = [SectionName::K_SCALES, SectionName::V_SCALES];
    for (name, section) in names.into_iter().zip(scales.form("L|2BNHD")?.sections()?) {
        sections.push(renamed(&section, name, scale_bytes).at(sizes.layers, section.offset()));
    }
    Geometry::from_sections(sections)
}

/// The same strides under another name, with stated heads.
fn renamed(section: &Section, name: SectionName, element_bytes: u32) -> Section {
    let plain = Section::new(name, element_bytes).at(section.first_region(), section.offset());
    Axis::ALL.into_iter().fold(plain, |all, axis| all.axis(axis, *section.steps(axis)))
}

/// A state that a page stores once for all tokens of a block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PageState {
    /// The name of its section.
    pub name: SectionName,
    /// Elements.
    pub elements: u32,
    /// Bytes of an element.
    pub element_bytes: u32,
}

/// Pages of recurrent models (vLLM's `MambaSpec`): the states of a block and layer follow each
/// other, and each page has `page_bytes` bytes. One tensor `[L, B, page]`.
///
/// The order of the states and the page size are vLLM's: first the convolution, then the recurrent
/// state. In a hybrid model, the page size is that of the attention groups that share the tensor
/// ([`vllm::page_padded`](super::vllm::page_padded)).
///
/// # Errors
///
/// [`LayoutError`] as from [`Geometry::from_sections`]; [`GeometryError`](crate::GeometryError) if
/// the states do not fit in `page_bytes`.
pub fn state_pages(
    num_blocks: u32,
    num_layers: u32,
    page_bytes: u64,
    states: &[PageState],
) -> Result<Geometry, LayoutError> {
    let page = ByteCount::new(page_bytes);
    let layer = page.checked_mul("num_blocks", num_blocks.into())?;
    let mut offset = ByteCount::ZERO;
    let mut sections = Vec::with_capacity(states.len());
    for state in states {
        let bytes = u64::from(state.elements) * u64::from(state.element_bytes);
        let section = Section::new(state.name, state.element_bytes)
            .at(0, offset.get())
            .axis(Axis::Block, AxisSteps::new(num_blocks, page_bytes))
            .axis(Axis::Layer, AxisSteps::new(num_layers, layer.get()))
            .axis(Axis::Element, AxisSteps::new(state.elements, state.element_bytes.into()));
        sections.push(section);
        offset = offset.checked_add(ByteCount::new(bytes))?;
    }
    let region = layer.checked_mul("num_layers", num_layers.into())?;
    Geometry::from_sections_in(sections, &[region])
}
