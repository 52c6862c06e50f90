//! Plans cover exactly the requested pieces, in as few runs as possible.

use std::collections::BTreeMap;
use std::ops::Range;

use proptest::prelude::*;
use terrane_core::{Alignment, ByteCount};
use terrane_layout::{LayoutConfig, LayoutKind};
use terrane_testkit::model::{origin, place, place_in_piece};
use terrane_transfer::{Endpoint, GridEnd, Planner, Side, Transfer, TransferPlan};

use crate::model::{Case, cases};
use crate::support::*;

/// A position in a layout: region and offset.
type At = (u32, u64);

/// A piece, or several that are joined: its destination, its source, and its length.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Stretch {
    to: At,
    from: At,
    bytes: u64,
}

/// The pieces, one by one from the documented formulas, in the order of the destination. Head by
/// head, if both ends state theirs.
fn expected_pieces(
    plan: &TransferPlan,
    from: &[u32],
    to: &[u32],
    layers: Range<u32>,
) -> Vec<Stretch> {
    let at = |end: &Endpoint, piece| {
        let (region, bytes) = place(&origin(end).0, origin(end).1, piece);
        (u32::try_from(region).unwrap(), u64::try_from(bytes.start).unwrap())
    };
    let configs = [Side::Source, Side::Destination].map(|side| origin(plan.end(side)).0);
    let bytes = configs[0].piece_bytes().get();
    let are_stated = configs.iter().all(|config| config.num_heads().is_some());
    let mut pieces = Vec::new();
    for (&from, &to) in from.iter().zip(to) {
        for layer in layers.clone() {
            for outer in 0..origin(plan.source()).0.outer_dim() {
                let to = at(plan.destination(), [to, layer, outer]);
                let from = at(plan.source(), [from, layer, outer]);
                if !are_stated {
                    pieces.push(Stretch { to, from, bytes });
                    continue;
                }
                let heads = [Side::Source, Side::Destination].map(|side| plan.heads(side));
                let [read, written] = heads;
                for token in 0..configs[0].page_size() {
                    for (read, written) in read.clone().zip(written.clone()) {
                        let part = |(region, offset): At, config, head| {
                            let place = place_in_piece(config, token, head);
                            (region, offset + u64::try_from(place.start).unwrap())
                        };
                        pieces.push(Stretch {
                            to: part(to, &configs[1], written),
                            from: part(from, &configs[0], read),
                            bytes: configs[0].head_bytes().unwrap().get(),
                        });
                    }
                }
            }
        }
    }
    pieces.sort_by_key(|piece| piece.to);
    pieces
}

/// Joins stretches that are adjacent at both ends.
fn joined(stretches: &[Stretch]) -> Vec<Stretch> {
    let mut joined: Vec<Stretch> = Vec::new();
    for stretch in stretches {
        let follows = |last: &Stretch| {
            (last.to.0, last.to.1 + last.bytes) == stretch.to
                && (last.from.0, last.from.1 + last.bytes) == stretch.from
        };
        match joined.last_mut().filter(|last| follows(last)) {
            Some(last) => last.bytes += stretch.bytes,
            None => joined.push(*stretch),
        }
    }
    joined
}

/// The number of runs that a plan may have beyond the minimum.
///
/// If outers are outermost, K of the last block is next to V of the first. Both may be copies of
/// one block, whose K and V are adjacent in the source. The planner need not find that coincidence,
/// which occurs once a layer.
///
/// If pieces are broken up, the last part of one piece may be adjacent to the first part of the
/// next one: one coincidence per piece.
fn coincidences(plan: &TransferPlan) -> usize {
    let pieces = if plan.breaks_pieces() { usize::try_from(plan.pieces()).unwrap() } else { 0 };
    plan.layers().len() + pieces
}

/// The plan's runs, in the order of the destination.
fn runs(plan: &TransferPlan) -> Vec<Stretch> {
    let mut runs = unsorted_runs(plan);
    runs.sort_by_key(|run| run.to);
    runs
}

