//! Dynamo: the layouts of its KV block manager (`FullyContiguous`, `LayerSeparate`).

use super::shape::Sizes;
use crate::config::LayoutConfig;
use crate::error::LayoutError;
use crate::geometry::Geometry;
use crate::kind::BlockDimension;

/// `FullyContiguous`: `[B, L, 2, N, H, D]`, one tensor.
///
/// # Errors
///
/// [`LayoutError`] as from [`Geometry::from_form`].
pub fn fully_contiguous(config: &LayoutConfig) -> Result<Geometry, LayoutError> {
    Sizes::of(config).geometry("BL2NHD")
}

/// `LayerSeparate`: `L × [B, 2, N, H, D]`, or `L × [2, B, N, H, D]` if `outer_contiguous` holds
/// ([`BlockDimension::Second`]).
///
/// # Errors
///
/// [`LayoutError`] as from [`Geometry::from_form`].
pub fn layer_separate(
    config: &LayoutConfig,
    block_dimension: BlockDimension,
) -> Result<Geometry, LayoutError> {
    Sizes::of(config).geometry(match block_dimension {
        BlockDimension::First => "L|B2NHD",
        BlockDimension::Second => "L|2BNHD",
    })
}
