//! Faults that the checker finds.

use super::*;
use crate::{BlockDimension, ElementFormat, LayoutConfig, LayoutKind};
use terrane_core::Alignment;

fn geometry(kind: LayoutKind, alignment: Alignment) -> Geometry {
    let config = LayoutConfig::builder()
        .num_blocks(5)
        .num_layers(3)
        .outer_dim(2)
        .page_size(7)
        .inner_dim(3)
        .element(ElementFormat::Width(1))
        .block_alignment(alignment)
        .build()
        .unwrap();
    Geometry::new(&config, kind).unwrap()
}

fn extents(geometry: &Geometry, longer: u64) -> Vec<Extent> {
    (0..geometry.region_count())
        .map(|region| Extent {
            place: Position { space: AddressSpace::Region(region), start: 0 },
            length: ByteCount::new(geometry.region_bytes(0).get() + longer),
        })
        .collect()
}

fn place(geometry: &Geometry, piece: PieceIndex) -> Position {
    let at = geometry.place_of(piece);
    Position { space: AddressSpace::Region(at.region), start: at.offset }
}

/// Maps every piece to its location, except one, which is moved.
fn with_fault(
    geometry: &Geometry,
    fault: PieceIndex,
    elsewhere: impl Fn(Position) -> Option<Position>,
) -> Result<VerifyReport, Violation> {
    verify_map(geometry, &extents(geometry, 1000), |piece| {
        let right = place(geometry, piece);
        if piece == fault { elsewhere(right) } else { Some(right) }
    })
}

const FAULT: PieceIndex = PieceIndex { block: 2, layer: 1, section: 1, stretch: 0 };

fn geometries() -> impl Iterator<Item = Geometry> {
    let alignments = [Alignment::BYTE, Alignment::SECTOR];
    LayoutKind::ALL.into_iter().flat_map(move |kind| {
        alignments.into_iter().map(move |alignment| geometry(kind, alignment))
    })
}

#[test]
fn every_kind_passes_and_accounts_for_every_byte() {
    for geometry in geometries() {
        let report = verify_map(&geometry, &extents(&geometry, 9), |p| Some(place(&geometry, p)));
        let report = report.unwrap();
        assert_eq!(report.pieces, 30);
        let regions = u64::from(geometry.region_count());
        let all = (geometry.region_bytes(0).get() + 9) * regions;
        assert_eq!(30 * 21 + report.padding.get() + report.tail.get(), all);
    }
}

#[test]
fn the_padding_of_a_config_is_no_hole_for_regions_at_any_address() {
    let [first, ..] = LayoutKind::ALL;
    let geometry = geometry(first, Alignment::SECTOR).with_block_alignment(Alignment::BYTE);
    let places = |piece| Some(place(&geometry, piece));
    assert!(verify_map(&geometry, &extents(&geometry, 0), places).unwrap().padding.get() > 0);
}

#[test]
fn a_shift_by_one_byte_is_an_overlap() {
    for geometry in LayoutKind::ALL.map(|kind| geometry(kind, Alignment::BYTE)) {
        let back = with_fault(&geometry, FAULT, |p| Some(Position { start: p.start - 1, ..p }));
        let forth = with_fault(&geometry, FAULT, |p| Some(Position { start: p.start + 1, ..p }));
        assert!(matches!(back, Err(Violation::Overlap { second: FAULT, .. })), "{back:?}");
        assert!(
            matches!(forth, Err(Violation::Overlap { first: FAULT, .. } | Violation::Hole { .. })),
            "{forth:?}"
        );
    }
}

#[test]
fn two_pieces_in_one_place_are_an_overlap() {
    let other = PieceIndex { block: 4, layer: 2, section: 0, stretch: 0 };
    for geometry in geometries() {
        let result = with_fault(&geometry, FAULT, |_| Some(place(&geometry, other)));
        let Err(Violation::Overlap { first, second }) = result else { panic!("{result:?}") };
        assert!([first, second].contains(&FAULT) && [first, second].contains(&other));
    }
}

