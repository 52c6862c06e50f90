//! Layouts that are accepted as groups that share memory, compared with all bytes of all blocks.

use std::ops::Range;

use proptest::prelude::*;
use terrane_core::{ByteCount, Region};
use terrane_layout::{
    Axis, AxisSteps, Geometry, LayoutBuilder, PhysicalLayout, Section, SectionName, Step,
};
use terrane_testkit::memory::HeapAllocator;
use terrane_transfer::{Endpoint, GroupRefusal, GroupsRefused};

use crate::groups::tensor_in;

/// A block axis of 6 blocks, split or not.
fn blocks() -> impl Strategy<Value = AxisSteps> {
    prop_oneof![
        (8..40_u64).prop_map(|stride| AxisSteps::new(6, stride)),
        (8..40_u64, 80..130_u64)
            .prop_map(|(inner, outer)| AxisSteps::split(Step::new(2, outer), Step::new(3, inner))),
        (8..40_u64).prop_map(|inner| AxisSteps::spread(2, 1, Step::new(3, inner))),
        Just(AxisSteps::spread(6, 1, Step::ONE)),
    ]
}

/// A block axis, and one axis inside or outside of it.
fn geometry(blocks: AxisSteps) -> impl Strategy<Value = Geometry> {
    let layers = prop_oneof![
        (1..20_u64).prop_map(|stride| AxisSteps::new(2, stride)),
        (150..300_u64).prop_map(|stride| AxisSteps::new(2, stride)),
        Just(AxisSteps::spread(2, 6, Step::ONE)),
        Just(AxisSteps::ABSENT),
    ];
    (layers, 0..60_u64, 1..10_u32).prop_filter_map(
        "strides are nested, and all regions used",
        move |(layers, offset, element)| {
            let section = Section::new(SectionName::STATE, element)
                .at(0, offset)
                .axis(Axis::Block, blocks)
                .axis(Axis::Layer, layers);
            Geometry::from_sections([section]).ok()
        },
    )
}

/// Two geometries, often with the same block axis.
fn pairs() -> impl Strategy<Value = [Geometry; 2]> {
    (blocks(), prop::option::weighted(0.2, blocks())).prop_flat_map(|(blocks, other)| {
        (geometry(blocks), geometry(other.unwrap_or(blocks))).prop_map(|(a, b)| [a, b])
    })
}

/// The bytes of each block, one element after the other. Regions have 1,000 bytes.
fn elements(geometry: &Geometry) -> Vec<(u32, Range<u64>)> {
    let indices = (0..geometry.num_blocks())
        .flat_map(|block| (0..geometry.num_layers()).map(move |layer| (block, layer)));
    let section = geometry.sections()[0];
    let found = indices.map(|(block, layer)| {
        let at = section.place([block, layer], [0; 3]);
        let start = u64::from(at.region) * 1000 + at.offset;
        (block, start..start + section.element_bytes().get())
    });
    found.collect()
}

fn spaced(tensor: &Region, geometry: &Geometry) -> PhysicalLayout {
    let regions: Vec<_> = (0..geometry.region_count())
        .map(|region| {
            let begin = ByteCount::new(u64::from(region) * 1000);
            tensor.view(begin, geometry.region_bytes(region)).unwrap()
        })
        .collect();
    let builder = LayoutBuilder::from_geometry(geometry.clone()).adopt(regions);
    builder.unregistered().build().unwrap()
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 2000, ..ProptestConfig::default() })]

    /// Compared with all bytes of all blocks.
    #[test]
    fn accepted_layouts_share_no_bytes_of_different_blocks([a, b] in pairs()) {
        let tensor = tensor_in(&HeapAllocator::system(), 20_000);
        let others = elements(&b);
        let meeting = elements(&a).into_iter().find_map(|(block, bytes)| {
            let meets = |(other, of_other): &&(u32, Range<u64>)| {
                *other != block && bytes.start < of_other.end && of_other.start < bytes.end
            };
            others.iter().find(meets).map(|(other, _)| (block, *other))
        });
        match Endpoint::of_groups([spaced(&tensor, &a), spaced(&tensor, &b)]) {
            Ok(_) => prop_assert_eq!(meeting, None),
            Err(GroupsRefused { layouts, reason }) => {
                prop_assert_eq!(layouts.len(), 2);
                if let GroupRefusal::BlocksOverlap { first_block, second_block, .. } = reason {
                    prop_assert!(first_block < 6 && second_block < 6);
                    prop_assert_ne!(first_block, second_block);
                }
            }
        }
    }

    /// With the same stride for both, they are refused only if windows of different blocks overlap.
    #[test]
    fn refused_layouts_share_bytes_of_different_blocks(
        stride in 4..30_u64,
        offsets in [0..120_u64, 0..120_u64],
        bytes in [1..30_u32, 1..30_u32],
    ) {
        let geometries = [0, 1].map(|at| {
            let bytes = bytes[at].min(u32::try_from(stride).unwrap());
            let section = Section::new(SectionName::STATE, bytes).at(0, offsets[at]);
            let section = section.axis(Axis::Block, AxisSteps::new(6, stride));
            Geometry::from_sections([section]).unwrap()
        });
        let [a, b] = geometries;
        let tensor = tensor_in(&HeapAllocator::system(), 20_000);
        let others = elements(&b);
        let meets = |block: u32, other: u32| {
            let of = |all: &[(u32, Range<u64>)], number| {
                all.iter().find(|(block, _)| *block == number).unwrap().1.clone()
            };
            let (bytes, of_other) = (of(&elements(&a), block), of(&others, other));
            bytes.start < of_other.end && of_other.start < bytes.end
        };
        match Endpoint::of_groups([spaced(&tensor, &a), spaced(&tensor, &b)]) {
            Ok(_) => {}
            Err(GroupsRefused { reason, .. }) => {
                let GroupRefusal::BlocksOverlap { first_block, second_block, .. } = reason else {
                    panic!("{reason}");
                };
                prop_assert!(first_block != second_block && meets(first_block, second_block));
            }
        }
    }
}
