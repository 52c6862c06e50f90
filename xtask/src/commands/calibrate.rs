//! `calibrate`: measures the copy paths of this machine's GPU and saves the results.

use std::ffi::OsString;
use std::process::ExitCode;

use anyhow::Result;

use crate::command::Tool;
use crate::workspace::Workspace;

/// The options of `cargo xtask calibrate`.
#[derive(Debug, clap::Args)]
pub struct Arguments {
    /// The arguments of the program (`--output FILE`, `--device N`; `--help` lists them)
    #[arg(trailing_var_arg = true, allow_hyphen_values = true, value_name = "ARGUMENTS")]
    arguments: Vec<OsString>,
}

/// Runs the example `calibrate` of the benchmark crate in release mode.
pub fn run(workspace: &Workspace, arguments: &Arguments) -> Result<ExitCode> {
    let code = Tool::cargo(workspace)
        .args(["run", "--quiet", "--release", "--package", "terrane-bench"])
        .args(["--example", "calibrate", "--"])
        .args(&arguments.arguments)
        .exit_code()?;
    Ok(ExitCode::from(u8::try_from(code).unwrap_or(u8::MAX)))
}
