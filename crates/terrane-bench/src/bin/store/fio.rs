//! fio, as a baseline.

use std::path::Path;
use std::process::Command;

use anyhow::{Context, Result, bail};
use serde_json::Value;

/// Returns the reason why fio cannot run, or `None` if it can.
pub fn reason_against() -> Option<String> {
    let error = Command::new("fio").arg("--version").output().err()?;
    Some(format!("fio, a baseline, cannot be run: {error}"))
}

/// Reads or writes the first `bytes` bytes of a file for half a second, with 32 requests in flight.
/// Returns the rate in GB/s. fio touches its buffers before that time.
pub fn rate(path: &Path, is_write: bool, block: u32, bytes: u64) -> Result<f64> {
    let direction = if is_write { "write" } else { "read" };
    let mut command = pass(path, direction, block, bytes);
    command.args(["--time_based", "--ramp_time=500ms", "--runtime=500ms"]);
    let report = report(&mut command)?;
    let rate = report["jobs"][0][direction]["bw_bytes"].as_f64();
    Ok(rate.context("fio's report has no rate")? / 1e9)
}

/// Writes the first `bytes` bytes of a file once.
pub fn fill(path: &Path, block: u32, bytes: u64) -> Result<()> {
    report(&mut pass(path, "write", block, bytes)).map(|_| ())
}

/// A pass over the first `bytes` bytes of a file.
fn pass(path: &Path, direction: &str, block: u32, bytes: u64) -> Command {
    let mut command = start();
    command
        .args(["--name=pass", "--overwrite=1", "--iodepth=32", &format!("--rw={direction}")])
        .args([format!("--bs={block}"), format!("--filename={}", path.display())])
        .arg(format!("--size={bytes}"));
    command
}

/// Loads and stores with the rates of the store.
pub struct Mix<'a> {
    pub path: &'a Path,
    /// The size of a load, in bytes.
    pub load: u64,
    pub loads_a_second: f64,
    /// The size of a request of a store, in bytes.
    pub store: u64,
    /// In bytes per second.
    pub store_rate: f64,
    /// The number of store requests in flight.
    pub store_depth: usize,
    /// The middle of the file. Loads are read from the first half, and stores are written to the
    /// second.
    pub half: u64,
    pub seconds: u32,
}

impl Mix<'_> {
    /// Returns the 99th percentile of the loads in seconds, and the rate of the stores in GB/s.
    pub fn run(&self) -> Result<(f64, f64)> {
        let Self { path, load, loads_a_second, store, store_rate, store_depth, half, seconds } =
            self;
        // A rate of bytes may be less than one load a second. A rate of 0 would be no limit.
        let load_rate = (*load as f64 * loads_a_second).max(1.0);
        let store_rate = store_rate.max(1.0);
        let mut command = start();
        command
            // Percentiles of whole loads, with their submission, as the store's are measured.
            .args(["--lat_percentiles=1", "--clat_percentiles=0"])
            .args([format!("--filename={}", path.display()), format!("--size={half}")])
            .args(["--time_based", &format!("--runtime={seconds}")])
            .args(["--name=loads", "--rw=read", "--offset=0", "--iodepth=1"])
            .args([format!("--bs={load}"), format!("--rate={load_rate:.0}")])
            .args(["--name=stores", "--rw=write", &format!("--offset={half}")])
            .args([format!("--bs={store}"), format!("--iodepth={store_depth}")])
            .arg(format!("--rate={store_rate:.0}"));
        let report = report(&mut command)?;
        let jobs = &report["jobs"];
        let p99 = jobs[0]["read"]["lat_ns"]["percentile"]["99.000000"].as_f64();
        let rate = jobs[1]["write"]["bw_bytes"].as_f64();
        let p99 = p99.context("fio's report has no percentile")?;
        Ok((p99 / 1e9, rate.context("fio's report has no rate")? / 1e9))
    }
}

fn start() -> Command {
    let mut command = Command::new("fio");
    command
        .args(["--output-format=json", "--direct=1", "--thread", "--ioengine=io_uring"])
        // Puts fio's buffers on huge pages, as in the store.
        .env("GLIBC_TUNABLES", "glibc.malloc.hugetlb=1");
    command
}

fn report(command: &mut Command) -> Result<Value> {
    let output = command.output().context("fio cannot be run")?;
    if !output.status.success() {
        bail!("fio failed: {}", String::from_utf8_lossy(&output.stderr));
    }
    serde_json::from_slice(&output.stdout).context("fio's report cannot be read")
}
