//! Reads the output of `cargo test` line by line, and decides what to show and what to count.
//!
//! Between runners it shows everything: warnings, compile errors, cargo's own messages. It holds
//! back the lines of a runner until libtest's `test result:` line. A passed runner shows only this
//! line. A failed runner shows everything except the output of passed tests. A runner that ends
//! without a result (a crash or an exit) counts as one failure.

use crate::tally::{Skip, Tally};

/// The state of one `cargo test` run.
#[derive(Debug, Default)]
pub struct TestLog {
    tally: Tally,
    /// The output of the current runner; `None` between runners.
    runner: Option<Runner>,
    /// Cargo's last `Running …` or `Doc-tests …` line.
    heading: String,
    /// Whether all tests of the last runner passed.
    has_passed: bool,
}

#[derive(Debug, Default)]
struct Runner {
    lines: Vec<String>,
    skips: Vec<Skip>,
    /// Passed tests that printed a `skipped:` line. They are not counted as passed.
    skipped_themselves: u64,
    ignored: u64,
    /// Tests that run for over 60 seconds. A runner that is killed for its time has one that hangs.
    slow: Vec<String>,
    /// Whether the current section of captured output already has a `skipped:` line.
    section_skipped: bool,
    /// The reader's position in libtest's final report.
    part: Part,
}

#[derive(Debug, Default, Clone, Copy, PartialEq, Eq)]
enum Part {
    #[default]
    Running,
    Successes,
    Failures,
}

impl TestLog {
    /// Reads the next line and returns the lines that the terminal should show for it.
    pub fn line(&mut self, line: &str) -> Vec<String> {
        let trimmed = line.trim_start();
        if let Some(counts) = trimmed.strip_prefix("test result: ") {
            return self.finish_runner(line, counts);
        }
        if trimmed.starts_with("Running ") || trimmed.starts_with("Doc-tests ") {
            let output = self.abandon_runner();
            self.has_passed = false;
            trimmed.clone_into(&mut self.heading);
            self.runner = Some(Runner::default());
            return output;
        }
        // Doctests have up to two reports under one heading.
        if self.runner.is_none() && is_report_start(trimmed) {
            self.runner = Some(Runner::default());
        }
        if trimmed.starts_with("error: ") && trimmed.contains("to rerun pass") {
            let mut output = self.abandon_runner();
            if std::mem::take(&mut self.has_passed) {
                // libtest has already reported its result, so the process failed when it exited.
                let how = "passed, and then failed as it exited";
                self.tally.fail(1, [format!("{} {how}", short_heading(&self.heading))]);
                output.push(format!("---- {} {how}", self.heading));
            }
            output.push(line.to_owned());
            return output;
        }
        match &mut self.runner {
            Some(runner) => {
                runner.line(line);
                Vec::new()
            }
            None if is_noise(trimmed) => Vec::new(),
            None => vec![line.to_owned()],
        }
    }

    /// Ends the log. Returns the remaining lines to show and the sums.
    ///
    /// `succeeded` is from the exit status. A failure that no runner reported, such as a test that
    /// does not compile, counts as one.
    pub fn finish(mut self, succeeded: bool) -> (Vec<String>, Tally) {
        let output = self.abandon_runner();
        if !succeeded {
            self.tally.note_failure();
        }
        (output, self.tally)
    }

    fn finish_runner(&mut self, line: &str, counts: &str) -> Vec<String> {
        let runner = self.runner.take().unwrap_or_default();
        let passed = count_before(counts, " passed");
        let failed = count_before(counts, " failed");
        let ignored = count_before(counts, " ignored");

        self.tally.passed += passed.saturating_sub(runner.skipped_themselves);
        self.tally.fail(failed, runner.failures(&short_heading(&self.heading)));
        let unnamed = ignored.saturating_sub(runner.ignored);
        self.tally.skips.extend(runner.skips);
        for _ in 0..unnamed {
            let reason = String::from("ignored by libtest");
            self.tally.skips.push(Skip { name: self.heading.clone(), reason });
        }

        let mut output = Vec::new();
        self.has_passed = failed == 0 && counts.starts_with("ok");
        if !self.has_passed {
            output.push(format!("---- {}", self.heading));
            output.extend(runner.lines);
            output.push(line.to_owned());
        } else if passed + ignored > 0 {
            output.push(format!("{}: {counts}", short_heading(&self.heading)));
        }
        output
    }

    /// Ends a runner without a result. A runner that printed nothing may not use libtest.
    fn abandon_runner(&mut self) -> Vec<String> {
        let Some(runner) = self.runner.take() else {
            return Vec::new();
        };
        if runner.lines.is_empty() {
            return Vec::new();
        }
        let how = "ended without a result";
        let mut name = format!("{} {how}", short_heading(&self.heading));
        if !runner.slow.is_empty() {
            name += &format!(" during {}", runner.slow.join(", "));
        }
        self.tally.fail(1, [name]);
        let mut output = vec![format!("---- {} {how}", self.heading)];
        output.extend(runner.lines);
        output
    }
}

