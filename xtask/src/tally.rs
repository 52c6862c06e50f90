//! The sum of tests over all runners.

use std::fmt::Write as _;

/// The numbers of passed and failed tests, and the skipped tests.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Tally {
    /// Tests that ran to their end and passed.
    pub passed: u64,
    /// Tests that failed, and runners or steps that ended without a result.
    pub failed: u64,
    /// The names of the failed tests and runners, where they are known.
    pub failures: Vec<String>,
    /// The test or step that could not run.
    pub skips: Vec<Skip>,
}

/// A test or step that could not run.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Skip {
    /// The test or step.
    pub name: String,
    /// The missing requirement.
    pub reason: String,
}

impl Skip {
    /// Reads `skipped: NAME: REASON`. Returns `None` if `line` has another form.
    ///
    /// A test's direct write to standard error may follow libtest's `test NAME ... ` on one line.
    pub fn parse(line: &str) -> Option<Self> {
        let line = line.trim_start();
        let line = line
            .split_once(" ... ")
            .filter(|(head, _)| head.starts_with("test "))
            .map_or(line, |(_, tail)| tail);
        let (name, reason) = line.strip_prefix("skipped: ")?.split_once(": ")?;
        Some(Self { name: name.trim().to_owned(), reason: reason.trim().to_owned() })
    }
}

impl Tally {
    /// Adds another tally to this one.
    pub fn add(&mut self, other: Self) {
        self.passed += other.passed;
        self.failed += other.failed;
        self.failures.extend(other.failures);
        self.skips.extend(other.skips);
    }

    /// Records a test or step that could not run. Prints it now, and again in the summary.
    pub fn skip(&mut self, name: &str, reason: &str) {
        println!("{name} does not run: {reason}");
        self.skips.push(Skip { name: name.to_owned(), reason: reason.to_owned() });
    }

    /// Counts and names failures of a runner.
    pub fn fail(&mut self, count: u64, names: impl IntoIterator<Item = String>) {
        self.failed += count;
        self.failures.extend(names);
    }

    /// Counts one failure if no test reported any.
    pub fn note_failure(&mut self) {
        self.failed = self.failed.max(1);
    }

    /// Removes the lines of [`Tally::summary`] from the end of a program's output. Returns an empty
    /// tally if there are none.
    pub fn take_summary(lines: &mut Vec<String>) -> Self {
        let counts = |line: &String| -> Option<[u64; 2]> {
            let (passed, rest) = line.split_once(" passed, ")?;
            let (failed, _) = rest.split_once(" failed, ")?;
            Some([passed.parse().ok()?, failed.parse().ok()?])
        };
        let Some([passed, failed]) = lines.last().and_then(counts) else { return Self::default() };
        lines.pop();
        let name = |line: &String| line.strip_prefix("failed: ").map(str::to_owned);
        let failures = take_last(lines, name);
        let skips = take_last(lines, |line| Skip::parse(line));
        Self { passed, failed, failures, skips }
    }

    /// Returns every skip with its reason, the name of every failure, and then one line with the
    /// three sums. The end of a long log is the part that is always kept, so failures are named
    /// there.
    pub fn summary(&self) -> String {
        let mut text = String::new();
        for skip in &self.skips {
            // Writing to a string cannot fail.
            let _ = writeln!(text, "skipped: {}: {}", skip.name, skip.reason);
        }
        for name in &self.failures {
            let _ = writeln!(text, "failed: {name}");
        }
        let _ = writeln!(
            text,
            "{} passed, {} failed, {} skipped",
            self.passed,
            self.failed,
            self.skips.len()
        );
        text
    }
}

/// Removes the last lines, as far as they can be read, and returns what they say.
fn take_last<T>(lines: &mut Vec<String>, read: impl Fn(&String) -> Option<T>) -> Vec<T> {
    let count = lines.iter().rev().map_while(&read).count();
    lines.split_off(lines.len() - count).iter().filter_map(read).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_skip_line_is_read() {
        let skip = Skip::parse("skipped: disk::direct_io: tmpfs refuses O_DIRECT: EINVAL").unwrap();
        assert_eq!(skip.name, "disk::direct_io");
        assert_eq!(skip.reason, "tmpfs refuses O_DIRECT: EINVAL");
    }

    #[test]
    fn a_skip_line_is_read_behind_the_name_of_its_test() {
        let skip = Skip::parse("test numa ... skipped: numa: one node").unwrap();
        assert_eq!(skip, Skip { name: "numa".into(), reason: "one node".into() });
    }

    #[test]
    fn other_lines_are_no_skips() {
        for line in ["skipped: without a reason", "left: \"skipped: a: b\"", "3 skipped: a: b", ""]
        {
            assert_eq!(Skip::parse(line), None, "{line}");
        }
    }

    #[test]
    fn the_summary_ends_with_the_failures_and_the_three_sums() {
        let mut tally = Tally { passed: 2, ..Tally::default() };
        let skips = vec![Skip { name: "a".into(), reason: "b".into() }];
        let mut other = Tally { passed: 1, skips, ..Tally::default() };
        other.fail(2, [String::from("it: c")]);
        tally.add(other);
        let summary = "skipped: a: b\nfailed: it: c\n3 passed, 2 failed, 1 skipped\n";
        assert_eq!(tally.summary(), summary);
    }

    #[test]
    fn the_summary_is_read_back_from_the_end_of_an_output() {
        let skip = |name: &str| Skip { name: name.into(), reason: "b: c".into() };
        let failures = vec![String::from("it: g"), String::from("it: h")];
        let tally = Tally { passed: 2, failed: 2, failures, skips: vec![skip("a"), skip("d")] };
        let mut lines = vec![String::from("skipped: e: f"), String::from("other")];
        lines.extend(tally.summary().lines().map(String::from));
        assert_eq!(Tally::take_summary(&mut lines), tally);
        assert_eq!(lines, ["skipped: e: f", "other"]);
        assert_eq!(Tally::take_summary(&mut lines), Tally::default());
        assert_eq!(lines.len(), 2);
    }

    #[test]
    fn an_unreported_failure_counts_once() {
        let mut tally = Tally::default();
        tally.note_failure();
        tally.note_failure();
        assert_eq!(tally.failed, 1);
    }
}
