//! `cargo xtask bench pool`: pools, compared with the designs that they replace.
//!
//! - `hit/…`: acquire and release of cached blocks of 4 to 512 KiB, by one thread and by two;
//! - `handover/…`: blocks acquired by one thread and released by another;
//! - `stream/…`: a block acquired on a stream and released there;
//! - `replay/…`: random and serving-like sequences, by one thread and by two. All designs use the same
//!   upstream, once at the cost of a driver and once free. The cases measure the time of a step, and
//!   the ratio of the peaks of held and of requested bytes;
//! - `full/…`: mixed sizes in a full pool: held and requested bytes, and a refusal;
//! - `budget/…`: reservations in a tree of budgets.
#![forbid(unsafe_code)]

mod baselines;
mod budgets;
mod full;
mod hits;
mod pairing;
mod programs;
mod replays;

use std::process::ExitCode;

use clap::Parser;
use terrane_bench::Settings;

/// Compares pools with a DashMap of ArrayQueues, a mutexed table, malloc and offset-allocator.
#[derive(Parser)]
struct Arguments {
    #[command(flatten)]
    settings: Settings,
}

fn main() -> ExitCode {
    let Arguments { settings } = Arguments::parse();
    terrane_bench::run("pool", &settings, |settings, reporter| {
        for group in GROUPS.into_iter().filter(|group| may_want(settings, group)) {
            match group {
                "full/" => full::run(settings, reporter)?,
                "hit/" => hits::run(settings, reporter)?,
                "handover/" => hits::handover(settings, reporter)?,
                "stream/" => hits::stream(settings, reporter)?,
                "budget/" => budgets::run(settings, reporter)?,
                _ => replays::run(settings, reporter)?,
            }
        }
        Ok(())
    })
}

/// The prefixes of the names of all cases.
const GROUPS: [&str; 6] = ["full/", "hit/", "handover/", "stream/", "budget/", "replay/"];

/// Whether the filter may select a case of `group`. A filter that names another group does not.
fn may_want(settings: &Settings, group: &str) -> bool {
    let named = settings
        .filter
        .as_deref()
        .and_then(|filter| GROUPS.into_iter().find(|known| filter.starts_with(known)));
    named.is_none_or(|named| named == group)
}
