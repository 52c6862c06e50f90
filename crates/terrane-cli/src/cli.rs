//! The arguments, and the dispatch to commands.

use std::ffi::OsString;

use clap::error::ErrorKind;
use clap::{CommandFactory, Parser, Subcommand};

use crate::commands::{bench, doctor, layout, plan, store, top};
use crate::error::{ExitStatus, Failure};
use crate::output::Output;
use crate::restart::Restart;

/// Plans and examines the memory under an LLM serving engine.
#[derive(Debug, Parser)]
#[command(name = "terrane", version, max_term_width = 80, after_help = EXIT_STATUSES)]
struct Arguments {
    #[command(subcommand)]
    command: Command,
}

/// The table of exit statuses in the help text.
const EXIT_STATUSES: &str = "\
Exit status:
  0  the command succeeded
  1  the system refused an operation
  2  the arguments, or a file that they name, are not valid
  3  the machine lacks a capability that `doctor --require` lists
  4  `plan --check`: the plan exceeds a limit of the machine
  5  data is damaged";

#[derive(Debug, Subcommand)]
enum Command {
    /// Computes the memory that a model's KV cache needs on a machine
    Plan(Box<plan::Arguments>),
    /// Examines this machine, and prints a remedy for each refusal
    Doctor(doctor::Arguments),
    /// Draws the bytes of a block in each tier
    Layout(layout::Arguments),
    /// Compares copies of a model's blocks with the machine's limits
    Bench(bench::Arguments),
    /// Lists, examines, verifies, repairs or clears a store's directory
    Store(store::Arguments),
    /// Shows a live view of a store's metrics
    Top(top::Arguments),
    /// Prints a completion script for a shell
    Completions {
        /// The shell
        shell: clap_complete::Shell,
    },
}

/// Runs the command, and prints its failure.
pub(crate) fn run(
    arguments: impl IntoIterator<Item = impl Into<OsString> + Clone>,
    restart: &Restart,
    output: &mut Output<'_>,
) -> ExitStatus {
    let arguments = match Arguments::try_parse_from(arguments) {
        Ok(arguments) => arguments,
        Err(error) => return refuse(&error, output),
    };
    match dispatch(&arguments.command, restart, output) {
        Ok(status) => status,
        // The live view of `top` writes to the terminal itself, and has no verdict.
        Err(failure) if failure.is_closed_pipe() => ExitStatus::Success,
        Err(failure) => {
            output.error_line(&format!("terrane: {failure}"));
            failure.status()
        }
    }
}

/// Prints help and versions to standard output, and a usage error as one line.
fn refuse(error: &clap::Error, output: &mut Output<'_>) -> ExitStatus {
    let text = error.render().to_string();
    if !error.use_stderr() {
        return match output.text(&text) {
            Ok(()) => ExitStatus::Success,
            Err(_) => ExitStatus::Failure,
        };
    }
    if error.kind() == ErrorKind::DisplayHelpOnMissingArgumentOrSubcommand {
        // Without a command, the list of commands is the most useful output.
        output.error_line(text.trim_end());
    } else {
        output.error_line(&one_line(&text));
    }
    ExitStatus::Usage
}

/// The first paragraph and the tips of clap's message.
fn one_line(text: &str) -> String {
    let lines = text.lines().map(str::trim).filter(|line| !line.is_empty());
    let useful =
        lines.take_while(|line| !line.starts_with("Usage:") && !line.starts_with("For more"));
    let text = useful.collect::<Vec<_>>().join(" ");
    let text = text.strip_prefix("error: ").unwrap_or(&text);
    format!("terrane: {text}; see `terrane --help`")
}

fn dispatch(
    command: &Command,
    restart: &Restart,
    output: &mut Output<'_>,
) -> Result<ExitStatus, Failure> {
    match command {
        Command::Plan(arguments) => plan::run(arguments, restart, output),
        Command::Doctor(arguments) => doctor::run(arguments, restart, output),
        Command::Layout(arguments) => layout::run(arguments, output),
        Command::Bench(arguments) => bench::run(arguments, restart, output),
        Command::Store(arguments) => store::run(arguments, output),
        Command::Top(arguments) => top::run(arguments, output),
        Command::Completions { shell } => {
            let mut script = Vec::new();
            clap_complete::generate(*shell, &mut Arguments::command(), "terrane", &mut script);
            output.text(&String::from_utf8_lossy(&script))?;
            Ok(ExitStatus::Success)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_definition_of_the_arguments_is_sound() {
        Arguments::command().debug_assert();
    }

    #[test]
    fn the_help_has_every_exit_status() {
        let all = [
            ExitStatus::Success,
            ExitStatus::Failure,
            ExitStatus::Usage,
            ExitStatus::Missing,
            ExitStatus::LimitHit,
            ExitStatus::Damaged,
        ];
        for (number, status) in all.into_iter().enumerate() {
            assert_eq!(usize::from(status.code()), number);
            assert!(EXIT_STATUSES.contains(&format!("\n  {number}  ")), "{status:?}");
        }
    }

    #[test]
    fn without_a_command_the_commands_are_listed() {
        for arguments in [&["terrane"][..], &["terrane", "store"]] {
            let mut error = Vec::new();
            let restart = Restart::of_this_executable();
            let status = run(arguments, &restart, &mut Output::new(Vec::new(), &mut error, false));
            let text = String::from_utf8(error).unwrap();
            assert_eq!(status, ExitStatus::Usage);
            assert!(text.contains("Commands:") && text.contains("Usage: terrane"), "{text}");
        }
    }

    /// Standard output whose reader has ended.
    struct ClosedPipe;

    impl std::io::Write for ClosedPipe {
        fn write(&mut self, _: &[u8]) -> std::io::Result<usize> {
            Err(std::io::ErrorKind::BrokenPipe.into())
        }

        fn flush(&mut self) -> std::io::Result<()> {
            Ok(())
        }
    }

    #[test]
    fn a_closed_pipe_keeps_the_status_of_the_result() {
        let restart = Restart::of_this_executable();
        for (check, expected) in
            [(&[][..], ExitStatus::Success), (&["--check"], ExitStatus::LimitHit)]
        {
            let arguments = ["terrane", "plan", "llama-3.1-8b", "--machine", "l4"];
            let arguments = arguments.iter().chain(["--gpu-mem", "8TiB"].iter()).chain(check);
            let mut error = Vec::new();
            let status = run(arguments, &restart, &mut Output::new(ClosedPipe, &mut error, false));
            assert_eq!((status, error.as_slice()), (expected, &b""[..]));
        }
    }

    #[test]
    fn a_usage_error_is_one_line() {
        let mut error = Vec::new();
        let arguments = ["terrane", "plan", "llama-3.1-8b", "--hots", "1GiB"];
        let restart = Restart::of_this_executable();
        let status = run(arguments, &restart, &mut Output::new(Vec::new(), &mut error, false));
        let text = String::from_utf8(error).unwrap();
        assert_eq!((status, text.lines().count()), (ExitStatus::Usage, 1), "{text}");
        assert!(text.contains("--host"), "{text}");
    }
}
