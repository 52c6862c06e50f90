//! The one checker of layouts: every piece in bounds, none overlapping, the map a bijection.
//!
//! It knows nothing of how places are computed. It asks for the place of every single
//! (block, layer, outer) and compares the places with each other and with the regions, so that it
//! serves the plan ([`verify`]), the layout in memory ([`PhysicalLayout::verify`]) and any other
//! map of the same shape ([`verify_map`]) alike.
//!
//! The order of tokens and heads within a piece is not its matter: whichever it is, they fill the
//! piece, as the config's builder has checked.
//!
//! # Cost
//!
//! Pieces are asked for in the order in which the layout's kind should place them. As long as
//! their places ascend within each region, one look at each piece proves everything: time is
//! linear in the pieces (about 10 ns each) and memory is that of the regions' bookkeeping. The
//! first descent means that the map is in another order, or at fault: then all pieces are sorted
//! by place, at 24 bytes each, which tells the two apart.

mod findings;
mod walk;

use terrane_core::{ByteCount, Memory, Place, Space};

pub use findings::{Extent, Piece, VerifyReport, Violation};

use crate::{BlockDimension, Geometry, LayoutError, LayoutKind, PhysicalLayout};
use walk::Walk;

/// Checks that `geometry` fits into regions of these lengths.
///
/// # Errors
///
/// The first [`Violation`].
///
/// ```
/// use terrane_core::ByteCount;
/// use terrane_layout::{ElementFormat, Geometry, LayoutConfig, LayoutKind, Violation, verify};
///
/// # fn main() -> Result<(), terrane_layout::LayoutError> {
/// let config = LayoutConfig::builder()
///     .num_blocks(3)
///     .num_layers(2)
///     .outer_dim(2)
///     .page_size(10)
///     .inner_dim(5)
///     .element(ElementFormat::Width(2))
///     .build()?;
/// let geometry = Geometry::new(&config, LayoutKind::FullyContiguous)?;
/// assert_eq!(verify(&geometry, &[geometry.region_bytes()])?.pieces, 12);
///
/// let short = verify(&geometry, &[ByteCount::new(1199)]);
/// assert!(matches!(short, Err(Violation::OutOfBounds { .. })));
/// # Ok(())
/// # }
/// ```
pub fn verify(
    geometry: &Geometry,
    region_lengths: &[ByteCount],
) -> Result<VerifyReport, Violation> {
    let extents: Vec<Extent> = (0_u32..)
        .zip(region_lengths)
        .map(|(region, &length)| Extent {
            place: Place { space: Space::Region(region), start: 0 },
            length,
        })
        .collect();
    verify_map(geometry, &extents, |piece| {
        let at = geometry.offset(piece.block, piece.layer, piece.outer);
        Some(Place { space: Space::Region(at.region), start: at.offset })
    })
}

impl PhysicalLayout {
    /// Checks the layout where it lies: the locations of all pieces, against each other and
    /// against the regions that the memory really has.
    ///
    /// # Errors
    ///
    /// [`LayoutError::Violation`] with the first violation.
    pub fn verify(&self) -> Result<VerifyReport, LayoutError> {
        let needed = self.geometry().region_bytes();
        let extent = |memory: &terrane_core::Region| {
            let place = memory.location().place();
            // Bytes beyond those needed may be anybody's, so that they are no part of the check.
            Extent { place, length: memory.length().min(needed) }
        };
        let extents: Vec<Extent> = self.regions().iter().map(extent).collect();
        let report = verify_map(self.geometry(), &extents, |piece| {
            Some(self.location(piece.block, piece.layer, piece.outer).ok()?.place())
        })?;
        Ok(report)
    }
}

