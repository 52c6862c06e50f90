//! `soak`: pools under random load for a while, with exact accounts at the end.

use anyhow::{Context, Result, bail};

use crate::command::Tool;
use crate::workspace::Workspace;

const CRATE: &str = "terrane-pool";
const EXAMPLE: &str = "soak";

/// The options of `cargo xtask soak`.
#[derive(Debug, clap::Args)]
pub struct Arguments {
    /// How long
    #[arg(long, value_name = "N", default_value_t = 60)]
    seconds: u64,
    /// What the sizes, faults and choices of the threads are drawn from
    #[arg(long, value_name = "N", default_value_t = 1)]
    seed: u64,
    /// How many threads use a pool at once
    #[arg(long, value_name = "N", default_value_t = 4)]
    threads: u64,
}

impl Arguments {
    /// What the gate has time for: every policy and every stack has at least one turn.
    pub fn short() -> Self {
        Self { seconds: 5, seed: 1, threads: 4 }
    }
}

/// Runs the example in release mode; it fails at the first byte that is not accounted for.
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
