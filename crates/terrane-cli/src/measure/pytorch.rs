//! Copies of engines that use PyTorch, in a Python process.

use std::ffi::OsStr;
use std::process::Command;
use std::time::Duration;

use serde::Deserialize;
use serde_json::json;

use super::{Shape, Spread};
use crate::child::{self, ChildFailure};

/// A script that imports PyTorch, verifies its copies, and prints times.
const SCRIPT: &str = include_str!("pytorch.py");

/// The time limit: the time to start, and the time of the passes. Each method and its limit run one
/// more time than `passes`, and the bytes are verified. A slower machine is treated as hung.
fn timeout(bytes: u64, passes: u32) -> Duration {
    /// The first import of PyTorch takes up to half a minute on a slow disk.
    const START: Duration = Duration::from_secs(180);
    const COPIES: u64 = 8;
    const LEAST_BYTES_PER_SECOND: u64 = 50_000_000;
    let copied = bytes.saturating_mul(COPIES).saturating_mul(u64::from(passes) + 2);
    START + Duration::from_secs(copied / LEAST_BYTES_PER_SECOND)
}

/// The times of the PyTorch methods.
#[derive(Debug, Deserialize)]
pub(crate) struct Measured {
    /// PyTorch's version.
    pub version: String,
    pub rows: Vec<Row>,
}

/// One method in one direction.
#[derive(Debug, Deserialize)]
pub(crate) struct Row {
    pub name: String,
    pub to_host: bool,
    seconds: Vec<f64>,
    /// One contiguous copy of the same number of bytes, in the same process, between the passes.
    limit_seconds: Vec<f64>,
}

impl Row {
    pub(crate) fn times(&self) -> (Spread, Spread) {
        (Spread::of(self.seconds.clone()), Spread::of(self.limit_seconds.clone()))
    }
}

#[derive(Deserialize)]
#[serde(untagged)]
enum ScriptResult {
    Refused { error: String, is_missing: bool },
    Measured(Measured),
}

/// Runs the script with this interpreter on a PyTorch device, such as `cuda:0`. The error is the
/// reason, on one line.
pub(crate) fn run(
    python: &OsStr,
    shape: &Shape,
    passes: u32,
    device: &str,
) -> Result<Measured, String> {
    let layers = u64::from(shape.device.num_layers());
    let request = json!({
        "blocks": shape.blocks,
        "layers": layers,
        "row_bytes": shape.block_bytes() / layers.max(1),
        "passes": passes,
        "device": device,
    });
    let mut command = Command::new(python);
    command.args(["-c", SCRIPT, &request.to_string()]);
    // Modules in the current directory must not replace PyTorch's.
    command.env("PYTHONSAFEPATH", "1");
    let name = python.display();
    let timeout = timeout(shape.bytes(), passes);
    let output = child::output_of(command, timeout).map_err(|error| match error {
        ChildFailure::TimedOut(limit) => format!(
            "{name} printed no times in {} s; use a smaller --size, or fewer --passes",
            limit.as_secs()
        ),
        other => format!("{name} {other}"),
    })?;
    match serde_json::from_slice(&output) {
        Ok(ScriptResult::Measured(measured)) => Ok(measured),
        Ok(ScriptResult::Refused { error, is_missing }) => Err(reason(&error, is_missing)),
        Err(error) => Err(format!("{name} printed no times: {error}")),
    }
}

/// The error of the script on one line; it can have several.
fn reason(error: &str, is_missing: bool) -> String {
    let mut reason = error.split_whitespace().collect::<Vec<_>>().join(" ");
    if is_missing {
        reason.push_str("; `--python PROGRAM` names a Python that has PyTorch and a GPU");
    }
    reason
}

#[cfg(test)]
mod tests {
    use std::io::{BufRead, BufReader};
    use std::process::Stdio;
    use std::time::Instant;

    use terrane_core::ByteCount;
    use terrane_plan::{Model, PlanRequest};

    use super::*;

    fn shape() -> Shape {
        let request = PlanRequest::new(Model::published("llama-3.2-1b").unwrap());
        Shape::of_group(&request, 0, ByteCount::mib(4)).unwrap().unwrap()
    }

