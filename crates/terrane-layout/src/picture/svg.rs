//! A picture as SVG.

use std::fmt::{self, Write as _};

use terrane_core::convert::to_u64;

use crate::geometry::Geometry;

use super::labels::{MOST_PIECES, axis_counts, counted, omitted, strides, summary};
use super::pieces::{Drawn, DrawnPiece, DrawnRegion};

/// Pixels.
const WIDTH: u64 = 960;
const MARGIN: u64 = 16;
const LINE: u64 = 20;
const BAR: u64 = 44;
/// The width of a gap between pieces. It does not depend on the number of bytes.
const GAP: u64 = 14;
/// The minimum width of a piece.
const NARROWEST: u64 = 6;
/// The width of a letter, to check whether a label fits into a piece.
const LETTER: u64 = 7;

/// Two shades of each section's colour, for even and odd layers.
const COLOURS: [[&str; 2]; 6] = [
    ["#7aa6d8", "#a9c7e8"],
    ["#e8a468", "#f3c79f"],
    ["#8fbf7f", "#b9dab0"],
    ["#c99bd0", "#e0c4e4"],
    ["#d8c56a", "#eadfa5"],
    ["#a8a8a8", "#cccccc"],
];

pub(super) fn render(geometry: &Geometry, drawn: &Drawn) -> String {
    let (sections, regions) = (to_u64(geometry.sections().len()), to_u64(drawn.regions.len()));
    let height = 2 * MARGIN + LINE * (2 + sections) + regions * (BAR + 2 * LINE);
    let mut svg = String::new();
    let written = write_all(geometry, drawn, height, &mut svg);
    debug_assert!(written.is_ok(), "text grows");
    svg
}

fn write_all(geometry: &Geometry, drawn: &Drawn, height: u64, svg: &mut String) -> fmt::Result {
    writeln!(
        svg,
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {WIDTH} {height}\" \
         font-family=\"sans-serif\" font-size=\"13\">"
    )?;
    writeln!(svg, "<rect width=\"{WIDTH}\" height=\"{height}\" fill=\"#ffffff\"/>")?;
    let mut y = MARGIN + LINE;
    line(svg, MARGIN, y, &format!("{}; the bytes of block 0", summary(geometry)))?;
    for (number, section) in geometry.sections().iter().enumerate() {
        y += LINE;
        let [colour, _] = colours(number);
        let top = y - 12;
        writeln!(
            svg,
            "<rect x=\"{MARGIN}\" y=\"{top}\" width=\"14\" height=\"14\" fill=\"{colour}\"/>"
        )?;
        let text =
            format!("{}: {}; strides: {}", section.name(), axis_counts(section), strides(section));
        line(svg, MARGIN + 22, y, &text)?;
    }
    for region in &drawn.regions {
        y += 2 * LINE;
        bar(geometry, region, y, svg)?;
        y += BAR;
    }
    if let Some(text) = omitted(geometry, drawn) {
        line(svg, MARGIN, y + LINE, &text)?;
    }
    writeln!(svg, "</svg>")
}

/// Draws one region: its pieces in order, with widths in proportion to their bytes, and gaps of one
/// width.
fn bar(geometry: &Geometry, region: &DrawnRegion, y: u64, svg: &mut String) -> fmt::Result {
    let bytes = geometry.region_bytes(region.number).get();
    let drawn_count = region.pieces.len().min(MOST_PIECES);
    let more = region.pieces.len() - drawn_count;
    let mut title = format!("region {}, {}", region.number, counted(bytes, "byte"));
    if more > 0 {
        write!(title, "; {} behind these", counted(to_u64(more), "more piece"))?;
    }
    line(svg, MARGIN, y - 6, &title)?;
    let pieces = region.pieces.get(..drawn_count).unwrap_or_default();
    let total: u128 = pieces.iter().map(|piece| u128::from(piece.bytes)).sum();
    let ends = std::iter::once(0).chain(pieces.iter().map(DrawnPiece::end));
    let gaps = pieces.iter().zip(ends).filter(|(piece, end)| piece.start > *end).count();
    let room = WIDTH - 2 * MARGIN - GAP * to_u64(gaps) - NARROWEST * to_u64(drawn_count);
    let (mut x, mut end) = (MARGIN, 0);
    for piece in pieces {
        if piece.start > end {
            let (middle, height) = (x + GAP / 2, y + BAR / 2);
            writeln!(
                svg,
                "<text x=\"{middle}\" y=\"{height}\" text-anchor=\"middle\" fill=\"#888888\">⋯\
                 <title>{} of other blocks or padding</title></text>",
                counted(piece.start - end, "byte")
            )?;
            x += GAP;
        }
        let share = u128::from(piece.bytes) * u128::from(room) / total.max(1);
        let width = u64::try_from(share).unwrap_or(room) + NARROWEST;
        rectangle(geometry, piece, [x, y, width], svg)?;
        (x, end) = (x + width, piece.end());
    }
    Ok(())
}

fn rectangle(
    geometry: &Geometry,
    piece: &DrawnPiece,
    [x, y, width]: [u64; 3],
    svg: &mut String,
) -> fmt::Result {
    let [even, odd] = colours(piece.section);
    let colour = if piece.layer().is_multiple_of(2) { even } else { odd };
    let name = piece.name(geometry);
    writeln!(
        svg,
        "<rect x=\"{x}\" y=\"{y}\" width=\"{width}\" height=\"{BAR}\" fill=\"{colour}\" \
         stroke=\"#ffffff\"><title>{name}: {} from {} on</title></rect>",
        counted(piece.bytes, "byte"),
        piece.start,
    )?;
    let middle = x + width / 2;
    let [upper, mut lower] = piece.short_name(geometry);
    if lower.is_empty() {
        lower = format!("{} B", piece.bytes);
    }
    for (text, below) in [(upper, 18), (lower, 35)] {
        if to_u64(text.len()).saturating_mul(LETTER) <= width {
            let below = y + below;
            writeln!(
                svg,
                "<text x=\"{middle}\" y=\"{below}\" text-anchor=\"middle\">{text}</text>"
            )?;
        }
    }
    Ok(())
}

fn line(svg: &mut String, x: u64, y: u64, text: &str) -> fmt::Result {
    writeln!(svg, "<text x=\"{x}\" y=\"{y}\">{text}</text>")
}

fn colours(section: usize) -> [&'static str; 2] {
    COLOURS.iter().cycle().nth(section).copied().unwrap_or(["#a8a8a8", "#cccccc"])
}
