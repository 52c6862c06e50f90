//! The body of the `main` of every suite.

use std::io::{self, Stdout};
use std::process::ExitCode;

use crate::reporter::{Outcome, Reporter};
use crate::settings::Settings;

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
