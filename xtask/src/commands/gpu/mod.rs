//! `gpu`: GPU tests and benchmarks, as a folder for machines without Rust.

mod bundle;
#[cfg(test)]
mod tests;

use std::ffi::OsString;
use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::Result;

use crate::command::Tool;
use crate::workspace::Workspace;

/// The options of `cargo xtask gpu`.
#[derive(Debug, clap::Args)]
pub struct Arguments {
    #[command(subcommand)]
    action: Action,
}

#[derive(Debug, clap::Subcommand)]
enum Action {
    /// Builds all GPU tests and benchmarks into one folder with a `run.sh`, at most 48 MiB packed
    ///
    /// The folder has release builds of every test binary named `gpu`, and of the benchmark suites
    /// `gpu` and `nixl`. It also has the calibration, the kernel rates, the examples `offload` and
    /// `remote`, the command `terrane`, and the Python tests with their package. NIXL is included
    /// and fetched if necessary. Copy the folder, or `target/gpu-bundle.tar.gz` with the same
    /// content, to a machine with an NVIDIA driver. Run `./run.sh` there; `./run.sh --help` lists
    /// its options. It needs a POSIX shell, awk and tar, but no Rust and no CUDA toolkit.
    Bundle {
        /// The folder; an earlier bundle in it is replaced [default: target/gpu-bundle]
        #[arg(long, value_name = "DIRECTORY")]
        output: Option<PathBuf>,
    },
    /// Builds the bundle and runs it here, for machines with Rust and a GPU
    ///
    /// Without a GPU, skips all tests and prints the reason.
    Test {
        /// The arguments of `run.sh`
        #[arg(trailing_var_arg = true, allow_hyphen_values = true, value_name = "ARGUMENTS")]
        arguments: Vec<OsString>,
    },
}

/// Builds the bundle, and runs it if requested.
pub fn run(workspace: &Workspace, arguments: &Arguments) -> Result<ExitCode> {
    let default = || workspace.target().join("gpu-bundle");
    match &arguments.action {
        Action::Bundle { output } => {
            bundle::make(workspace, &output.clone().unwrap_or_else(default))?;
            Ok(ExitCode::SUCCESS)
        }
        Action::Test { arguments } => {
            let folder = default();
            bundle::make(workspace, &folder)?;
            let code = Tool::new(workspace, folder.join("run.sh")).args(arguments).exit_code()?;
            Ok(ExitCode::from(u8::try_from(code).unwrap_or(u8::MAX)))
        }
    }
}
