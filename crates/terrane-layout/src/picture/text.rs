//! A picture as text.

use std::fmt;

use crate::geometry::{Axis, Geometry, Section};

use super::pieces::{Drawn, DrawnRegion};
use super::{MOST_PIECES, counted, holds};

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
    let shown = u64::try_from(drawn.regions.len()).unwrap_or(u64::MAX);
    if drawn.is_cut {
        writeln!(f, "only the first rows are shown")?;
    } else if shown < all {
        writeln!(f, "and {}", counted(all - shown, "more region"))?;
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

/// The strides of all axes that have more than one position, the largest first.
pub(super) fn strides(section: &Section) -> String {
    let mut parts: Vec<(bool, u64, String)> = Vec::new();
    for axis in Axis::ALL {
        let steps = section.steps(axis);
        let (outer, inner) = (steps.outer(), steps.inner());
        if steps.regions() > 0 {
            let regions = u64::from(steps.regions());
            parts.push((true, regions, format!("{axis} {}", counted(regions, "region"))));
        } else if outer.count > 1 {
            let text = format!("{axis}/{} {}", inner.count, outer.stride);
            parts.push((false, outer.stride, text));
        }
        if inner.count > 1 {
            parts.push((false, inner.stride, format!("{axis} {}", inner.stride)));
        }
    }
    parts.sort_by_key(|&(in_regions, stride, _)| std::cmp::Reverse((in_regions, stride)));
    let parts: Vec<String> = parts.into_iter().map(|(.., text)| text).collect();
    if parts.is_empty() { "none".to_owned() } else { parts.join(", ") }
}
