//! Publishes snapshots through the [`metrics`] crate, which Prometheus, StatsD and others support.
//!
//! Serving engines in Rust commonly use this crate. It does nothing until the program installs a
//! recorder. The caller publishes at the interval of its exporter, so a hit costs nothing.

use metrics::{counter, gauge};

use crate::snapshot::PoolSnapshot;

impl PoolSnapshot {
    /// Publishes the snapshot under the name of its pool.
    ///
    /// - `terrane_pool_bytes` by `state` (`held`, `peak`, `live`, `cached`, `pending`,
    ///   `abandoned`): gauges;
    /// - `terrane_pool_requests` by `class` (bytes) and `from` (`magazine`, `queue`, `miss`), and
    ///   `terrane_pool_evictions` by `class`: counters; classes without requests are omitted;
    /// - `terrane_pool_reclaims` by `stage`: counters.
    pub fn record_metrics(&self, pool: &str) {
        let states = [
            ("held", self.held),
            ("peak", self.peak_held),
            ("live", self.live),
            ("cached", self.cached),
            ("pending", self.pending),
            ("abandoned", self.abandoned),
        ];
        for (state, bytes) in states {
            let gauge = gauge!("terrane_pool_bytes", "pool" => pool.to_owned(), "state" => state);
            gauge.set(bytes.get() as f64);
        }
        for class in &self.classes {
            let requests = [
                ("magazine", class.magazine_hits),
                ("queue", class.shared_hits),
                ("miss", class.misses),
            ];
            if requests.iter().all(|&(_, count)| count == 0) {
                continue;
            }
            let size = class.size.get().to_string();
            for (from, count) in requests {
                let labels =
                    [("pool", pool.to_owned()), ("class", size.clone()), ("from", from.to_owned())];
                counter!("terrane_pool_requests", &labels).absolute(count);
            }
            let labels = [("pool", pool.to_owned()), ("class", size)];
            counter!("terrane_pool_evictions", &labels).absolute(class.evictions);
        }
        let stages = [
            ("exhausted", self.reclaim.exhausted),
            ("pending", self.reclaim.pending),
            ("larger", self.reclaim.larger),
            ("trimmed", self.reclaim.trimmed),
            ("upstream_trimmed", self.reclaim.upstream_trimmed),
            ("callback", self.reclaim.callback),
            ("refused", self.reclaim.refused),
        ];
        for (stage, count) in stages {
            let labels = [("pool", pool.to_owned()), ("stage", stage.to_owned())];
            counter!("terrane_pool_reclaims", &labels).absolute(count);
        }
    }
}

#[cfg(test)]
#[cfg(not(loom))]
mod tests {
    use std::collections::BTreeMap;
    use std::sync::{Arc, Mutex};

    use metrics::{
        Counter, CounterFn, Gauge, GaugeFn, Histogram, Key, KeyName, Metadata, Recorder,
        SharedString, Unit, with_local_recorder,
    };
    use terrane_core::ByteCount;
    use terrane_core::sync::lock;

    use crate::{Pool, PoolOptions};
    use terrane_testkit::simulated::{Simulated, SimulatedOptions};

    /// Every metric, by its name and the values of its labels.
    #[derive(Clone, Default)]
    struct Seen(Arc<Mutex<BTreeMap<String, f64>>>);

    struct Cell(Seen, String);

    impl Cell {
        fn set(&self, value: f64) {
            let mut seen = lock(&self.0.0);
            seen.insert(self.1.clone(), value);
        }
    }

    impl CounterFn for Cell {
        fn increment(&self, _: u64) {
            unreachable!("counters are absolute");
        }
        fn absolute(&self, value: u64) {
            self.set(value as f64);
        }
    }

    impl GaugeFn for Cell {
        fn increment(&self, _: f64) {
            unreachable!("gauges are set");
        }
        fn decrement(&self, _: f64) {
            unreachable!("gauges are set");
        }
        fn set(&self, value: f64) {
            Cell::set(self, value);
        }
    }

    impl Seen {
        fn cell(&self, key: &Key) -> Arc<Cell> {
            let labels: Vec<_> = key.labels().map(metrics::Label::value).collect();
            Arc::new(Cell(self.clone(), format!("{} {}", key.name(), labels.join(" "))))
        }
    }

    impl Recorder for Seen {
        fn describe_counter(&self, _: KeyName, _: Option<Unit>, _: SharedString) {}
        fn describe_gauge(&self, _: KeyName, _: Option<Unit>, _: SharedString) {}
        fn describe_histogram(&self, _: KeyName, _: Option<Unit>, _: SharedString) {}
        fn register_counter(&self, key: &Key, _: &Metadata<'_>) -> Counter {
            Counter::from_arc(self.cell(key))
        }
        fn register_gauge(&self, key: &Key, _: &Metadata<'_>) -> Gauge {
            Gauge::from_arc(self.cell(key))
        }
        fn register_histogram(&self, _: &Key, _: &Metadata<'_>) -> Histogram {
            Histogram::noop()
        }
    }

    #[test]
    fn a_snapshot_is_published_by_pool_class_and_state() {
        let device = Simulated::new(SimulatedOptions::default());
        let pool = Pool::new(device, PoolOptions::default()).unwrap();
        let kept = pool.allocate_bytes(ByteCount::kib(4)).unwrap();
        drop(pool.allocate_bytes(ByteCount::kib(4)).unwrap());
        drop(pool.allocate_bytes(ByteCount::kib(4)).unwrap());
        let seen = Seen::default();
        with_local_recorder(&seen, || pool.snapshot().record_metrics("kv"));
        let seen = seen.0.lock().unwrap();
        let value = |name: &str| seen.get(name).copied();
        assert_eq!(value("terrane_pool_bytes kv held"), Some(8192.0));
        assert_eq!(value("terrane_pool_bytes kv live"), Some(4096.0));
        assert_eq!(value("terrane_pool_bytes kv cached"), Some(4096.0));
        assert_eq!(value("terrane_pool_requests kv 4096 magazine"), Some(1.0));
        assert_eq!(value("terrane_pool_requests kv 4096 miss"), Some(2.0));
        assert_eq!(value("terrane_pool_evictions kv 4096"), Some(0.0));
        assert_eq!(value("terrane_pool_reclaims kv refused"), Some(0.0));
        assert_eq!(value("terrane_pool_requests kv 8192 miss"), None, "it was never requested");
        drop(kept);
    }
}
