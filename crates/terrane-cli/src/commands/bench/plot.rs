//! A report as a page with a plot.

use plotters::prelude::*;

use super::report::{Case, Report};
use crate::commands::page;
use crate::error::Failure;

const BAR: RGBColor = RGBColor(58, 110, 165);
const LIMIT: RGBColor = RGBColor(163, 0, 0);

pub(crate) fn page(report: &Report) -> Result<String, Failure> {
    let title = format!("{} of {}", report.suite, report.model);
    let mut body = format!("<h1>{}</h1>\n", page::escape(&title));
    body.push_str(&format!(
        "<p class=\"note\">{}; median of {} passes, with the range. A red mark is the limit of the same run.</p>\n",
        page::escape(&report.subject),
        report.passes
    ));
    for unit in ["GB/s", "us"] {
        let cases: Vec<&Case> = report.cases.iter().filter(|case| case.unit == unit).collect();
        if !cases.is_empty() {
            let better = if unit == "us" { "shorter is better" } else { "longer is better" };
            body.push_str(&format!("<h2>{unit}, {better}</h2>\n{}", bars(&cases)?));
        }
    }
    let rows = report.cases.iter().map(|case| {
        vec![
            case.case.clone(),
            format!("{:.2}", case.value.median),
            format!("{:.2}–{:.2}", case.value.min, case.value.max),
            case.unit.clone(),
            format!("{:.2} ({})", case.limit, case.limit_name),
            format!("{:.3}", case.ratio),
        ]
    });
    let rows: Vec<_> = rows.collect();
    body.push_str("<h2>Figures</h2>\n");
    body.push_str(&page::table(&["Case", "Median", "Range", "Unit", "Limit", "Ratio"], &rows));
    for missing in &report.not_measured {
        let line = format!("Not measured: {}: {}", missing.case, missing.reason);
        body.push_str(&format!("<p class=\"note\">{}</p>\n", page::escape(&line)));
    }
    for note in &report.notes {
        body.push_str(&format!("<p class=\"note\">{}</p>\n", page::escape(note)));
    }
    Ok(page::page(&title, &body))
}

/// A bar for each case, its range, and its limit.
fn bars(cases: &[&Case]) -> Result<String, Failure> {
    const ROW: u32 = 36;
    let failed = |error: &dyn std::fmt::Display| Failure::Plot(error.to_string());
    let count = u32::try_from(cases.len()).unwrap_or(1);
    let largest =
        cases.iter().map(|case| case.value.max.max(case.limit)).fold(0.0, f64::max) * 1.05;
    // The mark is two pixels wide, for any limit.
    let mark = largest / 650.0;
    let mut svg = String::new();
    {
        let area = SVGBackend::with_string(&mut svg, (980, ROW * count + 40)).into_drawing_area();
        let mut chart = ChartBuilder::on(&area)
            .margin(4)
            .margin_left(330)
            .x_label_area_size(30)
            .build_cartesian_2d(0.0..largest.max(1e-9), 0.0..f64::from(count))
            .map_err(|error| failed(&error))?;
        chart
            .configure_mesh()
            .disable_y_mesh()
            .disable_y_axis()
            .light_line_style(TRANSPARENT)
            .x_labels(8)
            .label_style(("sans-serif", 15))
            .draw()
            .map_err(|error| failed(&error))?;
        for (number, case) in (0..).zip(cases) {
            // The first case is on top.
            let y = f64::from(count - 1 - number) + 0.5;
            let shapes = [
                Rectangle::new([(0.0, y - 0.25), (case.value.median, y + 0.25)], BAR.filled()),
                Rectangle::new(
                    [(case.value.min, y - 0.06), (case.value.max, y + 0.06)],
                    BLACK.filled(),
                ),
                Rectangle::new(
                    [(case.limit - mark, y - 0.38), (case.limit + mark, y + 0.38)],
                    LIMIT.filled(),
                ),
            ];
            chart.draw_series(shapes).map_err(|error| failed(&error))?;
            let at = chart.backend_coord(&(0.0, y));
            let style = ("sans-serif", 16).into_font().color(&BLACK);
            let label = label(&case.case);
            area.draw_text(&label, &style, (6, at.1 - 8)).map_err(|error| failed(&error))?;
        }
        area.present().map_err(|error| failed(&error))?;
    }
    Ok(format!("{svg}\n"))
}

/// Keeps the end of a long name: the beginning is the group, which is less important.
fn label(name: &str) -> String {
    const MOST: usize = 46;
    let count = name.chars().count();
    if count <= MOST {
        name.to_owned()
    } else {
        format!("…{}", name.chars().skip(count - MOST + 1).collect::<String>())
    }
}
