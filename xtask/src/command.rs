//! Starts other programs. Each error has the command line, so that a user can run it again.

use std::ffi::OsStr;
use std::fmt;
use std::io::{self, BufRead, BufReader, Read, Write as _};
use std::path::Path;
use std::process::{Command, ExitStatus, Stdio};
use std::thread;

use anyhow::{Context, Result, anyhow, bail};

use crate::workspace::Workspace;

/// The time limit of a test binary or an example in seconds, so that a deadlock ends. libtest names
/// a hanging test earlier ("has been running for over 60 seconds").
///
/// The longest binary runs for a minute under AddressSanitizer. A busy machine can take several
/// times as long.
pub const MOST_SECONDS: u64 = 900;

/// The words before a command line that end its program after a time. With `--foreground`, an
/// interrupt from the terminal still reaches the program.
pub fn limit(seconds: u64) -> [String; 4] {
    let words = ["timeout", "--foreground", "--kill-after=10"].map(String::from);
    let [timeout, foreground, kill] = words;
    [timeout, foreground, kill, seconds.to_string()]
}

/// The destination of a program's standard error.
enum Errors {
    ToTerminal,
    /// The lines of both streams come in the order in which they were written.
    BesideOutput,
}

/// A command line that starts in the workspace's root directory.
pub struct Tool {
    command: Command,
    line: String,
    /// The time limit in seconds.
    limit: Option<u64>,
}

impl Tool {
    /// The cargo that runs this program.
    pub fn cargo(workspace: &Workspace) -> Self {
        let program = environment("CARGO").unwrap_or_else(|| String::from("cargo"));
        let mut tool = Self::new(workspace, program);
        tool.line = String::from("cargo");
        tool
    }

    /// Another program.
    pub fn new(workspace: &Workspace, program: impl AsRef<OsStr>) -> Self {
        let line = program.as_ref().to_string_lossy().into_owned();
        let mut command = Command::new(program);
        command.current_dir(workspace.root());
        Self { command, line, limit: None }
    }

    /// Ends the program after this time, which is a failure. Errors show the command line without
    /// the limit.
    #[must_use]
    pub fn within(self, seconds: u64) -> Self {
        let [timeout, options @ ..] = limit(seconds);
        let mut command = Command::new(timeout);
        command.args(options).arg(self.command.get_program()).args(self.command.get_args());
        for (name, value) in self.command.get_envs() {
            match value {
                Some(value) => command.env(name, value),
                None => command.env_remove(name),
            };
        }
        if let Some(folder) = self.command.get_current_dir() {
            command.current_dir(folder);
        }
        Self { command, limit: Some(seconds), ..self }
    }

    /// Adds one argument.
    #[must_use]
    pub fn arg(mut self, argument: impl AsRef<OsStr>) -> Self {
        self.line.push(' ');
        self.line.push_str(&argument.as_ref().to_string_lossy());
        self.command.arg(argument);
        self
    }

    /// Adds several arguments.
    #[must_use]
    pub fn args<A: AsRef<OsStr>>(self, arguments: impl IntoIterator<Item = A>) -> Self {
        arguments.into_iter().fold(self, Self::arg)
    }

    /// Sets a variable in the program's environment.
    #[must_use]
    pub fn env(mut self, name: &str, value: impl AsRef<OsStr>) -> Self {
        self.line = format!("{name}={:?} {}", value.as_ref(), self.line);
        self.command.env(name, value);
        self
    }

    /// Sets a variable unless the user has set it already.
    #[must_use]
    pub fn default_env(self, name: &str, value: &str) -> Self {
        if environment(name).is_some() { self } else { self.env(name, value) }
    }

    /// Adds `folder` to the search path of the dynamic linker. It precedes folders that were added
    /// earlier and those of this program's environment.
    #[must_use]
    pub fn library_path(self, folder: &Path) -> Self {
        const NAME: &str = "LD_LIBRARY_PATH";
        let set = self.command.get_envs().find(|(name, _)| *name == NAME);
        let before = match set {
            Some((_, value)) => value.map(|value| value.to_string_lossy().into_owned()),
            None => environment(NAME),
        };
        let folder = folder.display();
        match before {
            Some(path) if !path.is_empty() => self.env(NAME, format!("{folder}:{path}")),
            _ => self.env(NAME, folder.to_string()),
        }
    }