#[test]
fn a_piece_beyond_its_region_is_out_of_bounds() {
    for geometry in geometries() {
        let end = geometry.region_bytes(0).get() + 1000;
        for start in [end - 20, end, u64::MAX] {
            let result = with_fault(&geometry, FAULT, |p| Some(Position { start, ..p }));
            assert!(matches!(result, Err(Violation::OutOfBounds { piece: FAULT, .. })));
        }
        let space = AddressSpace::Region(99);
        let result = with_fault(&geometry, FAULT, |p| Some(Position { space, ..p }));
        assert!(matches!(result, Err(Violation::OutOfBounds { piece: FAULT, .. })));
    }
}

#[test]
fn a_piece_moved_behind_all_others_leaves_a_hole() {
    for geometry in geometries() {
        let end = geometry.region_bytes(0).get();
        let result = with_fault(&geometry, FAULT, |p| Some(Position { start: end + 512, ..p }));
        assert!(matches!(result, Err(Violation::Hole { .. })), "{result:?}");
    }
}

#[test]
fn a_hole_of_one_byte_is_found() {
    let last = PieceIndex { block: 4, layer: 2, section: 1, stretch: 0 };
    for geometry in LayoutKind::ALL.map(|kind| geometry(kind, Alignment::BYTE)) {
        let result = with_fault(&geometry, last, |p| Some(Position { start: p.start + 1, ..p }));
        let Err(Violation::Hole { next, bytes, .. }) = result else { panic!("{result:?}") };
        assert_eq!((next, bytes), (last, ByteCount::new(1)));
    }
}

#[test]
fn a_piece_without_a_place_is_named() {
    for geometry in geometries() {
        let result = with_fault(&geometry, FAULT, |_| None);
        assert_eq!(result, Err(Violation::Unmapped { piece: FAULT }));
    }
}

#[test]
fn another_order_passes_by_sorting() {
    for geometry in geometries() {
        let last = geometry.num_blocks() - 1;
        let backwards = verify_map(&geometry, &extents(&geometry, 0), |piece| {
            Some(place(&geometry, PieceIndex { block: last - piece.block, ..piece }))
        });
        assert_eq!(backwards.unwrap().pieces, 30);
    }
}

#[test]
fn regions_that_overlap_or_are_too_few_are_refused() {
    let kind = LayoutKind::LayerSeparate { block_dimension: BlockDimension::First };
    let geometry = geometry(kind, Alignment::BYTE);
    let bytes = geometry.region_bytes(0);
    let at = |start| Extent { place: Position { space: AddressSpace::Host, start }, length: bytes };
    let overlapping = [at(10_000), at(0), at(bytes.get() - 1)];
    let result = verify_map(&geometry, &overlapping, |_| None);
    assert_eq!(result, Err(Violation::RegionsOverlap { first: 1, second: 2 }));
    let result = verify(&geometry, &[ByteCount::new(u64::MAX); 3]);
    assert_eq!(result, Err(Violation::RegionsTooLong));
    let result = verify(&geometry, &[bytes, bytes]);
    assert_eq!(result, Err(Violation::RegionCount { expected: 3, actual: 2 }));
}

#[test]
#[cfg_attr(miri, ignore = "takes minutes under Miri, and has no unsafe code")]
fn a_million_pieces() {
    let config = LayoutConfig::builder()
        .num_blocks(10_000)
        .num_layers(50)
        .outer_dim(2)
        .page_size(16)
        .inner_dim(1024)
        .element(ElementFormat::Width(2))
        .build()
        .unwrap();
    for kind in LayoutKind::ALL {
        let geometry = Geometry::new(&config, kind).unwrap();
        let count = usize::try_from(geometry.region_count()).unwrap();
        let report = verify(&geometry, &vec![geometry.region_bytes(0); count]).unwrap();
        assert_eq!(report.pieces, 1_000_000);
    }
}