impl Runner {
    fn line(&mut self, line: &str) {
        match line.trim_end() {
            "successes:" => self.enter(Part::Successes),
            "failures:" => self.enter(Part::Failures),
            _ => {}
        }
        if line.starts_with("---- ") {
            self.section_skipped = false;
        }
        if let Some(skip) = Skip::parse(line) {
            self.skips.push(skip);
            if self.part == Part::Successes && !self.section_skipped {
                self.section_skipped = true;
                self.skipped_themselves += 1;
            }
        } else if let Some(skip) = ignored_test(line) {
            self.skips.push(skip);
            self.ignored += 1;
        }
        if let Some((name, rest)) = line.strip_prefix("test ").and_then(|line| line.split_once(' '))
        {
            match rest {
                _ if rest.starts_with("has been running") => self.slow.push(name.to_owned()),
                _ => self.slow.retain(|slow| slow != name),
            }
        }
        let passed_test = line.starts_with("test ") && line.ends_with(" ... ok");
        if self.part != Part::Successes && !passed_test {
            self.lines.push(line.to_owned());
        }
    }

    /// The names of the failed tests, behind that of the runner.
    fn failures(&self, heading: &str) -> Vec<String> {
        let name = |line: &String| {
            let name = line.strip_prefix("test ")?.strip_suffix(" ... FAILED")?;
            Some(format!("{heading}: {name}"))
        };
        self.lines.iter().filter_map(name).collect()
    }

    fn enter(&mut self, part: Part) {
        self.part = part;
        self.section_skipped = false;
    }
}

/// Reads `test NAME ... ignored` with an optional `, REASON`.
fn ignored_test(line: &str) -> Option<Skip> {
    let (name, outcome) = line.strip_prefix("test ")?.split_once(" ... ")?;
    let reason = outcome.strip_prefix("ignored")?.trim_start_matches([',', ' ']);
    let reason = if reason.is_empty() { "ignored without a reason" } else { reason };
    Some(Skip { name: name.to_owned(), reason: reason.to_owned() })
}

/// Reads the number before `label` in libtest's result line; 0 without the label.
fn count_before(counts: &str, label: &str) -> u64 {
    counts
        .split_once(label)
        .and_then(|(head, _)| head.rsplit(' ').next())
        .and_then(|number| number.parse().ok())
        .unwrap_or(0)
}

/// Reads libtest's `running 3 tests`.
fn is_report_start(line: &str) -> bool {
    line.strip_prefix("running ")
        .is_some_and(|rest| rest.ends_with(" test") || rest.ends_with(" tests"))
}

/// Whether cargo prints such a line for each of hundreds of dependencies.
fn is_noise(line: &str) -> bool {
    const VERBS: [&str; 8] = [
        "Compiling ",
        "Downloading ",
        "Downloaded ",
        "Finished ",
        "Fresh ",
        "Blocking ",
        "Locking ",
        "all doctests ran in ",
    ];
    line.is_empty() || VERBS.iter().any(|verb| line.starts_with(verb))
}

