//! Positions, bounds, and the queries that planners use.

use super::*;
use crate::{BlockDimension, ElementFormat, TokenOrder};

fn config() -> LayoutConfig {
    LayoutConfig::builder()
        .num_blocks(5)
        .num_layers(3)
        .outer_dim(2)
        .page_size(4)
        .inner_dim(6)
        .num_heads(2)
        .element(ElementFormat::Width(2))
        .build()
        .unwrap()
}

fn token_steps(geometry: &Geometry) -> [u64; 2] {
    let section = geometry.section(SectionName::V).unwrap();
    [Axis::Token, Axis::Head].map(|axis| section.steps(axis).inner().stride)
}

#[test]
fn positions_of_a_split_axis_are_counted_in_groups() {
    let steps = AxisSteps::split(Step::new(3, 100), Step::new(4, 7));
    assert_eq!(steps.count(), 12);
    let offsets: Vec<u64> = (0..6).map(|position| steps.place(position).offset).collect();
    assert_eq!(offsets, [0, 7, 14, 21, 100, 107]);
    let steps = AxisSteps::spread(3, 2, Step::new(4, 7));
    let at = |region, offset| RegionOffset { region, offset };
    assert_eq!([3, 4, 11].map(|position| steps.place(position)), [at(0, 21), at(2, 0), at(4, 21)]);
    let steps = AxisSteps::spread(3, 2, Step::ONE);
    assert_eq!([1, 2].map(|position| steps.place(position)), [at(2, 0), at(4, 0)]);
}

#[test]
fn axes_that_need_one_stride_are_equal() {
    let plain = AxisSteps::new(12, 7);
    for split in [
        AxisSteps::split(Step::new(3, 28), Step::new(4, 7)),
        AxisSteps::split(Step::new(12, 7), Step::new(1, 99)),
        AxisSteps::split(Step::new(1, 99), Step::new(12, 7)),
    ] {
        assert_eq!(split, plain);
    }
    assert_ne!(AxisSteps::split(Step::new(3, 29), Step::new(4, 7)), plain);
    // More positions than 32 bits stay in two parts, and the proof refuses them.
    let half = Step::new(1 << 16, 1);
    let large = AxisSteps::split(Step::new(1 << 16, 1 << 16), half);
    assert_eq!((large.outer().count, large.count()), (1 << 16, 1 << 32));
    assert_eq!(AxisSteps::spread(1, 5, Step::new(4, 7)), AxisSteps::new(4, 7));
}

#[test]
fn the_orders_of_a_config_are_sections() {
    for kind in LayoutKind::ALL {
        let geometry = Geometry::new(&config(), kind).unwrap();
        assert_eq!(geometry.origin(), Some(&(config(), kind)));
        assert_eq!(token_steps(&geometry), [12, 6]);
        let by_head = config().with_token_order(TokenOrder::HeadMajor).unwrap();
        assert_eq!(token_steps(&Geometry::new(&by_head, kind).unwrap()), [6, 24]);
        let pieces = geometry.pieces().unwrap();
        assert_eq!(pieces.piece_bytes().get(), 48);
        // The arithmetic of pieces and that of sections agree.
        for (number, section) in (0_u32..).zip(geometry.sections()) {
            for (block, layer) in (0..5).flat_map(|block| (0..3).map(move |layer| (block, layer))) {
                assert_eq!(pieces.offset(block, layer, number), section.begin(block, layer));
            }
        }
        assert_eq!(geometry.label(), kind.to_string());
    }
    let latent = LayoutConfig::builder().num_blocks(2).num_layers(1).outer_dim(1).page_size(1);
    let latent = latent.inner_dim(576).element(ElementFormat::RowBytes(656)).build().unwrap();
    let geometry = Geometry::new(&latent, LayoutKind::FullyContiguous).unwrap();
    let section = geometry.section(SectionName::LATENT).unwrap();
    let shape = section.shape();
    assert_eq!((shape.elements, shape.element_bytes, shape.heads), (1, 656, None));
    assert_eq!((shape.head_bytes(), shape.row_bytes(), shape.piece_bytes()), (656, 656, 656));
    assert_eq!(geometry.section(SectionName::K), None);
}

