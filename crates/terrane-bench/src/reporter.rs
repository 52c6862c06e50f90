//! Reports measurements: as a table, or as one JSON object per line.

use std::io::{self, Write};

use comfy_table::{CellAlignment, Table, presets};
use serde::{Deserialize, Serialize};

use crate::measurement::{Direction, Measurement};
use crate::settings::Settings;

/// The JSON form of a measurement. Every field is always present. A field that does not apply is
/// `null`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Record {
    /// The suite, as `cargo xtask bench` names it.
    pub suite: String,
    /// The case, unique in its suite.
    pub case: String,
    /// The median of the repeats; `null` if it is not finite.
    pub value: Option<f64>,
    /// The unit of `value` and `baseline`.
    pub unit: String,
    /// The baseline, from the same run.
    pub baseline: Option<f64>,
    /// The name of the baseline; `limit` for a fixed limit.
    pub baseline_name: Option<String>,
    /// The ratio of `value` to `baseline`, in the direction in which larger is better.
    pub ratio: Option<f64>,
    /// The minimum ratio.
    pub target: Option<f64>,
    /// Why the row has no target; `null` where it has one.
    #[serde(default)]
    pub no_target_because: Option<String>,
    /// Whether no target was missed.
    pub ok: bool,
}

/// The result of a suite.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Outcome {
    /// Measurements reported.
    pub reported: usize,
    /// Measurements that missed their target.
    pub missed: usize,
    /// Cases that could not run.
    pub skipped: usize,
}

/// Reports the measurements of one suite.
#[derive(Debug)]
pub struct Reporter<W> {
    suite: String,
    output: W,
    json: bool,
    filter: Option<String>,
    rows: Vec<[String; 8]>,
    outcome: Outcome,
}

impl<W: Write> Reporter<W> {
    /// Creates a reporter that writes to `output` in the form of the settings.
    pub fn new(suite: impl Into<String>, settings: &Settings, output: W) -> Self {
        Self {
            suite: suite.into(),
            output,
            json: settings.json,
            filter: settings.filter.clone(),
            rows: Vec::new(),
            outcome: Outcome::default(),
        }
    }

    /// Whether the filter selects this case. Call it before a long measurement.
    pub fn wants(&self, case: &str) -> bool {
        self.filter.as_ref().is_none_or(|filter| case.contains(filter))
    }

    /// Reports a measurement. JSON is written at once, so that a long run can be observed.
    ///
    /// A case that the filter does not select is dropped.
    ///
    /// # Errors
    ///
    /// Errors of the output, of numbers that JSON cannot represent, and of a row with neither a
    /// target nor a reason for having none ([`Measurement::without_target`]).
    pub fn report(&mut self, measurement: &Measurement) -> io::Result<()> {
        if !self.wants(&measurement.case) {
            return Ok(());
        }
        if !measurement.is_accounted_for() {
            let case = format!("{}/{}", self.suite, measurement.case);
            return Err(io::Error::other(format!(
                "{case} has no target: set one, or state the reason with `without_target`"
            )));
        }
        self.outcome.reported += 1;
        self.outcome.missed += usize::from(!measurement.is_ok());
        if self.json {
            serde_json::to_writer(&mut self.output, &record(&self.suite, measurement))?;
            self.output.write_all(b"\n")?;
            self.output.flush()
        } else {
            self.rows.push(row(measurement));
            Ok(())
        }
    }

    /// Prints on standard error that a case cannot run, with the reason.
    #[expect(clippy::print_stderr, reason = "people read this; standard output is for figures")]
    pub fn skip(&mut self, case: &str, reason: &str) {
        if self.wants(case) {
            self.outcome.skipped += 1;
            eprintln!("skipped: {}/{case}: {reason}", self.suite);
        }
    }

    /// Writes the table, if it has a row, and returns the result.
    ///
    /// # Errors
    ///
    /// Errors of the output.
    pub fn finish(mut self) -> io::Result<Outcome> {
        if !self.json && !self.rows.is_empty() {
            writeln!(self.output, "{}", table(&self.rows))?;
        }
        self.output.flush()?;
        Ok(self.outcome)
    }
}

fn record(suite: &str, measurement: &Measurement) -> Record {
    let finite = |number: f64| number.is_finite().then_some(number);
    let (baseline_name, baseline) = measurement.baseline.clone().unzip();
    Record {
        suite: suite.to_owned(),
        case: measurement.case.clone(),
        value: finite(measurement.value.median),
        unit: measurement.unit.clone(),
        baseline: baseline.and_then(finite),
        baseline_name,
        ratio: measurement.ratio(),
        target: measurement.target,
        no_target_because: measurement.reason.map(str::to_owned),
        ok: measurement.is_ok(),
    }
}

const HEADER: [&str; 8] =
    ["case", "value", "unit", "min … max", "baseline", "ratio", "target", "ok"];

