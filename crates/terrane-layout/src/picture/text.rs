//! A picture as text.

use std::fmt;

use crate::geometry::Geometry;

use super::pieces::{Drawn, DrawnRegion};
use super::words::{MOST_PIECES, counted, holds, strides};

pub(super) fn render(
    geometry: &Geometry,
    drawn: &Drawn,
    f: &mut fmt::Formatter<'_>,
) -> fmt::Result {
    writeln!(
        f,
        "{} of {} in {}",
        counted(u64::from(geometry.num_blocks()), "block"),
        counted(geometry.block_bytes().get(), "byte"),
        counted(u64::from(geometry.region_count()), "region"),
    )?;
    for section in geometry.sections() {
        let name = section.name();
        writeln!(f, "{name}: {}", holds(section))?;
        writeln!(f, "{:width$}  strides: {}", "", strides(section), width = name.as_str().len())?;
    }
    for region in &drawn.regions {
        render_region(geometry, region, f)?;
    }
    let all = u64::from(geometry.region_count());
    let drawn_count = u64::try_from(drawn.regions.len()).unwrap_or(u64::MAX);
    if drawn.is_cut {
        writeln!(f, "only the first rows are shown")?;
    } else if drawn_count < all {
        writeln!(f, "and {}", counted(all - drawn_count, "more region"))?;
    }
    Ok(())
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
    match region.pieces.len().checked_sub(MOST_PIECES) {
        None | Some(0) => Ok(()),
        Some(more) => {
            let more = u64::try_from(more).unwrap_or(u64::MAX);
            writeln!(f, "{:>25}  and {}", "", counted(more, "more piece"))
        }
    }
}