    /// Removes a variable from the program's environment.
    #[must_use]
    pub fn without_env(mut self, name: &str) -> Self {
        self.command.env_remove(name);
        self
    }

    /// Runs the program on this terminal until it ends. Any result except success is an error.
    pub fn run(mut self) -> Result<()> {
        let status = self.command.status().with_context(|| format!("cannot start `{self}`"))?;
        if !status.success() {
            bail!("`{self}` {}", self.failure(status));
        }
        Ok(())
    }

    /// Runs the program on this terminal until it ends, and returns the exit code. Death by a
    /// signal is an error.
    pub fn exit_code(mut self) -> Result<i32> {
        let status = self.command.status().with_context(|| format!("cannot start `{self}`"))?;
        status.code().with_context(|| format!("`{self}` was ended by a signal ({status})"))
    }

    /// Returns standard output as text. Returns `None` if the program is missing or fails.
    pub fn probe(mut self) -> Option<String> {
        let output = self.command.stderr(Stdio::null()).output().ok()?;
        output.status.success().then(|| String::from_utf8_lossy(&output.stdout).into_owned())
    }

    /// Runs the program without output on this terminal. Returns its standard error if it fails.
    pub fn stderr_if_failed(mut self) -> Result<Option<String>> {
        let output = self.command.output().with_context(|| format!("cannot start `{self}`"))?;
        let stderr = String::from_utf8_lossy(&output.stderr).into_owned();
        Ok((!output.status.success()).then_some(stderr))
    }

    /// Returns the lines of standard output, each with a line feed. Standard error goes to this
    /// terminal.
    pub fn stdout(mut self) -> Result<String> {
        let mut text = String::new();
        let status = self.follow(Errors::ToTerminal, |line| {
            text.push_str(line);
            text.push('\n');
            Ok(())
        })?;
        if !status.success() {
            print!("{text}");
            bail!("`{self}` {}", self.failure(status));
        }
        Ok(text)
    }

    /// Passes each line of standard output and standard error to `on_line`, in the order in which
    /// they were written. Returns whether the program succeeded.
    pub fn each_line(mut self, mut on_line: impl FnMut(&str) -> Result<()>) -> Result<bool> {
        let status = self.follow(Errors::BesideOutput, &mut on_line)?;
        if self.is_over_limit(status) {
            on_line(&format!("`{self}` {}", self.failure(status)))?;
        }
        Ok(status.success())
    }

    /// Runs the program, and passes each line of its output to `on_line`.
    ///
    /// It does not wait for output of a process that outlives the program, such as one that a test
    /// started.
    fn follow(
        &mut self,
        errors: Errors,
        mut on_line: impl FnMut(&str) -> Result<()>,
    ) -> Result<ExitStatus> {
        let (reader, mut writer) = io::pipe().context("cannot create a pipe")?;
        let duplicate = || writer.try_clone().context("cannot duplicate a pipe");
        self.command.stdout(duplicate()?).stderr(match errors {
            Errors::ToTerminal => Stdio::inherit(),
            // One pipe for both streams, because two pipes would lose their common order.
            Errors::BesideOutput => duplicate()?.into(),
        });
        let mut child = self.command.spawn().with_context(|| format!("cannot start `{self}`"))?;
        // Otherwise the builder would keep its write ends open.
        self.command.stdout(Stdio::null()).stderr(Stdio::null());

        // The pipe closes when the last process with a write end exits, possibly long after the
        // program. So a mark in the pipe follows the program's output.
        let mark = format!("\0{} ended\0\n", child.id());
        let (read, status) = thread::scope(|scope| {
            let waiting = scope.spawn(|| {
                let status = child.wait();
                // The reader is dropped if `on_line` failed.
                let _ = writer.write_all(mark.as_bytes());
                status
            });
            (lines_until(reader, mark.trim_end(), &mut on_line), waiting.join())
        });
        read?;
        let status = status.map_err(|_| anyhow!("the thread that waits for `{self}` panicked"))?;
        status.with_context(|| format!("cannot wait for `{self}`"))
    }

    /// Whether `timeout` has ended the program: by its own code, or by a kill after 10 s.
    fn is_over_limit(&self, status: ExitStatus) -> bool {
        self.limit.is_some() && matches!(status.code(), Some(124 | 137))
    }

