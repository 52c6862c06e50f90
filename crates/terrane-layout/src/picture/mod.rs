//! Pictures of layouts: the bytes of one block in the regions.

mod labels;
mod pieces;
mod svg;
#[cfg(test)]
mod tests;
mod text;

use crate::geometry::Geometry;
use pieces::Drawn;

/// The bytes of block 0 as text ([`Display`](std::fmt::Display)) and as SVG.
///
/// A piece is a range of bytes of one layer and section without a gap. Its name lists the axes that
/// the piece contains only in part. The space between pieces belongs to other blocks, or is
/// padding. The picture shows the first regions and pieces, and the number of the omitted ones.
///
/// ```
/// use terrane_layout::formats::vllm;
/// use terrane_layout::{ElementFormat, LayoutConfig};
///
/// # fn main() -> Result<(), terrane_layout::LayoutError> {
/// let config = LayoutConfig::builder()
///     .num_blocks(100)
///     .num_layers(2)
///     .outer_dim(2)
///     .page_size(16)
///     .inner_dim(2 * 64)
///     .num_heads(2)
///     .element(ElementFormat::Width(2))
///     .build()?;
/// let picture = vllm::cross_layer(&config)?.picture();
/// assert_eq!(
///     picture.to_string(),
///     "\
/// 100 blocks of 16384 bytes in 1 region
/// k: 2 layers, 2 heads, 16 tokens, 64 elements of 2 bytes
///    strides: block 16384, layer 8192, token 256, head 128, element 2
/// v: 2 layers, 2 heads, 16 tokens, 64 elements of 2 bytes
///    strides: block 16384, layer 8192, token 256, head 128, element 2
/// block 0 in region 0 of 1638400 bytes:
///               0      4096  k, layer 0
///            4096      4096  v, layer 0
///            8192      4096  k, layer 1
///           12288      4096  v, layer 1
/// "
/// );
/// assert!(picture.to_svg().starts_with("<svg "));
/// # Ok(())
/// # }
/// ```
#[derive(Clone, Debug)]
pub struct Picture {
    geometry: Geometry,
    drawn: Drawn,
}

impl Geometry {
    /// A picture of block 0.
    #[must_use]
    pub fn picture(&self) -> Picture {
        Picture { geometry: self.clone(), drawn: Drawn::of(self) }
    }
}

impl Picture {
    /// The picture as an SVG image, 960 pixels wide. It needs no fonts and no scripts.
    #[must_use]
    pub fn to_svg(&self) -> String {
        svg::render(&self.geometry, &self.drawn)
    }
}

impl std::fmt::Display for Picture {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        text::render(&self.geometry, &self.drawn, f)
    }
}
