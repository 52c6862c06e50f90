//! The differences of two geometries.

use proptest::prelude::*;
use terrane_core::{Alignment, StorageKind};
use terrane_layout::{
    Axis, BlockDimension, ElementFormat, Geometry, LayoutConfig, LayoutFingerprint, LayoutKind,
    SectionName, TokenOrder,
};
use terrane_wire::{GeometryField, first_difference, first_shape_difference};

use crate::layouts::{any_geometry, config, describe, geometry, several_sections};

const KIND: LayoutKind = LayoutKind::FullyContiguous;

fn ours() -> Geometry {
    geometry(&config(), KIND)
}

/// The config with one changed field at a time, and the expected text.
fn changed() -> Vec<(LayoutConfig, GeometryField, &'static str)> {
    let unstated = LayoutConfig::builder()
        .num_blocks(64)
        .num_layers(32)
        .outer_dim(2)
        .page_size(16)
        .inner_dim(1024)
        .element(ElementFormat::Width(2));
    let builder = || unstated.num_heads(8);
    use GeometryField as F;
    [
        (builder().num_blocks(65), F::NumBlocks, "num_blocks is 64 here and 65 there"),
        (builder().num_layers(31), F::NumLayers, "section k: num_layers is 32 here and 31 there"),
        (builder().outer_dim(1), F::Section, "section k: the section is present here and absent"),
        (
            builder().page_size(32),
            F::Tokens,
            "section k: the number of tokens of a block is 16 here and 32 there",
        ),
        (
            builder().inner_dim(512),
            F::Elements,
            "section k: the number of elements of a head is 128 here and 64 there",
        ),
        (
            builder().element(ElementFormat::Width(1)),
            F::ElementBytes,
            "section k: the size of an element is 2 B here and 1 B there",
        ),
        (builder().num_heads(4), F::NumHeads, "section k: num_heads is 8 here and 4 there"),
        (unstated, F::NumHeads, "section k: num_heads is 8 here and not stated there"),
        (
            builder().token_order(TokenOrder::HeadMajor),
            F::Strides(Axis::Head),
            "section k: the head axis is 8 positions 256 B apart here and 8 positions 4096 B apart",
        ),
        (
            builder().block_alignment(Alignment::PAGE),
            F::BlockAlignment,
            "block_alignment is 1 B here and 4 KiB there",
        ),
    ]
    .map(|(builder, field, text)| (builder.build().unwrap(), field, text))
    .into()
}

#[test]
fn each_field_is_named_with_both_values() {
    for (theirs, field, text) in changed() {
        let theirs = geometry(&theirs, KIND);
        let difference = first_difference(&ours(), &theirs).unwrap();
        assert_eq!(difference.field, field, "{text}");
        assert!(difference.to_string().starts_with(text), "{difference}");
        let error = describe(&theirs, StorageKind::System).expect(&ours()).unwrap_err();
        assert!(error.to_string().contains(text), "{error}");
    }
}

#[test]
fn strides_and_offsets_are_named() {
    let separate = |block_dimension| LayoutKind::LayerSeparate { block_dimension };
    let first = geometry(&config(), separate(BlockDimension::First));
    let difference = first_difference(&ours(), &first).unwrap();
    let text = "section k: the block axis is 64 positions 2097152 B apart here and 64 positions \
                65536 B apart there";
    assert_eq!(difference.to_string(), text);
    let one = config().with_num_blocks(1).unwrap();
    let difference =
        first_difference(&geometry(&one, KIND), &geometry(&one, separate(BlockDimension::First)));
    let text = "section k: the layer axis is 32 positions 65536 B apart here and 32 groups 1 \
                regions apart of 1 position there";
    assert_eq!(difference.unwrap().to_string(), text);

    let geometry = several_sections(4, 2);
    let mut sections = geometry.sections().to_vec();
    sections[1] = sections[1].at(0, 64 * 128 + 4);
    let moved = Geometry::from_sections(sections.clone()).unwrap();
    let difference = first_difference(&geometry, &moved).unwrap();
    assert_eq!(difference.section, Some(SectionName::SCALES));
    assert_eq!(
        difference.to_string(),
        "section scales: the offset is 8192 B here and 8196 B there"
    );
    sections[1] = geometry.sections()[1];
    sections.swap(0, 1);
    let swapped = Geometry::from_sections(sections).unwrap();
    let difference = first_difference(&geometry, &swapped).unwrap();
    assert_eq!(difference.field, GeometryField::Position);
    let mut lengths: Vec<_> = (0..4).map(|region| geometry.region_bytes(region)).collect();
    lengths[3] = lengths[3].checked_add(lengths[3]).unwrap();
    let longer = Geometry::from_sections_in(geometry.sections().to_vec(), &lengths).unwrap();
    let difference = first_difference(&geometry, &longer).unwrap();
    assert_eq!(difference.to_string(), "the length of region 3 is 1600 B here and 3200 B there");
}

#[test]
fn the_first_of_several_differences_is_named() {
    let theirs = config().with_num_blocks(1).unwrap().with_num_layers(1).unwrap();
    let difference = first_difference(&ours(), &geometry(&theirs, KIND)).unwrap();
    assert_eq!(difference.field, GeometryField::NumBlocks);
}

#[test]
fn shapes_differ_in_fewer_fields() {
    use GeometryField as F;
    for (theirs, field, text) in changed() {
        let expected = match field {
            F::NumBlocks | F::BlockAlignment | F::Strides(_) => None,
            // Whole rows are compared if one side states no heads.
            F::NumHeads if theirs.num_heads().is_none() => None,
            // An element of half the size is a head of half the size.
            F::ElementBytes => Some(F::HeadBytes),
            other => Some(other),
        };
        for kind in LayoutKind::ALL {
            let theirs = geometry(&theirs, kind);
            let found = first_shape_difference(&ours(), &theirs).map(|found| found.field);
            assert_eq!(found, expected, "{text}");
            let described = describe(&theirs, StorageKind::System);
            assert_eq!(described.expect_shape(&ours()).is_ok(), expected.is_none(), "{text}");
        }
    }
}

#[test]
fn rows_without_stated_heads_must_be_contiguous() {
    let stated = config().with_token_order(TokenOrder::HeadMajor).unwrap();
    let unstated = changed().into_iter().find(|(c, ..)| c.num_heads().is_none()).unwrap().0;
    let unstated = geometry(&unstated, KIND);
    let difference = first_shape_difference(&unstated, &geometry(&stated, KIND)).unwrap();
    assert_eq!(difference.to_string(), "section k: a row is contiguous here and in parts there");
    let narrower = geometry(&config().with_num_heads(4).unwrap(), KIND);
    let difference = first_shape_difference(&unstated, &narrower).unwrap();
    assert_eq!(
        difference.to_string(),
        "section k: the number of elements of a row is 1024 here and 512 there"
    );
    let difference = first_shape_difference(&ours(), &narrower).unwrap();
    assert_eq!(difference.to_string(), "section k: num_heads is 8 here and 4 there");
}

proptest! {
    /// No field is missing: two geometries differ exactly if their fingerprints do.
    #[test]
    fn different_geometries_have_a_difference(a in any_geometry(), b in any_geometry()) {
        let difference = first_difference(&a, &b);
        prop_assert_eq!(difference.is_none(), a == b);
        let name = LayoutFingerprint::new;
        prop_assert_eq!(difference.is_none(), name(&a) == name(&b));
        prop_assert!(first_difference(&a, &a.clone()).is_none());
    }
}
