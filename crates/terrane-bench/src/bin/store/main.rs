//! The block store, compared with its layers and with other designs.
//!
//! One caller runs gets and puts over one directory. The baselines are the disk engine alone, the
//! I/O queue alone, and fio. Another baseline is a tier with one file for each block and one thread
//! for each request, the design of file tiers in serving engines.

#![deny(unsafe_code)]

mod blocks;
mod calls;
mod file_tier;
mod fio;
mod memory;
mod metrics;
mod mixed;
mod presence;
mod restart;

use std::path::PathBuf;
use std::process::ExitCode;

use clap::Parser;
use terrane_bench::{Settings, run};

/// Measures the block store.
#[derive(Parser)]
struct Arguments {
    #[command(flatten)]
    settings: Settings,
    /// The directory of the store; its disk is measured
    #[arg(long, default_value = "target")]
    directory: PathBuf,
    /// The number of resident keys in the queries
    #[arg(long, default_value_t = 1_000_000)]
    keys: u32,
    /// The number of blocks in the store that is opened again, of 4 KiB each on disk
    #[arg(long, default_value_t = 500_000)]
    blocks: u32,
    /// The duration of loads during stores, in seconds
    #[arg(long, default_value_t = 5)]
    seconds: u32,
}

fn main() -> ExitCode {
    let arguments = Arguments::parse();
    run("store", &arguments.settings, |settings, reporter| {
        for block in [1 << 20, 4 << 20] {
            blocks::measure(block, &arguments, settings, reporter)?;
        }
        calls::measure(&arguments, settings, reporter)?;
        mixed::measure(&arguments, reporter)?;
        presence::measure(&arguments, settings, reporter)?;
        metrics::measure(settings, reporter)?;
        restart::measure(&arguments, settings, reporter)
    })
}
