//! Copies of blocks between a GPU and pinned memory, compared with the driver's own rate on the
//! same machine in the same run.

mod allocation;
mod bindings;
mod blocks;
mod by_hand;
mod checksums;
mod formats;
mod interference;
mod latency;
mod methods;
mod pageable_baseline;
mod peer;
mod pools;
mod predictions;
mod product;
mod relayout;
mod relays;
mod setup;
mod shapes;

use std::path::PathBuf;
use std::process::ExitCode;

use clap::Parser;
use terrane_bench::{Settings, run};

use setup::{Setup, first_device};

/// Measures copies between a GPU and pinned memory.
#[derive(Parser)]
struct Arguments {
    #[command(flatten)]
    settings: Settings,
    /// The device, by its ordinal
    #[arg(long, value_name = "N", default_value_t = 0)]
    device: u32,
    /// The size of the copies of each case, in MiB
    #[arg(long, value_name = "N", default_value_t = 256)]
    moved_mib: u32,
    /// A saved calibration; measured now if not given
    #[arg(long, value_name = "FILE")]
    calibration: Option<PathBuf>,
    /// The cuBLAS library, for the matrix product; searched in the usual directories if not given
    #[arg(long, value_name = "LIBRARY")]
    cublas: Option<PathBuf>,
    /// The directory of the file for relayed transfers; its disk is measured
    #[arg(long, value_name = "FOLDER", default_value = ".")]
    directory: PathBuf,
    /// Copies a few MiB a few times, to test the suite without a useful measurement
    #[arg(long)]
    smoke: bool,
}

fn main() -> ExitCode {
    let mut arguments = Arguments::parse();
    if arguments.smoke {
        arguments.settings.warm_up = 0;
        arguments.settings.repeats = 1;
    }
    run("gpu", &arguments.settings, |settings, reporter| {
        let context = match first_device(arguments.device) {
            Ok(context) => context,
            Err(reason) => {
                reporter.skip("all cases", &reason.to_string());
                return Ok(());
            }
        };
        let setup = Setup::new(context, &arguments)?;
        blocks::report(&setup, settings, reporter)?;
        latency::report(&setup, settings, reporter)?;
        checksums::report(&setup, settings, reporter)?;
        relayout::report(&setup, settings, reporter)?;
        formats::report(&setup, settings, reporter)?;
        pageable_baseline::report(&setup, settings, reporter)?;
        interference::report(&setup, arguments.cublas.as_deref(), settings, reporter)?;
        allocation::report(&setup, settings, reporter)?;
        pools::report(&setup, settings, reporter)?;
        peer::report(&setup, arguments.cublas.as_deref(), settings, reporter)?;
        relays::report(&setup, &arguments.directory, settings, reporter)?;
        setup.predictions.conclude(reporter)
    })
}
