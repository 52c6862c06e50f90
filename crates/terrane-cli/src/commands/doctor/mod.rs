//! `terrane doctor`.

mod directory;
mod finding;
mod gpu;
mod host;
mod measure;
mod nixl;
mod probe;
pub(crate) mod this_machine;

use std::path::PathBuf;
use std::thread;
use std::time::Instant;

use clap::{Args, ValueEnum};
use serde::Serialize;
use terrane_core::ByteCount;

use crate::commands::sizes::size;
use crate::error::{ExitStatus, Failure};
use crate::output::Output;
use crate::restart::Restart;
use crate::table::{duration, wrap};
use finding::{Finding, Status};
use probe::{Measured, ProbeResult, probe_in_child};

/// The arguments of `terrane doctor`.
#[derive(Args, Debug)]
pub(crate) struct Arguments {
    /// Directories to examine
    directories: Vec<PathBuf>,
    /// Prints JSON
    #[arg(long)]
    json: bool,
    /// Also measures memory, the directories and the bus, for about 5 seconds
    #[arg(long)]
    measure: bool,
    /// Bytes of each case of --measure
    #[arg(long, value_name = "SIZE", default_value = "256MiB", value_parser = size)]
    size: ByteCount,
    /// Exits with 3 if any of these capabilities is not granted
    #[arg(long, value_name = "NAME", value_delimiter = ',')]
    require: Vec<Requirement>,
    /// Writes a description of this machine for `terrane plan --machine`
    #[arg(long, value_name = "FILE")]
    machine_file: Option<PathBuf>,
    /// Internal: the probe of a child process
    #[arg(long, hide = true)]
    probe: Option<String>,
}

/// The names that `--require` accepts: the keys of findings.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Requirement {
    Gpu,
    Kernels,
    Pinned,
    Nixl,
    Cufile,
    DirectIo,
    UnnamedFile,
    Preallocation,
    #[value(name = "io_uring", alias = "io-uring")]
    IoUring,
    RegisteredBuffers,
    HugePages,
    TransparentHugePages,
    Memlock,
    Shm,
    Numa,
    ControlGroup,
}

/// The report as JSON.
#[derive(Debug, Serialize)]
struct Report {
    schema: &'static str,
    findings: Vec<Finding>,
    /// The time that the driver needed to start, if it started.
    driver_start_seconds: Option<f64>,
    /// The time that NIXL needed to start, if it started.
    nixl_start_seconds: Option<f64>,
    /// The time of all probes.
    seconds: f64,
    measured: Vec<Measured>,
}

pub(crate) fn run(
    arguments: &Arguments,
    restart: &Restart,
    output: &mut Output<'_>,
) -> Result<ExitStatus, Failure> {
    if let Some(probe) = &arguments.probe {
        output.json(&run_probe(probe, arguments.size)?)?;
        return Ok(ExitStatus::Success);
    }
    let mut report = examine(arguments, restart);
    if arguments.measure {
        report.measured = measure::all(&arguments.directories, arguments.size, restart);
    }
    if let Some(file) = &arguments.machine_file {
        let mut machine = this_machine::facts(restart, &arguments.directories);
        machine.rates = measure::rates(&report.measured);
        crate::commands::files::write(file, &format!("{}\n", machine.to_json()?))?;
    }
    if arguments.json {
        output.json(&report)?;
    } else {
        output.text(&text(&report))?;
    }
    let missing = missing(&arguments.require, &report.findings);
    if missing.is_empty() {
        return Ok(ExitStatus::Success);
    }
    output.error_line(&format!("terrane: required and not granted: {}", missing.join(", ")));
    Ok(ExitStatus::Missing)
}

