//! Starting other programs, so that each failure names the command line to run again.

use std::ffi::OsStr;
use std::fmt;
use std::io::{self, BufRead, BufReader, Read};
use std::process::{Command, Stdio};
use std::sync::mpsc::{self, RecvTimeoutError};
use std::thread;
use std::time::Duration;

use anyhow::{Context, Result, bail};

use crate::workspace::Workspace;

/// A command line, started in the workspace's root.
pub struct Tool {
    command: Command,
    line: String,
}

impl Tool {
    /// The cargo that runs this program.
    pub fn cargo(workspace: &Workspace) -> Self {
        let program = environment("CARGO").unwrap_or_else(|| String::from("cargo"));
        let mut tool = Self::new(workspace, program);
        tool.line = String::from("cargo");
        tool
    }

    /// Any other program.
    pub fn new(workspace: &Workspace, program: impl AsRef<OsStr>) -> Self {
        let line = program.as_ref().to_string_lossy().into_owned();
        let mut command = Command::new(program);
        command.current_dir(workspace.root());
        Self { command, line }
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

    /// Takes a variable out of the program's environment.
    #[must_use]
    pub fn without_env(mut self, name: &str) -> Self {
        self.command.env_remove(name);
        self
    }

    /// Runs to the end on this terminal; anything but success is an error.
    pub fn run(mut self) -> Result<()> {
        let status = self.command.status().with_context(|| format!("cannot start `{self}`"))?;
        if !status.success() {
            bail!("`{self}` failed ({status})");
        }
        Ok(())
    }

    /// Runs to the end on this terminal and gives the exit code; death by a signal is an error.
    pub fn exit_code(mut self) -> Result<i32> {
        let status = self.command.status().with_context(|| format!("cannot start `{self}`"))?;
        status.code().with_context(|| format!("`{self}` was ended by a signal ({status})"))
    }

    /// Gives standard output as text, or nothing if the program is missing or fails.
    pub fn probe(mut self) -> Option<String> {
        let output = self.command.stderr(Stdio::null()).output().ok()?;
        output.status.success().then(|| String::from_utf8_lossy(&output.stdout).into_owned())
    }

    /// Gives standard output as text; standard error goes to this terminal.
    pub fn stdout(mut self) -> Result<String> {
        let output = self
            .command
            .stderr(Stdio::inherit())
            .output()
            .with_context(|| format!("cannot start `{self}`"))?;
        if !output.status.success() {
            print!("{}", String::from_utf8_lossy(&output.stdout));
            bail!("`{self}` failed ({})", output.status);
        }
        Ok(String::from_utf8_lossy(&output.stdout).into_owned())
    }

    /// Hands each line of standard output and standard error, in the order in which they were
    /// written, to `on_line`; answers whether the program succeeded.
    pub fn each_line(mut self, mut on_line: impl FnMut(&str) -> Result<()>) -> Result<bool> {
        // One pipe for both streams: two would lose their common order.
        let (reader, writer) = io::pipe().context("cannot create a pipe")?;
        self.command.stdout(writer.try_clone().context("cannot duplicate a pipe")?).stderr(writer);
        let mut child = self.command.spawn().with_context(|| format!("cannot start `{self}`"))?;
        // The builder keeps the writing ends open; the loop below would never see the end.
        self.command.stdout(Stdio::null()).stderr(Stdio::null());

        // The pipe ends when the last process that holds it does, which may be one that a test left
        // behind; so the lines come over a channel, and the program's own end ends the loop, too.
        let (sender, lines) = mpsc::channel();
        thread::Builder::new()
            .name(String::from("command output"))
            .spawn(move || {
                // A closed channel means that nobody listens any more.
                split_lines(reader, |line| sender.send(line).is_ok());
            })
            .context("cannot start a thread")?;
        let status = loop {
            match lines.recv_timeout(QUIET) {
                Ok(line) => on_line(&line)?,
                Err(RecvTimeoutError::Disconnected) => break child.wait(),
                Err(RecvTimeoutError::Timeout) => match child.try_wait() {
                    Ok(None) => {}
                    Ok(Some(status)) => break Ok(status),
                    Err(error) => break Err(error),
                },
            }
        };
        let status = status.with_context(|| format!("cannot wait for `{self}`"))?;
        Ok(status.success())
    }
}

/// How long a program that has ended must have been silent before its output is taken as complete.
const QUIET: Duration = Duration::from_millis(500);

/// Hands over the lines of `reader` until it ends, fails, or `on_line` says that it is enough.
fn split_lines(reader: impl Read, mut on_line: impl FnMut(String) -> bool) {
    let mut reader = BufReader::new(reader);
    let mut bytes = Vec::new();
    while reader.read_until(b'\n', &mut bytes).is_ok_and(|read| read > 0) {
        let line = String::from_utf8_lossy(&bytes).trim_end_matches(['\n', '\r']).to_owned();
        if !on_line(line) {
            return;
        }
        bytes.clear();
    }
}

impl fmt::Display for Tool {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str(&self.line)
    }
}

/// A variable of this program's own environment, if it is set to valid Unicode.
#[expect(clippy::disallowed_methods, reason = "the ban is for library crates; this is a tool")]
fn environment(name: &str) -> Option<String> {
    std::env::var(name).ok()
}

#[cfg(test)]
mod tests {
    use std::time::Instant;

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
    fn a_process_left_behind_does_not_hold_the_output_open() {
        let started = Instant::now();
        let (lines, succeeded) = lines("sleep 30 & echo done");
        assert_eq!((lines, succeeded), (vec![String::from("done")], true));
        assert!(started.elapsed() < Duration::from_secs(20));
    }

    #[test]
    fn a_tool_shows_its_command_line() {
        assert_eq!(shell("true").env("A", "b c").to_string(), "A=\"b c\" sh -c true");
    }
}
