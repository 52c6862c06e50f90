//! The command `terrane`.
//!
//! # Should I be using this crate?
//!
//! Install it for its program. As a library it has one function, [`run`]. Another program, such as
//! the entry point of a Python wheel, offers the same command with it. The logic is in other
//! crates: plans in `terrane-plan`, capability reports in `terrane-storage` and `terrane-cuda`,
//! copies in `terrane-transfer`.
//!
//! # Limits of this crate
//!
//! It needs no GPU. It changes no setting of the machine: it prints the commands that would do so.
//! Only these commands write files:
//!
//! - `store clear` and `store scrub` remove blocks of a store.
//! - `bench disk`, `bench store` and `doctor DIR` write temporary files in the directory.
//! - `layout` with a tier on disk creates temporary files in the system's temporary directory.
//! - `layout --svg`, `--html` and `doctor --machine-file` write the files in their arguments.

#![forbid(unsafe_code)]

mod child;
mod cli;
mod commands;
mod error;
mod measure;
mod output;
mod restart;
mod table;

use std::ffi::OsString;

pub use error::ExitStatus;
pub use restart::Restart;

/// Runs the command with its arguments; the first is the program's name. Prints to standard output
/// and standard error. Returns the exit status of the program.
///
/// `restart` describes how to start the command in a child process. Probes need a child process
/// because they may crash or hang.
pub fn run(
    arguments: impl IntoIterator<Item = impl Into<OsString> + Clone>,
    restart: &Restart,
) -> ExitStatus {
    cli::run(arguments, restart, &mut output::Output::standard())
}