fn examine(arguments: &Arguments, restart: &Restart) -> Report {
    let begun = Instant::now();
    // The driver and NIXL take most of the time, so they start first and run in parallel.
    let (gpu, nixl, mut findings) = thread::scope(|scope| {
        let gpu = scope.spawn(|| probe_in_child(restart, "gpu"));
        let nixl = scope.spawn(|| {
            if cfg!(feature = "nixl") { probe_in_child(restart, "nixl") } else { nixl::probe() }
        });
        let mut findings = host::findings();
        for directory in &arguments.directories {
            findings.extend(directory::findings(directory));
        }
        (gpu.join().unwrap_or_default(), nixl.join().unwrap_or_default(), findings)
    });
    let mut all = gpu.findings;
    all.append(&mut findings);
    all.extend(nixl.findings);
    all.push(gpu::cufile());
    Report {
        schema: "terrane.doctor/1",
        findings: all,
        driver_start_seconds: gpu.start_seconds,
        nixl_start_seconds: nixl.start_seconds,
        seconds: begun.elapsed().as_secs_f64(),
        measured: Vec::new(),
    }
}

/// Runs a probe in this process.
fn run_probe(probe: &str, size: ByteCount) -> Result<ProbeResult, Failure> {
    match probe {
        "gpu" => Ok(gpu::probe(true)),
        "gpu-facts" => Ok(gpu::probe(false)),
        "gpu-measure" => Ok(measure::device(size)),
        "nixl" => Ok(nixl::probe()),
        other => Err(Failure::Usage(format!("there is no probe {other:?}; use gpu or nixl"))),
    }
}

/// The requirements that are not granted everywhere.
fn missing(required: &[Requirement], findings: &[Finding]) -> Vec<String> {
    let names = required.iter().filter_map(|requirement| requirement.to_possible_value());
    let names = names.map(|value| value.get_name().to_owned());
    names
        .filter(|name| {
            let mut matching = findings.iter().filter(|finding| finding.key == *name).peekable();
            matching.peek().is_none() || matching.any(|finding| finding.status != Status::Granted)
        })
        .collect()
}

fn text(report: &Report) -> String {
    let mut text = String::new();
    for finding in &report.findings {
        let subject =
            finding.subject.as_ref().map_or_else(String::new, |subject| format!(" {subject}"));
        let line =
            format!("{:<8} {}{subject}: {}", finding.status.word(), finding.key, finding.detail);
        // `wrap` keeps runs of spaces, so the names are aligned in a column.
        text.push_str(&wrap(&line, "         "));
        if let Some(remedy) = &finding.remedy {
            text.push_str(&wrap(&format!("         do: {remedy}"), "             "));
        }
    }
    for measured in &report.measured {
        let word = if measured.bytes_per_second.is_some() { "measured" } else { "no rate " };
        text.push_str(&wrap(&format!("{word} {measured}"), "         "));
    }
    let start = |name: &str, seconds: Option<f64>| {
        seconds.map_or_else(String::new, |seconds| format!("; {name} {}", duration(seconds)))
    };
    text.push_str(&format!(
        "\n{} in all{}{}\n",
        duration(report.seconds),
        start("the driver", report.driver_start_seconds),
        start("NIXL", report.nixl_start_seconds)
    ));
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_requirement_holds_if_it_is_granted_everywhere() {
        let findings = [
            Finding::granted("direct-io", "works").about("/a"),
            Finding::refused("direct-io", "no", "ext4").about("/b"),
            Finding::granted("gpu", "driver"),
        ];
        assert_eq!(missing(&[Requirement::Gpu], &findings), [""; 0]);
        assert_eq!(missing(&[Requirement::DirectIo], &findings), ["direct-io"]);
        assert_eq!(missing(&[Requirement::DirectIo], &findings[..1]), [""; 0]);
        // Without a directory, there is no finding.
        assert_eq!(
            missing(&[Requirement::DirectIo, Requirement::IoUring], &[]),
            ["direct-io", "io_uring"]
        );
    }

    #[test]
    fn every_remedy_is_below_its_finding() {
        let report = Report {
            schema: "",
            findings: vec![Finding::refused("shm", "64 MiB free", "docker run --shm-size=8g")],
            driver_start_seconds: Some(0.25),
            nixl_start_seconds: None,
            seconds: 0.5,
            measured: Vec::new(),
        };
        let expected = "refused  shm: 64 MiB free\n         do: docker run --shm-size=8g\n\n\
                        500.000 ms in all; the driver 250.000 ms\n";
        assert_eq!(text(&report), expected.replace("500.000", "500").replace("250.000", "250"));
    }
}
