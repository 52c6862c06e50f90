//! The report of a suite.

use std::path::Path;

use serde::{Deserialize, Serialize};

use crate::commands::files;
use crate::error::Failure;
use crate::measure::Spread;
use crate::table::{table, wrap};

/// The measured cases of a suite.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Report {
    /// `terrane.bench/1`.
    pub schema: String,
    pub suite: String,
    pub model: String,
    /// The directory, or the device.
    pub subject: String,
    pub passes: u32,
    pub cases: Vec<Case>,
    /// The cases that cannot run on this machine.
    #[serde(default)]
    pub not_measured: Vec<NotMeasured>,
    /// Remarks, such as the paths of engines.
    pub notes: Vec<String>,
}

/// A case that was not measured, with the reason.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct NotMeasured {
    pub case: String,
    pub reason: String,
}

/// A measured case, with a limit from the same run.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Case {
    pub case: String,
    pub bytes: u64,
    /// `GB/s` (higher is better), or `us` (lower is better).
    pub unit: String,
    pub value: Spread,
    /// The limit's name and its median in the same unit.
    pub limit_name: String,
    pub limit: f64,
    /// The value as a share of the limit. 1 means that the case reaches the limit.
    pub ratio: f64,
}

impl Case {
    /// Creates a case with a rate, from seconds.
    pub(crate) fn rate(
        case: impl Into<String>,
        bytes: u64,
        seconds: Spread,
        limit: (&str, Spread),
    ) -> Self {
        let gigabytes = bytes as f64 / 1e9;
        let (value, limit_value) = (seconds.rate(gigabytes), limit.1.rate(gigabytes).median);
        Self {
            case: case.into(),
            bytes,
            unit: "GB/s".to_owned(),
            ratio: value.median / limit_value,
            value,
            limit_name: limit.0.to_owned(),
            limit: limit_value,
        }
    }

    /// Creates a case with a time.
    pub(crate) fn time(
        case: impl Into<String>,
        bytes: u64,
        seconds: Spread,
        limit: (&str, Spread),
    ) -> Self {
        let (value, limit_value) = (seconds.scaled(1e6), limit.1.scaled(1e6).median);
        Self {
            case: case.into(),
            bytes,
            unit: "us".to_owned(),
            ratio: limit_value / value.median,
            value,
            limit_name: limit.0.to_owned(),
            limit: limit_value,
        }
    }
}

impl Report {
    pub(crate) fn text(&self) -> String {
        let rows = self.cases.iter().map(|case| {
            vec![
                case.case.clone(),
                format!("{:.2}", case.value.median),
                format!("{:.2}-{:.2}", case.value.min, case.value.max),
                case.unit.clone(),
                format!("{:.2} {}", case.limit, case.limit_name),
                format!("{:.3}", case.ratio),
            ]
        });
        let rows: Vec<_> = rows.collect();
        let mut text = format!(
            "{} of {}, {}; median of {} passes\n\n",
            self.suite, self.model, self.subject, self.passes
        );
        text.push_str(&table(
            &["CASE", "MEDIAN", "RANGE", "UNIT", "LIMIT", "RATIO"],
            &rows,
            &[3, 4],
        ));
        for missing in &self.not_measured {
            let line = format!("not measured: {}: {}", missing.case, missing.reason);
            text.push_str(&wrap(&line, "  "));
        }
        for note in &self.notes {
            text.push_str(&wrap(note, "  "));
        }
        text
    }
}

/// Reads a report that was written with `--json`.
pub(crate) fn read(path: &Path) -> Result<Report, Failure> {
    serde_json::from_slice(&files::read(path)?).map_err(|source| Failure::Report {
        path: path.to_owned(),
        command: "terrane bench",
        source,
    })
}
