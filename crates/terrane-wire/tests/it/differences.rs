//! In what two geometries differ.

use proptest::prelude::*;
use terrane_core::{Alignment, StorageKind};
use terrane_layout::{
    BlockDimension, ElementFormat, Fingerprint, LayoutConfig, LayoutKind, TokenOrder,
};
use terrane_wire::{GeometryField, first_difference, first_shape_difference};

use crate::layouts::{any_config, config, describe};

const KIND: LayoutKind = LayoutKind::FullyContiguous;

/// The config with one field changed at a time, and what that is told as.
fn changed() -> Vec<(LayoutConfig, GeometryField, &'static str)> {
    let builder = || {
        let c = config();
        LayoutConfig::builder()
            .num_blocks(c.num_blocks())
            .num_layers(c.num_layers())
            .outer_dim(c.outer_dim())
            .page_size(c.page_size())
            .inner_dim(c.inner_dim())
            .element(c.element())
            .num_heads(8)
    };
    let unstated = LayoutConfig::builder()
        .num_blocks(64)
        .num_layers(32)
        .outer_dim(2)
        .page_size(16)
        .inner_dim(1024)
        .element(ElementFormat::Width(2));
    use GeometryField as F;
    [
        (builder().num_blocks(65), F::NumBlocks, "num_blocks is 64 here and 65 there"),
        (builder().num_layers(31), F::NumLayers, "num_layers is 32 here and 31 there"),
        (builder().outer_dim(1), F::OuterDim, "outer_dim is 2 here and 1 there"),
        (builder().page_size(32), F::PageSize, "page_size is 16 here and 32 there"),
        (builder().inner_dim(512), F::InnerDim, "inner_dim is 1024 here and 512 there"),
        (
            builder().element(ElementFormat::Width(1)),
            F::Element,
            "element is 2 B an element here and 1 B an element there",
        ),
        (builder().num_heads(4), F::NumHeads, "num_heads is 8 here and 4 there"),
        (unstated, F::NumHeads, "num_heads is 8 here and not stated there"),
        (
            builder().token_order(TokenOrder::HeadMajor),
            F::TokenOrder,
            "token_order is token-major here and head-major there",
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
    let ours = config();
    for (theirs, field, text) in changed() {
        let difference = first_difference((&ours, KIND), (&theirs, KIND)).unwrap();
        assert_eq!((difference.field, difference.to_string().as_str()), (field, text));
        let error = describe(&theirs, KIND, StorageKind::System).expect(&ours, KIND).unwrap_err();
        assert!(error.to_string().contains(text), "{error}");
    }
    let other = LayoutKind::LayerSeparate { block_dimension: BlockDimension::First };
    let difference = first_difference((&ours, KIND), (&ours, other)).unwrap();
    assert_eq!(difference.field, GeometryField::Kind);
    assert_eq!(
        difference.to_string(),
        "kind is fully contiguous here and layer separate, block first there"
    );
}

#[test]
fn the_first_of_several_differences_is_named() {
    let ours = config();
    let theirs = ours.with_num_blocks(1).unwrap().with_num_layers(1).unwrap();
    let difference = first_difference((&ours, KIND), (&theirs, KIND)).unwrap();
    assert_eq!(difference.field, GeometryField::NumBlocks);
}

/// As a transfer sees it: `terrane-transfer` is asked the same in its own tests.
#[test]
fn shapes_differ_in_less() {
    use GeometryField as F;
    let ours = config();
    let of_shape = |field| match field {
        F::NumBlocks | F::BlockAlignment | F::TokenOrder => None,
        F::InnerDim => Some(F::HeadDim),
        F::Element => Some(F::HeadBytes),
        // Heads of another size; or, where one side says nothing of heads, whole rows.
        F::NumHeads => Some(F::HeadDim),
        other => Some(other),
    };
    for (theirs, field, text) in changed() {
        let found = first_shape_difference(&ours, &theirs).map(|difference| difference.field);
        let expected = if theirs.num_heads().is_none() { None } else { of_shape(field) };
        assert_eq!(found, expected, "{text}");
        for kind in LayoutKind::ALL {
            let described = describe(&theirs, kind, StorageKind::System);
            assert_eq!(described.expect_shape(&ours).is_ok(), expected.is_none(), "{text}");
        }
    }
}

#[test]
fn unstated_heads_move_whole_rows_in_one_order() {
    let stated = config().with_token_order(TokenOrder::HeadMajor).unwrap();
    let unstated = changed().into_iter().find(|(c, ..)| c.num_heads().is_none()).unwrap().0;
    let difference = first_shape_difference(&unstated, &stated).unwrap();
    assert_eq!(difference.field, GeometryField::TokenOrder);
    let narrower = config().with_num_heads(4).unwrap();
    let difference = first_shape_difference(&unstated, &narrower).unwrap();
    assert_eq!(difference.to_string(), "inner_dim is 1024 here and 512 there");
    let difference = first_shape_difference(&config(), &narrower).unwrap();
    assert_eq!(difference.to_string(), "num_heads is 8 here and 4 there");
}

proptest! {
    /// No field is forgotten: two configs that differ have a difference, and the same goes for
    /// their names.
    #[test]
    fn different_configs_have_a_difference(a in any_config(), b in any_config()) {
        let difference = first_difference((&a, KIND), (&b, KIND));
        prop_assert_eq!(difference.is_none(), a == b);
        let name = |config| Fingerprint::new(config, KIND).unwrap();
        prop_assert_eq!(difference.is_none(), name(&a) == name(&b));
    }
}
