//! FlashInfer: the paged caches of `BatchPrefillWithPagedKVCacheWrapper` and its siblings.

use super::shape::Sizes;
use crate::config::LayoutConfig;
use crate::error::LayoutError;
use crate::geometry::Geometry;

/// `kv_layout="NHD"`: `L × [B, 2, N, H, D]`.
///
/// # Errors
///
/// [`LayoutError`] as from [`Geometry::from_form`].
pub fn nhd(config: &LayoutConfig) -> Result<Geometry, LayoutError> {
    Sizes::of(config).geometry("L|B2NHD")
}

/// `kv_layout="HND"`: `L × [B, 2, H, N, D]`.
///
/// # Errors
///
/// [`LayoutError::HeadsNotStated`], and [`LayoutError`] as from [`Geometry::from_form`].
pub fn hnd(config: &LayoutConfig) -> Result<Geometry, LayoutError> {
    Sizes::of(config).geometry("L|B2HND")
}
