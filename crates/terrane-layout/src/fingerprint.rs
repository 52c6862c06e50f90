//! Identifiers of block shapes and of layouts, for descriptors and files.

use std::fmt;
use std::str::FromStr;

use xxhash_rust::xxh3::xxh3_128;

use crate::geometry::encoding::VERSION;
use crate::geometry::{Geometry, Section};
use crate::physical::PhysicalLayout;

/// The prefix of a fingerprint's text.
const PREFIX: &str = "v2-";

/// A 128-bit identifier of the contents of a block: shape, elements, sections, group and a salt.
///
/// It is equal on every tier and for every order of strides. So a block that was stored from one
/// layout can be read into another one. The caller chooses the salt, for example a model's name and
/// revision. The hash is XXH3 of a fixed little-endian encoding. It does not protect against
/// forgery.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct BlockFingerprint(u128);

/// A 128-bit identifier of a layout: its blocks' shape, every stride, and the number of blocks.
///
/// Two peers with equal fingerprints agree on the position of each element within its region. The
/// locations of the regions are not part of it.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct LayoutFingerprint(u128);

impl BlockFingerprint {
    /// The fingerprint of blocks of `geometry`. `group` distinguishes the cache groups of one
    /// model.
    #[must_use]
    pub fn new(geometry: &Geometry, group: u32, salt: &[u8]) -> Self {
        let mut encoded = Vec::with_capacity(128);
        encoded.extend([VERSION, b'B']);
        encoded.extend(group.to_le_bytes());
        encode_shapes(geometry, &mut encoded);
        // The salt is last, so its length need not be encoded.
        encoded.extend(salt);
        Self(xxh3_128(&encoded))
    }
}

impl LayoutFingerprint {
    /// The fingerprint of a geometry: XXH3 of its [encoding](Geometry::encode).
    #[must_use]
    pub fn new(geometry: &Geometry) -> Self {
        let mut encoded = geometry.encode();
        encoded.push(b'L');
        Self(xxh3_128(&encoded))
    }
}

impl PhysicalLayout {
    /// The fingerprint of the geometry. It does not depend on the location of the memory.
    #[must_use]
    pub fn fingerprint(&self) -> LayoutFingerprint {
        LayoutFingerprint::new(self.geometry())
    }
}

/// The shapes of the sections, in the order of their names.
fn encode_shapes(geometry: &Geometry, encoded: &mut Vec<u8>) {
    let mut sections: Vec<&Section> = geometry.sections().iter().collect();
    sections.sort_by_key(|section| section.name());
    encoded.extend(geometry.section_count().to_le_bytes());
    for section in sections {
        let shape = section.shape();
        section.name().encode(encoded);
        // Zero means that heads are not stated.
        let heads = shape.heads.unwrap_or(0);
        for number in [shape.layers, heads, shape.tokens, shape.elements, shape.element_bytes] {
            encoded.extend(number.to_le_bytes());
        }
    }
}

fn parse(text: &str) -> Result<u128, InvalidFingerprint> {
    let is_hexadecimal =
        |text: &str| text.len() == 32 && text.bytes().all(|byte| byte.is_ascii_hexdigit());
    if is_hexadecimal(text) {
        return Err(InvalidFingerprint::Version1);
    }
    let error = InvalidFingerprint::Text { length: text.len() };
    let digits = text.strip_prefix(PREFIX).filter(|digits| is_hexadecimal(digits)).ok_or(error)?;
    u128::from_str_radix(digits, 16).map_err(|_| error)
}

macro_rules! bits_and_text {
    ($($name:ident),*) => {$(
        impl $name {
            /// Restores a fingerprint from [`to_u128`](Self::to_u128).
            #[must_use]
            pub const fn from_u128(bits: u128) -> Self {
                Self(bits)
            }

            /// The 128 bits.
            #[must_use]
            pub const fn to_u128(self) -> u128 {
                self.0
            }
        }

        /// `v2-` and 32 hexadecimal digits.
        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.pad(&format!("{PREFIX}{:032x}", self.0))
            }
        }

        impl fmt::Debug for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                write!(f, "{}({self})", stringify!($name))
            }
        }

        impl FromStr for $name {
            type Err = InvalidFingerprint;

            fn from_str(text: &str) -> Result<Self, InvalidFingerprint> {
                parse(text).map(Self)
            }
        }
    )*};
}

bits_and_text!(BlockFingerprint, LayoutFingerprint);

