//! Tables of at most 80 columns, without colour.

use comfy_table::presets::NOTHING;
use comfy_table::{CellAlignment, ContentArrangement, Table};

/// The width of all output.
pub(crate) const WIDTH: u16 = 80;

/// A table with a header. Columns after the first are aligned to the right, except the `left` ones.
pub(crate) fn table(header: &[&str], rows: &[Vec<String>], left: &[usize]) -> String {
    let mut table = Table::new();
    table.load_style(NOTHING).set_content_arrangement(ContentArrangement::Dynamic).set_width(WIDTH);
    if !header.is_empty() {
        table.set_header(header);
    }
    table.add_rows(rows);
    for (number, column) in table.column_iter_mut().enumerate() {
        let padding = if number == 0 { (0, 1) } else { (1, 1) };
        column.set_padding(padding);
        if number > 0 && !left.contains(&number) {
            column.set_cell_alignment(CellAlignment::Right);
        }
    }
    let lines = table.lines().map(|line| format!("{}\n", line.trim_end()));
    lines.collect()
}

/// Breaks a text into lines of at most 80 columns. All lines but the first begin with `indent`.
/// Spaces are kept.
pub(crate) fn wrap(text: &str, indent: &str) -> String {
    let words = text.trim_start_matches(' ');
    let (mut lines, mut line) = (String::new(), " ".repeat(text.len() - words.len()));
    let mut is_first = true;
    for word in words.split(' ') {
        let length = line.chars().count() + 1 + word.chars().count();
        if !is_first && length > usize::from(WIDTH) {
            lines.push_str(line.trim_end());
            lines.push('\n');
            line = indent.to_owned();
        } else if !is_first {
            line.push(' ');
        }
        line.push_str(word);
        is_first = false;
    }
    lines.push_str(line.trim_end());
    lines.push('\n');
    lines
}

/// An integer with separators of thousands.
pub(crate) fn grouped(number: u64) -> String {
    let digits = number.to_string();
    let mut text = String::new();
    for (at, digit) in digits.chars().enumerate() {
        if at > 0 && (digits.len() - at).is_multiple_of(3) {
            text.push(',');
        }
        text.push(digit);
    }
    text
}

/// A time in a readable unit.
pub(crate) fn duration(seconds: f64) -> String {
    let units = [(1.0, "s"), (1e-3, "ms"), (1e-6, "us")];
    let (scale, unit) =
        units.into_iter().find(|(scale, _)| seconds >= *scale).unwrap_or((1e-9, "ns"));
    let value = seconds / scale;
    if value >= 100.0 { format!("{value:.0} {unit}") } else { format!("{value:.3} {unit}") }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_line_is_longer_than_80_columns() {
        let words =
            "some words of a sentence that is far too long for one line of a terminal ".repeat(4);
        let text = wrap(&words, "    ");
        assert!(text.lines().count() > 3);
        assert!(text.lines().all(|line| line.chars().count() <= 80), "{text}");
        assert!(text.lines().skip(1).all(|line| line.starts_with("    ")));
        let rows = vec![vec!["a".repeat(50), "b ".repeat(60), "1".into()]];
        let table = table(&["name", "words", "n"], &rows, &[1]);
        assert!(table.lines().all(|line| line.chars().count() <= 80), "{table}");
    }

    #[test]
    fn numbers_are_readable() {
        assert_eq!([0, 999, 1000, 1_234_567].map(grouped), ["0", "999", "1,000", "1,234,567"]);
        assert_eq!([2.5, 0.0025, 0.000_000_25].map(duration), ["2.500 s", "2.500 ms", "250 ns"]);
    }
}
