//! Snapshots for the [`metrics`] facade, which Prometheus, StatsD and others support.
//!
//! The facade has no effect until the program installs a recorder. The caller publishes snapshots,
//! as often as its exporter reads, so transfers have no cost for it.

use metrics::{counter, gauge};
use terrane_core::metrics::Unit;

use super::snapshot::{COUNTERS, TransferSnapshot};

/// The published quantiles of the latency, in thousandths.
const QUANTILES: [(&str, u64); 3] = [("0.5", 500), ("0.99", 990), ("0.999", 999)];

impl TransferSnapshot {
    /// Publishes the snapshot. All names but the last have the labels `engine`, `path`, `from` and
    /// `to`.
    ///
    /// - `terrane_transfers` by `result` (`success`, `failure`, `cancelled`), and
    ///   `terrane_transfer_bytes`, `_busy_nanoseconds`, `_queued_nanoseconds`, `_pieces`, `_runs`
    ///   and `_retries`: counters;
    /// - `terrane_transfers_in_flight`, and `terrane_transfer_latency_seconds` by `quantile`
    ///   (`0.5`, `0.99`, `0.999`): gauges;
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
                // A label without a name is left out.
                labels.into_iter().filter(|(name, _)| !name.is_empty()).collect::<Vec<_>>()
            };
            for (result, count) in path.results() {
                counter!("terrane_transfers", &with("result", result)).absolute(count);
            }
            for (name, unit, _, value) in COUNTERS {
                let ending = match unit {
                    Unit::Bytes => "_bytes",
                    // Counters of the facade are whole numbers.
                    Unit::Seconds => "_nanoseconds",
                    _ => "",
                };
                counter!(format!("{name}{ending}"), &with("", "")).absolute(value(path));
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

#[cfg(all(test, not(loom)))]
mod tests {
    use std::sync::{Arc, Mutex};
    use std::time::Duration;

    use metrics::{
        Counter, CounterFn, Gauge, Histogram, Key, KeyName, Metadata, Recorder, SharedString,
        with_local_recorder,
    };
    use terrane_core::sync::lock;

    use super::super::snapshot::PathSnapshot;
    use super::*;

    /// Stores the counters that were set.
    #[derive(Clone, Default)]
    struct Kept(Arc<Mutex<Vec<(String, u64)>>>);

    struct KeptCounter(Kept, String);

    impl CounterFn for KeptCounter {
        fn increment(&self, _: u64) {}

        fn absolute(&self, value: u64) {
            lock(&self.0.0).push((self.1.clone(), value));
        }
    }

    impl Recorder for Kept {
        fn describe_counter(&self, _: KeyName, _: Option<metrics::Unit>, _: SharedString) {}
        fn describe_gauge(&self, _: KeyName, _: Option<metrics::Unit>, _: SharedString) {}
        fn describe_histogram(&self, _: KeyName, _: Option<metrics::Unit>, _: SharedString) {}

        fn register_counter(&self, key: &Key, _: &Metadata<'_>) -> Counter {
            let labels: Vec<_> =
                key.labels().map(|it| format!("{}={}", it.key(), it.value())).collect();
            let name = format!("{} {}", key.name(), labels.join(","));
            Counter::from_arc(Arc::new(KeptCounter(self.clone(), name)))
        }

        fn register_gauge(&self, _: &Key, _: &Metadata<'_>) -> Gauge {
            Gauge::noop()
        }

        fn register_histogram(&self, _: &Key, _: &Metadata<'_>) -> Histogram {
            Histogram::noop()
        }
    }

    #[test]
    fn snapshots_are_published_by_path() {
        let path = PathSnapshot {
            engine: "host",
            path: "streaming copy",
            source: "system",
            destination: "pinned",
            succeeded: 5,
            failed: 2,
            cancelled: 1,
            in_flight: 0,
            retries: 3,
            bytes: terrane_core::ByteCount::new(77),
            pieces: 10,
            runs: 4,
            busy: Duration::from_nanos(9),
            queued: Duration::ZERO,
            latency: terrane_core::metrics::HistogramSnapshot::default(),
        };
        let snapshot = TransferSnapshot { paths: vec![path], refused: 6 };
        let kept = Kept::default();
        with_local_recorder(&kept, || snapshot.record_metrics());
        let labels = "engine=host,path=streaming copy,from=system,to=pinned";
        let found = lock(&kept.0).clone();
        for (name, value) in [
            (format!("terrane_transfers {labels},result=success"), 5),
            (format!("terrane_transfers {labels},result=failure"), 2),
            (format!("terrane_transfer_bytes {labels}"), 77),
            (format!("terrane_transfer_busy_nanoseconds {labels}"), 9),
            (format!("terrane_transfer_runs {labels}"), 4),
            ("terrane_transfers_refused ".to_owned(), 6),
        ] {
            assert!(found.contains(&(name.clone(), value)), "{name} {value} is not in {found:?}");
        }
    }
}
