//! The pieces of a block, in the order of memory.

use terrane_core::ByteCount;

use crate::geometry::{Axis, Geometry, Section};

use super::labels::MOST_REGIONS;

/// The most rows of a section that are visited.
const MOST_ROWS: u64 = 1 << 14;

/// The axes within a block.
const AXES: [Axis; 4] = [Axis::Layer, Axis::Head, Axis::Token, Axis::Element];

/// Bytes of one section and layer without a gap, and their positions on each axis.
#[derive(Clone, Debug)]
pub(super) struct DrawnPiece {
    pub(super) start: u64,
    pub(super) bytes: u64,
    /// The number of the section.
    pub(super) section: usize,
    /// First and last position on each of [`AXES`].
    ranges: [(u32, u32); 4],
}

/// The pieces of a block in one region.
#[derive(Clone, Debug)]
pub(super) struct DrawnRegion {
    pub(super) number: u32,
    pub(super) pieces: Vec<DrawnPiece>,
}

/// The pieces of a block.
#[derive(Clone, Debug)]
pub(super) struct Drawn {
    /// The first regions in which the block has bytes.
    pub(super) regions: Vec<DrawnRegion>,
    /// Whether some rows were not visited.
    pub(super) is_cut: bool,
}

impl Drawn {
    pub(super) fn of(geometry: &Geometry) -> Self {
        let mut drawn = Self { regions: Vec::new(), is_cut: false };
        for (number, section) in geometry.sections().iter().enumerate() {
            drawn.is_cut |= for_each_row(section, |region, piece| {
                let regions = &mut drawn.regions;
                let at = regions.partition_point(|other| other.number < region);
                if regions.get(at).is_none_or(|other| other.number != region) {
                    regions.insert(at, DrawnRegion { number: region, pieces: Vec::new() });
                    // Later sections may begin in earlier regions. Regions after the maximum are
                    // not drawn.
                    regions.truncate(MOST_REGIONS);
                }
                if let Some(region) = regions.get_mut(at) {
                    region.pieces.push(DrawnPiece { section: number, ..piece });
                }
            });
        }
        for region in &mut drawn.regions {
            region.pieces.sort_by_key(|piece| piece.start);
            let pieces = std::mem::take(&mut region.pieces);
            for piece in pieces {
                push_merged(&mut region.pieces, piece);
            }
        }
        drawn
    }
}

/// Adds a piece, and merges it with earlier ones while they form one box of positions.
fn push_merged(pieces: &mut Vec<DrawnPiece>, piece: DrawnPiece) {
    let mut piece = piece;
    while let Some(before) = pieces.pop() {
        match before.with(&piece) {
            Some(both) => piece = both,
            None => {
                pieces.push(before);
                break;
            }
        }
    }
    pieces.push(piece);
}

impl DrawnPiece {
    pub(super) fn end(&self) -> u64 {
        self.start.saturating_add(self.bytes)
    }

    /// Joins both pieces, if they are adjacent, have one layer, and differ on one other axis.
    fn with(&self, next: &Self) -> Option<Self> {
        let [layer, ..] = self.ranges;
        let [other_layer, ..] = next.ranges;
        if self.section != next.section || layer != other_layer || self.end() != next.start {
            return None;
        }
        let mut ranges = self.ranges;
        let mut differing = ranges.iter_mut().zip(next.ranges).filter(|(a, b)| **a != *b);
        let (range, other) = differing.next()?;
        if differing.next().is_some() || range.1.checked_add(1) != Some(other.0) {
            return None;
        }
        range.1 = other.1;
        Some(Self { bytes: self.bytes.saturating_add(next.bytes), ranges, ..self.clone() })
    }

    /// The section, and the axes that the piece contains only in part.
    pub(super) fn name(&self, geometry: &Geometry) -> String {
        let Some(section) = geometry.sections().get(self.section) else { return String::new() };
        let parts =
            self.partial_axes(section).map(|(axis, _, [first, last])| match first == last {
                true => format!(", {axis} {first}"),
                false => format!(", {axis}s {first}-{last}"),
            });
        std::iter::once(section.name().to_string()).chain(parts).collect()
    }

    /// The name in two short lines, with the letters of [`formats`](crate::formats).
    pub(super) fn short_name(&self, geometry: &Geometry) -> [String; 2] {
        let Some(section) = geometry.sections().get(self.section) else { return <_>::default() };
        let (mut upper, mut lower) = (vec![section.name().to_string()], Vec::new());
        for (axis, letter, [first, last]) in self.partial_axes(section) {
            let line = if axis == Axis::Layer { &mut upper } else { &mut lower };
            line.push(match first == last {
                true => format!("{letter}{first}"),
                false => format!("{letter}{first}-{last}"),
            });
        }
        [upper, lower].map(|words| words.join(" "))
    }

    /// The axes that the piece contains only in part: their letters and ranges.
    fn partial_axes(&self, section: &Section) -> impl Iterator<Item = (Axis, char, [u32; 2])> {
        AXES.into_iter().zip("LHND".chars()).zip(self.ranges).filter_map(
            |((axis, letter), (first, last))| {
                let is_whole = first == 0 && u64::from(last) + 1 == section.steps(axis).count();
                (!is_whole).then_some((axis, letter, [first, last]))
            },
        )
    }

    pub(super) fn layer(&self) -> u32 {
        let [(layer, _), ..] = self.ranges;
        layer
    }
}

/// Visits the rows of block 0: contiguous elements of one head and token. Returns whether it
/// stopped before the last row.
fn for_each_row(section: &Section, mut visit: impl FnMut(u32, DrawnPiece)) -> bool {
    let shape = section.shape();
    let elements = section.steps(Axis::Element);
    let element_bytes = section.element_bytes().get();
    // Adjacent elements form one row.
    let inner = elements.inner();
    let together = if inner.stride == element_bytes { inner.count } else { 1 };
    let rows = u64::from(shape.elements / together.max(1));
    let counts = [shape.layers.into(), shape.heads.unwrap_or(1).into(), shape.tokens.into(), rows];
    let all = counts.iter().try_fold(1_u64, |product, count| product.checked_mul(*count));
    let visited = all.map_or(MOST_ROWS, |all| all.min(MOST_ROWS));
    for row in 0..visited {
        let mut rest = row;
        let mut at = [0_u32; 4];
        for (position, count) in at.iter_mut().zip(counts).rev() {
            *position = u32::try_from(rest % count).unwrap_or(0);
            rest /= count;
        }
        let [layer, head, token, part] = at;
        let element = part.saturating_mul(together);
        let place = section.place([0, layer], [head, token, element]);
        let single = |position| (position, position);
        let last = element.saturating_add(together.saturating_sub(1));
        visit(
            place.region,
            DrawnPiece {
                start: place.offset,
                bytes: ByteCount::new(element_bytes.saturating_mul(together.into())).get(),
                section: 0,
                ranges: [single(layer), single(head), single(token), (element, last)],
            },
        );
    }
    all != Some(visited)
}
