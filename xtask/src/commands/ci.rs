//! `ci`: the whole gate, step by step.

use std::process::ExitCode;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{self, Sender};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Error, Result};

use crate::command::Tool;
use crate::commands::{features, interop, lint, nixl, offload, python, remote, soak, test};
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
    run: Run,
}

/// The scheduling of a step.
#[derive(Clone, Copy)]
enum Run {
    /// Before all others.
    First(Body),
    /// After the first ones.
    Then(Body),
    /// In another process, at the same time as [`Run::Then`].
    Concurrent,
}

type Body = fn(&Workspace, &mut Tally) -> Result<()>;

/// The gate. Cheap steps come first, so that most mistakes show within two minutes.
///
/// The other steps often leave one of two cores idle while they link, download, or wait for one
/// test. So two steps run at a time. Cargo locks the folder of a profile for one process, so the
/// first steps of [`Run::Concurrent`] use other folders or profiles. The last steps use the folder
/// of `test` and wait while it compiles.
const STEPS: [Step; 19] = [
    first("fmt", "fmt --check", |workspace, _| lint::check_format(workspace)),
    first("tidy", "tidy", |workspace, _| tidy::run(workspace)),
    first("nixl", "nixl", |workspace, _| nixl::provide(workspace).map(drop)),
    first("lint", "lint", |workspace, _| lint::lint(workspace)),
    then("test", |workspace, tally| test::run_once(workspace, &test::Arguments::default(), tally)),
    then("interop", |workspace, tally| {
        interop::run(workspace, &interop::Arguments::default(), tally)
    }),
    then("offload", |workspace, _| offload::run(workspace)),
    then("remote", remote::run),
    then("soak", |workspace, _| soak::run(workspace, &soak::Arguments::SHORT)),
    then("python", |workspace, tally| python::run(workspace, &python::Arguments::default(), tally)),
    then("features", |workspace, _| features::run(workspace)),
    concurrent("deny", "deny"),
    concurrent("compose", "compose"),
    concurrent("loom", "loom"),
    concurrent("asan", "asan"),
    concurrent("miri", "miri"),
    concurrent("simulated", "simulated"),
    concurrent("doc", "doc"),
    concurrent("package", "package"),
];

const fn first(name: &'static str, rerun: &'static str, body: Body) -> Step {
    Step { name, rerun, run: Run::First(body) }
}

const fn then(name: &'static str, body: Body) -> Step {
    Step { name, rerun: name, run: Run::Then(body) }
}

const fn concurrent(name: &'static str, rerun: &'static str) -> Step {
    Step { name, rerun, run: Run::Concurrent }
}