/// `xtask: unittests src/main.rs` for `Running unittests src/main.rs (target/…/xtask-0123)`.
fn short_heading(heading: &str) -> String {
    if let Some(name) = heading.strip_prefix("Doc-tests ") {
        return format!("{name}: doctests");
    }
    let running = heading.strip_prefix("Running ").unwrap_or(heading);
    let Some((kind, binary)) = running.split_once(" (") else { return running.to_owned() };
    let name = binary.rsplit('/').next().unwrap_or(binary);
    let name = name.rsplit_once('-').map_or(name, |(name, _hash)| name);
    format!("{name}: {kind}")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(text: &str, succeeded: bool) -> (String, Tally) {
        let mut log = TestLog::default();
        let mut output = Vec::new();
        for line in text.lines() {
            output.extend(log.line(line));
        }
        let (rest, tally) = log.finish(succeeded);
        output.extend(rest);
        (output.join("\n"), tally)
    }

    const PASSING: &str = "\
   Compiling terrane-core v0.1.0
warning: something to see
     Running unittests src/lib.rs (target/debug/deps/core-0123)

running 3 tests
test a ... ok
test b ... ok
test c ... ignored, needs two NUMA nodes

successes:

---- b stdout ----
skipped: b: no huge pages reserved
skipped: b::twice: no gigantic pages either

successes:
    a
    b

test result: ok. 2 passed; 0 failed; 1 ignored; 0 measured; 0 filtered out; finished in 0.00s

   Doc-tests core

running 2 tests
test src/lib.rs - one (line 1) ... ok
test src/lib.rs - two (line 9) ... ok

test result: ok. 2 passed; 0 failed; 0 ignored; 0 measured; 0 filtered out; finished in 0.10s

running 1 test
test src/lib.rs - three (line 20) - compile fail ... ok

test result: ok. 1 passed; 0 failed; 0 ignored; 0 measured; 0 filtered out; finished in 0.10s

all doctests ran in 0.2s; merged doctests compilation took 0.1s
";

    #[test]
    fn passes_and_skips_are_summed_over_runners() {
        let (output, tally) = read(PASSING, true);
        // `b` passed for libtest, but printed that it was skipped.
        assert_eq!(tally.passed, 4);
        assert_eq!(tally.failed, 0);
        let names: Vec<_> = tally.skips.iter().map(|skip| skip.name.as_str()).collect();
        assert_eq!(names, ["c", "b", "b::twice"]);
        assert_eq!(tally.skips[0].reason, "needs two NUMA nodes");
        assert!(output.contains("warning: something to see"), "{output}");
        assert!(output.contains("core: unittests src/lib.rs: ok. 2 passed"), "{output}");
        assert!(output.contains("core: doctests: ok. 1 passed"), "{output}");
        assert!(!output.contains("test a ... ok"), "{output}");
        assert!(!output.contains("Compiling"), "{output}");
    }

    const FAILING: &str = "\
     Running tests/it/main.rs (target/debug/deps/it-0123)

running 2 tests
test good ... ok
test bad ... FAILED

successes:

---- good stdout ----
chatter of a good test

successes:
    good

failures:

---- bad stdout ----

thread 'bad' panicked at src/lib.rs:1:1:
assertion failed: bytes differ

failures:
    bad

test result: FAILED. 1 passed; 1 failed; 0 ignored; 0 measured; 0 filtered out; finished in 0.00s

error: test failed, to rerun pass `-p it --test it`
";

    #[test]
    fn failures_are_shown_whole() {
        let (output, tally) = read(FAILING, false);
        assert_eq!((tally.passed, tally.failed), (1, 1));
        assert!(output.contains("assertion failed: bytes differ"), "{output}");
        assert!(output.contains("to rerun pass `-p it --test it`"), "{output}");
        assert!(!output.contains("chatter of a good test"), "{output}");
        assert_eq!(tally.failures, ["it: tests/it/main.rs: bad"]);
    }

    #[test]
    fn a_crashed_runner_is_one_failure_and_is_shown() {
        let text = "\
     Running tests/it/main.rs (target/debug/deps/it-0123)

running 3 tests
test slow has been running for over 60 seconds
test good has been running for over 60 seconds
test good ... ok
free(): double free detected
error: test failed, to rerun pass `-p it --test it`
";
        let (output, tally) = read(text, false);
        assert_eq!((tally.passed, tally.failed), (0, 1));
        assert!(output.contains("ended without a result"), "{output}");
        assert!(output.contains("double free"), "{output}");
        assert_eq!(tally.failures, ["it: tests/it/main.rs ended without a result during slow"]);
    }

    #[test]
    fn a_crash_at_exit_is_distinguished_from_a_failed_test() {
        let text = "\
     Running tests/it/main.rs (target/debug/deps/it-0123)

running 1 test
test good ... ok

test result: ok. 1 passed; 0 failed; 0 ignored; 0 measured; 0 filtered out; finished in 0.00s

error: test failed, to rerun pass `-p it --test it`

Caused by:
  process didn't exit successfully: `it-0123` (signal: 11, SIGSEGV: invalid memory reference)
";
        let (output, tally) = read(text, false);
        assert_eq!((tally.passed, tally.failed), (1, 1));
        assert!(output.contains("passed, and then failed as it exited"), "{output}");
        assert!(output.contains("SIGSEGV"), "{output}");
        let (output, _) = read(FAILING, false);
        assert!(!output.contains("as it exited"), "{output}");
    }

    #[test]
    fn a_compile_error_is_one_failure_and_is_shown() {
        let text = "   Compiling it v0.1.0\nerror[E0308]: mismatched types\n --> src/lib.rs:1:1\n";
        let (output, tally) = read(text, false);
        assert_eq!(tally.failed, 1);
        assert!(output.contains("mismatched types"), "{output}");
    }

    #[test]
    fn an_ignored_test_with_a_mangled_line_is_still_counted() {
        let text = "\
     Running tests/it/main.rs (target/debug/deps/it-0123)
running 1 test
test x ... something printed in betweenignored
test result: ok. 0 passed; 0 failed; 1 ignored; 0 measured; 0 filtered out; finished in 0.00s
";
        let (_, tally) = read(text, true);
        assert_eq!(tally.skips.len(), 1);
    }
}
