//! SGLang: the device pools of `MHATokenToKVPool` and the host pools of HiCache (`pool_host`).
//!
//! SGLang counts tokens, and its page is Terrane's block: `size` tokens are `B · N`. Latents
//! (`MLATokenToKVPoolHost`) have the same layouts without the dimension 2.

use super::shape::Sizes;
use crate::config::LayoutConfig;
use crate::error::LayoutError;
use crate::geometry::{Axis, Geometry, SectionName};

use super::shape::moved;

/// The device pool: `k_buffer` and `v_buffer` are lists of tensors, `2 × L × [B, N, H, D]`.
///
/// The regions are all layers of K, then all layers of V. The pool begins with one page of padding,
/// which counts as a block.
///
/// # Errors
///
/// [`LayoutError`] as from [`Geometry::from_form`].
pub fn device(config: &LayoutConfig) -> Result<Geometry, LayoutError> {
    Sizes::of(config).geometry("2L|BNHD")
}

/// The host pool `layer_first`: `[2, L, B, N, H, D]`, one tensor.
///
/// # Errors
///
/// [`LayoutError`] as from [`Geometry::from_form`].
pub fn layer_first(config: &LayoutConfig) -> Result<Geometry, LayoutError> {
    Sizes::of(config).geometry("2LBNHD")
}

/// The host pool `page_first`: `[2, B, N, L, H, D]`, one tensor. The layers of a token are
/// adjacent.
///
/// # Errors
///
/// [`LayoutError`] as from [`Geometry::from_form`].
pub fn page_first(config: &LayoutConfig) -> Result<Geometry, LayoutError> {
    Sizes::of(config).geometry("2BNLHD")
}

/// The host pool `page_first_direct`: `[2, B, L, N, H, D]`, one tensor.
///
/// # Errors
///
/// [`LayoutError`] as from [`Geometry::from_form`].
pub fn page_first_direct(config: &LayoutConfig) -> Result<Geometry, LayoutError> {
    Sizes::of(config).geometry("2BLNHD")
}

/// The host pool `page_head`: `[2, B, H, N, L, D]`, one tensor. A page can be split by heads.
///
/// # Errors
///
/// [`LayoutError::HeadsNotStated`], and [`LayoutError`] as from [`Geometry::from_form`].
pub fn page_head(config: &LayoutConfig) -> Result<Geometry, LayoutError> {
    Sizes::of(config).geometry("2BHNLD")
}

/// The host pool `page_first_direct` with K and V rows of unequal length. It has two tensors,
/// `[B, L, N, H, D]` and `[B, L, N, H, D′]`, with `value_elements` = D′.
///
/// # Errors
///
/// [`LayoutError::HeadsNotStated`], and [`LayoutError`] as from [`Geometry::from_form`].
pub fn page_first_direct_unequal(
    config: &LayoutConfig,
    value_elements: u32,
) -> Result<Geometry, LayoutError> {
    let sizes = Sizes::of(config).of_outers(2)?;
    let heads = sizes.stated_heads()?;
    let form = |name, elements| {
        sizes
            .one(name)
            .dim(Axis::Block, sizes.blocks)
            .dim(Axis::Layer, sizes.layers)
            .dim(Axis::Token, sizes.tokens)
            .dim(Axis::Head, heads)
            .dim(Axis::Element, elements)
    };
    let mut sections = moved(&form(SectionName::K, sizes.elements), 0, 0)?;
    sections.extend(moved(&form(SectionName::V, value_elements), 1, 0)?);
    Geometry::from_sections(sections)
}
