//! Geometry against an independent oracle: memory written out byte by byte.

use proptest::prelude::*;
use terrane_core::{Alignment, ByteCount, Limits};
use terrane_layout::{
    BlockDimension, ElementFormat, Geometry, LayoutConfig, LayoutKind, LayoutPlan, verify,
};

/// The (block, layer, outer, byte of the piece) of a byte of memory; `None` is padding.
type Cell = Option<(u32, u32, u32, u64)>;

/// The regions as arrays of cells, by nested loops in the order of the kind, with padding at the
/// end of a block. The code multiplies no strides.
fn regions_by_hand(config: &LayoutConfig, kind: LayoutKind, row_bytes: u64) -> Vec<Vec<Cell>> {
    let piece = |cells: &mut Vec<Cell>, block, layer, outer| {
        for byte in 0..u64::from(config.page_size()) * row_bytes {
            cells.push(Some((block, layer, outer, byte)));
        }
    };
    let pad = |cells: &mut Vec<Cell>| {
        while !(cells.len() as u64).is_multiple_of(config.block_alignment().get()) {
            cells.push(None);
        }
    };
    let (blocks, layers) = (0..config.num_blocks(), 0..config.num_layers());
    let outers = 0..config.outer_dim();
    match kind {
        LayoutKind::FullyContiguous => {
            let mut cells = Vec::new();
            for block in blocks {
                for layer in layers.clone() {
                    for outer in outers.clone() {
                        piece(&mut cells, block, layer, outer);
                    }
                }
                pad(&mut cells);
            }
            vec![cells]
        }
        LayoutKind::LayerSeparate { block_dimension: BlockDimension::First } => layers
            .map(|layer| {
                let mut cells = Vec::new();
                for block in blocks.clone() {
                    for outer in outers.clone() {
                        piece(&mut cells, block, layer, outer);
                    }
                    pad(&mut cells);
                }
                cells
            })
            .collect(),
        LayoutKind::LayerSeparate { block_dimension: BlockDimension::Second } => layers
            .map(|layer| {
                let mut cells = Vec::new();
                for outer in outers.clone() {
                    for block in blocks.clone() {
                        piece(&mut cells, block, layer, outer);
                        pad(&mut cells);
                    }
                }
                cells
            })
            .collect(),
    }
}

/// The starts of pieces in the oracle's memory.
fn beginnings(regions: &[Vec<Cell>]) -> impl Iterator<Item = ((u32, u32, u32), (u32, u64))> + '_ {
    (0_u32..).zip(regions).flat_map(|(region, cells)| {
        (0_u64..).zip(cells).filter_map(move |(offset, cell)| match cell {
            Some((block, layer, outer, 0)) => Some(((*block, *layer, *outer), (region, offset))),
            _ => None,
        })
    })
}

/// A config, and the bytes of a token's row.
fn configs() -> impl Strategy<Value = (LayoutConfig, u64)> {
    let element = prop_oneof![
        (1..=8_u8, 1..=6_u32).prop_map(|(width, inner)| {
            (ElementFormat::Width(width), inner, u64::from(width) * u64::from(inner))
        }),
        (1..=4_u32, 1..=5_u32, 1..=3_u32).prop_map(|(elements, bytes, groups)| {
            let format = ElementFormat::BlockScaled { elements, bytes };
            (format, elements * groups, u64::from(bytes) * u64::from(groups))
        }),
        (1..=20_u32, 1..=6_u32).prop_map(|(bytes, inner)| {
            (ElementFormat::RowBytes(bytes), inner, u64::from(bytes))
        }),
    ];
    let dimensions = (1..=5_u32, 1..=4_u32, 1..=2_u32, 1..=9_u32);
    (dimensions, element, 0..=9_u32).prop_map(|(dimensions, element, alignment)| {
        let (num_blocks, num_layers, outer_dim, page_size) = dimensions;
        let (format, inner_dim, row_bytes) = element;
        let config = LayoutConfig::builder()
            .num_blocks(num_blocks)
            .num_layers(num_layers)
            .outer_dim(outer_dim)
            .page_size(page_size)
            .inner_dim(inner_dim)
            .element(format)
            .block_alignment(Alignment::new(1 << alignment).unwrap())
            .build()
            .unwrap();
        (config, row_bytes)
    })
}

fn kinds() -> impl Strategy<Value = LayoutKind> {
    prop::sample::select(LayoutKind::ALL.to_vec())
}

