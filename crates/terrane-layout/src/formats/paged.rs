//! Paged attention: K with its elements split into groups of x, and V transposed.
//!
//! In all of these, x elements of K take 16 bytes, so x is 16 divided by the width of an element.

use super::shape::{Sizes, divide, moved};
use crate::config::LayoutConfig;
use crate::error::LayoutError;
use crate::geometry::{Axis, Geometry, SectionName, TensorForm};

/// vLLM V0 (`PagedAttention.split_kv_cache`): `L ×` one tensor of K, `[B, H, D/x, N, x]`, followed
/// by V, `[B, H, D, N]`.
///
/// # Errors
///
/// [`GeometryError::NotDivided`](crate::GeometryError::NotDivided) if `x` does not divide D,
/// [`LayoutError::HeadsNotStated`], and [`LayoutError`] as from [`Geometry::from_form`].
pub fn vllm_v0(config: &LayoutConfig, x: u32) -> Result<Geometry, LayoutError> {
    let sizes = Sizes::of(config).of_outers(2)?;
    let keys = config.piece_bytes().checked_mul("num_blocks", sizes.blocks.into())?;
    let mut sections = moved(&split_keys(&sizes, x)?, 0, 0)?;
    sections.extend(moved(&transposed_values(&sizes)?, 0, keys.get())?);
    Geometry::from_sections(sections)
}

/// mistral.rs and candle-vllm (`CacheEngine`): for each layer a tensor of K, `[B, H, D/x, N, x]`,
/// and one of V, `[B, H, D, N]`. The regions are K and V of layer 0, then those of layer 1, etc.
///
/// # Errors
///
/// As from [`vllm_v0`].
pub fn pairs_of_tensors(config: &LayoutConfig, x: u32) -> Result<Geometry, LayoutError> {
    let sizes = Sizes::of(config).of_outers(2)?;
    of_pairs(&sizes, &split_keys(&sizes, x)?, &transposed_values(&sizes)?)
}

/// AITER, shuffled (`rocm_aiter_fa`): for each layer a plane of K, `[B, H, D/x, N, x]`, and one of
/// V, `[B, H, N/x, D, x]`. The regions are K and V of layer 0, then those of layer 1, and so on.
///
/// # Errors
///
/// As from [`vllm_v0`], and [`GeometryError::NotDivided`](crate::GeometryError::NotDivided) if `x`
/// does not divide N.
pub fn aiter_shuffled(config: &LayoutConfig, x: u32) -> Result<Geometry, LayoutError> {
    let sizes = Sizes::of(config).of_outers(2)?;
    let values = outside(&sizes, SectionName::V)?
        .dim(Axis::Token, divide("page_size", sizes.tokens, x)?)
        .dim(Axis::Element, sizes.elements)
        .dim(Axis::Token, x);
    of_pairs(&sizes, &split_keys(&sizes, x)?, &values)
}

/// `[B, H, D/x, N, x]` for each layer.
fn split_keys(sizes: &Sizes, x: u32) -> Result<TensorForm, LayoutError> {
    let groups = divide("head_dim", sizes.elements, x)?;
    Ok(outside(sizes, SectionName::K)?
        .dim(Axis::Element, groups)
        .dim(Axis::Token, sizes.tokens)
        .dim(Axis::Element, x))
}

/// `[B, H, D, N]` for each layer.
fn transposed_values(sizes: &Sizes) -> Result<TensorForm, LayoutError> {
    Ok(outside(sizes, SectionName::V)?
        .dim(Axis::Element, sizes.elements)
        .dim(Axis::Token, sizes.tokens))
}

fn outside(sizes: &Sizes, name: SectionName) -> Result<TensorForm, LayoutError> {
    Ok(sizes
        .one(name)
        .tensors(Axis::Layer, sizes.layers)
        .dim(Axis::Block, sizes.blocks)
        .dim(Axis::Head, sizes.stated_heads()?))
}

/// A region of K and one of V for each layer, alternating.
fn of_pairs(
    sizes: &Sizes,
    keys: &TensorForm,
    values: &TensorForm,
) -> Result<Geometry, LayoutError> {
    let layer = crate::geometry::AxisSteps::spread(sizes.layers, 2, crate::geometry::Step::ONE);
    let mut sections = moved(keys, 0, 0)?;
    sections.extend(moved(values, 1, 0)?);
    Geometry::from_sections(sections.into_iter().map(|section| section.axis(Axis::Layer, layer)))
}
