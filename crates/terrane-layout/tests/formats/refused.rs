//! Strides, counts and sizes that are refused, each with the right error.

use terrane_core::ByteCount;
use terrane_layout::formats::vllm::PackedOrder;
use terrane_layout::formats::{lmcache, model, paged, sglang, vllm};
use terrane_layout::{
    Axis, AxisSteps, ElementFormat, Geometry, GeometryError, LARGEST_LAYOUT, LayoutConfig,
    LayoutError, Section, SectionName, Step, TensorAxis, TensorForm,
};

use terrane_testkit::formats::{SMALL, keys_and_values, latent};

const K: SectionName = SectionName::K;
const V: SectionName = SectionName::V;

fn refused(sections: impl IntoIterator<Item = Section>) -> GeometryError {
    match Geometry::from_sections(sections) {
        Err(LayoutError::Geometry(error)) => error,
        other => panic!("{other:?}"),
    }
}

/// `count` blocks of 10 bytes, `stride` bytes apart.
fn blocks(name: SectionName, count: u32, stride: u64, offset: u64) -> Section {
    Section::new(name, 10).at(0, offset).axis(Axis::Block, AxisSteps::new(count, stride))
}

#[test]
fn an_overlap_of_one_byte_names_axes_and_address() {
    assert!(Geometry::from_sections([blocks(K, 3, 10, 7)]).is_ok());
    let error = refused([blocks(K, 3, 9, 7)]);
    assert_eq!(
        error,
        GeometryError::NotNested {
            section: K,
            outer: Axis::Block,
            inner: Axis::Element,
            stride: 9,
            span: 10,
            unit: "byte",
            address: 16,
        }
    );
    let text = error.to_string();
    assert!(
        text.contains("section k: the block axis has a stride of 9, less than the 10"),
        "{text}"
    );
    let zero = refused([blocks(K, 2, 0, 7)]);
    assert!(matches!(zero, GeometryError::NotNested { stride: 0, address: 7, .. }));
}

#[test]
fn the_address_is_the_first_that_two_elements_share() {
    // Tokens at 0, 50 and 100; the second block begins at 95, and shares bytes from 100 on.
    let section = |stride| blocks(K, 2, stride, 1000).axis(Axis::Token, AxisSteps::new(3, 50));
    let address = |stride| match refused([section(stride)]) {
        GeometryError::NotNested { address, .. } => address,
        other => panic!("{other}"),
    };
    assert_eq!(address(95), 1100);
    // Interleaved without a shared byte: also refused.
    assert_eq!(address(75), 1075);
    assert!(Geometry::from_sections([section(110)]).is_ok());
}

#[test]
fn axes_spread_over_the_same_regions_are_refused() {
    let spread = |regions| {
        Section::new(K, 1)
            .axis(Axis::Layer, AxisSteps::spread(3, 1, Step::ONE))
            .axis(Axis::Head, AxisSteps::spread(2, regions, Step::ONE))
    };
    assert_eq!(Geometry::from_sections([spread(3)]).unwrap().region_count(), 6);
    for regions in [1, 2] {
        let error = refused([spread(regions)]);
        assert!(matches!(error, GeometryError::NotNested { unit: "region", .. }), "{error}");
    }
    // With a spread over no regions, the heads overlap.
    let error = refused([spread(0)]);
    assert!(matches!(error, GeometryError::NotNested { unit: "byte", stride: 0, .. }), "{error}");
}

#[test]
fn sections_that_share_a_byte_are_refused_at_its_address() {
    let packed = |offset| [blocks(K, 100, 20, 0), blocks(V, 100, 20, offset)];
    assert!(Geometry::from_sections(packed(10)).is_ok());
    for (offset, expected) in [(9, 9), (11, 20), (0, 0), (1999 - 10, 1989)] {
        let error = refused(packed(offset));
        let GeometryError::SectionsOverlap { first, second, region, address } = error else {
            panic!("{error}")
        };
        assert_eq!((first, second, region, address), (K, V, 0, expected));
    }
}

#[test]
fn a_section_may_lie_in_the_gaps_of_another() {
    // Blocks of 1,000 bytes: K at 0 and 500, V at 200 and 600, by strides that differ.
    let section = |name, offset, stride| {
        blocks(name, 4, 1000, offset).axis(Axis::Token, AxisSteps::new(2, stride))
    };
    assert!(Geometry::from_sections([section(K, 0, 500), section(V, 200, 400)]).is_ok());
    let error = refused([section(K, 0, 500), section(V, 200, 305)]);
    assert!(matches!(error, GeometryError::SectionsOverlap { address: 505, .. }), "{error}");
    // Ten tokens of V between eleven of K take more comparisons than the limit, and are refused.
    let many = |name, offset, stride| {
        blocks(name, 1, 0, offset).axis(Axis::Token, AxisSteps::new(10, stride))
    };
    let apart = [many(K, 0, 100), many(V, 20, 101)];
    assert!(matches!(refused(apart), GeometryError::SectionsOverlap { .. }));
}