    #[test]
    fn the_script_copies_the_right_bytes_on_the_cpu() {
        match run(OsStr::new("python3"), &shape(), 2, "cpu") {
            Ok(measured) => {
                assert_eq!(measured.rows.len(), 4);
                for row in &measured.rows {
                    let (time, limit) = row.times();
                    assert_eq!(row.seconds.len(), 2);
                    assert!(time.min > 0.0 && limit.min > 0.0, "{row:?}");
                }
            }
            Err(reason) => {
                assert!(reason.contains("cannot import torch: "), "{reason}");
                assert!(reason.contains("; `--python PROGRAM` names"), "{reason}");
                eprintln!("skipped: the_script_copies_the_right_bytes_on_the_cpu: {reason}");
            }
        }
    }

    #[test]
    fn the_time_limit_grows_with_passes_and_bytes() {
        assert_eq!(timeout(4 << 20, 1), Duration::from_secs(182));
        // 9 passes of 256 MiB. The largest arguments do not overflow.
        assert_eq!(timeout(256 << 20, 9), Duration::from_secs(180 + 472));
        assert!(timeout(u64::MAX, u32::MAX) > Duration::from_secs(1 << 30));
    }

    #[test]
    fn only_what_another_python_may_have_is_a_hint() {
        let missing =
            reason("python3 cannot import torch: no library\n  needed by:\tlibtorch\n", true);
        let expected = "python3 cannot import torch: no library needed by: libtorch; `--python PROGRAM` names a \
                        Python that has PyTorch and a GPU";
        assert_eq!(missing, expected);
        assert_eq!(
            reason("PyTorch 2: a way copied\nwrong bytes", false),
            "PyTorch 2: a way copied wrong bytes"
        );
    }

    #[test]
    fn the_script_imports_nothing_from_the_current_directory() {
        let (here, path) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        for name in ["json.py", "time.py", "torch.py"] {
            std::fs::write(here.path().join(name), "raise SystemExit('of the current directory')")
                .unwrap();
        }
        std::fs::write(path.path().join("torch.py"), "raise OSError('a library\\nis missing')")
            .unwrap();
        let mut command = Command::new("python3");
        command.args(["-c", SCRIPT, r#"{"device": "cpu"}"#]).env("PYTHONPATH", path.path());
        command.env_remove("PYTHONSAFEPATH").current_dir(here.path());
        let output = match child::output_of(command, Duration::from_secs(60)) {
            Err(ChildFailure::NotStarted(error)) => {
                let test = "the_script_imports_nothing_from_the_current_directory";
                return eprintln!("skipped: {test}: python3: {error}");
            }
            other => other.unwrap(),
        };
        let ScriptResult::Refused { error, is_missing } = serde_json::from_slice(&output).unwrap()
        else {
            panic!("{}", String::from_utf8_lossy(&output));
        };
        assert!(
            is_missing && error.ends_with("cannot import torch: a library\nis missing"),
            "{error}"
        );
    }

    #[test]
    fn the_script_ends_with_the_command() {
        let path = tempfile::tempdir().unwrap();
        let torch = "import os, sys, time\nprint(os.getpid(), flush=True)\ntime.sleep(600)";
        std::fs::write(path.path().join("torch.py"), torch).unwrap();
        let mut parent = Command::new("sh")
            .args(["-c", "python3 -c \"$0\" \"$1\" & wait", SCRIPT, r#"{"device": "cpu"}"#])
            .env("PYTHONPATH", path.path())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let mut line = String::new();
        BufReader::new(parent.stdout.take().unwrap()).read_line(&mut line).unwrap();
        parent.kill().unwrap();
        parent.wait().unwrap();
        if line.is_empty() {
            return eprintln!("skipped: the_script_ends_with_the_command: there is no python3");
        }
        // Without a process that reaps it, it stays as a zombie.
        let stat = format!("/proc/{}/stat", line.trim());
        let is_there = || std::fs::read_to_string(&stat).is_ok_and(|stat| !stat.contains(") Z "));
        let deadline = Instant::now() + Duration::from_secs(60);
        while is_there() {
            assert!(Instant::now() < deadline, "{stat} is still there");
            std::thread::sleep(Duration::from_millis(5));
        }
    }

    #[test]
    fn a_python_that_is_missing_or_prints_nothing_is_a_reason() {
        let reason = |python: &str| run(OsStr::new(python), &shape(), 1, "cpu").unwrap_err();
        assert!(reason("/no/such/python").starts_with("/no/such/python could not be started"));
        assert!(reason("true").starts_with("true printed no times"));
        assert!(reason("false").starts_with("false ended with status 1"));
    }
}
