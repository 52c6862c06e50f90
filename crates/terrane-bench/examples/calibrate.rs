//! Measures how fast each copy path of a GPU is, prints it, and saves it for
//! `DeviceEngineOptions::calibration`.
//!
//! `cargo xtask calibrate`, or `calibrate` of a GPU bundle.

#![forbid(unsafe_code)]

use std::path::PathBuf;
use std::process::ExitCode;

use clap::Parser;
use terrane_core::DeviceId;
use terrane_cuda::{Calibration, CalibrationOptions, Context};

/// Measures the copy paths of a GPU.
///
/// Exits with 3 where there is none, and says what is missing.
#[derive(Parser)]
struct Arguments {
    /// Where the measured figures go, as JSON
    #[arg(long, value_name = "FILE")]
    output: Option<PathBuf>,
    /// The device, by its ordinal
    #[arg(long, value_name = "N", default_value_t = 0)]
    device: u32,
}

/// The machine cannot do what was asked.
const MACHINE: u8 = 3;

#[expect(clippy::print_stdout, clippy::print_stderr, reason = "a command line tool prints")]
fn main() -> ExitCode {
    let arguments = Arguments::parse();
    let context = match Context::primary(DeviceId::new(arguments.device)) {
        Ok(context) => context,
        Err(reason) => {
            eprintln!("error: nothing can be calibrated here: {reason}");
            return ExitCode::from(MACHINE);
        }
    };
    let measured = Calibration::measure(&context, &CalibrationOptions::default());
    let calibration = match measured {
        Ok(calibration) => calibration,
        Err(error) => {
            eprintln!("error: {error}");
            return ExitCode::FAILURE;
        }
    };
    println!("{calibration}");
    if let Some(output) = &arguments.output {
        if let Err(error) = calibration.save(output) {
            eprintln!("error: {error}");
            return ExitCode::FAILURE;
        }
        println!("saved in {}", output.display());
    }
    ExitCode::SUCCESS
}