fn row(measurement: &Measurement) -> [String; 8] {
    let value = measurement.value;
    let baseline = measurement.baseline.as_ref();
    let better = match measurement.direction {
        Direction::HigherIsBetter => "↑",
        Direction::LowerIsBetter => "↓",
    };
    let ok = match (measurement.target, measurement.is_ok()) {
        (None, _) => "",
        (Some(_), true) => "yes",
        (Some(_), false) => "NO",
    };
    [
        measurement.case.clone(),
        figures(value.median),
        format!("{} {better}", measurement.unit),
        format!("{} … {}", figures(value.min), figures(value.max)),
        baseline.map_or_else(String::new, |(name, value)| format!("{} {name}", figures(*value))),
        measurement.ratio().map_or_else(String::new, |ratio| format!("{ratio:.2}")),
        measurement.target.map_or_else(String::new, |target| format!("{target:.2}")),
        ok.to_owned(),
    ]
}

fn table(rows: &[[String; 8]]) -> Table {
    let mut table = Table::new();
    table.load_style(presets::ASCII_MARKDOWN).set_header(HEADER).add_rows(rows);
    for column in [1, 5, 6] {
        if let Some(column) = table.column_mut(column) {
            column.set_cell_alignment(CellAlignment::Right);
        }
    }
    table
}

/// Four significant figures or a few more, because repeats of a benchmark agree on no more.
fn figures(number: f64) -> String {
    match number.abs() {
        size if size >= 1000.0 => format!("{number:.0}"),
        size if size >= 100.0 => format!("{number:.1}"),
        size if size >= 10.0 => format!("{number:.2}"),
        size if size >= 0.1 => format!("{number:.3}"),
        _ => format!("{number:.6}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Spread;

    fn settings(json: bool) -> Settings {
        Settings { json, ..Settings::default() }
    }

    fn address() -> Measurement {
        let value = Spread { median: 1.6, min: 1.5, max: 1.9 };
        Measurement::new("address", value, "ns", Direction::LowerIsBetter)
    }

    fn lines(measurements: &[Measurement]) -> (Vec<String>, Outcome) {
        let mut output = Vec::new();
        let mut reporter = Reporter::new("layout", &settings(true), &mut output);
        for measurement in measurements {
            reporter.report(measurement).unwrap();
        }
        let outcome = reporter.finish().unwrap();
        let text = String::from_utf8(output).unwrap();
        (text.lines().map(str::to_owned).collect(), outcome)
    }

    #[test]
    fn json_has_one_object_a_line_with_every_field() {
        let explained = address().without_target("a baseline");
        let (lines, outcome) = lines(&[address().within(2.0), explained]);
        assert_eq!(
            lines,
            [
                r#"{"suite":"layout","case":"address","value":1.6,"unit":"ns","baseline":2.0,"baseline_name":"limit","ratio":1.25,"target":1.0,"no_target_because":null,"ok":true}"#,
                r#"{"suite":"layout","case":"address","value":1.6,"unit":"ns","baseline":null,"baseline_name":null,"ratio":null,"target":null,"no_target_because":"a baseline","ok":true}"#,
            ]
        );
        assert_eq!(outcome, Outcome { reported: 2, missed: 0, skipped: 0 });
    }

    #[test]
    fn a_row_without_target_and_reason_is_an_error_that_names_it() {
        let mut reporter = Reporter::new("layout", &settings(true), Vec::new());
        let error = reporter.report(&address()).unwrap_err().to_string();
        assert!(error.contains("layout/address has no target"), "{error}");
    }

    #[test]
    fn json_is_read_back() {
        let (lines, _) = lines(&[address().with_baseline("naive", 0.8).at_least(0.9)]);
        let record: Record = serde_json::from_str(&lines[0]).unwrap();
        assert_eq!(record.ratio, Some(0.5));
        assert!(!record.ok);
    }

    #[test]
    fn a_value_that_is_no_number_is_null_and_misses_its_target() {
        let broken =
            Measurement::new("broken", Spread::single(f64::NAN), "GB/s", Direction::HigherIsBetter);
        let (lines, outcome) = lines(&[broken.within(1.0)]);
        let record: Record = serde_json::from_str(&lines[0]).unwrap();
        assert_eq!((record.value, record.ratio, record.ok), (None, None, false));
        assert_eq!(outcome.missed, 1);
    }

    #[test]
    fn a_table_shows_each_case_with_its_spread() {
        let mut output = Vec::new();
        let mut reporter = Reporter::new("layout", &settings(false), &mut output);
        reporter.report(&address().within(1.0)).unwrap();
        reporter.finish().unwrap();
        let text = String::from_utf8(output).unwrap();
        for part in ["address", "1.600", "ns ↓", "1.500 … 1.900", "1.000 limit", "0.62", "NO"] {
            assert!(text.contains(part), "`{part}` is not in\n{text}");
        }
    }

    #[test]
    fn without_measurements_nothing_is_written() {
        let mut output = Vec::new();
        let mut reporter = Reporter::new("gpu", &settings(false), &mut output);
        reporter.skip("all cases", "no device");
        assert_eq!(reporter.finish().unwrap(), Outcome { skipped: 1, ..Outcome::default() });
        assert!(output.is_empty());
    }

    #[test]
    fn only_selected_cases_are_reported() {
        let settings = Settings { filter: Some("plan".into()), ..settings(true) };
        let mut output = Vec::new();
        let mut reporter = Reporter::new("layout", &settings, &mut output);
        reporter.report(&address().within(2.0)).unwrap();
        reporter.skip("address of a view", "not requested");
        assert!(reporter.wants("plan of 16 blocks"));
        assert_eq!(reporter.finish().unwrap(), Outcome::default());
        assert!(output.is_empty());
    }
}
