//! `soak`: pools under random load, with exact counters at the end.

use anyhow::{Context, Result, bail};

use crate::command::Tool;
use crate::workspace::Workspace;

const CRATE: &str = "terrane-pool";
const EXAMPLE: &str = "soak";

/// The options of `cargo xtask soak`.
#[derive(Debug, clap::Args)]
pub struct Arguments {
    /// The duration in seconds
    #[arg(long, value_name = "N", default_value_t = 60)]
    seconds: u64,
    /// The seed of sizes, faults and choices of the threads
    #[arg(long, value_name = "N", default_value_t = 1)]
    seed: u64,
    /// The number of threads that use a pool at once
    #[arg(long, value_name = "N", default_value_t = 4)]
    threads: u64,
}

impl Arguments {
    /// The options of the gate: every policy and every stack runs at least once.
    pub fn short() -> Self {
        Self { seconds: 5, seed: 1, threads: 4 }
    }
}

/// Runs the example in release mode; it fails at the first lost byte.
pub fn run(workspace: &Workspace, arguments: &Arguments) -> Result<()> {
    let pool =
        workspace.member(CRATE).with_context(|| format!("the workspace has no crate `{CRATE}`"))?;
    if !pool.targets.iter().any(|target| target.is_example() && target.name == EXAMPLE) {
        bail!("the crate `{CRATE}` has no example `{EXAMPLE}`");
    }
    let Arguments { seconds, seed, threads } = arguments;
    Tool::cargo(workspace)
        .args(["run", "--quiet", "--release", "--package", CRATE, "--example", EXAMPLE, "--"])
        .args(["--seconds", &seconds.to_string(), "--seed", &seed.to_string()])
        .args(["--threads", &threads.to_string()])
        .run()
}
