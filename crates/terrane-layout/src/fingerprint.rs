//! A name for a geometry that travels with descriptors and files.

use std::fmt;
use std::str::FromStr;

use xxhash_rust::xxh3::xxh3_128;

use crate::{
    BlockDimension, ElementFormat, Geometry, LayoutConfig, LayoutError, LayoutKind, PhysicalLayout,
    TokenOrder,
};

/// The version of what is fingerprinted and how; its first byte.
const VERSION: u8 = 1;

/// 128 bits that name a geometry: the kind, every field of the config, and the strides.
///
/// Two parties whose fingerprints are equal agree on where each piece lies within its region, and on
/// the order of tokens and heads within it, if heads are stated. It
/// says nothing of where the regions lie, so it is the same on every tier with the same config.
/// Equal on all platforms; it is a hash (XXH3, of a fixed little-endian encoding), no proof
/// against somebody who forges one.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Fingerprint(u128);

impl Fingerprint {
    /// The fingerprint of `config` laid out in the order `kind`.
    ///
    /// # Errors
    ///
    /// [`LayoutError`] if there is no such geometry, as from [`Geometry::new`].
    pub fn new(config: &LayoutConfig, kind: LayoutKind) -> Result<Self, LayoutError> {
        Ok(Self::of(config, &Geometry::new(config, kind)?))
    }

    /// A fingerprint that was taken before, from [`to_u128`](Self::to_u128).
    #[must_use]
    pub const fn from_u128(bits: u128) -> Self {
        Self(bits)
    }

    /// The 128 bits.
    #[must_use]
    pub const fn to_u128(self) -> u128 {
        self.0
    }

    fn of(config: &LayoutConfig, geometry: &Geometry) -> Self {
        let kind = match geometry.kind() {
            LayoutKind::FullyContiguous => 0,
            LayoutKind::LayerSeparate { block_dimension: BlockDimension::First } => 1,
            LayoutKind::LayerSeparate { block_dimension: BlockDimension::Second } => 2,
        };
        let (format, first, second) = match config.element() {
            ElementFormat::Width(width) => (0, u32::from(width), 0),
            ElementFormat::BlockScaled { elements, bytes } => (1, elements, bytes),
            ElementFormat::RowBytes(bytes) => (2, bytes, 0),
        };
        let mut encoded = Vec::with_capacity(96);
        encoded.extend([VERSION, kind, format]);
        for field in [
            config.num_blocks(),
            config.num_layers(),
            config.outer_dim(),
            config.page_size(),
            config.inner_dim(),
            first,
            second,
        ] {
            encoded.extend(field.to_le_bytes());
        }
        for bytes in [
            config.block_alignment().get(),
            geometry.piece_bytes().get(),
            geometry.block_stride().get(),
            geometry.layer_stride().get(),
            geometry.outer_stride().get(),
            geometry.region_bytes().get(),
        ] {
            encoded.extend(bytes.to_le_bytes());
        }
        // Only where stated, so that the names of other layouts stay what they were; the length
        // tells the two apart.
        if let Some(num_heads) = config.num_heads() {
            encoded.extend(num_heads.to_le_bytes());
            encoded.push(match config.token_order() {
                TokenOrder::TokenMajor => 0,
                TokenOrder::HeadMajor => 1,
            });
        }
        Self(xxh3_128(&encoded))
    }
}

impl PhysicalLayout {
    /// The fingerprint of config and geometry; the same wherever the memory lies.
    #[must_use]
    pub fn fingerprint(&self) -> Fingerprint {
        Fingerprint::of(self.config(), self.geometry())
    }
}

/// 32 hexadecimal digits.
impl fmt::Display for Fingerprint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(&format!("{:032x}", self.0))
    }
}

impl fmt::Debug for Fingerprint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Fingerprint({self})")
    }
}

impl FromStr for Fingerprint {
    type Err = InvalidFingerprint;

    fn from_str(text: &str) -> Result<Self, InvalidFingerprint> {
        let error = InvalidFingerprint { length: text.len() };
        if text.len() != 32 || !text.bytes().all(|byte| byte.is_ascii_hexdigit()) {
            return Err(error);
        }
        u128::from_str_radix(text, 16).map(Self).map_err(|_| error)
    }
}

/// A text that is no fingerprint.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("a fingerprint is 32 hexadecimal digits, and this text of {length} bytes is not")]
pub struct InvalidFingerprint {
    /// The length of the text.
    pub length: usize,
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::LayoutConfigBuilder;
    use std::collections::HashSet;
    use terrane_core::Alignment;

    fn builder() -> LayoutConfigBuilder {
        LayoutConfig::builder()
            .num_blocks(1024)
            .num_layers(32)
            .outer_dim(2)
            .page_size(16)
            .inner_dim(1024)
            .element(ElementFormat::Width(2))
    }

    fn of(builder: LayoutConfigBuilder, kind: LayoutKind) -> Fingerprint {
        Fingerprint::new(&builder.build().unwrap(), kind).unwrap()
    }

    /// These travel in files: a change of any is a new `VERSION`.
    #[test]
    fn pinned() {
        let pinned = LayoutKind::ALL.map(|kind| of(builder(), kind).to_string());
        assert_eq!(
            pinned,
            [
                "348903585277eb9083685eb4eaa65aea",
                "7e323d58ac110365a474abcadb874e8b",
                "a28a62ead04086625861cbd1b2fb2884",
            ]
        );
        let scaled = of(builder().element(ElementFormat::MXFP4), LayoutKind::FullyContiguous);
        assert_eq!(scaled.to_string(), "e50d7a88ec34515f02731169b22ffe37");
        let head_major = builder().num_heads(8).token_order(TokenOrder::HeadMajor);
        let head_major = of(head_major, LayoutKind::FullyContiguous);
        assert_eq!(head_major.to_string(), "e9aa01a59d1e4d6080eef0ae52e0b60d");
    }

    #[test]
    fn every_field_counts() {
        let kind = LayoutKind::FullyContiguous;
        let variants = [
            builder(),
            builder().num_blocks(1025),
            builder().num_layers(33),
            builder().outer_dim(1),
            builder().page_size(17),
            builder().inner_dim(2048),
            builder().element(ElementFormat::Width(3)),
            // The same bytes, of another element.
            builder().element(ElementFormat::RowBytes(2048)),
            builder().inner_dim(2048).element(ElementFormat::Width(1)),
            builder().block_alignment(Alignment::PAGE),
            builder().num_heads(8),
            builder().num_heads(4),
            builder().num_heads(8).token_order(TokenOrder::HeadMajor),
        ];
        let distinct: HashSet<Fingerprint> = variants.iter().map(|&b| of(b, kind)).collect();
        assert_eq!(distinct.len(), variants.len());
    }

    #[test]
    fn text_and_back() {
        let fingerprint = of(builder(), LayoutKind::FullyContiguous);
        assert_eq!(fingerprint.to_string().parse(), Ok(fingerprint));
        assert_eq!(Fingerprint::from_u128(fingerprint.to_u128()), fingerprint);
        for text in ["", "12", "+0000000000000000000000000000000", &"g".repeat(32), &"0".repeat(33)]
        {
            assert!(text.parse::<Fingerprint>().is_err(), "{text}");
        }
    }
}
