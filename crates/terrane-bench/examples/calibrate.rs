//! Measures the cost of each copy path of a GPU, prints the costs, and saves them for
//! `DeviceEngineOptions::calibration`.
//!
//! `cargo xtask calibrate`, or `calibrate` of a GPU bundle.

#![forbid(unsafe_code)]

use std::path::PathBuf;
use std::process::ExitCode;

use clap::Parser;
use comfy_table::{CellAlignment, Table, presets};
use terrane_core::{ByteCount, DeviceId};
use terrane_cuda::{Calibration, CalibrationOptions, Context, CopyPath, Direction};

/// Measures the copy paths of a GPU.
///
/// Without a GPU, prints the missing requirement and exits with 3.
#[derive(Parser)]
struct Arguments {
    /// The file for the measured costs, as JSON
    #[arg(long, value_name = "FILE")]
    output: Option<PathBuf>,
    /// The device, by its ordinal
    #[arg(long, value_name = "N", default_value_t = 0)]
    device: u32,
    /// The size of a transfer, in MiB; the default saturates the bus of any device
    #[arg(long, value_name = "N")]
    moved_mib: Option<u32>,
}

/// The exit status if the machine lacks a requirement.
const MACHINE: u8 = 3;

#[expect(clippy::print_stdout, clippy::print_stderr, reason = "a command line tool prints")]
fn main() -> ExitCode {
    let arguments = Arguments::parse();
    let context = match Context::primary(DeviceId::new(arguments.device)) {
        Ok(context) => context,
        Err(reason) => {
            eprintln!("error: cannot calibrate: {reason}");
            return ExitCode::from(MACHINE);
        }
    };
    let mut options = CalibrationOptions::default();
    if let Some(moved) = arguments.moved_mib {
        options.bytes = ByteCount::mib(moved);
    }
    let calibration = match options.measure(&context) {
        Ok(calibration) => calibration,
        Err(error) => {
            eprintln!("error: {error}");
            return ExitCode::FAILURE;
        }
    };
    println!("{}, CUDA {}\n{}", calibration.device(), calibration.driver(), table(&calibration));
    if let Some(output) = &arguments.output {
        if let Err(error) = calibration.save(output) {
            eprintln!("error: {error}");
            return ExitCode::FAILURE;
        }
        println!("saved in {}", output.display());
    }
    ExitCode::SUCCESS
}

/// The cost of each path in each direction that it supports.
fn table(calibration: &Calibration) -> Table {
    let mut table = Table::new();
    table.load_style(presets::ASCII_MARKDOWN).set_header([
        "direction",
        "path",
        "fixed, us",
        "a piece, ns",
        "a short piece, ns",
        "GB/s",
    ]);
    for direction in Direction::ALL {
        for path in CopyPath::ALL {
            let Some(cost) = calibration.cost(direction, path) else { continue };
            table.add_row([
                format!("{direction:?}"),
                path.name().to_owned(),
                format!("{:.1}", cost.fixed.as_secs_f64() * 1e6),
                format!("{:.2}", cost.per_piece_ns),
                format!("{:.2}", cost.per_short_piece_ns),
                format!("{:.1}", cost.bytes_per_second * 1e-9),
            ]);
        }
    }
    for column in table.column_iter_mut().skip(2) {
        column.set_cell_alignment(CellAlignment::Right);
    }
    table
}
