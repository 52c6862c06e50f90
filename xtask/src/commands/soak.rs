//! `soak`: pools under random load, with exact counters at the end.

use anyhow::{Context, Result};

use crate::command::MOST_SECONDS;
use crate::commands::examples::example;
use crate::workspace::Workspace;

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
    /// The options of the gate: long enough for every policy and every stack to run at least once.
    pub const SHORT: Self = Self { seconds: 5, seed: 1, threads: 4 };
}

/// Runs the example; it fails at the first lost byte.
pub fn run(workspace: &Workspace, arguments: &Arguments) -> Result<()> {
    let Arguments { seconds, seed, threads } = arguments;
    let most = seconds.checked_add(MOST_SECONDS).context("--seconds is too large")?;
    example(workspace, EXAMPLE, most)?
        .args(["--seconds", &seconds.to_string(), "--seed", &seed.to_string()])
        .args(["--threads", &threads.to_string()])
        .run()
}
