//! The block store, beside what it is built on and beside what others do.
//!
//! Gets and puts run from one caller over one directory. They are compared with the disk engine alone,
//! with the queue of requests alone, with fio, and with a tier that keeps one file for each block and
//! uses one thread for each request, as the file tiers of serving engines do.

#![deny(unsafe_code)]

mod blocks;
mod calls;
mod file_tier;
mod fio;
mod memory;
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
    /// The directory of the store; the disk that it is on is measured
    #[arg(long, default_value = "target")]
    directory: PathBuf,
    /// The resident keys of the queries
    #[arg(long, default_value_t = 1_000_000)]
    keys: u32,
    /// The blocks of the store that is opened again, of 4 KiB each on disk
    #[arg(long, default_value_t = 500_000)]
    blocks: u32,
    /// The seconds in which loads run under stores
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
        restart::measure(&arguments, settings, reporter)
    })
}
