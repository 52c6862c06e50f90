//! Copies between host memory and files, compared with the best rate of fio for the same requests.
//!
//! Both programs use the same file, the same depth and buffers on pages of the same size. The page
//! size matters: a request of 1 MiB has one segment in huge pages and 256 in small pages, and each
//! segment costs the disk time. fio runs in three modes. The baseline is the mode with the lowest
//! ratio of engine to fio.

#![forbid(unsafe_code)]

mod fio;
mod setup;

use std::io::Write;
use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::Result;
use clap::Parser;
use terrane_bench::{Direction, Measurement, Reporter, Settings, Spread, run};
use terrane_layout::LayoutKind;

use fio::Method;
use setup::{Pages, Setup};

/// Measures copies between host memory and files.
#[derive(Parser)]
struct Arguments {
    #[command(flatten)]
    settings: Settings,
    /// The directory of the file; its disk is measured
    #[arg(long, default_value = "target")]
    directory: PathBuf,
    /// The size of the copies of each case, in MiB
    #[arg(long, default_value_t = 1024)]
    size_mib: u32,
    /// The number of requests in flight
    #[arg(long, default_value_t = 32)]
    depth: u32,
    /// The most memory that the engine registers with io_uring, in GiB; 0 for none
    #[arg(long, default_value_t = 4)]
    registered_gib: u32,
}

/// The shape of the blocks of a case.
struct Case {
    name: &'static str,
    layers: u32,
    piece: u64,
    kind: LayoutKind,
}

impl Case {
    fn block(&self) -> u64 {
        self.piece * u64::from(self.layers)
    }
}

/// Each block is one request. The blocks of 1 MiB and 4 MiB have one piece. The third case has the
/// 61 pieces of a block of a model with latent attention. These pieces are apart in memory and
/// adjacent in the file.
const CASES: [Case; 3] = [
    Case { name: "blocks of 1 MiB", layers: 1, piece: 1 << 20, kind: LayoutKind::FullyContiguous },
    Case { name: "blocks of 4 MiB", layers: 1, piece: 4 << 20, kind: LayoutKind::FullyContiguous },
    Case {
        name: "blocks of 61 pieces of 18,432 bytes",
        layers: 61,
        piece: 18_432,
        kind: LayoutKind::ALL[1],
    },
];

/// The minimum share of fio's rate.
const TARGET: f64 = 0.95;

fn main() -> ExitCode {
    let arguments = Arguments::parse();
    run("disk", &arguments.settings, |settings, reporter| {
        for case in &CASES {
            for pages in [Pages::Small, Pages::Huge] {
                measure(case, pages, &arguments, settings, reporter)?;
            }
        }
        Ok(())
    })
}

fn measure<W: Write>(
    case: &Case,
    pages: Pages,
    arguments: &Arguments,
    settings: &Settings,
    reporter: &mut Reporter<W>,
) -> Result<()> {
    let name = |is_write| {
        let direction = if is_write { "write" } else { "read" };
        format!("{direction} {}, {pages}, depth {}", case.name, arguments.depth)
    };
    let directions = [true, false].into_iter().filter(|&write| reporter.wants(&name(write)));
    let directions: Vec<bool> = directions.collect();
    if directions.is_empty() {
        return Ok(());
    }
    let reason = fio::reason_against().or_else(|| pages.reason_against());
    if let Some(reason) = reason {
        directions.iter().for_each(|&write| reporter.skip(&name(write), &reason));
        return Ok(());
    }
    let setup = Setup::new(case, pages, arguments)?;
    if !setup.is_direct() {
        let reason = "the file system has no direct I/O for these blocks";
        directions.iter().for_each(|&write| reporter.skip(&name(write), reason));
        return Ok(());
    }
    // The passes of this loop are not measured. The first pass writes the reserved disk blocks for
    // the first time, and in the others the engine measures which method is faster.
    for is_write in [true, false, true, false, true, false, true, false] {
        setup.pass(is_write)?;
    }
    for is_write in directions {
        let compared = Compared::measure(&setup, is_write, settings.repeats.max(1))?;
        let report = |suffix, spread, unit| {
            let name = format!("{}{suffix}", name(is_write));
            Measurement::new(name, spread, unit, Direction::HigherIsBetter)
        };
        let share = report("", compared.ratio, "of fio");
        let best = format!("fio, {}", compared.method);
        reporter.report(&share.with_baseline(best.as_str(), 1.0).at_least(TARGET))?;
        let rate = report(": rate", compared.terrane, "GB/s")
            .with_baseline(best, compared.baseline.median);
        reporter.report(&rate.without_target("the rates behind the share of fio"))?;
    }
    Ok(())
}

/// The rates of the engine and of the fio mode with the lowest ratio.
struct Compared {
    method: Method,
    ratio: Spread,
    terrane: Spread,
    baseline: Spread,
}

impl Compared {
    /// Measures pairs of passes, one by the engine and one by fio. Their order alternates, because
    /// a pass changes the state of the disk for the next one.
    fn measure(setup: &Setup, is_write: bool, pairs: u32) -> Result<Self> {
        let mut passes = Method::ALL.map(|method| (method, Vec::new(), Vec::new()));
        for round in 0..pairs {
            for (method, terrane, baseline) in &mut passes {
                if round % 2 == 0 {
                    terrane.push(setup.pass(is_write)?);
                    baseline.push(setup.fio(*method, is_write)?);
                } else {
                    baseline.push(setup.fio(*method, is_write)?);
                    terrane.push(setup.pass(is_write)?);
                }
            }
        }
        let spread = |values: &[f64]| Spread::of(values).unwrap_or(Spread::single(f64::NAN));
        let compared = passes.map(|(method, terrane, baseline)| {
            let ratios: Vec<f64> = terrane.iter().zip(&baseline).map(|(a, b)| a / b).collect();
            let [ratio, terrane, baseline] =
                [&ratios, &terrane, &baseline].map(|values| spread(values));
            Self { method, ratio, terrane, baseline }
        });
        let [first, rest @ ..] = compared;
        let lower = |a: Self, b: Self| if b.ratio.median < a.ratio.median { b } else { a };
        Ok(rest.into_iter().fold(first, lower))
    }
}
