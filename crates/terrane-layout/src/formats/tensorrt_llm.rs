//! TensorRT-LLM: the pools of `KVCacheManager`.

use super::shape::Sizes;
use crate::config::LayoutConfig;
use crate::error::LayoutError;
use crate::geometry::Geometry;

/// The primary and secondary pool of `WindowBlockManager`: `[B, L, 2, H, N, D]`, one tensor. A
/// latent cache (`kvFactor` 1) has no dimension 2.
///
/// # Errors
///
/// [`LayoutError::HeadsNotStated`] for K and V without heads. [`LayoutError`] as from
/// [`Geometry::from_form`].
pub fn pool(config: &LayoutConfig) -> Result<Geometry, LayoutError> {
    let sizes = Sizes::of(config);
    let is_latent = sizes.outers == 1 && sizes.heads.is_none();
    sizes.geometry(if is_latent { "BLND" } else { "BL2HND" })
}