#[test]
fn sections_of_other_regions_never_meet() {
    let layers = |name, region, regions| {
        blocks(name, 8, 10, 0)
            .at(region, 0)
            .axis(Axis::Layer, AxisSteps::spread(4, regions, Step::ONE))
    };
    let in_turns = Geometry::from_sections([layers(K, 0, 2), layers(V, 1, 2)]).unwrap();
    assert_eq!(in_turns.region_count(), 8);
    let in_rows = Geometry::from_sections([layers(K, 0, 1), layers(V, 4, 1)]).unwrap();
    assert_eq!(in_rows.region_count(), 8);
    let error = refused([layers(K, 0, 1), layers(V, 3, 1)]);
    assert!(matches!(error, GeometryError::SectionsOverlap { region: 3, .. }), "{error}");
}

/// Sections in each other's gaps at every level, with different strides. They share no byte, but a
/// proof would need a million comparisons, so it is not attempted.
#[test]
fn sections_that_take_too_many_comparisons_are_refused() {
    let section = |name, offset, first: u32| {
        // Four positions per step, except `first` for the innermost one: the strides of two
        // sections are never equal.
        let step = |level: u32| match level {
            0 => Step::new(first, 16),
            _ => Step::new(4, (16 * u64::from(first)) << (2 * (level - 1))),
        };
        let axis = |level| AxisSteps::split(step(level + 5), step(level));
        Section::new(name, 1)
            .at(0, offset)
            .axis(Axis::Element, axis(0))
            .axis(Axis::Token, axis(1))
            .axis(Axis::Head, axis(2))
            .axis(Axis::Layer, axis(3))
            .axis(Axis::Block, axis(4))
    };
    assert!(Geometry::from_sections([section(K, 0, 4), section(V, 1, 4)]).is_ok());
    let error = refused([section(K, 0, 4), section(V, 1, 2)]);
    assert!(matches!(error, GeometryError::SectionsOverlap { .. }), "{error}");
}

#[test]
fn no_section_ends_behind_the_largest_layout() {
    let end = LARGEST_LAYOUT.get();
    assert!(Geometry::from_sections([blocks(K, 1, 0, end - 10)]).is_ok());
    for section in [blocks(K, 1, 0, end - 9), blocks(K, 2, end - 9, 0), blocks(K, 2, 10, u64::MAX)]
    {
        assert!(matches!(refused([section]), GeometryError::TooLarge { .. }));
    }
    // Each region fits, but all of them together do not.
    let spread = AxisSteps::spread(2, 1, Step::ONE);
    let large = Geometry::from_sections([blocks(K, 1, 0, end - 10).axis(Axis::Layer, spread)]);
    assert!(matches!(large, Err(LayoutError::TooLarge { .. })), "{large:?}");
}

#[test]
fn no_value_of_any_number_panics_or_wraps() {
    let numbers = [0, 1, 2, 3, u64::from(u32::MAX), 1 << 62, LARGEST_LAYOUT.get(), u64::MAX];
    let counts = [0, 1, 2, u32::MAX];
    let mut accepted = 0;
    for stride in numbers {
        for inner in numbers {
            for offset in numbers {
                for (count, other) in counts.into_iter().flat_map(|a| counts.map(|b| (a, b))) {
                    let split = AxisSteps::split(Step::new(count, stride), Step::new(other, inner));
                    let spread = AxisSteps::spread(count, other, Step::new(other, inner));
                    let plain = AxisSteps::new(other, inner);
                    for (outer, width) in [(split, 1), (spread, 1), (split, u32::MAX)] {
                        let section = Section::new(K, width)
                            .at(0, offset)
                            .axis(Axis::Block, outer)
                            .axis(Axis::Token, plain);
                        let Ok(geometry) = Geometry::from_sections([section]) else { continue };
                        accepted += 1;
                        let last = section.place(
                            [geometry.num_blocks() - 1, 0],
                            [0, section.shape().tokens - 1, 0],
                        );
                        let end = u128::from(last.offset) + u128::from(width);
                        assert!(end <= u128::from(geometry.region_bytes(last.region).get()));
                        // No argument panics.
                        let _ = section.place([u32::MAX; 2], [u32::MAX; 3]);
                        let _ = geometry.offset(u32::MAX, u32::MAX, u32::MAX);
                        let _ = (geometry.block_unit(), geometry.alignment_class());
                    }
                }
            }
        }
    }
    assert!(accepted > 20, "{accepted}");
}

