//! Snapshots for the [`metrics`] facade, which Prometheus, StatsD and others support.
//!
//! The facade does nothing until the program installs a recorder. The caller publishes, as often as
//! its exporter reads, so that no transfer pays for it.

use metrics::{counter, gauge};

use super::snapshot::{COUNTERS, TransferSnapshot};

/// The published quantiles of the latency, in thousandths.
const QUANTILES: [(&str, u64); 3] = [("0.5", 500), ("0.99", 990), ("0.999", 999)];

impl TransferSnapshot {
    /// Publishes the snapshot under the names that
    /// [`write_openmetrics`](Self::write_openmetrics) uses. All of them have the labels `engine`,
    /// `path`, `from` and `to`.
    ///
    /// - `terrane_transfers` by `result`, the counters of bytes, pieces, runs and retries, and
    ///   those of times in nanoseconds: counters;
    /// - `terrane_transfers_in_flight`, and `terrane_transfer_latency_seconds` by `quantile`:
    ///   gauges;
    /// - `terrane_transfers_refused`, without labels: a counter.
    pub fn record_metrics(&self) {
        for path in &self.paths {
            let with = |name: &'static str, value: &'static str| {
                let labels = [
                    ("engine", path.engine),
                    ("path", path.path),
                    ("from", path.source),
                    ("to", path.destination),
                    (name, value),
                ];
                // A label without a name is none.
                labels.into_iter().filter(|(name, _)| !name.is_empty()).collect::<Vec<_>>()
            };
            for (result, count) in path.results() {
                counter!("terrane_transfers", &with("result", result)).absolute(count);
            }
            for (name, _, _, value) in COUNTERS {
                counter!(*name, &with("", "")).absolute(value(path));
            }
            gauge!("terrane_transfers_in_flight", &with("", "")).set(path.in_flight as f64);
            for (quantile, part) in QUANTILES {
                if let Some(nanoseconds) = path.latency.quantile(part, 1000) {
                    let labels = with("quantile", quantile);
                    let gauge = gauge!("terrane_transfer_latency_seconds", &labels);
                    gauge.set(nanoseconds as f64 / 1e9);
                }
            }
        }
        counter!("terrane_transfers_refused").absolute(self.refused);
    }
}