/// The plan's runs, in its own order.
fn unsorted_runs(plan: &TransferPlan) -> Vec<Stretch> {
    let at = |at: terrane_layout::RegionOffset| (at.region, at.offset);
    let runs = plan.runs().iter();
    runs.map(|run| Stretch {
        to: at(run.destination()),
        from: at(run.source()),
        bytes: run.bytes().get(),
    })
    .collect()
}

/// The cells of the plan's grid, by its documented formula, in the order of the destination.
fn cells(plan: &TransferPlan) -> Vec<Stretch> {
    let grids = plan.grids().expect("the strides are even");
    let mut cells = Vec::new();
    for grid in grids.iter() {
        for (&from, &to) in plan.source_blocks().iter().zip(plan.destination_blocks()) {
            for layer in 0..grid.layers {
                for outer in 0..grid.outers {
                    for row in 0..grid.rows {
                        for column in 0..grid.columns {
                            let at = |end: &GridEnd, block: u32| {
                                let dimensions = [
                                    (block, end.block_stride),
                                    (layer, end.layer_stride),
                                    (outer, end.outer_stride),
                                    (row, end.row_stride),
                                    (column, end.column_stride),
                                ];
                                let offsets =
                                    dimensions.iter().map(|&(n, stride)| u64::from(n) * stride);
                                let region = end.first_region + layer * end.regions_per_layer;
                                (region, end.offset + offsets.sum::<u64>())
                            };
                            let bytes = grid.bytes.get();
                            let (to, from) = (at(&grid.destination, to), at(&grid.source, from));
                            cells.push(Stretch { to, from, bytes });
                        }
                    }
                }
            }
        }
    }
    cells.sort_by_key(|cell| cell.to);
    cells
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(400))]

    #[test]
    fn runs_are_the_pieces_joined_as_far_as_they_join(case in cases()) {
        let Case { from, to, layers, .. } = &case;
        let [source, destination] = case.endpoints();
        let plan = Planner::new().plan(&case.transfer(&source, &destination)).unwrap();
        // By arithmetic, before the list exists.
        let count = plan.run_count();
        let fewest = joined(&expected_pieces(&plan, from, to, layers.clone()));
        let runs = runs(&plan);
        prop_assert_eq!(&joined(&runs), &fewest);
        prop_assert_eq!(&joined(&cells(&plan)), &fewest);
        prop_assert!(runs.len() <= fewest.len() + coincidences(&plan), "{:?}", runs);
        let bytes: u64 = fewest.iter().map(|run| run.bytes).sum();
        prop_assert_eq!(plan.bytes().get(), bytes);
        let blocks = u64::try_from(from.len()).unwrap();
        let of_block = layers.len() * origin(&source).0.outer_dim() as usize;
        prop_assert_eq!(plan.pieces(), blocks * u64::try_from(of_block).unwrap());
        prop_assert_eq!(count, u64::try_from(runs.len()).unwrap());
        check_pairs(&plan, from, to);
        prop_assert_eq!(plan.mean_run().get(), bytes.checked_div(count).unwrap_or(0));
        for (index, run) in plan.runs().iter().enumerate() {
            prop_assert_eq!(plan.run(index), Some(*run));
        }
        prop_assert_eq!(plan.run(plan.runs().len()), None);
        prop_assert_eq!(plan.run_count(), u64::try_from(plan.runs().len()).unwrap());
        prop_assert_eq!(plan.layers(), layers.clone());

        // The blocks in which a run begins, as errors name them.
        let begins = |end: &Endpoint, piece: [u32; 3]| {
            let (region, bytes) = place(&origin(end).0, origin(end).1, piece);
            (u32::try_from(region).unwrap(), u64::try_from(bytes.start).unwrap())
        };
        let mut blocks = BTreeMap::new();
        for (&from, &to) in from.iter().zip(to) {
            for layer in layers.clone() {
                for outer in 0..origin(&source).0.outer_dim() {
                    blocks.insert(begins(&destination, [to, layer, outer]), (from, to));
                }
            }
        }
        for (index, run) in plan.runs().iter().enumerate() {
            let at = run.destination();
            let named = plan.blocks_of(index, ByteCount::ZERO).unwrap();
            let named = (named.source, named.destination);
            // The last piece that begins there or before.
            let (_, block) = blocks.range(..=(at.region, at.offset)).next_back().unwrap();
            prop_assert_eq!(&named, block);
        }
        check_alignments(&plan, &fewest);
    }

    #[test]
    fn runs_by_layer_are_those_of_each_layer_one_after_the_other(case in cases()) {
        let Case { from, to, layers, .. } = &case;
        let [source, destination] = case.endpoints();
        let transfer = case.transfer(&source, &destination).layer_by_layer();
        let plan = Planner::new().plan(&transfer).unwrap();
        check_agreement(&plan);
        prop_assert_eq!(plan.grids().unwrap()[0].layers as usize, layers.len());
        prop_assert!((0..plan.runs().len()).is_sorted_by_key(|run| plan.layer(run)));
        for layer in layers.clone() {
            let fewest = joined(&expected_pieces(&plan, from, to, layer..layer + 1));
            let all = unsorted_runs(&plan).into_iter().enumerate();
            let of_layer = all.filter(|(run, _)| plan.layer(*run) == layer);
            let mut of_layer: Vec<_> = of_layer.map(|(_, stretch)| stretch).collect();
            of_layer.sort_by_key(|run| run.to);
            prop_assert_eq!(&joined(&of_layer), &fewest);
            prop_assert!(of_layer.len() <= fewest.len() + coincidences(&plan), "{:?}", of_layer);
        }
    }
}

