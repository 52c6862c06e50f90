//! The memory that plans request.

use super::*;
use crate::{BlockDimension, ElementFormat};

fn config(alignment: Alignment) -> LayoutConfig {
    LayoutConfig::builder()
        .num_blocks(3)
        .num_layers(4)
        .outer_dim(2)
        .page_size(5)
        .inner_dim(7)
        .element(ElementFormat::Width(2))
        .block_alignment(alignment)
        .build()
        .unwrap()
}

const BLOCK_FIRST: LayoutKind =
    LayoutKind::LayerSeparate { block_dimension: BlockDimension::First };

#[test]
fn the_strictest_alignment_counts() {
    let plan = |block, limit| {
        let limits = Limits { alignment: limit, ..Limits::NONE };
        LayoutPlan::new(&config(block), BLOCK_FIRST, limits).unwrap().alignment()
    };
    assert_eq!(plan(Alignment::BYTE, Alignment::BYTE), Alignment::SECTOR);
    assert_eq!(plan(Alignment::PAGE, Alignment::BYTE), Alignment::PAGE);
    assert_eq!(plan(Alignment::PAGE, Alignment::HUGE_PAGE), Alignment::HUGE_PAGE);
}

#[test]
fn the_base_is_rounded_to_the_granule_and_its_padding_is_reported() {
    let limits = Limits { granule: Alignment::PAGE, ..Limits::NONE };
    let plan = LayoutPlan::new(&config(Alignment::BYTE), BLOCK_FIRST, limits).unwrap();
    // Four regions of 3·2·70 = 420 bytes, at multiples of 512.
    assert_eq!(plan.base_bytes(), ByteCount::new(4096));
    let padding = plan.padding();
    assert_eq!(padding.block_bytes, ByteCount::new(1680));
    assert_eq!(padding.block_padding, ByteCount::ZERO);
    assert_eq!(padding.region_padding, ByteCount::new(4096 - 1680));
    assert!((padding.ratio() - 2416.0 / 1680.0).abs() < 1e-12);
}

#[test]
fn regions_over_the_limit_are_refused_and_bases_are_checked_on_request() {
    let limits = |bytes| Limits { largest_region: Some(ByteCount::new(bytes)), ..Limits::NONE };
    let plan = |bytes| LayoutPlan::new(&config(Alignment::BYTE), BLOCK_FIRST, limits(bytes));
    assert!(matches!(plan(419), Err(LayoutError::RegionTooLarge { part: Part::Region(0), .. })));
    let each_fits = plan(420).unwrap();
    let base = each_fits.check_base();
    assert!(matches!(base, Err(LayoutError::RegionTooLarge { part: Part::Base, .. })));
    assert_eq!(each_fits.requests().len(), 4);
    assert!(each_fits.requests().all(|request| request.bytes == ByteCount::new(420)));
    assert!(plan(1 << 20).unwrap().check_base().is_ok());
}

#[test]
#[cfg_attr(miri, ignore = "takes minutes under Miri, and has no unsafe code")]
fn blocks_within_a_prefix_have_all_their_pieces_in_it() {
    for kind in LayoutKind::ALL {
        for block in [Alignment::BYTE, Alignment::SECTOR] {
            let plan = LayoutPlan::new(&config(block), kind, Limits::NONE).unwrap();
            let geometry = plan.geometry();
            // The end of each block's last byte, piece by piece.
            let end = |block| {
                let pieces = (0..4).flat_map(|layer| (0..2).map(move |outer| (layer, outer)));
                let ends = pieces.map(|(layer, outer)| {
                    let at = geometry.offset(block, layer, outer);
                    let region = plan.region_offset(at.region).unwrap().get();
                    region + at.offset + geometry.pieces().unwrap().piece_bytes().get()
                });
                ends.max().unwrap()
            };
            for prefix in 0..=plan.base_bytes().get() {
                let expected = (0..3).take_while(|&block| end(block) <= prefix).count();
                let found = plan.blocks_within(ByteCount::new(prefix));
                assert_eq!(usize::try_from(found).unwrap(), expected, "{kind}, {prefix}");
            }
            assert_eq!(plan.blocks_within(ByteCount::new(u64::MAX)), 3);
        }
    }
}

/// Bytes from one region to the next, or of the base allocation if there is one region.
fn region_stride(plan: &LayoutPlan) -> ByteCount {
    plan.region_offset(1).unwrap_or(plan.base_bytes())
}

