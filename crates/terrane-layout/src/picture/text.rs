//! A picture as text.

use std::fmt;

use terrane_core::convert::to_u64;

use crate::geometry::Geometry;

use super::labels::{MOST_PIECES, axis_counts, counted, omitted, strides, summary};
use super::pieces::{Drawn, DrawnRegion};

pub(super) fn render(
    geometry: &Geometry,
    drawn: &Drawn,
    f: &mut fmt::Formatter<'_>,
) -> fmt::Result {
    writeln!(f, "{}", summary(geometry))?;
    for section in geometry.sections() {
        let name = section.name();
        writeln!(f, "{name}: {}", axis_counts(section))?;
        writeln!(f, "{:width$}  strides: {}", "", strides(section), width = name.as_str().len())?;
    }
    for region in &drawn.regions {
        render_region(geometry, region, f)?;
    }
    omitted(geometry, drawn).map_or(Ok(()), |text| writeln!(f, "{text}"))
}

fn render_region(
    geometry: &Geometry,
    region: &DrawnRegion,
    f: &mut fmt::Formatter<'_>,
) -> fmt::Result {
    let bytes = geometry.region_bytes(region.number).get();
    writeln!(f, "block 0 in region {} of {}:", region.number, counted(bytes, "byte"))?;
    for piece in region.pieces.iter().take(MOST_PIECES) {
        writeln!(f, "{:>15}{:>10}  {}", piece.start, piece.bytes, piece.name(geometry))?;
    }
    match to_u64(region.pieces.len().saturating_sub(MOST_PIECES)) {
        0 => Ok(()),
        more => writeln!(f, "{:>25}  and {}", "", counted(more, "more piece")),
    }
}