/// A region for each layer, whose layer axis has a second part of one position.
#[test]
fn a_stride_over_one_position_moves_no_piece() {
    let form = TensorForm::new(&[SectionName::K], 1)
        .tensors(Axis::Layer, 3)
        .dim(Axis::Layer, 1)
        .dim(Axis::Block, 4)
        .dim(Axis::Token, 2)
        .dim(Axis::Element, 8);
    let geometry = Geometry::from_form(&form).unwrap();
    let pieces = geometry.pieces().unwrap();
    assert_eq!(pieces.layer_stride(), ByteCount::ZERO);
    for (block, layer) in (0..4).flat_map(|block| (0..3).map(move |layer| (block, layer))) {
        let place = RegionOffset { region: layer, offset: u64::from(block) * 16 };
        assert_eq!(geometry.offset(block, layer, 0), place);
        assert_eq!(geometry.sections()[0].begin(block, layer), place);
    }
    assert_eq!(AxisSteps::spread(3, 1, Step::new(1, 64)), AxisSteps::spread(3, 1, Step::ONE));
}

#[test]
fn indices_out_of_range_are_named() {
    let geometry = Geometry::new(&config(), LayoutKind::FullyContiguous).unwrap();
    for (at, index, value, bound) in [
        ([5, 0, 0], Index::Block, 5, 5),
        ([u32::MAX, 9, 9], Index::Block, u32::MAX, 5),
        ([4, 3, 2], Index::Layer, 3, 3),
        ([4, 2, 2], Index::Section, 2, 2),
    ] {
        let error = geometry.try_offset(at[0], at[1], at[2]).unwrap_err();
        assert_eq!(error, IndexOutOfRange { index, value, bound });
    }
    assert_eq!(geometry.try_offset(4, 2, 1).unwrap(), geometry.offset(4, 2, 1));
}

/// A section without layers has the same position for every layer.
#[test]
fn sections_may_lack_layers_tokens_and_heads() {
    let values = Section::new(SectionName::VALUES, 4)
        .axis(Axis::Block, AxisSteps::new(2, 100))
        .axis(Axis::Layer, AxisSteps::new(3, 20));
    let state = Section::new(SectionName::STATE, 8)
        .at(0, 60)
        .axis(Axis::Block, AxisSteps::new(2, 100))
        .axis(Axis::Element, AxisSteps::new(5, 8));
    let geometry = Geometry::from_sections([values, state]).unwrap();
    assert_eq!((geometry.num_blocks(), geometry.num_layers()), (2, 3));
    assert_eq!(geometry.block_bytes().get(), 3 * 4 + 5 * 8);
    for layer in 0..3 {
        let at = geometry.try_offset(1, layer, 1).unwrap();
        assert_eq!(at, RegionOffset { region: 0, offset: 160 });
        let at = geometry.try_offset(1, layer, 0).unwrap();
        assert_eq!(at.offset, 100 + u64::from(layer) * 20);
    }
    assert!(geometry.pieces().is_none());
    assert_eq!(geometry.label(), "sections values, state");
    assert_eq!(geometry.section(SectionName::STATE).unwrap().shape().layers, 1);
    assert_eq!(geometry.region_bytes(0).get(), 200);
    assert_eq!(geometry.block_unit(), Some(ByteCount::new(100)));
    assert_eq!(geometry.alignment_class().get(), 4);
}

#[test]
fn rows_that_are_apart_are_stretches() {
    // [block, token, layer, element]: the layers of a token are adjacent.
    let section = Section::new(SectionName::K, 2)
        .axis(Axis::Block, AxisSteps::new(2, 4 * 3 * 10))
        .axis(Axis::Token, AxisSteps::new(4, 3 * 10))
        .axis(Axis::Layer, AxisSteps::new(3, 10))
        .axis(Axis::Element, AxisSteps::new(5, 2));
    let stretches = Stretches::of(&section);
    assert_eq!((stretches.bytes(), stretches.count()), (10, 4));
    assert_eq!(stretches.strides().collect::<Vec<_>>(), [30]);
    let geometry = Geometry::from_sections([section]).unwrap();
    assert!(geometry.pieces().is_none());
    let piece = PieceIndex { block: 1, layer: 2, section: 0, stretch: 3 };
    assert_eq!(geometry.place_of(piece), RegionOffset { region: 0, offset: 120 + 20 + 90 });
    assert_eq!(geometry.block_unit(), Some(ByteCount::new(120)));
    assert_eq!(geometry.alignment_class().get(), 2);
}