#[test]
fn counts_of_zero_and_counts_that_differ_are_named() {
    let error = refused([blocks(K, 0, 10, 0)]);
    assert!(matches!(error, GeometryError::Zero { axis: Axis::Block, .. }), "{error}");
    let error = refused([Section::new(K, 0)]);
    assert!(matches!(error, GeometryError::Zero { axis: Axis::Element, .. }), "{error}");
    let error = refused([blocks(K, 3, 10, 0), blocks(V, 4, 10, 100)]);
    let expected =
        GeometryError::AxisCount { section: V, axis: Axis::Block, count: 4, expected: 3 };
    assert_eq!(error, expected);
    let layers = |name, count, offset| {
        blocks(name, 1, 0, offset).axis(Axis::Layer, AxisSteps::new(count, 10))
    };
    let error = refused([layers(K, 3, 0), layers(V, 2, 100)]);
    assert!(matches!(error, GeometryError::AxisCount { axis: Axis::Layer, .. }), "{error}");
    assert!(Geometry::from_sections([layers(K, 3, 0), layers(V, 1, 100)]).is_ok());
    let error = refused([blocks(K, 1, 0, 0), blocks(K, 1, 0, 100)]);
    assert_eq!(error, GeometryError::DuplicateSection { section: K });
    assert!(matches!(refused([]), GeometryError::SectionCount { count: 0, .. }));
    let error = refused(std::iter::repeat(Section::new(K, 1)));
    assert!(matches!(error, GeometryError::SectionCount { count: 17, .. }), "{error}");
}

#[test]
fn regions_are_as_long_as_needed_and_all_in_use() {
    let sections = || [blocks(K, 3, 10, 5)];
    let within = |bytes: &[u64]| {
        let bytes: Vec<ByteCount> = bytes.iter().map(|&bytes| ByteCount::new(bytes)).collect();
        Geometry::from_sections_in(sections(), &bytes)
    };
    assert_eq!(within(&[35]).unwrap().region_bytes(0).get(), 35);
    assert_eq!(within(&[99]).unwrap().all_region_bytes().get(), 99);
    let error = within(&[34]).unwrap_err().to_string();
    assert!(error.contains("section k ends at byte 35 of region 0, which has 34 bytes"), "{error}");
    for regions in [&[35, 35][..], &[]] {
        assert!(within(regions).is_err(), "{regions:?}");
    }
    let error = refused([blocks(K, 1, 0, 0).at(1, 0)]);
    assert_eq!(error, GeometryError::UnusedRegion { region: 0, regions: 2 });
    // Regions without sections cause no allocation.
    let error = refused([blocks(K, 1, 0, 0).at(u32::MAX, 0)]);
    assert!(matches!(error, GeometryError::TooLarge { .. }), "{error}");
}

#[test]
fn forms_without_blocks_or_with_an_axis_thrice_are_refused() {
    let form = || TensorForm::new(&[K, V], 2);
    let error = |form: TensorForm| Geometry::from_form(&form).unwrap_err().to_string();
    let both = || form().dim(TensorAxis::Outer, 2);
    assert!(error(both().dim(Axis::Token, 3)).contains("the block dimension 0 times"));
    assert!(error(form().dim(Axis::Block, 3)).contains("the outer dimension 0 times"));
    let three = form().dim(TensorAxis::Outer, 3).dim(Axis::Block, 3);
    assert!(error(three).contains("the outer dimension 1 times"));
    let thrice = both().dim(Axis::Block, 2).dim(Axis::Block, 2).dim(Axis::Block, 2);
    assert!(error(thrice).contains("the block dimension 3 times"));
    let late = both().dim(Axis::Block, 2).tensors(Axis::Layer, 3);
    assert!(error(late).contains("must come before all dimensions of tensors"));
    let huge = both().dim(Axis::Block, u32::MAX).dim(Axis::Token, u32::MAX).dim(Axis::Head, 9);
    assert!(error(huge).contains("the block axis reaches past 2^63"));
    let short = both().dim(Axis::Block, 4).dim(Axis::Token, 4).padded(1);
    assert!(error(short).contains("the token axis has a stride of 1"));
}

