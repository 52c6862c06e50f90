//! SGLang: the device pools of `MHATokenToKVPool` and the host pools of HiCache (`pool_host`).
//!
//! SGLang counts tokens, and its page is Terrane's block: `size` tokens are `B · N`. Latents
//! (`MLATokenToKVPoolHost`) have the same layouts without the dimension 2.

use super::shape::{Sizes, divide, moved};
use crate::config::LayoutConfig;
use crate::error::LayoutError;
use crate::geometry::{Axis, Geometry, SectionName, TensorAxis, TensorForm};

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

/// The host pool `page_unified`: `[B, H/h, L, 2, N, h, D]`, one tensor, with `heads_in_group` = h.
/// The bytes of a group of heads are contiguous for each layer, so that ranks can exchange them.
///
/// A config of one outer, such as a latent, has no groups: `[B, L, N, H, D]`.
///
/// # Errors
///
/// [`GeometryError::NotDivided`](crate::GeometryError::NotDivided) if `heads_in_group` does not
/// divide the heads, [`LayoutError::HeadsNotStated`], and [`LayoutError`] as from
/// [`Geometry::from_form`].
pub fn page_unified(config: &LayoutConfig, heads_in_group: u32) -> Result<Geometry, LayoutError> {
    let sizes = Sizes::of(config);
    if sizes.outers == 1 {
        return sizes.geometry("BLNHD");
    }
    let groups = divide("num_heads", sizes.stated_heads()?, heads_in_group)?;
    let form = TensorForm::new(sizes.names(), sizes.element_bytes)
        .dim(Axis::Block, sizes.blocks)
        .dim(Axis::Head, groups)
        .dim(Axis::Layer, sizes.layers)
        .dim(TensorAxis::Outer, sizes.outers)
        .dim(Axis::Token, sizes.tokens)
        .dim(Axis::Head, heads_in_group)
        .dim(Axis::Element, sizes.elements);
    Geometry::from_form(&form)
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::element::ElementFormat;

    /// `[B, H/h, L, 2, N, h, D]` of `[2, 2, 3, 2, 5, 2, 8]` bytes.
    #[test]
    fn a_group_of_heads_is_contiguous_in_each_layer() {
        let config = LayoutConfig::builder()
            .num_blocks(2)
            .num_layers(3)
            .outer_dim(2)
            .page_size(5)
            .inner_dim(4 * 8)
            .num_heads(4)
            .element(ElementFormat::Width(1))
            .build()
            .unwrap();
        let geometry = page_unified(&config, 2).unwrap();
        let values = geometry.section(SectionName::V).unwrap();
        for head in 0..4 {
            let found = values.place([1, 2], [head, 3, 6]);
            let place = [1, head / 2, 2, 1, 3, head % 2, 6];
            let expected = place
                .into_iter()
                .zip([2, 2, 3, 2, 5, 2, 8])
                .fold(0, |offset, (index, count)| offset * count + u64::from(index));
            assert_eq!((found.region, found.offset), (0, expected), "head {head}");
        }
    }
}