#[test]
fn the_unit_of_blocks_is_none_where_blocks_mix() {
    let unit = |steps: [AxisSteps; 2]| {
        let section =
            Section::new(SectionName::K, 1).axis(Axis::Block, steps[0]).axis(Axis::Token, steps[1]);
        Geometry::from_sections([section]).unwrap().block_unit().map(ByteCount::get)
    };
    let plain = AxisSteps::new;
    assert_eq!(unit([plain(4, 10), plain(10, 1)]), Some(10));
    assert_eq!(unit([plain(4, 12), plain(10, 1)]), Some(12));
    // Tokens of all blocks interleave, at multiples of the stride of blocks, and at other
    // distances.
    assert_eq!(unit([plain(4, 1), plain(10, 4)]), Some(1));
    assert_eq!(unit([plain(4, 2), plain(10, 9)]), None);
    assert_eq!(unit([AxisSteps::split(Step::new(2, 50), Step::new(2, 10)), plain(10, 1)]), None);
}

#[test]
fn regions_have_lengths_of_their_own() {
    let section = |name, region, tokens| {
        Section::new(name, 1)
            .at(region, 0)
            .axis(Axis::Layer, AxisSteps::spread(2, 2, Step::ONE))
            .axis(Axis::Block, AxisSteps::new(3, tokens))
            .axis(Axis::Token, AxisSteps::new(u32::try_from(tokens).unwrap(), 1))
    };
    let sections = [section(SectionName::K, 0, 8), section(SectionName::V, 1, 2)];
    let geometry = Geometry::from_sections(sections).unwrap();
    let lengths: Vec<u64> = (0..5).map(|region| geometry.region_bytes(region).get()).collect();
    assert_eq!(lengths, [24, 6, 24, 6, 0]);
    assert_eq!((geometry.region_count(), geometry.all_region_bytes().get()), (4, 60));
    assert_eq!(geometry.total_bytes().get(), 60);
}

#[test]
fn opaque_blocks_are_pieces() {
    let geometry = Geometry::opaque(7, 100).unwrap();
    assert_eq!(geometry.block_bytes().get(), 100);
    assert_eq!(geometry.pieces().unwrap().block_stride().get(), 100);
    assert_eq!(geometry.offset(6, 0, 0).offset, 600);
    assert!(Geometry::opaque(7, 0).is_err() && Geometry::opaque(0, 7).is_err());
}

/// The bytes of a block in all regions exceed 64 bits.
#[test]
fn the_bytes_of_a_block_that_overflow_are_refused() {
    let far = 1 << 31;
    let section = |layers| {
        Section::new(SectionName::K, far)
            .axis(Axis::Layer, AxisSteps::spread(layers, 1, Step::ONE))
            .axis(Axis::Element, AxisSteps::new(far, far.into()))
    };
    assert!(Geometry::from_sections([section(1)]).is_ok());
    for layers in [2, 4, 8] {
        let error = Geometry::from_sections([section(layers)]).unwrap_err();
        let named = matches!(error, LayoutError::Overflow(_) | LayoutError::TooLarge { .. });
        assert!(named, "{layers}: {error}");
    }
}

#[test]
fn a_block_alignment_is_kept() {
    let aligned = config().with_block_alignment(Alignment::SECTOR).unwrap();
    let kind = LayoutKind::LayerSeparate { block_dimension: BlockDimension::Second };
    let geometry = Geometry::new(&aligned, kind).unwrap();
    assert_eq!(geometry.block_alignment(), Alignment::SECTOR);
    assert_eq!(geometry.pieces().unwrap().block_stride().get(), 512);
    assert_eq!(geometry.region_bytes(2).get(), 2 * 5 * 512);
    let opaque = Geometry::opaque(2, 8).unwrap().with_block_alignment(Alignment::PAGE);
    assert_eq!(opaque.block_alignment(), Alignment::PAGE);
}
