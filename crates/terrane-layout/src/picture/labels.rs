//! Texts and limits for both kinds of pictures.

use std::cmp::Reverse;
use std::fmt::Display;

use terrane_core::convert::to_u64;

use super::pieces::Drawn;
use crate::geometry::{Axis, Geometry, Section};

/// The most regions that are drawn.
pub(super) const MOST_REGIONS: usize = 4;

/// The most pieces of a region that are drawn.
pub(super) const MOST_PIECES: usize = 16;

/// `1 layer`, `2 layers`.
pub(super) fn counted(count: impl Display + PartialEq<u64>, what: &str) -> String {
    if count == 1 { format!("{count} {what}") } else { format!("{count} {what}s") }
}

/// The blocks of a geometry, and its regions.
pub(super) fn summary(geometry: &Geometry) -> String {
    format!(
        "{} of {} in {}",
        counted(u64::from(geometry.num_blocks()), "block"),
        counted(geometry.block_bytes().get(), "byte"),
        counted(u64::from(geometry.region_count()), "region"),
    )
}

/// What the picture omits.
pub(super) fn omitted(geometry: &Geometry, drawn: &Drawn) -> Option<String> {
    if drawn.is_cut {
        return Some("only the first rows are shown".to_owned());
    }
    let more = u64::from(geometry.region_count()).saturating_sub(to_u64(drawn.regions.len()));
    (more > 0).then(|| format!("and {}", counted(more, "more region")))
}

/// The counts of a section's axes.
pub(super) fn axis_counts(section: &Section) -> String {
    let shape = section.shape();
    let heads = shape.heads.map(|heads| counted(u64::from(heads), "head"));
    let parts = [
        Some(counted(u64::from(shape.layers), "layer")),
        heads,
        Some(counted(u64::from(shape.tokens), "token")),
        Some(counted(u64::from(shape.elements), "element")),
    ];
    let parts: Vec<String> = parts.into_iter().flatten().collect();
    format!("{} of {}", parts.join(", "), counted(u64::from(shape.element_bytes), "byte"))
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
    parts.sort_by_key(|&(in_regions, stride, _)| Reverse((in_regions, stride)));
    let parts: Vec<String> = parts.into_iter().map(|(.., text)| text).collect();
    if parts.is_empty() { "none".to_owned() } else { parts.join(", ") }
}
