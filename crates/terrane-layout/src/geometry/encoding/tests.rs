//! Encodings that are decoded, and encodings that are refused.

use proptest::prelude::*;

use super::super::steps::AxisSteps;
use super::*;
use crate::kind::{BlockDimension, LayoutKind};
use crate::{ElementFormat, GeometryError, LayoutConfig, LayoutError, LayoutFingerprint};

const LIMITS: GeometryLimits = GeometryLimits { blocks: 1 << 22, sections: 16, regions: 4096 };

fn config(layers: u32) -> LayoutConfig {
    let config = LayoutConfig::builder().num_blocks(7).num_layers(layers).outer_dim(2);
    let config = config.page_size(5).inner_dim(12).element(ElementFormat::Width(2)).num_heads(3);
    config.block_alignment(Alignment::SECTOR).build().unwrap()
}

fn geometry(layers: u32, kind: LayoutKind) -> Geometry {
    Geometry::new(&config(layers), kind).unwrap()
}

#[test]
fn every_kind_is_decoded_unchanged() {
    for kind in LayoutKind::ALL {
        for layers in [1, 3] {
            let geometry = geometry(layers, kind);
            let back = Geometry::decode(&geometry.encode(), &LIMITS).unwrap();
            assert_eq!(back, geometry);
            assert_eq!(back.encode(), geometry.encode());
            assert_eq!((back.num_layers(), back.block_bytes()), (layers, geometry.block_bytes()));
            assert_eq!(back.pieces().is_some(), geometry.pieces().is_some());
            assert_eq!(LayoutFingerprint::new(&back), LayoutFingerprint::new(&geometry));
        }
    }
}

/// Neither a stride over one position nor the name of a config changes the encoding.
#[test]
fn equal_places_have_one_encoding() {
    let separate = LayoutKind::LayerSeparate { block_dimension: BlockDimension::First };
    let (one, other) = (geometry(1, LayoutKind::FullyContiguous), geometry(1, separate));
    assert_eq!((&one, one.encode()), (&other, other.encode()));
    assert_ne!(geometry(2, LayoutKind::FullyContiguous), geometry(2, separate));

    let section = |tokens| {
        let section = Section::new(SectionName::K, 1).axis(Axis::Token, tokens);
        let section = section.axis(Axis::Block, AxisSteps::new(2, 64));
        Geometry::from_sections([section.axis(Axis::Element, AxisSteps::new(8, 1))]).unwrap()
    };
    let plain = section(AxisSteps::new(4, 16));
    for same in [
        AxisSteps::split(Step::new(4, 16), Step::new(1, 5)),
        AxisSteps::split(Step::new(1, 9), Step::new(4, 16)),
    ] {
        assert_eq!((&section(same), section(same).encode()), (&plain, plain.encode()));
    }
}

#[test]
fn regions_of_other_lengths_are_runs() {
    let section = Section::new(SectionName::STATE, 1)
        .axis(Axis::Layer, AxisSteps::spread(4, 1, Step::ONE))
        .axis(Axis::Element, AxisSteps::new(8, 1));
    let lengths = [8, 8, 9, 8].map(ByteCount::new);
    let geometry = Geometry::from_sections_in([section], &lengths).unwrap();
    let back = Geometry::decode(&geometry.encode(), &LIMITS).unwrap();
    let found: Vec<_> = (0..4).map(|region| back.region_bytes(region)).collect();
    assert_eq!(found, lengths);
    let few = GeometryLimits { regions: 3, ..LIMITS };
    let error = Geometry::decode(&geometry.encode(), &few).unwrap_err();
    assert!(matches!(
        error,
        DecodeError::OverLimit { what: EncodedCount::Regions, count: 4, limit: 3 }
    ));
}

#[test]
fn version_1_is_refused_by_name() {
    let mut bytes = geometry(1, LayoutKind::FullyContiguous).encode();
    bytes[0] = 1;
    let error = Geometry::decode(&bytes, &LIMITS).unwrap_err();
    assert!(matches!(error, DecodeError::Version { version: 1 }));
    assert!(error.to_string().contains("version 1, and this library reads version 2"), "{error}");
}

