//! The arithmetic of pieces and that of sections agree.

use proptest::prelude::*;
use terrane_layout::{Axis, Geometry, SectionName, TensorAxis, TensorForm};

/// How the layers of a form are stated.
#[derive(Clone, Copy, Debug)]
enum Layers {
    /// A dimension.
    Dimension,
    /// A tensor for each layer.
    Tensors,
    /// A tensor for each layer, with a second part of one position.
    TensorsOfOne,
}

#[derive(Clone, Debug)]
struct Drawn {
    layers: Layers,
    counts: [u32; 5],
    outside: Vec<TensorAxis>,
    padding: u64,
}

impl Drawn {
    fn form(&self) -> TensorForm {
        let [outers, blocks, layers, tokens, elements] = self.counts;
        let names = [SectionName::K, SectionName::V];
        let names = if outers == 1 { &names[..1] } else { &names[..] };
        let mut form = TensorForm::new(names, 1);
        if !matches!(self.layers, Layers::Dimension) {
            form = form.tensors(Axis::Layer, layers);
        }
        for &axis in &self.outside {
            let inside = u64::from(tokens * elements * outers * blocks * layers) + self.padding;
            form = match (axis, self.layers) {
                (TensorAxis::Outer, _) => form.dim(axis, outers),
                (TensorAxis::Of(Axis::Layer), Layers::Dimension) => form.dim(axis, layers),
                (TensorAxis::Of(Axis::Layer), Layers::Tensors) => form,
                // The stride over one position is padded too.
                (TensorAxis::Of(Axis::Layer), _) => form.dim(axis, 1).padded(inside),
                _ => form.dim(axis, blocks),
            };
        }
        form.dim(Axis::Token, tokens).dim(Axis::Element, elements)
    }
}

fn forms() -> impl Strategy<Value = Drawn> {
    let layers =
        prop::sample::select(vec![Layers::Dimension, Layers::Tensors, Layers::TensorsOfOne]);
    let outside = [TensorAxis::Outer, Axis::Block.into(), Axis::Layer.into()];
    let counts = (1..=2_u32, 1..4_u32, 1..4_u32, 1..4_u32, 1..4_u32);
    (layers, counts, Just(outside.to_vec()).prop_shuffle(), 0..9_u64).prop_map(
        |(layers, (outers, blocks, each, tokens, elements), outside, padding)| Drawn {
            layers,
            counts: [outers, blocks, each, tokens, elements],
            outside,
            padding,
        },
    )
}

proptest! {
    #[test]
    fn pieces_are_where_their_sections_begin(drawn in forms()) {
        let geometry = Geometry::from_form(&drawn.form()).unwrap();
        let Some(pieces) = geometry.pieces() else { return Err(TestCaseError::fail("no pieces")) };
        for (number, section) in (0_u32..).zip(geometry.sections()) {
            for block in 0..geometry.num_blocks() {
                for layer in 0..geometry.num_layers() {
                    let place = section.begin(block, layer);
                    prop_assert_eq!(pieces.offset(block, layer, number), place);
                    let end = place.offset + pieces.piece_bytes().get();
                    prop_assert!(end <= geometry.region_bytes(place.region).get());
                }
            }
        }
    }
}
