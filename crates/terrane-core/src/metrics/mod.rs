//! Counters and histograms that many threads update, and their text form.
//!
//! [`ShardedCounters`] contains numbered counters. A thread updates several of them in one step, in
//! about ten nanoseconds, without an allocation. A range of counters can be a histogram
//! ([`HISTOGRAM_CELLS`]). [`OpenMetrics`] writes values in the text format that Prometheus reads.
//!
//! There is no registry and no server, because both belong to the application.
//!
//! ```
//! use terrane_core::metrics::{HISTOGRAM_CELLS, OpenMetrics, ShardedCounters, Unit};
//!
//! const READS: usize = 0;
//! const LATENCY: usize = 1;
//! let counters = ShardedCounters::new(LATENCY + HISTOGRAM_CELLS);
//! counters.update(|shard| {
//!     shard.add(READS, 1);
//!     shard.record(LATENCY, 1_500); // nanoseconds
//! });
//!
//! let mut text = String::new();
//! let mut out = OpenMetrics::new(&mut text);
//! out.counter("reads", Unit::None, "Reads that have ended.")?
//!     .sample(&[("tier", "disk")], counters.get(READS))?;
//! out.histogram("read_latency", Unit::Seconds, "Time of a read.")?
//!     .distribution(&[("tier", "disk")], &counters.histogram(LATENCY))?;
//! out.finish()?;
//! assert!(text.contains("reads_total{tier=\"disk\"} 1\n"));
//! # Ok::<(), std::fmt::Error>(())
//! ```

mod histogram;
mod openmetrics;
mod sharded;

pub use histogram::{HISTOGRAM_CELLS, HistogramSnapshot};
pub use openmetrics::{MetricFamily, OpenMetrics, Unit};
pub use sharded::{CounterShard, ShardedCounters};
