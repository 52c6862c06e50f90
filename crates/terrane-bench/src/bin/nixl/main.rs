//! Transfers, registrations and descriptions through Terrane, beside the same through the bindings of
//! NIXL alone: two agents of one process, over UCX, between the same memory.

mod metadata;
mod ours;
mod raw;
mod registration;
mod transfers;

use std::process::ExitCode;

use clap::Parser;
use terrane_bench::{Settings, run};
use terrane_core::ByteCount;

/// Measures what Terrane adds to NIXL, and what it saves.
#[derive(Parser)]
struct Arguments {
    #[command(flatten)]
    settings: Settings,
    /// The larger of the two amounts that are moved, in MiB
    #[arg(long, default_value_t = 1024)]
    size_mib: u32,
}

/// What is moved in the smaller cases.
const SMALL: ByteCount = ByteCount::mib(64);

fn main() -> ExitCode {
    let arguments = Arguments::parse();
    run("nixl", &arguments.settings, |settings, reporter| {
        // Without it the bindings would end the process at their first call.
        terrane_nixl::probe()?;
        let large = ByteCount::mib(arguments.size_mib);
        transfers::measure(SMALL, settings, reporter)?;
        if large != SMALL {
            // Long copies differ less from one another, and take their time.
            let fewer = Settings { repeats: settings.repeats.div_ceil(3), ..settings.clone() };
            transfers::measure(large, &fewer, reporter)?;
        }
        metadata::measure(settings, reporter)?;
        registration::measure(large, settings, reporter)
    })
}
