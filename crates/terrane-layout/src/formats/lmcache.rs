//! LMCache: the values of `MemoryFormat`, whose objects have chunks of several pages.
//!
//! A chunk has `pages` blocks, and T = `pages` · N tokens. Chunks follow each other.

use super::shape::Sizes;
use crate::config::LayoutConfig;
use crate::error::LayoutError;
use crate::geometry::Geometry;

/// `KV_2LTD`: chunks of `[2, L, T, H, D]`.
///
/// # Errors
///
/// [`GeometryError::NotDivided`](crate::GeometryError::NotDivided) if `pages` does not divide the
/// number of blocks, and [`LayoutError`] as from [`Geometry::from_form`].
pub fn kv_2ltd(config: &LayoutConfig, pages: u32) -> Result<Geometry, LayoutError> {
    chunked(config, "C2LBNHD", pages)
}

/// `KV_2TD`, layer by layer: `L ×` chunks of `[2, T, H, D]`.
///
/// # Errors
///
/// As from [`kv_2ltd`].
pub fn kv_2td(config: &LayoutConfig, pages: u32) -> Result<Geometry, LayoutError> {
    chunked(config, "L|C2BNHD", pages)
}

/// `KV_T2D`, layer by layer: `L ×` chunks of `[T, 2, H, D]`. K and V of a token are adjacent.
///
/// # Errors
///
/// As from [`kv_2ltd`].
pub fn kv_t2d(config: &LayoutConfig, pages: u32) -> Result<Geometry, LayoutError> {
    chunked(config, "L|CBN2HD", pages)
}

/// `KV_MLA_FMT`: chunks of `[1, L, T, D]`.
///
/// # Errors
///
/// As from [`kv_2ltd`], and [`GeometryError::Dimension`](crate::GeometryError::Dimension) if the
/// config has K and V.
pub fn mla(config: &LayoutConfig, pages: u32) -> Result<Geometry, LayoutError> {
    Sizes::of(config).of_outers(1)?;
    chunked(config, "CLBNHD", pages)
}

fn chunked(config: &LayoutConfig, shape: &str, pages: u32) -> Result<Geometry, LayoutError> {
    Geometry::from_form(&Sizes::of(config).split_form(shape, Some(pages))?)
}