/// An axis in two parts that need one stride.
#[test]
fn a_split_that_needs_one_stride_is_not_canonical() {
    let geometry = |tokens| {
        let section = Section::new(SectionName::K, 1).axis(Axis::Token, tokens);
        Geometry::from_sections([section.axis(Axis::Element, AxisSteps::new(8, 1))]).unwrap()
    };
    let (outer, inner) = (Step::new(2, 32), Step::new(4, 8));
    assert_eq!(AxisSteps::split(outer, inner), AxisSteps::new(8, 8));
    let bytes = geometry(AxisSteps::of_parts(outer, inner, 0)).encode();
    let one = geometry(AxisSteps::new(8, 8));
    assert_eq!(Geometry::decode(&one.encode(), &LIMITS).unwrap(), one);
    let error = Geometry::decode(&bytes, &LIMITS).unwrap_err();
    let token = 3 + 19 + 3 * AXIS_BYTES;
    assert!(matches!(error, DecodeError::NotCanonical { offset } if offset == token), "{error}");
}

#[test]
fn hostile_sizes_are_refused() {
    let section = |layers| {
        Section::new(SectionName::K, 1 << 31)
            .axis(Axis::Layer, AxisSteps::spread(layers, 1, Step::ONE))
            .axis(Axis::Element, AxisSteps::new(1 << 31, 1 << 31))
    };
    let mut bytes = Geometry::from_sections([section(1)]).unwrap().encode();
    // The layer axis, and the number of regions.
    let (layer, run) = (3 + 19 + AXIS_BYTES, 12);
    bytes[layer..layer + 4].copy_from_slice(&1_u32.to_le_bytes());
    for layers in [2_u32, 4, 8] {
        bytes[layer + 4..layer + 8].copy_from_slice(&layers.to_le_bytes());
        let start = bytes.len() - run;
        bytes[start..start + 4].copy_from_slice(&layers.to_le_bytes());
        let error = Geometry::decode(&bytes, &LIMITS).unwrap_err();
        let DecodeError::Layout(error) = error else { panic!("{layers}: {error}") };
        let named = matches!(error, LayoutError::Overflow(_) | LayoutError::TooLarge { .. });
        assert!(named, "{layers}: {error}");
    }
}

#[test]
fn hostile_strides_fail_the_proof() {
    let bytes = geometry(1, LayoutKind::FullyContiguous).encode();
    // The position of the head stride: after the counts, the position of the section, and two axes.
    // Then follow regions, outer part and inner count.
    let head_stride = 3 + 19 + 2 * AXIS_BYTES + 20;
    assert_eq!(bytes[head_stride..head_stride + 8], 8_u64.to_le_bytes());
    for stride in [0, 1, 7, u64::MAX, 1 << 63, (-8_i64).cast_unsigned()] {
        let mut hostile = bytes.clone();
        hostile[head_stride..head_stride + 8].copy_from_slice(&stride.to_le_bytes());
        let error = Geometry::decode(&hostile, &LIMITS).unwrap_err();
        let DecodeError::Layout(LayoutError::Geometry(error)) = error else { panic!("{error}") };
        let expected = if stride < 8 { "less than the" } else { "reaches past 2^63" };
        assert!(error.to_string().contains(expected), "{stride}: {error}");
        assert!(matches!(error, GeometryError::NotNested { .. } | GeometryError::TooLarge { .. }));
    }
}

proptest! {
    /// A change of the bytes is refused, or gives the encoding of another geometry.
    #[test]
    fn any_change_is_refused_or_another_geometry(
        kind in prop::sample::select(LayoutKind::ALL.to_vec()),
        layers in 1_u32..4,
        changes in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 1..4),
    ) {
        let mut bytes = geometry(layers, kind).encode();
        for (at, byte) in changes {
            let at = at.index(bytes.len());
            bytes[at] = byte;
        }
        if let Ok(read) = Geometry::decode(&bytes, &LIMITS) {
            prop_assert_eq!(read.encode(), bytes);
        }
    }
}
