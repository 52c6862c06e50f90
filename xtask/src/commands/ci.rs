//! `ci`: the whole gate, step by step.

use std::process::ExitCode;
use std::time::{Duration, Instant};

use anyhow::Result;

use crate::commands::{
    asan, compose, deny, doc, features, interop, lint, loom, miri, nixl, offload, package, python,
    remote, soak, test,
};
use crate::tally::Tally;
use crate::tidy;
use crate::workspace::Workspace;

/// The options of `cargo xtask ci`.
#[derive(Debug, clap::Args)]
pub struct Arguments {
    /// Starts at this step instead of the first one
    #[arg(long, value_name = "STEP", value_parser = STEPS.map(|step| step.name))]
    from: Option<String>,
}

struct Step {
    /// Its name.
    name: &'static str,
    /// The arguments of `cargo xtask` that run only this step.
    rerun: &'static str,
    run: fn(&Workspace, &mut Tally) -> Result<()>,
}

/// The gate. Cheap steps come first, so that most mistakes show within a minute.
const STEPS: [Step; 18] = [
    Step { name: "fmt", rerun: "fmt --check", run: |workspace, _| lint::check_format(workspace) },
    Step { name: "tidy", rerun: "tidy", run: |workspace, _| tidy::run(workspace) },
    Step { name: "nixl", rerun: "nixl", run: |workspace, _| nixl::provide(workspace).map(drop) },
    Step { name: "lint", rerun: "lint", run: |workspace, _| lint::clippy(workspace) },
    Step { name: "features", rerun: "features", run: |workspace, _| features::run(workspace) },
    Step { name: "compose", rerun: "compose", run: |workspace, _| compose::run(workspace) },
    Step {
        name: "test",
        rerun: "test",
        run: |workspace, tally| test::run(workspace, &test::Arguments::default(), tally),
    },
    Step {
        name: "interop",
        rerun: "interop",
        run: |workspace, tally| interop::run(workspace, &interop::Arguments::default(), tally),
    },
    Step {
        name: "python",
        rerun: "python",
        run: |workspace, tally| python::run(workspace, &python::Arguments::default(), tally),
    },
    Step {
        name: "doc",
        rerun: "doc",
        run: |workspace, _| doc::run(workspace, &doc::Arguments::default()),
    },
    Step { name: "package", rerun: "package", run: |workspace, _| package::run(workspace) },
    Step { name: "loom", rerun: "loom", run: loom::run },
    Step { name: "miri", rerun: "miri", run: miri::run },
    Step { name: "deny", rerun: "deny", run: |workspace, _| deny::run(workspace) },
    Step { name: "asan", rerun: "asan", run: asan::run },
    Step { name: "offload", rerun: "offload", run: |workspace, _| offload::run(workspace) },
    Step { name: "remote", rerun: "remote", run: |workspace, _| remote::run(workspace) },
    Step {
        name: "soak",
        rerun: "soak --seconds 5",
        run: |workspace, _| soak::run(workspace, &soak::Arguments::short()),
    },
];

/// Runs the steps in order and stops at the first that fails.
pub fn run(workspace: &Workspace, arguments: &Arguments) -> Result<ExitCode> {
    let first =
        STEPS.iter().position(|step| Some(step.name) == arguments.from.as_deref()).unwrap_or(0);
    let mut tally = Tally::default();
    let mut timings = Vec::new();
    let mut failure = None;
    for (index, step) in STEPS.iter().enumerate().skip(first) {
        println!("\n==> [{}/{}] {}", index + 1, STEPS.len(), step.name);
        let started = Instant::now();
        let result = (step.run)(workspace, &mut tally);
        timings.push((step.name, started.elapsed()));
        if let Err(error) = result {
            tally.note_failure();
            failure = Some((step, error));
            break;
        }
        println!("<== {} took {:.1} s", step.name, started.elapsed().as_secs_f64());
    }
    println!("\n{}", timing_line(&timings));
    if let Some((step, error)) = &failure {
        println!("FAILED in step `{}`: {error:#}", step.name);
        println!("run it again with: cargo xtask {}", step.rerun);
    }
    print!("{}", tally.summary());
    Ok(if failure.is_none() { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

/// All steps that ran with their times, on one line.
fn timing_line(timings: &[(&str, Duration)]) -> String {
    let total: Duration = timings.iter().map(|(_, time)| *time).sum();
    let steps: Vec<String> =
        timings.iter().map(|(name, time)| format!("{name} {:.1} s", time.as_secs_f64())).collect();
    format!("time: {} (total {:.1} s)", steps.join(", "), total.as_secs_f64())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_timing_line_adds_up() {
        let timings = [("fmt", Duration::from_millis(500)), ("test", Duration::from_secs(2))];
        assert_eq!(timing_line(&timings), "time: fmt 0.5 s, test 2.0 s (total 2.5 s)");
    }

    #[test]
    fn every_step_says_how_to_run_it_again() {
        for step in &STEPS {
            assert!(step.rerun.starts_with(step.name), "{}", step.name);
        }
    }
}
