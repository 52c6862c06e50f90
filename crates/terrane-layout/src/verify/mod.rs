//! The checker of all layouts: every piece is in bounds, and no two overlap.
//!
//! It is independent of the code that computes locations. It requests the location of every
//! contiguous stretch of every (block, layer, section). It compares the locations with each other
//! and with the regions. It checks plans ([`verify`]), layouts in memory
//! ([`PhysicalLayout::verify`]) and any other map of the same shape ([`verify_map`]).
//!
//! # Cost
//!
//! Pieces are visited in the order of the strides. While their locations ascend within each region,
//! one comparison for each piece is enough: about 10 ns. If a location descends, the order differs
//! or there is a fault. Then all stretches are sorted by location, with 32 bytes for each.

pub(crate) mod findings;
mod walk;

use terrane_core::{AddressSpace, ByteCount, Memory, Position};

pub use findings::{Extent, PieceIndex, VerifyReport, Violation};

use crate::geometry::{Axis, Geometry, PieceStrides, Stretches, axis_count};
use crate::{LayoutError, PhysicalLayout};
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
/// assert_eq!(verify(&geometry, &[geometry.region_bytes(0)])?.pieces, 12);
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
            place: Position { space: AddressSpace::Region(region), start: 0 },
            length,
        })
        .collect();
    verify_map(geometry, &extents, |piece| {
        let at = geometry.place_of(piece);
        Some(Position { space: AddressSpace::Region(at.region), start: at.offset })
    })
}

impl PhysicalLayout {
    /// Checks the layout at its actual location: all pieces against each other and against the
    /// actual regions.
    ///
    /// # Errors
    ///
    /// [`LayoutError::Violation`] with the first violation.
    pub fn verify(&self) -> Result<VerifyReport, LayoutError> {
        let extent = |(number, memory): (u32, &terrane_core::Region)| {
            let place = memory.location().position();
            // Other code may use the bytes after the end of the layout.
            Extent { place, length: memory.length().min(self.geometry().region_bytes(number)) }
        };
        let extents: Vec<Extent> = (0_u32..).zip(self.regions()).map(extent).collect();
        let report = verify_map(self.geometry(), &extents, |piece| {
            Some(self.location_at(self.geometry().place_of(piece))?.position())
        })?;
        Ok(report)
    }
}

/// Checks that `locate` maps the stretches of `geometry`'s sections one to one into `extents`.
///
/// The geometry determines the dimensions and the length of each stretch. In a layout from a
/// config, gaps between pieces must be smaller than the block alignment.
///
/// # Errors
///
/// The first [`Violation`] in the order of memory. Pieces without a location, or outside every
/// extent, are reported first, in the order of pieces.
pub fn verify_map(
    geometry: &Geometry,
    extents: &[Extent],
    locate: impl Fn(PieceIndex) -> Option<Position>,
) -> Result<VerifyReport, Violation> {
    let expected = geometry.region_count();
    if u32::try_from(extents.len()) != Ok(expected) {
        return Err(Violation::RegionCount { expected, actual: extents.len() });
    }
    if let Some(pieces) = geometry.pieces() {
        let mut walk = Walk::new(geometry, extents)?;
        let length = pieces.piece_bytes().get();
        let in_order = for_each_piece(geometry, pieces, |piece| {
            let place = locate(piece).ok_or(Stop::At(Violation::Unmapped { piece }))?;
            let region = walk.find(piece, place, length).map_err(Stop::At)?;
            walk.step(region, piece, place.start, length).map_err(|_| Stop::Descended)
        });
        match in_order {
            Ok(()) => return walk.finish(),
            Err(Stop::At(violation)) => return Err(violation),
            Err(Stop::Descended) => {}
        }
    }

    let mut walk = Walk::new(geometry, extents)?;
    let mut places = Vec::new();
    for_each_stretch(geometry, |piece, length| {
        let place = locate(piece).ok_or(Violation::Unmapped { piece })?;
        places.push((walk.find(piece, place, length)?, place.start, piece, length));
        Ok(())
    })?;
    places.sort_unstable();
    for (region, start, piece, length) in places {
        walk.step(region, piece, start, length)?;
    }
    walk.finish()
}

enum Stop {
    At(Violation),
    /// A piece begins before the end of the previous piece.
    Descended,
}

/// Visits every piece, in ascending order of locations if the map has these strides.
fn for_each_piece<E>(
    geometry: &Geometry,
    pieces: &PieceStrides,
    mut visit: impl FnMut(PieceIndex) -> Result<(), E>,
) -> Result<(), E> {
    let layers_are_outermost = pieces.regions_per_layer() > 0;
    let mut dimensions = [
        (layers_are_outermost, pieces.layer_stride(), Axis::Layer, geometry.num_layers()),
        (false, pieces.block_stride(), Axis::Block, geometry.num_blocks()),
        // The element axis represents sections here, because it is not visited otherwise.
        (false, pieces.outer_stride(), Axis::Element, geometry.section_count()),
    ];
    dimensions.sort_by_key(|&(outermost, stride, ..)| std::cmp::Reverse((outermost, stride)));
    let [first, second, third] = dimensions.map(|(.., axis, count)| (axis, count));
    let mut piece = PieceIndex { block: 0, layer: 0, section: 0, stretch: 0 };
    let set = |piece: &mut PieceIndex, axis, position| match axis {
        Axis::Block => piece.block = position,
        Axis::Layer => piece.layer = position,
        _ => piece.section = position,
    };
    for a in 0..first.1 {
        set(&mut piece, first.0, a);
        for b in 0..second.1 {
            set(&mut piece, second.0, b);
            for c in 0..third.1 {
                set(&mut piece, third.0, c);
                visit(piece)?;
            }
        }
    }
    Ok(())
}

/// Visits every stretch of every section, with its length.
fn for_each_stretch(
    geometry: &Geometry,
    mut visit: impl FnMut(PieceIndex, u64) -> Result<(), Violation>,
) -> Result<(), Violation> {
    for (number, section) in (0_u32..).zip(geometry.sections()) {
        let stretches = Stretches::of(section);
        let count = u32::try_from(stretches.count()).unwrap_or(u32::MAX);
        for layer in 0..axis_count(section, Axis::Layer) {
            for block in 0..geometry.num_blocks() {
                for stretch in 0..count {
                    visit(
                        PieceIndex { block, layer, section: number, stretch },
                        stretches.bytes(),
                    )?;
                }
            }
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests;
