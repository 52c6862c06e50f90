//! Explanations of transfers before they start, and reports after they end.

use std::borrow::Cow;
use std::fmt;
use std::time::Duration;

use terrane_core::{Alignment, ByteCount, StorageKind};

use crate::engine::declined::Declined;
use crate::engine::quote::{Quote, SharedDecision};
use crate::plan::TransferPlan;

/// The execution of a transfer: its pieces and runs, the path, the reason and the prediction.
#[derive(Clone, Debug, PartialEq)]
pub struct Explanation {
    /// The kind of storage that is read.
    pub source: StorageKind,
    /// The kind of storage that is written.
    pub destination: StorageKind,
    /// The total number of bytes to copy.
    pub bytes: ByteCount,
    /// Spans before coalescing: one for each block, layer and section.
    pub pieces: u64,
    /// Spans after coalescing.
    pub runs: u64,
    /// The largest power of two that divides the offset and the length of every piece in the
    /// source.
    pub source_alignment: Alignment,
    /// The same for the destination.
    pub destination_alignment: Alignment,
    /// The engine that copies.
    pub engine: &'static str,
    /// How long the copy should take once started.
    pub predicted: Duration,
    /// The engines that declined, with their reasons. For example, NIXL's engine may decline a copy
    /// between a device and a file.
    pub declined: Vec<(&'static str, Declined)>,
    pub(crate) decision: SharedDecision,
}

impl Explanation {
    /// The quote of an engine for `plan`, with the engines that declined it.
    pub(crate) fn new(
        plan: &TransferPlan,
        engine: &'static str,
        quote: Quote,
        declined: Vec<(&'static str, Declined)>,
    ) -> Self {
        Self {
            source: plan.source().kind(),
            destination: plan.destination().kind(),
            bytes: plan.bytes(),
            pieces: plan.pieces(),
            runs: plan.run_count(),
            source_alignment: plan.source().alignment(),
            destination_alignment: plan.destination().alignment(),
            engine,
            predicted: quote.predicted,
            declined,
            decision: quote.decision,
        }
    }

    /// The engine's path.
    #[must_use]
    pub fn path(&self) -> Cow<'_, str> {
        self.decision.get().path()
    }

    /// Why the engine chose that path.
    #[must_use]
    pub fn reason(&self) -> Cow<'_, str> {
        self.decision.get().reason()
    }

    /// The mean length of a run.
    #[must_use]
    pub fn mean_run(&self) -> ByteCount {
        ByteCount::new(self.bytes.get().checked_div(self.runs).unwrap_or(0))
    }
}

/// Prints one line, with only those declined engines that serve these kinds of storage.
impl fmt::Display for Explanation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "{} from {} to {}: {} pieces in {} runs of {} on average, aligned to {} and {}; \
             {} by {} ({}), {:.3} ms predicted",
            self.bytes,
            self.source,
            self.destination,
            self.pieces,
            self.runs,
            self.mean_run(),
            self.source_alignment,
            self.destination_alignment,
            self.path(),
            self.engine,
            self.reason(),
            self.predicted.as_secs_f64() * 1e3,
        )?;
        let mut others = self.declined.iter().filter(|(_, why)| *why != Declined::Kinds);
        others.try_for_each(|(engine, why)| write!(f, "; declined by {engine}: {why}"))
    }
}

/// The report of a transfer: its explanation and the measured times.
#[derive(Clone, Debug, PartialEq)]
pub struct Report {
    /// How the transfer was executed, and why.
    pub explanation: Explanation,
    /// The time from the submission to the start of the copy: queueing, and waiting for
    /// predecessors.
    pub queued: Duration,
    /// From the start of the copy to its end.
    pub copied: Duration,
    /// The engine's own measurement, if it has one and it is enabled.
    pub engine_times: Option<EngineTimes>,
    /// The checksum of each block, if [requested](crate::Transfer::checksums), in the order in
    /// which the caller named the destination blocks.
    pub checksums: Option<Box<[u64]>>,
}

/// A measurement by the library below an engine.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct EngineTimes {
    /// The time of its submission calls.
    pub post: Duration,
    /// The time from start to end of each request, summed over all requests.
    pub transfer: Duration,
    /// The number of requests.
    pub requests: u64,
    /// The number of descriptors in all requests.
    pub descriptors: u64,
}

impl Report {
    /// The rate of the copy in bytes per second, without the time in the queue.
    #[must_use]
    pub fn bytes_per_second(&self) -> f64 {
        self.explanation.bytes.get() as f64 / self.copied.as_secs_f64()
    }
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "{}; took {:.3} ms ({:.2} GB/s) after {:.3} ms in the queue",
            self.explanation,
            self.copied.as_secs_f64() * 1e3,
            self.bytes_per_second() / 1e9,
            self.queued.as_secs_f64() * 1e3,
        )?;
        match &self.engine_times {
            Some(times) => write!(
                f,
                "; measured {:.3} ms in {} requests of {} descriptors, {:.3} ms of it for posting",
                times.transfer.as_secs_f64() * 1e3,
                times.requests,
                times.descriptors,
                times.post.as_secs_f64() * 1e3,
            ),
            None => Ok(()),
        }
    }
}
