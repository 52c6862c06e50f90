//! Draws the tables in a terminal, or as text.

use ratatui::Frame;
use ratatui::backend::TestBackend;
use ratatui::layout::{Alignment, Constraint, Layout};
use ratatui::style::{Modifier, Style};
use ratatui::text::Text;
use ratatui::widgets::{Cell, Paragraph, Row, Table};

use super::view::{Readings, Section};
use crate::error::Failure;
use crate::table::WIDTH;

/// Draws all tables, below a line with the source.
pub(super) fn frame(frame: &mut Frame<'_>, title: &str, readings: &Readings) {
    let sections = readings.sections();
    let heights = [Constraint::Length(2)]
        .into_iter()
        .chain(sections.iter().map(|s| Constraint::Length(height(s))));
    let areas = Layout::vertical(heights.chain([Constraint::Min(0)])).split(frame.area());
    let mut areas = areas.iter();
    if let Some(area) = areas.next() {
        frame.render_widget(Paragraph::new(title), *area);
    }
    for (section, area) in sections.iter().zip(areas) {
        frame.render_widget(table(section), *area);
    }
}

/// The number of lines: the rows, the header, and an empty line.
fn height(section: &Section) -> u16 {
    u16::try_from(section.rows.len()).unwrap_or(u16::MAX - 2) + 2
}

fn table(section: &Section) -> Table<'_> {
    let columns = section.header.len();
    let width = |column: usize| {
        let cells =
            section.rows.iter().filter_map(|row| row.get(column)).chain(section.header.get(column));
        cells.map(|cell| cell.chars().count()).max().unwrap_or(0)
    };
    let widths =
        (0..columns).map(|column| Constraint::Max(u16::try_from(width(column)).unwrap_or(WIDTH)));
    let cell = |(column, text): (usize, &String)| {
        let side = if column == 0 { Alignment::Left } else { Alignment::Right };
        Cell::new(Text::from(text.clone()).alignment(side))
    };
    let rows = section
        .rows
        .iter()
        .map(|row| Row::new(row.iter().enumerate().map(cell).collect::<Vec<_>>()));
    let header = Row::new(section.header.iter().enumerate().map(cell).collect::<Vec<_>>());
    Table::new(rows.collect::<Vec<_>>(), widths.collect::<Vec<_>>())
        .header(header.style(Style::new().add_modifier(Modifier::BOLD)))
        .column_spacing(2)
}

/// Renders the same view as text of 80 columns.
pub(super) fn text(title: &str, readings: &Readings) -> Result<String, Failure> {
    let rows: u16 = readings.sections().iter().map(height).fold(3, u16::saturating_add);
    let failed = |error: &dyn std::fmt::Display| Failure::Plot(error.to_string());
    let mut terminal =
        ratatui::Terminal::new(TestBackend::new(WIDTH, rows)).map_err(|error| failed(&error))?;
    terminal.draw(|area| frame(area, title, readings)).map_err(|error| failed(&error))?;
    let buffer = terminal.backend().buffer();
    let mut text = String::new();
    for cells in buffer.content().chunks(usize::from(WIDTH)) {
        let line: String = cells.iter().map(|cell| cell.symbol()).collect();
        text.push_str(line.trim_end());
        text.push('\n');
    }
    Ok(format!("{}\n", text.trim_end()))
}
