//! Layouts of hostile sizes: a few bytes that claim more than any receiver has memory for.

use proptest::prelude::*;
use proptest::sample::Index;
use terrane_core::{ByteCount, StorageKind};
use terrane_layout::{Axis, AxisSteps, Geometry, Section, SectionName, Step};
use terrane_wire::{LayoutDescriptor, Limited, WireError, WireLimits};

use crate::hostile::{framed_geometry, read, read_or_refused};
use crate::layouts::{any_geometry, describe};

const BLOCKS: u32 = WireLimits::DEFAULT.blocks;

/// A layout of one byte a block, so that its size is its number of blocks.
fn of_blocks(blocks: u32) -> LayoutDescriptor {
    describe(&Geometry::opaque(blocks, 1).unwrap(), StorageKind::System)
}

#[test]
fn more_blocks_than_the_limit_are_refused_for_the_price_of_reading_them() {
    for blocks in [BLOCKS + 1, u32::MAX] {
        let bytes = of_blocks(blocks).encode().unwrap();
        assert!(bytes.len() < 300, "{} B", bytes.len());
        match read(&bytes) {
            Err(WireError::OverLimit { what: Limited::Blocks, actual, limit }) => {
                assert_eq!((actual, limit), (blocks.into(), BLOCKS.into()));
            }
            other => panic!("{other:?}"),
        }
        // A receiver that means it takes them.
        let limits = WireLimits { blocks, ..WireLimits::default() };
        assert!(LayoutDescriptor::decode(&bytes, &limits).is_ok());
    }
    assert_eq!(read(&of_blocks(BLOCKS).encode().unwrap()).unwrap().geometry().num_blocks(), BLOCKS);
}

/// Numbers about which a reader may be wrong.
fn size() -> impl Strategy<Value = u32> {
    let near = |middle: u32| middle - 1..=middle + 1;
    prop_oneof![
        Just(u32::MAX),
        Just(u32::MAX - 1),
        0_u32..9,
        near(BLOCKS),
        near(1 << 16),
        near(1 << 31),
        any::<u32>(),
    ]
}

/// Strides: small, powers of two and their neighbours, and negative ones as a sender casts them.
fn stride() -> impl Strategy<Value = u64> {
    prop_oneof![
        0_u64..9,
        (0_u32..64, 0_u64..3).prop_map(|(power, near)| (1_u64 << power) - 1 + near % 2),
        (0_i64..100_000).prop_map(|stride| (-stride).cast_unsigned()),
        Just(u64::MAX),
        Just(1 << 63),
        any::<u64>(),
    ]
}

fn steps() -> impl Strategy<Value = AxisSteps> {
    let step = || (size(), stride()).prop_map(|(count, stride)| Step::new(count, stride));
    prop_oneof![
        step().prop_map(|step| AxisSteps::new(step.count, step.stride)),
        (step(), step()).prop_map(|(outer, inner)| AxisSteps::split(outer, inner)),
        (size(), size(), step())
            .prop_map(|(count, regions, inner)| AxisSteps::spread(count, regions, inner)),
    ]
}

/// The encoding of one section of hostile strides, as `Geometry::encode` would write it.
fn encoded(
    element: u32,
    place: (u32, u64),
    axes: &[AxisSteps],
    heads: bool,
    lengths: &[(u32, u64)],
) -> Vec<u8> {
    let mut bytes = vec![2, 0, 1, 1, b'k'];
    bytes.extend(element.to_le_bytes());
    bytes.push(heads.into());
    bytes.extend(place.0.to_le_bytes());
    bytes.extend(place.1.to_le_bytes());
    for steps in axes {
        bytes.extend(steps.regions().to_le_bytes());
        for step in [steps.outer(), steps.inner()] {
            bytes.extend(step.count.to_le_bytes());
            bytes.extend(step.stride.to_le_bytes());
        }
    }
    bytes.extend(u32::try_from(lengths.len()).unwrap().to_le_bytes());
    for (count, length) in lengths {
        bytes.extend(count.to_le_bytes());
        bytes.extend(length.to_le_bytes());
    }
    bytes
}

proptest! {
    #[test]
    fn a_whole_layout_of_hostile_strides_is_within_the_limits_or_refused(
        counts in prop::array::uniform5(1_u32..5),
        paddings in prop::array::uniform5(stride()),
        blocks in size(),
    ) {
        // Nested by construction, so that many of them are layouts.
        let (mut span, mut section) = (2_u64, Section::new(SectionName::K, 2));
        for (axis, (count, padding)) in Axis::ALL.into_iter().rev().zip(counts.into_iter().zip(paddings)) {
            let count = if axis == Axis::Block { blocks } else { count };
            let stride = span.saturating_add(padding & 0xffff);
            section = section.axis(axis, AxisSteps::new(count, stride));
            span = stride.saturating_mul(count.into());
        }
        if let Ok(geometry) = Geometry::from_sections([section]) {
            let layout = describe(&geometry, StorageKind::System);
            match read(&layout.encode().unwrap()) {
                Ok(read) => {
                    prop_assert!(read.geometry().num_blocks() <= BLOCKS);
                    prop_assert_eq!(read, layout);
                }
                Err(WireError::OverLimit { what: Limited::Blocks, actual, .. }) => {
                    prop_assert!(actual > BLOCKS.into());
                }
                Err(other) => prop_assert!(false, "{}", other),
            }
        }
    }

    /// No fingerprint fits these strides.
    #[test]
    fn hostile_strides_in_another_layouts_frame_are_refused(
        element in size(),
        place in (size(), stride()),
        axes in prop::collection::vec(steps(), 5),
        heads in any::<bool>(),
        lengths in prop::collection::vec((size(), stride()), 0..4),
    ) {
        let bytes = framed_geometry(&encoded(element, place, &axes, heads, &lengths));
        read_or_refused(&bytes)?;
        prop_assert!(read(&bytes).is_err());
    }

    /// As above, where all but two numbers are those of a layout.
    #[test]
    fn a_few_hostile_numbers_are_refused(
        geometry in any_geometry(),
        changes in prop::collection::vec((any::<Index>(), size(), stride(), any::<bool>()), 1..3),
    ) {
        let mut bytes = geometry.encode();
        for (at, size, stride, is_long) in changes {
            let number = if is_long { stride.to_le_bytes().to_vec() } else { size.to_le_bytes().to_vec() };
            let at = at.index(bytes.len());
            bytes.iter_mut().skip(at).zip(number).for_each(|(byte, new)| *byte = new);
        }
        read_or_refused(&framed_geometry(&bytes))?;
    }
}

/// The limit is on blocks alone: the other numbers of a layout of few blocks cost nothing.
#[test]
fn few_blocks_of_any_size_cost_nothing() {
    let section = Section::new(SectionName::STATE, 1)
        .axis(Axis::Block, AxisSteps::new(2, 1 << 60))
        .axis(Axis::Layer, AxisSteps::new(u32::MAX, 1 << 20))
        .axis(Axis::Element, AxisSteps::new(1 << 20, 1));
    let layout = describe(&Geometry::from_sections([section]).unwrap(), StorageKind::System);
    let read = read(&layout.encode().unwrap()).unwrap();
    assert!(read.geometry().region_bytes(0) > ByteCount::gib(1));
}
