//! `terrane bench`.

mod compare;
mod movers;
mod plot;
mod report;
mod suites;

use std::ffi::OsString;
use std::path::PathBuf;

use clap::{Args, Subcommand};
use terrane_core::ByteCount;

use crate::commands::files;
use crate::commands::model::ModelArguments;
use crate::commands::sizes::size;
use crate::error::{ExitStatus, Failure};
use crate::output::Output;
use crate::restart::Restart;
use report::Report;

/// The arguments of `terrane bench`.
#[derive(Args, Debug)]
#[command(args_conflicts_with_subcommands = true)]
pub(crate) struct Arguments {
    #[command(subcommand)]
    suite: Option<Suite>,
    /// Compares two reports that `--json` wrote
    #[arg(long, num_args = 2, value_names = ["A.json", "B.json"])]
    compare: Vec<PathBuf>,
}

#[derive(Debug, Subcommand)]
enum Suite {
    /// Copies within host memory, compared with memcpy
    Host {
        #[command(flatten)]
        options: Options,
    },
    /// Copies between host memory and a file, compared with a raw loop and fio
    Disk {
        /// The directory of the file
        directory: PathBuf,
        #[command(flatten)]
        options: Options,
        /// Requests in flight
        #[arg(long, value_name = "N", default_value_t = 32, value_parser = clap::value_parser!(u32).range(1..=4096))]
        depth: u32,
    },
    /// Copies between a GPU and pinned memory, compared with one contiguous copy
    Gpu {
        #[command(flatten)]
        options: Options,
    },
    /// Puts and gets of a store, compared with a raw loop over the same blocks
    Store {
        /// The directory of the store
        directory: PathBuf,
        #[command(flatten)]
        options: Options,
    },
    /// Methods of copying between a GPU and pinned memory, compared with Terrane's
    Movers {
        #[command(flatten)]
        options: Options,
        /// The Python interpreter for the PyTorch methods [default: python3; the current
        /// interpreter in the Python package]
        #[arg(long, value_name = "PROGRAM")]
        python: Option<OsString>,
    },
}

/// The options of every suite.
#[derive(Args, Debug)]
struct Options {
    #[command(flatten)]
    model: ModelArguments,
    /// Bytes of each case
    #[arg(long, value_name = "SIZE", default_value = "256MiB", value_parser = size)]
    size: ByteCount,
    /// Measured passes; the report has the median
    #[arg(long, value_name = "N", default_value_t = 9, value_parser = clap::value_parser!(u32).range(1..=1000))]
    passes: u32,
    /// Prints JSON
    #[arg(long)]
    json: bool,
    /// Writes a self-contained page with a plot
    #[arg(long, value_name = "FILE")]
    html: Option<PathBuf>,
}

pub(crate) fn run(
    arguments: &Arguments,
    restart: &Restart,
    output: &mut Output<'_>,
) -> Result<ExitStatus, Failure> {
    if let [before, after] = arguments.compare.as_slice() {
        output.text(&compare::render(&report::read(before)?, &report::read(after)?))?;
        return Ok(ExitStatus::Success);
    }
    let Some(suite) = &arguments.suite else {
        let text = "no suite was named; use host, disk DIR, store DIR, gpu or movers, or --compare A.json B.json";
        return Err(Failure::Usage(text.to_owned()));
    };
    let options = suite.options();
    let mut progress = suites::Progress::new(output.has_progress());
    let report = match suite {
        Suite::Host { .. } => suites::host(options, &mut progress),
        Suite::Disk { directory, depth, .. } => {
            suites::disk(options, directory, *depth, &mut progress)
        }
        Suite::Gpu { .. } => suites::gpu(options, &mut progress),
        Suite::Store { directory, .. } => suites::store(options, directory, &mut progress),
        Suite::Movers { python, .. } => {
            let python = python.as_deref().unwrap_or(restart.python());
            movers::movers(options, python, &mut progress)
        }
    }?;
    progress.end();
    print(&report, options, output)?;
    Ok(ExitStatus::Success)
}

fn print(report: &Report, options: &Options, output: &mut Output<'_>) -> Result<(), Failure> {
    if let Some(path) = &options.html {
        files::write(path, &plot::page(report)?)?;
    }
    if options.json { output.json(report) } else { output.text(&report.text()) }
}

impl Suite {
    fn options(&self) -> &Options {
        match self {
            Self::Host { options }
            | Self::Disk { options, .. }
            | Self::Store { options, .. }
            | Self::Gpu { options }
            | Self::Movers { options, .. } => options,
        }
    }
}