proptest! {
    #[test]
    fn every_byte_is_at_the_oracles_address((config, row_bytes) in configs(), kind in kinds()) {
        let geometry = Geometry::new(&config, kind).unwrap();
        let regions = regions_by_hand(&config, kind, row_bytes);
        prop_assert_eq!(regions.len(), usize::try_from(geometry.region_count()).unwrap());
        for cells in &regions {
            prop_assert_eq!(cells.len(), geometry.region_bytes(0).to_usize());
        }
        let mut pieces = 0;
        for ((block, layer, outer), (region, offset)) in beginnings(&regions) {
            let at = geometry.try_offset(block, layer, outer).unwrap();
            prop_assert_eq!((at.region, at.offset), (region, offset));
            pieces += 1;
        }
        let lengths = vec![geometry.region_bytes(0); regions.len()];
        let report = verify(&geometry, &lengths).unwrap();
        prop_assert_eq!(pieces, report.pieces);
        let padding = regions.iter().flatten().filter(|cell| cell.is_none()).count();
        let counted = report.padding.checked_add(report.tail).unwrap();
        prop_assert_eq!(counted, ByteCount::from_usize(padding));
    }

    #[test]
    fn facts_for_planners_are_true((config, row_bytes) in configs(), kind in kinds()) {
        let geometry = Geometry::new(&config, kind).unwrap();
        let regions = regions_by_hand(&config, kind, row_bytes);
        let pieces = geometry.pieces().unwrap();
        let piece = pieces.piece_bytes().get();
        let at = |block, layer, outer| geometry.offset(block, layer, outer);

        // No block's part of a region crosses a multiple of the unit.
        if let Some(unit) = geometry.block_unit() {
            for (region, cells) in regions.iter().enumerate() {
                for part in cells.chunks(unit.to_usize()) {
                    let mut blocks = part.iter().flatten().map(|&(block, ..)| block);
                    let first = blocks.next();
                    prop_assert!(blocks.all(|block| Some(block) == first), "region {}", region);
                }
            }
        }

        let class = beginnings(&regions)
            .map(|(_, (_, offset))| Alignment::of(offset))
            .fold(Alignment::of(piece), Ord::min);
        prop_assert_eq!(geometry.alignment_class(), class);

        if config.num_blocks() > 1 {
            let stride = pieces.block_stride().get();
            prop_assert_eq!(at(1, 0, 0).offset - at(0, 0, 0).offset, stride);
        }
    }

    #[test]
    fn plans_place_regions_aligned_and_apart(
        (config, _) in configs(),
        kind in kinds(),
        alignment in 0..=13_u32,
        granule in 0..=13_u32,
    ) {
        let limits = Limits {
            alignment: Alignment::new(1 << alignment).unwrap(),
            granule: Alignment::new(1 << granule).unwrap(),
            largest_region: None,
        };
        let plan = LayoutPlan::new(&config, kind, limits).unwrap();
        let bytes = plan.geometry().region_bytes(0).get();
        let mut end = 0;
        for region in 0..plan.geometry().region_count() {
            let offset = plan.region_offset(region).unwrap();
            prop_assert!(offset.is_aligned_to(limits.alignment));
            prop_assert!(offset.is_aligned_to(Alignment::SECTOR));
            prop_assert!(offset.is_aligned_to(config.block_alignment()));
            prop_assert!(offset.get() >= end);
            end = offset.get() + bytes;
        }
        prop_assert!(plan.base_bytes().get() >= end);
        prop_assert!(plan.base_bytes().get() - end < limits.granule.get());
        prop_assert!(plan.base_bytes().is_aligned_to(limits.granule));
        let padding = plan.padding();
        let counted = [padding.block_bytes, padding.block_padding, padding.region_padding];
        let sum: Result<ByteCount, _> = counted.into_iter().collect();
        prop_assert_eq!(sum.unwrap(), plan.base_bytes());
        prop_assert_eq!(padding.block_bytes, config.total_bytes());
    }
}

/// Dimensions and alignments at the ends of their ranges are refused or fit; they never wrap.
#[test]
fn extremes_do_not_wrap() {
    let extremes = [1, 2, 3, u32::MAX - 1, u32::MAX];
    let mut built = 0;
    for num_blocks in extremes {
        for num_layers in extremes {
            for page_size in extremes {
                for alignment in [0, 9, 40, 63] {
                    let config = LayoutConfig::builder()
                        .num_blocks(num_blocks)
                        .num_layers(num_layers)
                        .outer_dim(2)
                        .page_size(page_size)
                        .inner_dim(3)
                        .element(ElementFormat::Width(7))
                        .block_alignment(Alignment::new(1 << alignment).unwrap())
                        .build();
                    let Ok(config) = config else { continue };
                    for kind in LayoutKind::ALL {
                        let Ok(plan) = LayoutPlan::new(&config, kind, Limits::NONE) else {
                            continue;
                        };
                        let geometry = plan.geometry();
                        let last = geometry.offset(num_blocks - 1, num_layers - 1, 1);
                        let end = u128::from(last.offset)
                            + u128::from(geometry.pieces().unwrap().piece_bytes().get());
                        assert!(end <= u128::from(geometry.region_bytes(0).get()));
                        assert!(geometry.region_bytes(0) <= plan.base_bytes());
                        built += 1;
                    }
                }
            }
        }
    }
    assert!(built > 100, "{built}");
}