/// Checks that `locate` maps the pieces of `geometry`'s dimensions one to one into `extents`.
///
/// Of the geometry it takes the dimensions, the bytes of a piece, the block alignment (gaps
/// between pieces have to be smaller) and, as a hint that only affects speed, the kind.
///
/// # Errors
///
/// The first [`Violation`] in the order of memory; before it, in the order of pieces, those that
/// have no place or lie outside every extent.
pub fn verify_map(
    geometry: &Geometry,
    extents: &[Extent],
    locate: impl Fn(Piece) -> Option<Place>,
) -> Result<VerifyReport, Violation> {
    let expected = geometry.region_count();
    if u32::try_from(extents.len()) != Ok(expected) {
        return Err(Violation::RegionCount { expected, actual: extents.len() });
    }
    let mut walk = Walk::new(geometry, extents)?;
    let in_order = for_each_piece(geometry, |piece| {
        let place = locate(piece).ok_or(Stop::At(Violation::Unmapped { piece }))?;
        let region = walk.find(piece, place).map_err(Stop::At)?;
        walk.step(region, piece, place.start).map_err(|_| Stop::Descended)
    });
    match in_order {
        Ok(()) => return walk.finish(),
        Err(Stop::At(violation)) => return Err(violation),
        Err(Stop::Descended) => {}
    }

    let mut walk = Walk::new(geometry, extents)?;
    let mut places = Vec::new();
    for_each_piece(geometry, |piece| {
        let place = locate(piece).ok_or(Violation::Unmapped { piece })?;
        places.push((walk.find(piece, place)?, place.start, piece));
        Ok::<_, Violation>(())
    })?;
    places.sort_unstable();
    for (region, start, piece) in places {
        walk.step(region, piece, start)?;
    }
    walk.finish()
}

enum Stop {
    At(Violation),
    /// A piece begins before the end of the one before it.
    Descended,
}