    fn failure(&self, status: ExitStatus) -> String {
        match self.limit {
            Some(limit) if self.is_over_limit(status) => {
                format!("was ended after its limit of {limit} s; it hangs, or the machine is busy")
            }
            _ => format!("failed ({status})"),
        }
    }
}

/// Passes the lines of `reader` to `on_line` until a line ends with `mark`, or `on_line` fails.
fn lines_until(
    reader: impl Read,
    mark: &str,
    on_line: &mut impl FnMut(&str) -> Result<()>,
) -> Result<()> {
    let mut reader = BufReader::new(reader);
    let mut bytes = Vec::new();
    while reader.read_until(b'\n', &mut bytes).context("cannot read a program's output")? > 0 {
        let text = String::from_utf8_lossy(&bytes);
        let line = text.trim_end_matches(['\n', '\r']);
        if let Some(last) = line.strip_suffix(mark) {
            // The last line may have no line feed.
            return if last.is_empty() { Ok(()) } else { on_line(last) };
        }
        on_line(line)?;
        bytes.clear();
    }
    Ok(())
}

impl fmt::Display for Tool {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str(&self.line)
    }
}

/// Returns a variable of this program's environment, if it is set to valid Unicode.
#[expect(clippy::disallowed_methods, reason = "the ban is for library crates; this is a tool")]
pub fn environment(name: &str) -> Option<String> {
    std::env::var(name).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shell(script: &str) -> Tool {
        Tool::new(&Workspace::load().unwrap(), "sh").args(["-c", script])
    }

    fn lines(script: &str) -> (Vec<String>, bool) {
        let mut lines = Vec::new();
        let succeeded = shell(script).each_line(|line| {
            lines.push(line.to_owned());
            Ok(())
        });
        (lines, succeeded.unwrap())
    }

    #[test]
    fn both_streams_come_in_order() {
        let (lines, succeeded) = lines("echo a; echo b >&2; echo c; printf d");
        assert_eq!(lines, ["a", "b", "c", "d"]);
        assert!(succeeded);
    }

    #[test]
    fn a_failure_is_reported_and_bytes_that_are_no_text_pass() {
        let (lines, succeeded) = lines(r"printf '\377\n'; exit 3");
        assert_eq!(lines, ["\u{fffd}"]);
        assert!(!succeeded);
    }

    #[test]
    fn a_remaining_process_does_not_keep_the_output_open() {
        // The process exits when the folder is removed. Waiting for it would last forever.
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().display();
        let (lines, succeeded) =
            lines(&format!("(while [ -e '{path}' ]; do sleep 0.1; done) & echo done"));
        assert_eq!((lines, succeeded), (vec![String::from("done")], true));
        let script = format!("(while [ -e '{path}' ]; do sleep 0.1; done) & printf done");
        assert_eq!(shell(&script).stdout().unwrap(), "done\n");
    }

    #[test]
    fn an_error_of_the_callback_ends_the_program() {
        // More than the capacity of the pipe, so the program ends only if it is killed.
        let tool = shell("yes");
        let error = tool.each_line(|line| bail!("{line} is enough")).unwrap_err();
        assert_eq!(error.to_string(), "y is enough");
    }

    #[test]
    fn a_program_that_hangs_is_ended() {
        let error = shell("exec sleep 600").within(1).run().unwrap_err().to_string();
        assert!(
            error.starts_with("`sh -c exec sleep 600` was ended after its limit of 1 s"),
            "{error}"
        );
        let mut lines = Vec::new();
        let hanging = shell("echo $A; exec sleep 600").env("A", "begun").within(1).env("B", "c");
        let succeeded = hanging.each_line(|line| {
            lines.push(line.to_owned());
            Ok(())
        });
        assert!(!succeeded.unwrap() && lines.len() == 2, "{lines:?}");
        assert!(lines[0] == "begun" && lines[1].contains("limit of 1 s"), "{lines:?}");
    }

    #[test]
    fn a_limit_changes_nothing_for_a_program_that_ends() {
        let program = || shell("echo $A; exit 3").env("A", "b").within(60);
        assert!(program().run().unwrap_err().to_string().contains("failed (exit status: 3)"));
        assert_eq!(shell("echo $A").within(60).env("A", "b").stdout().unwrap(), "b\n");
    }

    #[test]
    fn a_tool_shows_its_command_line() {
        assert_eq!(shell("true").env("A", "b c").to_string(), "A=\"b c\" sh -c true");
    }
}