#[test]
fn formats_say_what_does_not_divide_or_is_not_stated() {
    let (kv, one) = (keys_and_values(SMALL), latent(SMALL));
    let not_divided = |result: Result<Geometry, LayoutError>, name: &str| {
        let Err(LayoutError::Geometry(GeometryError::NotDivided { field, .. })) = result else {
            panic!("{result:?}")
        };
        assert_eq!(field, name);
    };
    for x in [0, 3, 8] {
        not_divided(paged::vllm_v0(&kv, x), "head_dim");
    }
    let short = kv.with_num_heads(2).unwrap();
    not_divided(paged::aiter_shuffled(&short, 4), "page_size");
    not_divided(lmcache::kv_2ltd(&kv, 3), "num_blocks");
    not_divided(sglang::page_unified(&kv, 3), "num_heads");
    not_divided(lmcache::mla(&one, 0), "num_blocks");
    not_divided(vllm::offload_rows(&kv, PackedOrder::Lbnhc, 3, None), "num_blocks");
    not_divided(model::scales_beside(&kv, 3, 1), "head_dim");

    let no_heads = LayoutConfig::builder()
        .num_blocks(4)
        .num_layers(2)
        .outer_dim(2)
        .page_size(4)
        .inner_dim(8)
        .element(ElementFormat::Width(2))
        .build()
        .unwrap();
    assert!(vllm::nhd(&no_heads).is_ok());
    for result in [
        vllm::hnd(&no_heads),
        sglang::page_head(&no_heads),
        sglang::page_unified(&no_heads, 1),
        vllm::packed(&no_heads, PackedOrder::Lbnhc),
        paged::vllm_v0(&no_heads, 2),
        model::scales_beside(&no_heads, 2, 1),
    ] {
        assert!(matches!(result, Err(LayoutError::HeadsNotStated)), "{result:?}");
    }
    for result in [vllm::mla(&kv), lmcache::mla(&kv, 2), vllm::packed(&one, PackedOrder::Lbnhc)] {
        let error = result.unwrap_err().to_string();
        assert!(error.contains("the tensor has the outer dimension"), "{error}");
    }
}

#[test]
fn pages_that_are_too_short_are_refused() {
    let kv = keys_and_values(SMALL);
    let page = kv.piece_bytes().get() * 2;
    for order in [PackedOrder::Lbnhc, PackedOrder::Blhnc] {
        let exact = vllm::page_padded(&kv, order, page).unwrap();
        assert_eq!(exact.sections(), vllm::packed(&kv, order).unwrap().sections());
        let short = vllm::page_padded(&kv, order, page - 1);
        let Err(LayoutError::Geometry(error)) = short else { panic!("{short:?}") };
        assert!(matches!(error, GeometryError::SectionsOverlap { .. }), "{error}");
        let shorter = vllm::page_padded(&kv, order, page / 2);
        let Err(LayoutError::Geometry(error)) = shorter else { panic!("{shorter:?}") };
        assert!(matches!(error, GeometryError::NotNested { .. }), "{error}");
        assert!(vllm::page_padded(&kv, order, u64::MAX).is_err());
    }
    for order in [PackedOrder::Lhbnc, PackedOrder::Bhlnc] {
        let error = vllm::page_padded(&kv, order, page).unwrap_err().to_string();
        assert!(error.contains("inside blocks and layers"), "{error}");
    }
    let state = model::PageState { name: SectionName::STATE, elements: 10, element_bytes: 4 };
    let conv = model::PageState { name: SectionName::CONVOLUTION, elements: 3, element_bytes: 2 };
    assert!(model::state_pages(5, 2, 46, &[conv, state]).is_ok());
    for pages in [1, 5] {
        assert!(model::state_pages(pages, 1, 45, &[conv, state]).is_err());
    }
    assert!(model::state_pages(5, 2, u64::MAX, &[conv, state]).is_err());
}

/// The groups of a hybrid model: the pages of both groups fill the same tensor, block by block.
#[test]
fn groups_that_share_a_tensor_have_the_same_pages() {
    let kv = keys_and_values(SMALL);
    let page = 80;
    let attention = vllm::page_padded(&kv, PackedOrder::Lbnhc, page).unwrap();
    let state = model::PageState { name: SectionName::STATE, elements: 20, element_bytes: 4 };
    let recurrent = model::state_pages(SMALL.blocks, SMALL.layers, page, &[state]).unwrap();
    assert_eq!(attention.region_bytes(0), recurrent.region_bytes(0));
    for (block, layer) in [(0, 0), (3, 2), (1, 1)] {
        assert_eq!(attention.offset(block, layer, 0), recurrent.offset(block, layer, 0));
    }
    assert_eq!(attention.block_unit(), Some(ByteCount::new(page)));
    assert_eq!(recurrent.block_unit(), Some(ByteCount::new(page)));
}
