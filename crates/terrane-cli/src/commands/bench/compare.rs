//! Two reports side by side.

use super::report::{Case, Report};
use crate::table::{table, wrap};

/// The cases that both reports have, and the names of the other cases.
pub(crate) fn render(before: &Report, after: &Report) -> String {
    let mut rows = Vec::new();
    let mut alone = Vec::new();
    for case in &after.cases {
        match before.cases.iter().find(|other| other.case == case.case && other.unit == case.unit) {
            Some(other) => rows.push(row(other, case)),
            None => alone.push(format!("only in the second: {}", case.case)),
        }
    }
    for case in &before.cases {
        if !after.cases.iter().any(|other| other.case == case.case && other.unit == case.unit) {
            alone.push(format!("only in the first: {}", case.case));
        }
    }
    let mut text =
        table(&["CASE", "FIRST", "SECOND", "UNIT", "BETTER BY", "RATIO, BOTH"], &rows, &[3]);
    let (models, subjects) = ((&before.model, &after.model), (&before.subject, &after.subject));
    if models.0 != models.1 || subjects.0 != subjects.1 || before.suite != after.suite {
        let note = format!(
            "The reports differ: {} of {}, {}; {} of {}, {}.",
            before.suite, models.0, subjects.0, after.suite, models.1, subjects.1
        );
        text.push_str(&wrap(&note, "  "));
    }
    for line in alone {
        text.push_str(&wrap(&line, "  "));
    }
    let note = "Compare the ratios to the limits if the machine or the day differs. `~` marks a change within the ranges of both.";
    text.push_str(&wrap(note, "  "));
    text
}

fn row(before: &Case, after: &Case) -> Vec<String> {
    let more_is_better = after.unit != "us";
    let (a, b) = (before.value.median, after.value.median);
    let gain = if more_is_better { b / a - 1.0 } else { a / b - 1.0 };
    // The medians differ by less than the ranges of the passes.
    let overlaps = before.value.min <= after.value.max && after.value.min <= before.value.max;
    let mark = if overlaps { "~" } else { "" };
    vec![
        after.case.clone(),
        format!("{a:.2}"),
        format!("{b:.2}"),
        after.unit.clone(),
        format!("{mark}{:+.1} %", gain * 100.0),
        format!("{:.3} {:.3}", before.ratio, after.ratio),
    ]
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::measure::Spread;

    fn report(seconds: f64, name: &str) -> Report {
        let spread = Spread { median: seconds, min: seconds * 0.99, max: seconds * 1.01 };
        Report {
            schema: "terrane.bench/1".into(),
            suite: "host".into(),
            model: "m".into(),
            subject: "here".into(),
            passes: 3,
            cases: vec![
                Case::rate(name, 1_000_000_000, spread, ("memcpy", spread)),
                Case::time("one block", 2, spread, ("memcpy", spread)),
            ],
            not_measured: Vec::new(),
            notes: Vec::new(),
        }
    }

    #[test]
    fn a_shorter_time_is_better_in_both_units() {
        let text = render(&report(2.0, "load"), &report(1.0, "load"));
        let gains: Vec<&str> = text.lines().filter(|line| line.contains("+100.0 %")).collect();
        assert_eq!(gains.len(), 2, "{text}");
        assert!(render(&report(1.0, "load"), &report(1.001, "load")).contains("~-0.1 %"));
    }

    #[test]
    fn cases_of_one_report_are_named() {
        let text = render(&report(1.0, "load"), &report(1.0, "store"));
        assert!(
            text.contains("only in the second: store") && text.contains("only in the first: load")
        );
    }
}
