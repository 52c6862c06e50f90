//! The counts of a manager at one time, and their text form.

use std::fmt;
use std::time::Duration;

use terrane_core::ByteCount;
use terrane_core::metrics::{HistogramSnapshot, OpenMetrics, Unit};

use super::nanoseconds;

/// The transfers of a [`TransferManager`](crate::TransferManager) and its clones so far.
///
/// It is exact if no transfer is in flight. A transfer that is just ending may be counted in some
/// numbers only. Only [`PathSnapshot::in_flight`] ever decreases.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct TransferSnapshot {
    /// The paths that were taken, in the order of first use.
    pub paths: Vec<PathSnapshot>,
    /// Transfers that were refused at their submission.
    pub refused: u64,
}

/// The transfers of one path between two kinds of storage.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct PathSnapshot {
    /// The engine.
    pub engine: &'static str,
    /// The path of the engine ([`Decision::label`](crate::Decision::label)).
    pub path: &'static str,
    /// The kind of storage that is read: `system`, `pinned`, `device`, `disk` or `remote`.
    pub source: &'static str,
    /// The kind of storage that is written.
    pub destination: &'static str,
    /// Transfers that succeeded.
    pub succeeded: u64,
    /// Transfers that failed.
    pub failed: u64,
    /// Transfers that were cancelled.
    pub cancelled: u64,
    /// Transfers that have been submitted and have not ended: queued, or being copied.
    pub in_flight: u64,
    /// The number of parts that engines copied again
    /// ([`CopyJob::retried`](crate::CopyJob::retried)).
    pub retries: u64,
    /// The bytes of the transfers that succeeded.
    pub bytes: ByteCount,
    /// The pieces of the transfers that have ended: descriptors before coalescing.
    pub pieces: u64,
    /// Their runs: descriptors after coalescing.
    pub runs: u64,
    /// The time from the start to the end of each copy that succeeded, summed. Copies that run at
    /// the same time each count.
    pub busy: Duration,
    /// The time from submission to the start of each copy that succeeded, summed.
    pub queued: Duration,
    /// The time from submission to the end of each transfer that succeeded, in nanoseconds.
    pub latency: HistogramSnapshot,
}

impl PathSnapshot {
    /// Transfers that have ended, in any way.
    #[must_use]
    pub fn ended(&self) -> u64 {
        self.succeeded + self.failed + self.cancelled
    }

    fn labels(&self) -> [(&'static str, &'static str); 4] {
        let Self { engine, path, source, destination, .. } = *self;
        [("engine", engine), ("path", path), ("from", source), ("to", destination)]
    }

    /// How transfers ended.
    pub(super) fn results(&self) -> [(&'static str, u64); 3] {
        [("success", self.succeeded), ("failure", self.failed), ("cancelled", self.cancelled)]
    }
}

impl TransferSnapshot {
    /// Writes the snapshot in the OpenMetrics text format, which Prometheus reads.
    ///
    /// # Errors
    ///
    /// The errors of the writer.
    pub fn write_openmetrics(&self, to: &mut impl fmt::Write) -> fmt::Result {
        let mut out = OpenMetrics::new(to);
        self.write_families(&mut out)?;
        out.finish()
    }

    /// Writes the metrics without the end mark, for a text that also has metrics of other crates.
    ///
    /// # Errors
    ///
    /// The errors of the writer.
    pub fn write_families(&self, out: &mut OpenMetrics<'_, impl fmt::Write>) -> fmt::Result {
        let mut family =
            out.counter("terrane_transfers", Unit::None, "Transfers that have ended.")?;
        for path in &self.paths {
            let [engine, name, from, to] = path.labels();
            for (result, count) in path.results() {
                family.sample(&[engine, name, from, to, ("result", result)], count)?;
            }
        }
        for (name, unit, help, value) in COUNTERS {
            let mut family = out.counter(name, *unit, help)?;
            for path in &self.paths {
                family.sample(&path.labels(), value(path))?;
            }
        }
        let help = "Transfers that are queued or being copied.";
        let mut family = out.gauge("terrane_transfers_in_flight", Unit::None, help)?;
        for path in &self.paths {
            family.sample(&path.labels(), path.in_flight)?;
        }
        let help = "Time from submission to end of transfers that succeeded.";
        let mut family = out.histogram("terrane_transfer_latency", Unit::Seconds, help)?;
        for path in &self.paths {
            family.distribution(&path.labels(), &path.latency)?;
        }
        let help = "Transfers that were refused at their submission.";
        out.counter("terrane_transfers_refused", Unit::None, help)?.sample(&[], self.refused)
    }
}

type Counter = (&'static str, Unit, &'static str, fn(&PathSnapshot) -> u64);

/// The counters of a path that have no further labels.
pub(super) const COUNTERS: &[Counter] = &[
    ("terrane_transfer", Unit::Bytes, "Bytes of transfers that succeeded.", |path| {
        path.bytes.get()
    }),
    ("terrane_transfer_busy", Unit::Seconds, "Time of copies that succeeded, summed.", |path| {
        nanoseconds(path.busy)
    }),
    ("terrane_transfer_queued", Unit::Seconds, "Time before copies began, summed.", |path| {
        nanoseconds(path.queued)
    }),
    ("terrane_transfer_pieces", Unit::None, "Descriptors before coalescing.", |path| path.pieces),
    ("terrane_transfer_runs", Unit::None, "Descriptors after coalescing.", |path| path.runs),
    ("terrane_transfer_retries", Unit::None, "Parts that were copied again.", |path| path.retries),
];

/// Prints a line for each path.
impl fmt::Display for TransferSnapshot {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for path in &self.paths {
            let PathSnapshot { engine, path: name, source, destination, .. } = path;
            writeln!(
                f,
                "{source} to {destination}, {name} by {engine}: {} transfers of {} in {:.3} s, {} in \
                 flight, {} failed, {} cancelled; {:.3} ms on average",
                path.ended(),
                path.bytes,
                path.busy.as_secs_f64(),
                path.in_flight,
                path.failed,
                path.cancelled,
                Duration::from_nanos(path.latency.mean()).as_secs_f64() * 1e3,
            )?;
        }
        write!(f, "{} refused", self.refused)
    }
}
