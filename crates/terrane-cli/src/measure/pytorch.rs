//! The copies that engines do with PyTorch, in a Python process.

use std::ffi::OsStr;
use std::process::Command;
use std::time::Duration;

use serde::Deserialize;
use serde_json::json;

use super::{Shape, Spread};
use crate::child;

/// It imports PyTorch, checks what it copied, and prints times.
const SCRIPT: &str = include_str!("pytorch.py");

/// The first import of PyTorch takes up to half a minute on a slow disk.
const TIMEOUT: Duration = Duration::from_secs(180);

/// The times of PyTorch's ways.
#[derive(Debug, Deserialize)]
pub(crate) struct Measured {
    /// PyTorch's version.
    pub version: String,
    pub rows: Vec<Row>,
}

/// One way in one direction.
#[derive(Debug, Deserialize)]
pub(crate) struct Row {
    pub name: String,
    pub to_host: bool,
    seconds: Vec<f64>,
    /// One contiguous copy of as many bytes, in the same process and between the passes.
    limit_seconds: Vec<f64>,
}

impl Row {
    pub(crate) fn times(&self) -> (Spread, Spread) {
        (Spread::of(self.seconds.clone()), Spread::of(self.limit_seconds.clone()))
    }
}

#[derive(Deserialize)]
#[serde(untagged)]
enum Answer {
    Refused { error: String },
    Measured(Measured),
}

/// Runs the script with this Python on a device of PyTorch, such as `cuda:0`. The error is the reason, on one line.
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
    // Modules in the current directory are not PyTorch's.
    command.env("PYTHONSAFEPATH", "1");
    let name = python.display();
    let answer = child::answer(command, TIMEOUT).map_err(|error| format!("{name} {error}"))?;
    match serde_json::from_slice(&answer) {
        Ok(Answer::Measured(measured)) => Ok(measured),
        Ok(Answer::Refused { error }) => {
            Err(format!("{error}; `--python PROGRAM` names a Python that has PyTorch and a GPU"))
        }
        Err(error) => Err(format!("{name} printed no times: {error}")),
    }
}

#[cfg(test)]
mod tests {
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
                assert!(reason.contains("torch"), "{reason}");
                eprintln!("skipped: the_script_copies_the_right_bytes_on_the_cpu: {reason}");
            }
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
