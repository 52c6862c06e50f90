//! fio, as the baseline.

use std::fmt;
use std::path::Path;
use std::process::Command;

use anyhow::{Context, Result, bail};

use crate::setup::Pages;

/// The mode in which fio submits its requests.
#[derive(Clone, Copy, Debug)]
pub enum Method {
    /// One thread for each request in flight. Each thread makes blocking calls in its own part of
    /// the file.
    Threads,
    IoUring,
    /// io_uring, with registered buffers and a registered file.
    Registered,
}

impl Method {
    pub const ALL: [Self; 3] = [Self::Threads, Self::IoUring, Self::Registered];
}

impl fmt::Display for Method {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Self::Threads => "psync threads",
            Self::IoUring => "io_uring",
            Self::Registered => "io_uring, registered buffers",
        })
    }
}

/// One pass over a file.
#[derive(Debug)]
pub struct Pass<'a> {
    pub path: &'a Path,
    pub is_write: bool,
    pub block: u64,
    /// A multiple of the block size times the depth.
    pub bytes: u64,
    pub depth: u32,
    pub pages: Pages,
}

/// Returns the reason why fio cannot run, or `None` if it can.
pub fn reason_against() -> Option<String> {
    let error = Command::new("fio").arg("--version").output().err()?;
    Some(format!("fio, the baseline, cannot be run: {error}"))
}

impl Pass<'_> {
    /// Runs fio and returns its rate in GB/s.
    pub fn run(&self, method: Method) -> Result<f64> {
        let Self { path, is_write, block, bytes, depth, pages } = *self;
        let direction = if is_write { "write" } else { "read" };
        let part = bytes / u64::from(depth);
        let mut command = Command::new("fio");
        command
            .args(["--name=pass", "--direct=1", "--overwrite=1", "--thread"])
            .args(["--output-format=json", "--group_reporting", &format!("--rw={direction}")])
            .args([format!("--bs={block}"), format!("--filename={}", path.display())])
            .env("GLIBC_TUNABLES", pages.tunables());
        match method {
            Method::Threads => command
                .args(["--ioengine=psync", &format!("--numjobs={depth}")])
                .args([format!("--size={part}"), format!("--offset_increment={part}")]),
            Method::IoUring | Method::Registered => command
                .args(["--ioengine=io_uring", &format!("--iodepth={depth}")])
                .arg(format!("--size={bytes}")),
        };
        if matches!(method, Method::Registered) {
            command.args(["--fixedbufs=1", "--registerfiles=1"]);
        }
        let output = command.output().context("fio cannot be run")?;
        if !output.status.success() {
            bail!("fio failed: {}", String::from_utf8_lossy(&output.stderr));
        }
        let report: serde_json::Value =
            serde_json::from_slice(&output.stdout).context("fio's report cannot be read")?;
        let done = &report["jobs"][0][direction];
        if done["io_bytes"].as_u64() != Some(bytes) {
            bail!("fio moved {} bytes, not {bytes}", done["io_bytes"]);
        }
        Ok(done["bw_bytes"].as_f64().context("fio's report has no rate")? / 1e9)
    }
}