#[test]
fn no_piece_lies_across_a_multiple_of_a_request_s_unit() {
    for kind in LayoutKind::ALL {
        for block in [Alignment::BYTE, Alignment::SECTOR] {
            let plan = LayoutPlan::new(&config(block), kind, Limits::NONE).unwrap();
            let geometry = plan.geometry();
            let (base, region) = (plan.base_request().unit.get(), plan.requests().next());
            let unit = region.unwrap().unit.get();
            for (block, layer, outer) in
                (0..3).flat_map(|b| (0..4).flat_map(move |l| (0..2).map(move |o| (b, l, o))))
            {
                let at = geometry.offset(block, layer, outer);
                let last = geometry.pieces().unwrap().piece_bytes().get() - 1;
                let begin = plan.region_offset(at.region).unwrap().get() + at.offset;
                assert_eq!(begin / base, (begin + last) / base, "{kind}");
                assert_eq!(at.offset / unit, (at.offset + last) / unit, "{kind}");
            }
            // The unit is not larger than a region.
            assert!(base <= region_stride(&plan).get() && unit <= base, "{kind}");
        }
    }
    let units = |kind, block| {
        let plan = LayoutPlan::new(&config(block), kind, Limits::NONE).unwrap();
        let block = plan.geometry().pieces().unwrap().block_stride();
        (plan.base_request().unit, block, region_stride(&plan))
    };
    let (unit, block, _) = units(LayoutKind::FullyContiguous, Alignment::BYTE);
    assert_eq!(unit, block);
    let (unit, block, _) = units(BLOCK_FIRST, Alignment::SECTOR);
    assert_eq!(unit, block);
    let (unit, _, region) = units(BLOCK_FIRST, Alignment::BYTE);
    assert_eq!(unit, region, "420 bytes at multiples of 512");
}

/// Chunks of blocks, blocks in an order other than that of their numbers, and rows with gaps
/// between them.
#[test]
#[cfg_attr(miri, ignore = "takes minutes under Miri, and has no unsafe code")]
fn blocks_within_a_prefix_of_free_strides_are_whole() {
    use crate::{AxisSteps, Section, SectionName, Step};
    let blocks = [
        AxisSteps::split(Step::new(3, 1000), Step::new(2, 100)),
        AxisSteps::split(Step::new(3, 100), Step::new(2, 1000)),
        AxisSteps::spread(3, 1, Step::new(2, 100)),
        AxisSteps::new(6, 10),
    ];
    for (steps, tokens) in blocks.into_iter().zip([10, 10, 10, 100]) {
        let section = |name, offset| {
            Section::new(name, 5)
                .at(0, offset)
                .axis(Axis::Block, steps)
                .axis(Axis::Token, AxisSteps::new(4, tokens))
        };
        let sections = [section(SectionName::K, 0), section(SectionName::V, 5)];
        let plan =
            LayoutPlan::of(Geometry::from_sections(sections).unwrap(), Limits::NONE).unwrap();
        let end = |block: u32| {
            let places = plan.geometry().sections().iter().flat_map(|section| {
                (0..4).map(move |token| section.place([block, 0], [0, token, 0]))
            });
            let ends =
                places.map(|at| plan.region_offset(at.region).unwrap().get() + at.offset + 5);
            ends.max().unwrap()
        };
        for prefix in 0..=plan.base_bytes().get() {
            let expected = (0..6).take_while(|&block| end(block) <= prefix).count();
            let found = plan.blocks_within(ByteCount::new(prefix));
            assert_eq!(usize::try_from(found).unwrap(), expected, "{steps:?}, {prefix}");
        }
    }
}

#[test]
fn regions_that_do_not_exist_have_no_offset() {
    let plan = LayoutPlan::new(&config(Alignment::BYTE), BLOCK_FIRST, Limits::NONE).unwrap();
    assert_eq!(plan.region_offset(3), Some(ByteCount::new(3 * 512)));
    assert_eq!(plan.region_offset(4), None);
}

#[test]
fn an_alignment_that_overflows_is_an_error() {
    let alignment = Alignment::new(1 << 62).unwrap();
    for kind in LayoutKind::ALL {
        assert!(LayoutPlan::new(&config(alignment), kind, Limits::NONE).is_err(), "{kind}");
    }
}
