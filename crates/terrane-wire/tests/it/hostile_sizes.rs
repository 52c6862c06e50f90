//! Layouts of hostile sizes: a few bytes that claim more than any receiver has memory for.

use proptest::prelude::*;
use terrane_core::{Alignment, ByteCount, StorageKind};
use terrane_layout::{BlockDimension, ElementFormat, Geometry, LayoutConfig, LayoutKind};
use terrane_wire::{LayoutDescriptor, Limited, RegionDescriptor, WireError, WireLimits};

use crate::frames::{layout_frame, payload};
use crate::hostile::{read, read_or_refused};
use crate::layouts::{config, describe, space_of};

const BLOCKS: u32 = WireLimits::DEFAULT.blocks;

/// A layout of one byte a block, so that its size is its number of blocks.
fn of_blocks(blocks: u32) -> LayoutDescriptor {
    let config = LayoutConfig::builder().num_blocks(blocks).num_layers(1).outer_dim(1);
    let config = config.page_size(1).inner_dim(1).element(ElementFormat::Width(1));
    describe(&config.build().unwrap(), LayoutKind::FullyContiguous, StorageKind::System)
}

#[test]
fn more_blocks_than_the_limit_are_refused_for_the_price_of_reading_them() {
    for blocks in [BLOCKS + 1, u32::MAX] {
        let bytes = of_blocks(blocks).encode().unwrap();
        assert!(bytes.len() < 100, "{} B", bytes.len());
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
    assert_eq!(read(&of_blocks(BLOCKS).encode().unwrap()).unwrap().config().num_blocks(), BLOCKS);
}

/// Numbers about which a reader may be wrong.
fn size() -> impl Strategy<Value = u32> {
    let near = |middle: u32| middle - 1..=middle + 1;
    prop_oneof![
        Just(u32::MAX),
        Just(u32::MAX - 1),
        1_u32..9,
        near(BLOCKS),
        near(1 << 16),
        near(1 << 31),
        any::<u32>(),
    ]
}

fn kind() -> impl Strategy<Value = LayoutKind> {
    let separate = |block_dimension| LayoutKind::LayerSeparate { block_dimension };
    prop_oneof![
        3 => Just(LayoutKind::FullyContiguous),
        1 => Just(separate(BlockDimension::First)),
        1 => Just(separate(BlockDimension::Second)),
    ]
}

/// A layout with regions that fit it, if these sizes make one.
fn built(
    kind: LayoutKind,
    [blocks, layers, page, inner, row]: [u32; 5],
    outers: u32,
    alignment: u32,
) -> Option<LayoutDescriptor> {
    let config = LayoutConfig::builder()
        .num_blocks(blocks)
        .num_layers(layers)
        .outer_dim(outers)
        .page_size(page)
        .inner_dim(inner)
        .element(ElementFormat::RowBytes(row))
        .block_alignment(Alignment::new(1 << alignment).ok()?)
        .build()
        .ok()?;
    let geometry = Geometry::new(&config, kind).ok()?;
    let (length, space) = (geometry.region_bytes(), space_of(StorageKind::System));
    if geometry.region_count() > WireLimits::DEFAULT.regions {
        return None;
    }
    let regions = (0..u64::from(geometry.region_count()))
        .map(|n| Some(RegionDescriptor::new(space, n.checked_mul(length.get())?, length, [])))
        .collect::<Option<Vec<_>>>()?;
    let agent = "prefill-0".into();
    LayoutDescriptor::new(config, kind, StorageKind::System, agent, vec![1], regions).ok()
}

/// A number as it is written: seven bits a byte, the lowest first.
fn written(mut number: u32) -> Vec<u8> {
    let mut bytes = Vec::new();
    loop {
        let [low, ..] = (number & 0x7f).to_le_bytes();
        number >>= 7;
        if number == 0 {
            bytes.push(low);
            return bytes;
        }
        bytes.push(low | 0x80);
    }
}

proptest! {
    #[test]
    fn a_whole_layout_of_hostile_sizes_is_within_the_limits_or_refused(
        kind in kind(),
        sizes in prop::array::uniform5(size()),
        outers in 1_u32..=2,
        alignment in 0_u32..40,
    ) {
        if let Some(layout) = built(kind, sizes, outers, alignment) {
            match read(&layout.encode().unwrap()) {
                Ok(read) => {
                    prop_assert!(read.config().num_blocks() <= BLOCKS);
                    prop_assert_eq!(read, layout);
                }
                Err(WireError::OverLimit { what: Limited::Blocks, actual, .. }) => {
                    prop_assert!(actual > BLOCKS.into());
                }
                Err(other) => prop_assert!(false, "{}", other),
            }
        }
    }

    /// No regions fit these sizes, nor does the fingerprint.
    #[test]
    fn hostile_sizes_in_another_layouts_frame_are_refused(
        kind in 0_u8..3,
        sizes in prop::collection::vec(size(), 5),
        element in (0_u8..3, size(), size()),
        heads in prop::option::of(size()),
        order in 0_u8..2,
        alignment in 0_u32..70,
    ) {
        let (tag, first, second) = element;
        let mut inside = vec![kind];
        inside.extend(sizes.into_iter().flat_map(written));
        inside.push(tag);
        inside.extend([first, second].into_iter().flat_map(written));
        match heads {
            Some(heads) => inside.extend([vec![1], written(heads)].concat()),
            None => inside.push(0),
        }
        inside.push(order);
        inside.extend(written(alignment));
        let other = describe(&config(), LayoutKind::FullyContiguous, StorageKind::System);
        let other = other.encode().unwrap();
        // Its dimensions take 14 bytes, as those of `hostile::layout`.
        inside.extend_from_slice(&payload(&other)[14..]);
        read_or_refused(&layout_frame(&inside))?;
        prop_assert!(read(&layout_frame(&inside)).is_err());
    }
}

/// The limit is on blocks alone: what a layout of few blocks claims besides is only numbers.
#[test]
fn few_blocks_of_any_size_cost_nothing() {
    let sizes = [2, u32::MAX, 1, 1 << 16, 1 << 10];
    let layout = built(LayoutKind::FullyContiguous, sizes, 2, 0).unwrap();
    let read = read(&layout.encode().unwrap()).unwrap();
    assert!(Geometry::new(read.config(), read.kind()).unwrap().region_bytes() > ByteCount::gib(1));
}
