//! Runs fio, if it is installed.

use std::path::Path;
use std::process::Command;

/// One pass over a file.
#[derive(Debug)]
pub(crate) struct Pass<'a> {
    pub path: &'a Path,
    pub is_write: bool,
    pub block: u64,
    pub bytes: u64,
    pub depth: u32,
}

/// Runs fio with io_uring and direct I/O. Returns its rate in bytes per second, or the reason why
/// there is none.
pub(crate) fn run(pass: &Pass<'_>) -> Result<f64, String> {
    let direction = if pass.is_write { "write" } else { "read" };
    let output = Command::new("fio")
        .args(["--name=pass", "--direct=1", "--overwrite=1", "--thread", "--ioengine=io_uring"])
        .args([
            "--output-format=json",
            &format!("--rw={direction}"),
            &format!("--bs={}", pass.block),
        ])
        .args([format!("--filename={}", pass.path.display()), format!("--size={}", pass.bytes)])
        .arg(format!("--iodepth={}", pass.depth))
        .output()
        .map_err(|_| "fio: not installed".to_owned())?;
    if !output.status.success() {
        let error = String::from_utf8_lossy(&output.stderr);
        return Err(format!("fio: {}", error.lines().last().unwrap_or("failed")));
    }
    let report: serde_json::Value =
        serde_json::from_slice(&output.stdout).map_err(|error| format!("fio: {error}"))?;
    let rate = report.pointer(&format!("/jobs/0/{direction}/bw_bytes"));
    rate.and_then(serde_json::Value::as_f64).ok_or_else(|| "fio: its report has no rate".to_owned())
}
