//! The results of probes in child processes.

use std::time::Duration;

use serde::{Deserialize, Serialize};
use terrane_core::ByteCount;
use terrane_plan::DeviceFacts;

use super::finding::Finding;
use crate::child;
use crate::restart::Restart;
use crate::table::duration;

/// The result of a probe.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub(crate) struct ProbeResult {
    pub findings: Vec<Finding>,
    /// The first device, for plans.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub device: Option<DeviceFacts>,
    /// The time that the driver, or NIXL, took to start.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub start_seconds: Option<f64>,
    /// Rates, if they were requested.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub measured: Vec<Measured>,
}

/// A rate, or the reason why it was not measured.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct Measured {
    pub key: String,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub subject: Option<String>,
    /// The number of bytes that were measured. With two sizes, the larger one.
    pub bytes: u64,
    /// Its median time.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub seconds: Option<f64>,
    /// The rate without the fixed time.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub bytes_per_second: Option<f64>,
    /// The part of the time that does not depend on the number of bytes.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub fixed_seconds: Option<f64>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub error: Option<String>,
}

impl Measured {
    /// A row without a rate.
    pub(crate) fn of(key: &str, subject: Option<&str>) -> Self {
        Self {
            key: key.to_owned(),
            subject: subject.map(str::to_owned),
            bytes: 0,
            seconds: None,
            bytes_per_second: None,
            fixed_seconds: None,
            error: None,
        }
    }
}

impl std::fmt::Display for Measured {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}", self.key)?;
        if let Some(subject) = &self.subject {
            write!(f, " {subject}")?;
        }
        match (self.bytes_per_second, &self.error) {
            (Some(rate), _) => {
                write!(f, ": {:.2} GB/s", rate / 1e9)?;
                if let Some(fixed) = self.fixed_seconds.filter(|&fixed| fixed > 0.0) {
                    write!(f, " after {}", duration(fixed))?;
                }
                write!(f, " ({}", ByteCount::new(self.bytes))?;
                if let Some(seconds) = self.seconds {
                    write!(f, " in {}", duration(seconds))?;
                }
                f.write_str(")")
            }
            (None, Some(error)) => write!(f, ": {error}"),
            (None, None) => write!(f, ": not measured"),
        }
    }
}

/// The time limit of a probe in a child process.
const TIMEOUT: Duration = Duration::from_secs(5);

/// Runs a probe in a child process with a time limit.
pub(crate) fn probe_in_child(restart: &Restart, probe: &str) -> ProbeResult {
    probe_in_child_within(restart, &[probe], TIMEOUT)
}

pub(crate) fn probe_in_child_within(
    restart: &Restart,
    probe: &[&str],
    timeout: Duration,
) -> ProbeResult {
    let mut command = restart.command();
    command.args(["doctor", "--probe"]).args(probe);
    let key = if probe.first() == Some(&"nixl") { "nixl" } else { "gpu" };
    let refused = |detail: String| ProbeResult {
        findings: vec![Finding::refused(
            key,
            detail,
            "see dmesg, and repeat; everything else works without it",
        )],
        ..ProbeResult::default()
    };
    match child::output_of(command, timeout) {
        Ok(bytes) => serde_json::from_slice(&bytes)
            .unwrap_or_else(|error| refused(format!("the probe printed something else: {error}"))),
        Err(failure) => refused(format!("the probe {failure}")),
    }
}
