//! `cargo xtask bench pool`: pools beside the designs that they replace.
//!
//! - `hit/…`: acquire and release of cached blocks of 4 to 512 KiB, by one thread and by two;
//! - `handover/…`: blocks acquired by one thread and released by another;
//! - `stream/…`: a block acquired on a stream and released there;
//! - `replay/…`: random and serving-like sequences over a simulated device: time of a step, and
//!   the most that was held beside the most that was asked for;
//! - `budget/…`: reservations in a tree of budgets.
#![forbid(unsafe_code)]

mod baselines;
mod budgets;
mod hits;
mod pairing;
mod replays;

use std::process::ExitCode;

use clap::Parser;
use terrane_bench::Settings;

/// Pools beside a DashMap of ArrayQueues, a mutexed table, malloc and offset-allocator.
#[derive(Parser)]
struct Arguments {
    #[command(flatten)]
    settings: Settings,
}

fn main() -> ExitCode {
    let Arguments { settings } = Arguments::parse();
    terrane_bench::run("pool", &settings, |settings, reporter| {
        hits::run(settings, reporter)?;
        budgets::run(settings, reporter)?;
        replays::run(reporter)
    })
}
