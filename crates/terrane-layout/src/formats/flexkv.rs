//! FlexKV: the values of `KVCacheLayoutType`.

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

/// `LAYERBLOCK`: `[L, B, 2, N, H, D]`, one tensor. FlexKV uses it for the tensors of vLLM 0.23 and
/// later.
///
/// # Errors
///
/// [`LayoutError`] as from [`Geometry::from_form`].
pub fn layer_block(config: &LayoutConfig) -> Result<Geometry, LayoutError> {
    Sizes::of(config).geometry("LB2NHD")
}