/// The list of runs, their number and the grid agree, also for parts of a plan.
#[track_caller]
pub fn check_agreement(plan: &TransferPlan) {
    let count = plan.run_count();
    assert_eq!(count, u64::try_from(plan.runs().len()).unwrap(), "{plan:?}");
    let runs = runs(plan);
    assert_eq!(joined(&cells(plan)), joined(&runs), "{plan:?}");
    assert_eq!(plan.bytes().get(), runs.iter().map(|run| run.bytes).sum::<u64>(), "{plan:?}");
    for (index, run) in plan.runs().iter().enumerate() {
        assert_eq!(plan.run(index).as_ref(), Some(run));
    }
}

/// The pairs are those of the transfer, in both orders.
fn check_pairs(plan: &TransferPlan, from: &[u32], to: &[u32]) {
    let sorted = |from: &[u32], to: &[u32]| {
        let mut pairs: Vec<_> = from.iter().copied().zip(to.iter().copied()).collect();
        pairs.sort_unstable();
        pairs
    };
    let named = sorted(from, to);
    assert!(plan.destination_blocks().is_sorted());
    assert_eq!(sorted(plan.source_blocks(), plan.destination_blocks()), named);
    let [from, to] = plan.pairs_by_source();
    assert!(from.is_sorted());
    assert_eq!(sorted(&from, &to), named);
}

/// The alignment of a plan applies to every run, and to every contiguous stretch of one end.
fn check_alignments(plan: &TransferPlan, fewest: &[Stretch]) {
    for side in [Side::Source, Side::Destination] {
        let alignment = plan.alignment(side).get();
        let mut ends: Vec<_> = fewest
            .iter()
            .map(|stretch| {
                let at = if side == Side::Source { stretch.from } else { stretch.to };
                (at.0, at.1, at.1 + stretch.bytes)
            })
            .collect();
        // A source may be named twice.
        ends.sort_unstable();
        ends.dedup();
        let mut joined: Vec<(u32, u64, u64)> = Vec::new();
        for (region, begin, end) in ends {
            match joined.last_mut() {
                Some(last) if last.0 == region && last.2 >= begin => last.2 = last.2.max(end),
                _ => joined.push((region, begin, end)),
            }
        }
        for (region, begin, end) in joined {
            let base = plan.end(side).base(region).unwrap().position().start;
            assert_eq!((base + begin) % alignment, 0, "{side}: {plan:?}");
            assert_eq!((base + end) % alignment, 0, "{side}: {plan:?}");
        }
    }
}

/// The number of runs from one kind to the other.
#[track_caller]
fn count(from: (LayoutKind, &[u32]), to: (LayoutKind, &[u32]), config: LayoutConfig) -> usize {
    let [source, destination] = [from.0, to.0].map(|kind| endpoint(config, kind));
    let transfer = Transfer::new(&source, &destination).blocks(from.1, to.1);
    Planner::new().plan(&transfer).unwrap().runs().len()
}

