//! FlexKV: two of the values of `KVCacheLayoutType`.

use super::shape::Sizes;
use crate::config::LayoutConfig;
use crate::error::LayoutError;
use crate::geometry::Geometry;

/// `LAYERFIRST`: `[L, 2, B, N, H, D]`, one tensor.
///
/// # Errors
///
/// [`LayoutError`] as from [`Geometry::from_form`].
pub fn layer_first(config: &LayoutConfig) -> Result<Geometry, LayoutError> {
    Sizes::of(config).geometry("L2BNHD")
}

/// `BLOCKFIRST`: `[B, L, 2, N, H, D]`, one tensor.
///
/// # Errors
///
/// [`LayoutError`] as from [`Geometry::from_form`].
pub fn block_first(config: &LayoutConfig) -> Result<Geometry, LayoutError> {
    Sizes::of(config).geometry("BL2NHD")
}
