//! The storage format of the elements of a token's row.

use std::fmt;

use terrane_core::ByteCount;

use crate::config::field::{Field, in_range};
use crate::error::LayoutError;

/// The size of elements in bytes. A layout depends only on sizes, so two dtypes of one width are
/// equal.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum ElementFormat {
    /// Each element has this many bytes, 1 to 8: 1 for fp8 and int8, 2 for bfloat16 and fp16, 4 for
    /// fp32.
    Width(u8),
    /// Groups of elements that share a scale, which is stored with them.
    ///
    /// MXFP4 has 32 elements in 17 bytes: 32 half bytes and a scale of 8 bits (OCP Microscaling
    /// Formats specification 1.0). MXFP8 has 32 in 33, and NVFP4 has 16 in 9. A format of half
    /// bytes without scales is 2 elements in 1 byte. The inner dimension must be a multiple of the
    /// group.
    BlockScaled {
        /// Elements per group; at least 1.
        elements: u32,
        /// Bytes per group, scale included; at least 1.
        bytes: u32,
    },
    /// A token's row has this many bytes for all its elements; at least 1. It is for all other
    /// formats, such as scales that are stored after the elements.
    RowBytes(u32),
}

impl ElementFormat {
    /// MXFP4: 32 elements of 4 bits and a scale of 8 bits (OCP Microscaling Formats 1.0).
    pub const MXFP4: Self = Self::BlockScaled { elements: 32, bytes: 17 };
    /// MXFP8: 32 elements of 8 bits and a scale of 8 bits (OCP Microscaling Formats 1.0).
    pub const MXFP8: Self = Self::BlockScaled { elements: 32, bytes: 33 };
    /// NVFP4: 16 elements of 4 bits and a scale of 8 bits.
    pub const NVFP4: Self = Self::BlockScaled { elements: 16, bytes: 9 };

    /// The bytes of a row of `inner_dim` elements.
    ///
    /// # Errors
    ///
    /// [`LayoutError::FieldOutOfRange`] if the format is invalid, and
    /// [`LayoutError::InnerDimNotGrouped`] if the row is not a multiple of its groups.
    pub fn row_bytes(self, inner_dim: u32) -> Result<ByteCount, LayoutError> {
        match self {
            Self::Width(width) => {
                let width = in_range(Field::ElementWidth, Some(u32::from(width)), 1, 8)?;
                Ok(product(inner_dim, width))
            }
            Self::BlockScaled { elements, bytes } => {
                let elements = in_range(Field::GroupElements, Some(elements), 1, u32::MAX)?;
                let bytes = in_range(Field::GroupBytes, Some(bytes), 1, u32::MAX)?;
                if !inner_dim.is_multiple_of(elements) {
                    return Err(LayoutError::InnerDimNotGrouped { inner_dim, elements });
                }
                Ok(product(inner_dim / elements, bytes))
            }
            Self::RowBytes(bytes) => {
                let bytes = in_range(Field::RowBytes, Some(bytes), 1, u32::MAX)?;
                Ok(ByteCount::new(u64::from(bytes)))
            }
        }
    }
}

/// A product of two numbers of 32 bits fits in 64.
fn product(a: u32, b: u32) -> ByteCount {
    ByteCount::new(u64::from(a) * u64::from(b))
}

impl fmt::Display for ElementFormat {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Width(width) => write!(f, "{width} B per element"),
            Self::BlockScaled { elements, bytes } => write!(f, "{elements} elements in {bytes} B"),
            Self::RowBytes(bytes) => write!(f, "{bytes} B per token row"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn widths_from_one_to_eight() {
        for width in 1..=8 {
            let row = ElementFormat::Width(width).row_bytes(1024).unwrap();
            assert_eq!(row.get(), 1024 * u64::from(width));
        }
        for width in [0, 9, 255] {
            let text = ElementFormat::Width(width).row_bytes(1024).unwrap_err().to_string();
            assert!(text.contains(&format!("is {width}")), "{text}");
        }
    }

    #[test]
    fn groups_are_byte_exact() {
        assert_eq!(ElementFormat::MXFP4.row_bytes(1024).unwrap().get(), 32 * 17);
        assert_eq!(ElementFormat::NVFP4.row_bytes(16).unwrap().get(), 9);
        let error = ElementFormat::MXFP4.row_bytes(48).unwrap_err();
        assert!(matches!(error, LayoutError::InnerDimNotGrouped { inner_dim: 48, elements: 32 }));
        assert!(ElementFormat::BlockScaled { elements: 0, bytes: 1 }.row_bytes(1).is_err());
        assert!(ElementFormat::BlockScaled { elements: 1, bytes: 0 }.row_bytes(1).is_err());
    }

    #[test]
    fn the_largest_row_does_not_overflow() {
        let row = ElementFormat::BlockScaled { elements: 1, bytes: u32::MAX }.row_bytes(u32::MAX);
        assert_eq!(row.unwrap().get(), u64::from(u32::MAX).pow(2));
        assert!(ElementFormat::RowBytes(0).row_bytes(1).is_err());
    }
}