/// Runs the steps. After the first failure it starts no other step and waits for the step in the
/// other process.
pub fn run(workspace: &Workspace, arguments: &Arguments) -> Result<ExitCode> {
    let from =
        STEPS.iter().position(|step| Some(step.name) == arguments.from.as_deref()).unwrap_or(0);
    let started = Instant::now();
    let mut gate = Gate::default();
    for step in &STEPS[from..] {
        if let Run::First(body) = step.run {
            gate.run(workspace, step, body);
        }
    }
    if gate.failure.is_none() {
        both(workspace, &STEPS[from..], &mut gate);
    }
    println!("\n{}", timing_line(&gate.timings, started.elapsed()));
    if let Some((step, error)) = &gate.failure {
        println!("FAILED in step `{}`: {error:#}", step.name);
        println!("run it again with: cargo xtask {}", step.rerun);
    }
    print!("{}", gate.tally.summary());
    Ok(if gate.failure.is_none() { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

/// Runs the steps of [`Run::Then`] here, and those of [`Run::Concurrent`] at the same time.
fn both(workspace: &Workspace, steps: &'static [Step], gate: &mut Gate) {
    let has_failed = AtomicBool::new(false);
    let (sender, reports) = mpsc::channel();
    thread::scope(|scope| {
        scope.spawn(|| run_concurrent(workspace, steps, &has_failed, sender));
        for step in steps {
            if let Run::Then(body) = step.run {
                gate.run(workspace, step, body);
                // Between two steps, so that the lines of two processes do not mix.
                reports.try_iter().for_each(|report| gate.report(report));
                has_failed.store(gate.failure.is_some(), Ordering::Relaxed);
            }
        }
        if gate.failure.is_some() {
            println!("waiting for the step in the other process");
        }
        // Ends when the other thread does.
        reports.iter().for_each(|report| gate.report(report));
    });
}

/// Runs the steps of [`Run::Concurrent`] until one fails or `has_failed` is set. Sends reports.
fn run_concurrent(
    workspace: &Workspace,
    steps: &'static [Step],
    has_failed: &AtomicBool,
    reports: Sender<Report>,
) {
    for step in steps.iter().filter(|step| matches!(step.run, Run::Concurrent)) {
        if has_failed.load(Ordering::Relaxed) {
            return;
        }
        let report = Report::of(workspace, step);
        let is_last = report.result.is_err();
        // The receiver waits until the sender is dropped.
        let _ = reports.send(report);
        if is_last {
            return;
        }
    }
}

/// A step that ran in another process.
struct Report {
    step: &'static Step,
    result: Result<()>,
    /// Its output, without the summary of its tests.
    lines: Vec<String>,
    tally: Tally,
    time: Duration,
}

impl Report {
    /// Runs the step to its end.
    fn of(workspace: &Workspace, step: &'static Step) -> Self {
        let started = Instant::now();
        let mut lines = Vec::new();
        // This program, because cargo may have replaced its file since it started.
        let program = Tool::new(workspace, "/proc/self/exe").args(step.rerun.split(' '));
        let ended = program.each_line(|line| {
            lines.push(line.to_owned());
            Ok(())
        });
        let tally = Tally::take_summary(&mut lines);
        let result = match ended {
            Ok(true) => Ok(()),
            Ok(false) => Err(Error::msg("its output is above")),
            Err(error) => Err(error),
        };
        Self { step, result, lines, tally, time: started.elapsed() }
    }
}

/// The steps that have ended.
#[derive(Default)]
struct Gate {
    tally: Tally,
    timings: Vec<(&'static str, Duration)>,
    /// The first failure.
    failure: Option<(&'static Step, Error)>,
}

impl Gate {
    /// Runs a step, unless another one has failed.
    fn run(&mut self, workspace: &Workspace, step: &'static Step, body: Body) {
        if self.failure.is_some() {
            return;
        }
        begin(step);
        let started = Instant::now();
        let result = body(workspace, &mut self.tally);
        self.end(step, result, started.elapsed());
    }

    /// Prints and counts a step that ran in another process.
    fn report(&mut self, report: Report) {
        begin(report.step);
        report.lines.iter().for_each(|line| println!("{line}"));
        self.tally.add(report.tally);
        self.end(report.step, report.result, report.time);
    }

    fn end(&mut self, step: &'static Step, result: Result<()>, time: Duration) {
        self.timings.push((step.name, time));
        match result {
            Ok(()) => println!("<== {} took {:.1} s", step.name, time.as_secs_f64()),
            Err(error) => {
                println!("<== {} failed after {:.1} s", step.name, time.as_secs_f64());
                self.tally.note_failure();
                self.failure.get_or_insert((step, error));
            }
        }
    }
}

fn begin(step: &Step) {
    let place = STEPS.iter().take_while(|other| other.name != step.name).count() + 1;
    println!("\n==> [{place}/{}] {}", STEPS.len(), step.name);
}

/// Returns one line with the time of each step and the total time.
fn timing_line(timings: &[(&str, Duration)], total: Duration) -> String {
    let steps: Vec<String> =
        timings.iter().map(|(name, time)| format!("{name} {:.1} s", time.as_secs_f64())).collect();
    format!("time: {} (total {:.1} s)", steps.join(", "), total.as_secs_f64())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_timing_line_names_steps_and_the_whole() {
        let timings = [("fmt", Duration::from_millis(500)), ("test", Duration::from_secs(2))];
        let line = timing_line(&timings, Duration::from_millis(2100));
        assert_eq!(line, "time: fmt 0.5 s, test 2.0 s (total 2.1 s)");
    }

    #[test]
    fn every_step_says_how_to_run_it_again() {
        for step in &STEPS {
            assert!(step.rerun.starts_with(step.name), "{}", step.name);
        }
    }

    fn report(step: &'static Step, result: Result<()>) -> Report {
        let tally = Tally { passed: 1, ..Tally::default() };
        Report { step, result, lines: Vec::new(), tally, time: Duration::from_secs(1) }
    }

    #[test]
    fn the_first_failure_is_kept_and_no_step_begins_after_it() {
        let (workspace, mut gate) = (Workspace::load().unwrap(), Gate::default());
        gate.run(&workspace, &STEPS[0], |_, tally| {
            tally.passed += 1;
            Ok(())
        });
        gate.report(report(&STEPS[1], Err(Error::msg("one"))));
        gate.report(report(&STEPS[2], Err(Error::msg("two"))));
        gate.run(&workspace, &STEPS[3], |_, _| unreachable!());
        let (step, error) = gate.failure.unwrap();
        assert_eq!((step.name, error.to_string()), ("tidy", String::from("one")));
        assert_eq!((gate.tally.passed, gate.tally.failed, gate.timings.len()), (3, 1, 3));
    }
}
