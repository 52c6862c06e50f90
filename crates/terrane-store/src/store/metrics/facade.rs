//! Snapshots for the [`metrics`] facade, which Prometheus, StatsD and others support.
//!
//! The facade does nothing until the program installs a recorder. The caller publishes, as often as
//! its exporter reads, so that no job pays for it.

use metrics::{Label, counter, gauge};
use terrane_core::metrics::{HistogramSnapshot, Unit};

use crate::store::metrics::openmetrics::{
    GROUP_GAUGES, JOB_COUNTERS, JOB_GAUGES, TIER_COUNTERS, TIER_TIMES, misses,
};
use crate::store::metrics::snapshot::{StoreSnapshot, TierSnapshot};

/// The published quantiles of times, in thousandths.
const QUANTILES: [(&str, u64); 3] = [("0.5", 500), ("0.99", 990), ("0.999", 999)];

impl StoreSnapshot {
    /// Publishes the snapshot. Names and labels are those of
    /// [`write_openmetrics`](Self::write_openmetrics), without `_total`. There are these differences:
    ///
    /// - Times are gauges by `quantile` (`0.5`, `0.99`, `0.999`), in seconds:
    ///   `terrane_store_job_duration_seconds`, and, by `tier`, `terrane_store_get_duration_seconds` and
    ///   `terrane_store_put_duration_seconds`.
    /// - `terrane_store_job_nanoseconds` is the time of all ended jobs together, because counters of the
    ///   facade are whole numbers.
    ///
    /// The transfers of a manager that the store made are published too, by
    /// [`TransferSnapshot::record_metrics`](terrane_transfer::TransferSnapshot::record_metrics).
    pub fn record_metrics(&self) {
        self.tiers.iter().for_each(record_tier);
        for (reason, count) in misses(&self.misses) {
            counter!("terrane_store_misses", "reason" => reason).absolute(count);
        }
        for (name, _, value) in JOB_COUNTERS {
            counter!(name).absolute(value(self));
        }
        counter!("terrane_store_job_nanoseconds").absolute(self.job_times.sum());
        record_times("terrane_store_job_duration", &[], &self.job_times);
        for (name, _, value) in JOB_GAUGES {
            gauge!(name).set(value(self) as f64);
        }
        if let Some(transfers) = &self.transfers {
            transfers.record_metrics();
        }
    }
}

fn record_tier(tier: &TierSnapshot) {
    let labels = [Label::new("tier", tier.name.clone())];
    let and = |name: &'static str, value: String| {
        let [tier] = labels.clone();
        vec![tier, Label::new(name, value)]
    };
    for (name, unit, _, value) in TIER_COUNTERS {
        let ending = if unit == Unit::Bytes { "_bytes" } else { "" };
        counter!(format!("{name}{ending}"), labels.to_vec()).absolute(value(tier));
    }
    gauge!("terrane_store_tier_capacity_bytes", labels.to_vec()).set(tier.capacity.get() as f64);
    for (name, _, value) in TIER_TIMES {
        record_times(name, &labels, value(tier));
    }
    if tier.is_disk {
        for (direction, count) in [("read", tier.reads_queued), ("write", tier.writes_queued)] {
            let labels = and("direction", direction.to_owned());
            gauge!("terrane_store_tier_queued", labels).set(count as f64);
        }
    }
    for (number, group) in tier.groups.iter().enumerate() {
        for (name, _, value) in GROUP_GAUGES {
            gauge!(name, and("group", number.to_string())).set(value(group) as f64);
        }
    }
}