/// Visits every piece, in the order of memory if the map is what the kind says.
fn for_each_piece<E>(
    geometry: &Geometry,
    mut visit: impl FnMut(Piece) -> Result<(), E>,
) -> Result<(), E> {
    let (blocks, layers) = (0..geometry.num_blocks(), 0..geometry.num_layers());
    let outers = 0..geometry.outer_dim();
    match geometry.kind() {
        LayoutKind::FullyContiguous => {
            for block in blocks {
                for layer in layers.clone() {
                    for outer in outers.clone() {
                        visit(Piece { block, layer, outer })?;
                    }
                }
            }
        }
        LayoutKind::LayerSeparate { block_dimension: BlockDimension::First } => {
            for layer in layers {
                for block in blocks.clone() {
                    for outer in outers.clone() {
                        visit(Piece { block, layer, outer })?;
                    }
                }
            }
        }
        LayoutKind::LayerSeparate { block_dimension: BlockDimension::Second } => {
            for layer in layers {
                for outer in outers.clone() {
                    for block in blocks.clone() {
                        visit(Piece { block, layer, outer })?;
                    }
                }
            }
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{ElementFormat, LayoutConfig};
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
                place: Place { space: Space::Region(region), start: 0 },
                length: ByteCount::new(geometry.region_bytes().get() + longer),
            })
            .collect()
    }

    fn place(geometry: &Geometry, piece: Piece) -> Place {
        let at = geometry.offset(piece.block, piece.layer, piece.outer);
        Place { space: Space::Region(at.region), start: at.offset }
    }

    /// The place of every piece but one, which is elsewhere.
    fn with_fault(
        geometry: &Geometry,
        fault: Piece,
        elsewhere: impl Fn(Place) -> Option<Place>,
    ) -> Result<VerifyReport, Violation> {
        verify_map(geometry, &extents(geometry, 1000), |piece| {
            let right = place(geometry, piece);
            if piece == fault { elsewhere(right) } else { Some(right) }
        })
    }

    const FAULT: Piece = Piece { block: 2, layer: 1, outer: 1 };

    fn geometries() -> impl Iterator<Item = Geometry> {
        let alignments = [Alignment::BYTE, Alignment::SECTOR];
        LayoutKind::ALL.into_iter().flat_map(move |kind| {
            alignments.into_iter().map(move |alignment| geometry(kind, alignment))
        })
    }

    #[test]
    fn every_kind_passes_and_accounts_for_every_byte() {
        for geometry in geometries() {
            let report =
                verify_map(&geometry, &extents(&geometry, 9), |p| Some(place(&geometry, p)));
            let report = report.unwrap();
            assert_eq!(report.pieces, 30);
            let regions = u64::from(geometry.region_count());
            let all = (geometry.region_bytes().get() + 9) * regions;
            assert_eq!(30 * 21 + report.padding.get() + report.tail.get(), all);
        }
    }

    #[test]
    fn a_shift_by_one_byte_is_an_overlap() {
        for geometry in LayoutKind::ALL.map(|kind| geometry(kind, Alignment::BYTE)) {
            let back = with_fault(&geometry, FAULT, |p| Some(Place { start: p.start - 1, ..p }));
            let forth = with_fault(&geometry, FAULT, |p| Some(Place { start: p.start + 1, ..p }));
            assert!(matches!(back, Err(Violation::Overlap { second: FAULT, .. })), "{back:?}");
            assert!(
                matches!(
                    forth,
                    Err(Violation::Overlap { first: FAULT, .. } | Violation::Hole { .. })
                ),
                "{forth:?}"
            );
        }
    }

    #[test]
    fn two_pieces_in_one_place_are_an_overlap() {
        let other = Piece { block: 4, layer: 2, outer: 0 };
        for geometry in geometries() {
            let found = with_fault(&geometry, FAULT, |_| Some(place(&geometry, other)));
            let Err(Violation::Overlap { first, second }) = found else { panic!("{found:?}") };
            assert!([first, second].contains(&FAULT) && [first, second].contains(&other));
        }
    }

    #[test]
    fn a_piece_beyond_its_region_is_out_of_bounds() {
        for geometry in geometries() {
            let end = geometry.region_bytes().get() + 1000;
            for start in [end - 20, end, u64::MAX] {
                let found = with_fault(&geometry, FAULT, |p| Some(Place { start, ..p }));
                assert!(matches!(found, Err(Violation::OutOfBounds { piece: FAULT, .. })));
            }
            let space = Space::Region(99);
            let found = with_fault(&geometry, FAULT, |p| Some(Place { space, ..p }));
            assert!(matches!(found, Err(Violation::OutOfBounds { piece: FAULT, .. })));
        }
    }

    #[test]
    fn a_piece_moved_behind_all_others_leaves_a_hole() {
        for geometry in geometries() {
            let end = geometry.region_bytes().get();
            let found = with_fault(&geometry, FAULT, |p| Some(Place { start: end + 512, ..p }));
            assert!(matches!(found, Err(Violation::Hole { .. })), "{found:?}");
        }
    }

    #[test]
    fn a_hole_of_one_byte_is_found() {
        let last = Piece { block: 4, layer: 2, outer: 1 };
        for geometry in LayoutKind::ALL.map(|kind| geometry(kind, Alignment::BYTE)) {
            let found = with_fault(&geometry, last, |p| Some(Place { start: p.start + 1, ..p }));
            let Err(Violation::Hole { next, bytes, .. }) = found else { panic!("{found:?}") };
            assert_eq!((next, bytes), (last, ByteCount::new(1)));
        }
    }

    #[test]
    fn a_piece_without_a_place_is_named() {
        for geometry in geometries() {
            let found = with_fault(&geometry, FAULT, |_| None);
            assert_eq!(found, Err(Violation::Unmapped { piece: FAULT }));
        }
    }

    #[test]
    fn another_order_passes_by_sorting() {
        for geometry in geometries() {
            let last = geometry.num_blocks() - 1;
            let backwards = verify_map(&geometry, &extents(&geometry, 0), |piece| {
                Some(place(&geometry, Piece { block: last - piece.block, ..piece }))
            });
            assert_eq!(backwards.unwrap().pieces, 30);
        }
    }

    #[test]
    fn regions_that_overlap_or_are_too_few_are_refused() {
        let kind = LayoutKind::LayerSeparate { block_dimension: BlockDimension::First };
        let geometry = geometry(kind, Alignment::BYTE);
        let bytes = geometry.region_bytes();
        let at = |start| Extent { place: Place { space: Space::Host, start }, length: bytes };
        let overlapping = [at(10_000), at(0), at(bytes.get() - 1)];
        let found = verify_map(&geometry, &overlapping, |_| None);
        assert_eq!(found, Err(Violation::RegionsOverlap { first: 1, second: 2 }));
        let found = verify(&geometry, &[ByteCount::new(u64::MAX); 3]);
        assert_eq!(found, Err(Violation::RegionsTooLong));
        let found = verify(&geometry, &[bytes, bytes]);
        assert_eq!(found, Err(Violation::RegionCount { expected: 3, actual: 2 }));
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
            let report = verify(&geometry, &vec![geometry.region_bytes(); count]).unwrap();
            assert_eq!(report.pieces, 1_000_000);
        }
    }
}