#[test]
fn known_transfers_need_the_minimum_of_runs() {
    let all: Vec<_> = (0..8).collect();
    let every = |kind| (kind, &all[..]);
    // 8 blocks, 4 layers, K and V.
    assert_eq!(count(every(CONTIGUOUS), every(CONTIGUOUS), config(8)), 1);
    assert_eq!(count(every(BLOCK_FIRST), every(BLOCK_FIRST), config(8)), 4);
    assert_eq!(count(every(OUTER_FIRST), every(OUTER_FIRST), config(8)), 4);
    assert_eq!(count(every(CONTIGUOUS), every(BLOCK_FIRST), config(8)), 8 * 4);
    assert_eq!(count(every(CONTIGUOUS), every(OUTER_FIRST), config(8)), 8 * 4 * 2);
    assert_eq!(count(every(BLOCK_FIRST), every(OUTER_FIRST), config(8)), 8 * 4 * 2);
}

#[test]
fn adjacent_ids_join_in_any_order() {
    let pairs = |from: &[u32], to: &[u32]| count((CONTIGUOUS, from), (CONTIGUOUS, to), config(8));
    assert_eq!(pairs(&[0, 1, 2], &[5, 6, 7]), 1);
    assert_eq!(pairs(&[2, 0, 1], &[7, 5, 6]), 1);
    assert_eq!(pairs(&[2, 1, 0], &[5, 6, 7]), 3);
    assert_eq!(pairs(&[0, 1, 3], &[5, 6, 7]), 2);
    assert_eq!(pairs(&[0, 1, 2], &[4, 5, 7]), 2);
    assert_eq!(pairs(&[1, 1, 2], &[4, 5, 6]), 2);
    // K and V of the last pairs are not adjacent.
    let outer_first =
        |from: &[u32], to: &[u32]| count((OUTER_FIRST, from), (OUTER_FIRST, to), config(8));
    assert_eq!(outer_first(&[6, 7], &[6, 7]), 4 * 2);
    assert_eq!(outer_first(&[1, 2, 3], &[4, 5, 6]), 4 * 2);
}

#[test]
fn padding_between_blocks_is_not_copied() {
    let padded = config(8).with_block_alignment(Alignment::SECTOR).unwrap();
    let all: Vec<_> = (0..8).collect();
    assert_eq!(count((CONTIGUOUS, &all), (CONTIGUOUS, &all), padded), 8);
    // Blocks of 512 bytes need no padding.
    let even = shape().page_size(8).inner_dim(4).block_alignment(Alignment::SECTOR).build();
    assert_eq!(count((CONTIGUOUS, &all), (CONTIGUOUS, &all), even.unwrap()), 1);
}

#[test]
fn a_range_of_layers_copies_only_its_pieces() {
    let [source, destination] = [CONTIGUOUS; 2].map(|kind| endpoint(config(8), kind));
    let transfer = Transfer::new(&source, &destination).blocks(&[0, 1], &[2, 3]);
    let planner = Planner::new();
    let plan = planner.plan(&transfer.clone().layers(1..3)).unwrap();
    assert_eq!(plan.runs().len(), 2);
    assert_eq!(plan.runs()[0].bytes().get(), 2 * 2 * PIECE);
    assert_eq!(planner.plan(&transfer.layers(0..4)).unwrap().runs().len(), 1);
}

#[test]
fn locations_are_those_of_the_layouts() {
    let [source, destination] = [CONTIGUOUS, OUTER_FIRST].map(|kind| endpoint(config(8), kind));
    let transfer = Transfer::new(&source, &destination).blocks(&[5], &[2]);
    let plan = Planner::new().plan(&transfer).unwrap();
    for (index, run) in (0_u32..).zip(plan.runs()) {
        let (layer, outer) = (index / 2, index % 2);
        let expected = source.layout().location(5, layer, outer).unwrap();
        assert_eq!(plan.location(run, Side::Source), Some(expected));
        let expected = destination.layout().location(2, layer, outer).unwrap();
        assert_eq!(plan.location(run, Side::Destination), Some(expected));
    }
}
