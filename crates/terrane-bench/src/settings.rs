//! The arguments that all suites share, and the `main` that they all have.

use std::io::{self, Stdout};
use std::process::ExitCode;

use crate::{Outcome, Reporter};

/// What the command line of every suite takes; a suite with its own arguments flattens it in.
#[derive(Debug, Clone, clap::Args)]
pub struct Settings {
    /// Prints one JSON object a line on standard output, and nothing else there
    #[arg(long)]
    pub json: bool,
    /// Fails if a target is missed
    #[arg(long)]
    pub check: bool,
    /// Runs only cases whose name contains this text
    #[arg(long, value_name = "TEXT")]
    pub filter: Option<String>,
    /// Calls before the measured ones: they fault pages in, fill caches and raise the clock
    #[arg(long, value_name = "N", default_value_t = Settings::default().warm_up)]
    pub warm_up: u32,
    /// Measured calls; the median counts
    #[arg(long, value_name = "N", default_value_t = Settings::default().repeats)]
    pub repeats: u32,
}

impl Default for Settings {
    fn default() -> Self {
        Self { json: false, check: false, filter: None, warm_up: 2, repeats: 9 }
    }
}

/// The body of a suite's `main`: measures, reports, and turns the outcome into an exit code.
///
/// Fails if `body` does, and with `--check` if a target is missed. The error goes to standard
/// error.
#[expect(clippy::print_stderr, reason = "this is the end of a command line tool")]
pub fn run(
    suite: &str,
    settings: &Settings,
    body: impl FnOnce(&Settings, &mut Reporter<Stdout>) -> anyhow::Result<()>,
) -> ExitCode {
    let mut reporter = Reporter::new(suite, settings, io::stdout());
    let measured = body(settings, &mut reporter);
    let reported = reporter.finish().map_err(anyhow::Error::from);
    match measured.and(reported) {
        Ok(outcome) if is_success(settings, outcome) => ExitCode::SUCCESS,
        Ok(outcome) => {
            eprintln!("{suite}: {} of {} missed their target", outcome.missed, outcome.reported);
            ExitCode::FAILURE
        }
        Err(error) => {
            eprintln!("{suite}: {error:#}");
            ExitCode::FAILURE
        }
    }
}

fn is_success(settings: &Settings, outcome: Outcome) -> bool {
    !settings.check || outcome.missed == 0
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_missed_target_fails_only_when_checked() {
        let missed = Outcome { reported: 3, missed: 1, skipped: 0 };
        assert!(is_success(&Settings::default(), missed));
        let checked = Settings { check: true, ..Settings::default() };
        assert!(!is_success(&checked, missed));
        assert!(is_success(&checked, Outcome { missed: 0, ..missed }));
    }
}