/// A text that is not a fingerprint of this version.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum InvalidFingerprint {
    /// The text has another format.
    #[error(
        "the text has {length} bytes and is not a fingerprint; a fingerprint is `v2-` and 32 \
         hexadecimal digits"
    )]
    Text {
        /// The length of the text.
        length: usize,
    },
    /// The text is a fingerprint of version 1.
    #[error(
        "the fingerprint has version 1, and this library compares version 2; compute it again from \
         the layout"
    )]
    Version1,
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        ElementFormat, LayoutConfig, LayoutConfigBuilder, LayoutKind, SectionName, TokenOrder,
    };
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

    fn geometry(builder: LayoutConfigBuilder, kind: LayoutKind) -> Geometry {
        Geometry::new(&builder.build().unwrap(), kind).unwrap()
    }

    const KIND: LayoutKind = LayoutKind::FullyContiguous;

    /// Files contain these fingerprints. A change of any of them requires a new `VERSION`.
    #[test]
    fn pinned() {
        let layouts =
            LayoutKind::ALL.map(|kind| LayoutFingerprint::new(&geometry(builder(), kind)));
        let blocks = BlockFingerprint::new(&geometry(builder(), KIND), 0, b"");
        assert_eq!(
            layouts.map(|fingerprint| fingerprint.to_string()),
            [
                "v2-72f65413a1f06f7bc0c2a34fcd91db09",
                "v2-81ae5e0ee88fde2c34d9d6eef3820e5e",
                "v2-b30c5c8f5c94e47701f84d62f6736e50",
            ]
            .map(str::to_owned)
        );
        assert_eq!(blocks.to_string(), "v2-f9449c776469f8dac9a2f3f1c82a152e");
    }

    #[test]
    fn every_field_of_a_layout_counts() {
        let variants = [
            builder(),
            builder().num_blocks(1025),
            builder().num_layers(33),
            builder().outer_dim(1),
            builder().page_size(17),
            builder().inner_dim(2048),
            builder().element(ElementFormat::Width(3)),
            // The same bytes with another element.
            builder().element(ElementFormat::RowBytes(2048)),
            builder().inner_dim(2048).element(ElementFormat::Width(1)),
            builder().block_alignment(Alignment::PAGE),
            builder().num_heads(8),
            builder().num_heads(4),
            builder().num_heads(8).token_order(TokenOrder::HeadMajor),
        ];
        let distinct: HashSet<_> =
            variants.iter().map(|&each| LayoutFingerprint::new(&geometry(each, KIND))).collect();
        assert_eq!(distinct.len(), variants.len());
    }

    #[test]
    fn blocks_are_named_alike_on_every_tier() {
        let heads = builder().num_heads(8);
        let name = |builder, kind| BlockFingerprint::new(&geometry(builder, kind), 1, b"model");
        let first = name(heads, KIND);
        for kind in LayoutKind::ALL {
            assert_eq!(name(heads.token_order(TokenOrder::HeadMajor), kind), first);
            assert_eq!(name(heads.num_blocks(7).block_alignment(Alignment::PAGE), kind), first);
        }
        let other = geometry(heads, KIND);
        assert_ne!(BlockFingerprint::new(&other, 2, b"model"), first);
        assert_ne!(BlockFingerprint::new(&other, 1, b"another"), first);
        assert_ne!(name(heads.page_size(32), KIND), first);
    }

    #[test]
    fn the_names_and_the_order_of_sections_count() {
        let section = |name, offset| {
            Section::new(name, 1)
                .at(0, offset)
                .axis(crate::Axis::Element, crate::AxisSteps::new(100, 1))
        };
        let fingerprint = |names: [SectionName; 2], offsets: [u64; 2]| {
            let sections = [section(names[0], offsets[0]), section(names[1], offsets[1])];
            LayoutFingerprint::new(&Geometry::from_sections(sections).unwrap())
        };
        let (kv, vk) = ([SectionName::K, SectionName::V], [SectionName::V, SectionName::K]);
        let all = [(kv, [0, 100]), (vk, [0, 100]), (kv, [100, 0]), (vk, [100, 0])];
        let distinct: HashSet<_> =
            all.iter().map(|&(names, offsets)| fingerprint(names, offsets)).collect();
        assert_eq!(distinct.len(), 4);
    }

    #[test]
    fn text_and_back() {
        let fingerprint = LayoutFingerprint::new(&geometry(builder(), KIND));
        assert_eq!(fingerprint.to_string().parse(), Ok(fingerprint));
        assert_eq!(LayoutFingerprint::from_u128(fingerprint.to_u128()), fingerprint);
        for text in
            ["", "12", "v2-+000000000000000000000000000000", &format!("v2-{}", "g".repeat(32))]
        {
            assert!(text.parse::<LayoutFingerprint>().is_err(), "{text}");
        }
        let version_1 = "348903585277eb9083685eb4eaa65aea".parse::<BlockFingerprint>();
        assert_eq!(version_1, Err(InvalidFingerprint::Version1));
    }
}