fn record_times(name: &str, labels: &[Label], times: &HistogramSnapshot) {
    for (quantile, part) in QUANTILES {
        if let Some(nanoseconds) = times.quantile(part, 1000) {
            let mut labels = labels.to_vec();
            labels.push(Label::new("quantile", quantile));
            gauge!(format!("{name}_seconds"), labels).set(nanoseconds as f64 / 1e9);
        }
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use std::sync::{Arc, Mutex};

    use metrics::{
        Counter, CounterFn, Gauge, GaugeFn, Histogram, Key, KeyName, Metadata, Recorder,
        SharedString, with_local_recorder,
    };
    use terrane_core::ByteCount;
    use terrane_core::sync::lock;

    use super::*;
    use crate::store::Store;
    use crate::store::metrics::snapshot::Misses;
    use crate::store::open::builder::BlockGroup;

    /// Keeps the values that were set, by name and labels.
    #[derive(Clone, Default)]
    struct Kept(Arc<Mutex<Vec<(String, f64)>>>);

    struct KeptValue(Kept, String);

    impl KeptValue {
        fn of(kept: &Kept, key: &Key) -> Arc<Self> {
            let labels: Vec<_> =
                key.labels().map(|it| format!("{}={}", it.key(), it.value())).collect();
            Arc::new(Self(kept.clone(), format!("{} {}", key.name(), labels.join(","))))
        }
    }

    impl CounterFn for KeptValue {
        fn increment(&self, _: u64) {}

        fn absolute(&self, value: u64) {
            self.set(value as f64);
        }
    }

    impl GaugeFn for KeptValue {
        fn increment(&self, _: f64) {}
        fn decrement(&self, _: f64) {}

        fn set(&self, value: f64) {
            lock(&self.0.0).push((self.1.clone(), value));
        }
    }

    impl Recorder for Kept {
        fn describe_counter(&self, _: KeyName, _: Option<metrics::Unit>, _: SharedString) {}
        fn describe_gauge(&self, _: KeyName, _: Option<metrics::Unit>, _: SharedString) {}
        fn describe_histogram(&self, _: KeyName, _: Option<metrics::Unit>, _: SharedString) {}

        fn register_counter(&self, key: &Key, _: &Metadata<'_>) -> Counter {
            Counter::from_arc(KeptValue::of(self, key))
        }

        fn register_gauge(&self, key: &Key, _: &Metadata<'_>) -> Gauge {
            Gauge::from_arc(KeptValue::of(self, key))
        }

        fn register_histogram(&self, _: &Key, _: &Metadata<'_>) -> Histogram {
            Histogram::noop()
        }
    }

    fn published(snapshot: &StoreSnapshot) -> Vec<(String, f64)> {
        let kept = Kept::default();
        with_local_recorder(&kept, || snapshot.record_metrics());
        lock(&kept.0).clone()
    }

    #[test]
    fn snapshots_are_published_by_tier_and_reason() {
        let group = BlockGroup::new("kv", 4096);
        let (store, _) = Store::builder().group(group).host(ByteCount::kib(64)).open().unwrap();
        let mut snapshot = store.snapshot();
        snapshot.misses = Misses { absent: 3, ..Misses::default() };
        snapshot.ended_jobs = 9;
        snapshot.tiers[0].hits = 7;
        snapshot.tiers[0].read_bytes = 70;
        let found = published(&snapshot);
        for (name, value) in [
            ("terrane_store_tier_hits tier=host", 7.0),
            ("terrane_store_tier_read_bytes tier=host", 70.0),
            ("terrane_store_tier_capacity_bytes tier=host", 65536.0),
            ("terrane_store_tier_slots tier=host,group=0", 16.0),
            ("terrane_store_misses reason=absent", 3.0),
            ("terrane_store_jobs ", 9.0),
            ("terrane_store_jobs_running ", 0.0),
            ("terrane_transfers_refused ", 0.0),
        ] {
            assert!(
                found.contains(&(name.to_owned(), value)),
                "{name} {value} is not in {found:?}"
            );
        }
    }

    /// A number that is added to one exit cannot be missing in the other.
    #[test]
    fn names_are_those_of_the_text() {
        let group = BlockGroup::new("kv", 4096);
        let (store, _) = Store::builder().group(group).host(ByteCount::kib(64)).open().unwrap();
        let snapshot = store.snapshot();
        let found = published(&snapshot);
        let mut text = String::new();
        snapshot.write_openmetrics(&mut text).unwrap();
        let families = text.lines().filter_map(|line| line.strip_prefix("# TYPE "));
        let mut compared = 0;
        for (name, kind) in families.filter_map(|line| line.split_once(' ')) {
            let is_sample = |line: &str| {
                let found = line.split(['{', ' ']).next().unwrap_or_default();
                found == name || found.strip_suffix("_total") == Some(name)
            };
            let has_samples = text.lines().any(is_sample);
            // Times are quantiles here, of which an empty histogram has none.
            if kind == "histogram" || name.ends_with("_seconds") || !has_samples {
                continue;
            }
            let is_published =
                |(key, _): &(String, f64)| key.split(' ').next().is_some_and(|found| found == name);
            assert!(found.iter().any(is_published), "{name} is not in {found:?}");
            compared += 1;
        }
        assert!(compared > 20, "{compared} in {text}");
    }
}
