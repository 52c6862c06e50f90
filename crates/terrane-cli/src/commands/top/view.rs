//! The tables of `terrane top`: rates between two readings, and totals after the first.

use std::time::{Duration, Instant};

use super::metrics::Sample;

/// Two readings of the same metrics.
#[derive(Clone, Debug, Default)]
pub(super) struct Readings {
    now: Vec<Sample>,
    /// The time of `now`.
    at: Option<Instant>,
    /// The previous reading, and the time between the two.
    before: Option<(Vec<Sample>, Duration)>,
}

/// A table of the view.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Section {
    pub header: Vec<String>,
    pub rows: Vec<Vec<String>>,
}

const STORE: &str = "terrane_store_";

impl Readings {
    /// Adds a reading of this time. Rates cover the time since the previous successful reading, so
    /// failed attempts in between do not shorten it.
    pub(super) fn add(&mut self, samples: Vec<Sample>, at: Instant) {
        let before = std::mem::replace(&mut self.now, samples);
        if let Some(last) = self.at.replace(at)
            && !before.is_empty()
        {
            self.before = Some((before, at.saturating_duration_since(last)));
        }
    }

    /// The tables, in their order. Tables without rows are omitted.
    pub(super) fn sections(&self) -> Vec<Section> {
        let sections = [self.tiers(), self.groups(), self.misses(), self.jobs(), self.others()];
        sections.into_iter().filter(|section| !section.rows.is_empty()).collect()
    }

    /// Whether counters are shown as rates.
    pub(super) fn has_rates(&self) -> bool {
        self.before.is_some()
    }

    /// A counter's rate per second, or its total before the second reading.
    fn count(&self, name: &str, labels: &[(&str, &str)]) -> f64 {
        let total = sum(&self.now, name, labels);
        let Some((before, since)) = &self.before else { return total };
        // After a store is opened again, its counters start at zero.
        (total - sum(before, name, labels)).max(0.0) / since.as_secs_f64().max(1e-3)
    }

    fn values(&self, label: &str) -> Vec<String> {
        let mut values: Vec<String> = Vec::new();
        for value in self.now.iter().filter_map(|sample| sample.label(label)) {
            if !values.iter().any(|known| known == value) {
                values.push(value.to_owned());
            }
        }
        values
    }

    fn tiers(&self) -> Section {
        let unit = if self.has_rates() { "/s" } else { "" };
        let header = [
            "TIER",
            "CAPACITY",
            &format!("HITS{unit}"),
            "OF ALL",
            &format!("READ{unit}"),
            &format!("WRITTEN{unit}"),
            &format!("EVICTED{unit}"),
        ]
        .map(str::to_owned);
        let name = |suffix: &str| format!("{STORE}tier_{suffix}");
        let uses =
            sum_of(self.values("tier"), |tier| self.count(&name("hits_total"), &[("tier", tier)]))
                + sum_of(self.values("reason"), |reason| {
                    self.count(&format!("{STORE}misses_total"), &[("reason", reason)])
                });
        let rows = self.values("tier").into_iter().map(|tier| {
            let labels = [("tier", tier.as_str())];
            let count = |suffix: &str| self.count(&name(suffix), &labels);
            let hits = count("hits_total");
            vec![
                tier.clone(),
                bytes(sum(&self.now, &name("capacity_bytes"), &labels)),
                number(hits),
                if uses > 0.0 { format!("{:.1} %", hits / uses * 100.0) } else { "-".to_owned() },
                bytes(count("read_bytes_total")),
                bytes(count("written_bytes_total")),
                number(count("evictions_total")),
            ]
        });
        Section { rows: rows.collect(), header: header.to_vec() }
    }

    fn groups(&self) -> Section {
        let header =
            ["TIER", "GROUP", "SLOTS", "BLOCKS", "FILLED", "PINNED", "DIRTY"].map(str::to_owned);
        let mut rows = Vec::new();
        for tier in self.values("tier") {
            for group in self.values("group") {
                let labels = [("tier", tier.as_str()), ("group", group.as_str())];
                let gauge =
                    |suffix: &str| sum(&self.now, &format!("{STORE}tier_{suffix}"), &labels);
                let slots = gauge("slots");
                if slots > 0.0 {
                    let filled = format!("{:.1} %", gauge("blocks") / slots * 100.0);
                    let mut row = vec![
                        tier.clone(),
                        group.clone(),
                        number(slots),
                        number(gauge("blocks")),
                        filled,
                    ];
                    row.extend([number(gauge("pinned")), number(gauge("dirty"))]);
                    rows.push(row);
                }
            }
        }
        Section { header: header.to_vec(), rows }
    }

    fn misses(&self) -> Section {
        let unit = if self.has_rates() { "MISSES/s" } else { "MISSES" };
        let rows = self.values("reason").into_iter().map(|reason| {
            let count = self.count(&format!("{STORE}misses_total"), &[("reason", &reason)]);
            vec![reason.replace('_', " "), number(count)]
        });
        Section { rows: rows.collect(), header: vec!["REASON".to_owned(), unit.to_owned()] }
    }

    fn jobs(&self) -> Section {
        let is_store = self.now.iter().any(|sample| sample.name.starts_with(STORE));
        let unit = if self.has_rates() { "/s" } else { "" };
        let gauge = |name: &str| number(sum(&self.now, &format!("{STORE}{name}"), &[]));
        let count = |name: &str| self.count(&format!("{STORE}{name}_total"), &[]);
        let jobs = count("jobs");
        let mean = if jobs > 0.0 {
            format!("{:.2} ms", count("job_seconds") / jobs * 1e3)
        } else {
            "-".to_owned()
        };
        let rows = vec![vec![
            gauge("jobs_running"),
            gauge("jobs_waiting_for_room"),
            number(jobs),
            mean,
            number(count("jobs_refused")),
            number(count("timed_out")),
            number(count("failed")),
        ]];
        let header = [
            "JOBS RUNNING",
            "WAITING",
            &format!("ENDED{unit}"),
            "MEAN",
            &format!("REFUSED{unit}"),
            &format!("TIMED OUT{unit}"),
            &format!("FAILED{unit}"),
        ]
        .map(str::to_owned);
        Section { header: header.to_vec(), rows: if is_store { rows } else { Vec::new() } }
    }

    /// Metrics that are not the store's, such as bandwidths of paths and depths of queues.
    fn others(&self) -> Section {
        let others = self.now.iter().filter(|sample| !sample.name.starts_with(STORE));
        let rows = others.map(|sample| {
            let labels: Vec<(&str, &str)> =
                sample.labels.iter().map(|(name, value)| (name.as_str(), value.as_str())).collect();
            let values: Vec<&str> = labels.iter().map(|(_, value)| *value).collect();
            let is_counter = sample.name.ends_with("_total");
            let value = if is_counter { self.count(&sample.name, &labels) } else { sample.value };
            let unit = if is_counter && self.has_rates() { "/s" } else { "" };
            let is_bytes = sample.name.contains("bytes");
            let value = if is_bytes { bytes(value) } else { number(value) };
            vec![sample.name.clone(), values.join(" "), format!("{value}{unit}")]
        });
        Section {
            rows: rows.collect(),
            header: ["METRIC", "OF", "VALUE"].map(str::to_owned).to_vec(),
        }
    }
}

/// The sum of the samples with this name and at least these labels.
fn sum(samples: &[Sample], name: &str, labels: &[(&str, &str)]) -> f64 {
    let has = |sample: &&Sample| {
        sample.name == name
            && labels.iter().all(|(label, value)| sample.label(label) == Some(value))
    };
    // The sum of an empty list of floating-point numbers is -0.
    samples.iter().filter(has).map(|sample| sample.value).sum::<f64>() + 0.0
}

fn sum_of(values: Vec<String>, count: impl Fn(&str) -> f64) -> f64 {
    values.iter().map(|value| count(value)).sum()
}

fn number(value: f64) -> String {
    if value.fract() == 0.0 && value < 1e15 { format!("{value:.0}") } else { format!("{value:.2}") }
}

fn bytes(value: f64) -> String {
    let units = [(1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB")];
    let unit = units.into_iter().find(|(scale, _)| value >= *scale);
    unit.map_or_else(
        || format!("{value:.0} B"),
        |(scale, unit)| format!("{:.2} {unit}", value / scale),
    )
}

#[cfg(test)]
mod tests {
    use super::super::metrics::parse;
    use super::*;

    fn text(hits: u32, absent: u32) -> String {
        format!(
            "terrane_store_tier_hits_total{{tier=\"host\"}} {hits}\nterrane_store_tier_capacity_bytes{{tier=\"host\"}} 2000000\n\
             terrane_store_tier_slots{{tier=\"host\",group=\"0\"}} 8\nterrane_store_tier_blocks{{tier=\"host\",group=\"0\"}} 2\n\
             terrane_store_misses_total{{reason=\"absent\"}} {absent}\nterrane_store_jobs_running 3\nqueue_depth{{path=\"disk\"}} 7\n"
        )
    }

    #[test]
    fn counters_become_rates_with_the_second_reading() {
        let begun = Instant::now();
        let mut readings = Readings::default();
        readings.add(parse(&text(30, 10)).unwrap(), begun);
        let first = readings.sections();
        assert_eq!(first[0].rows[0][..4], ["host", "2.00 MB", "30", "75.0 %"]);
        assert_eq!(first[1].rows[0][2..5], ["8", "2", "25.0 %"]);
        assert_eq!(first.last().unwrap().rows[0], ["queue_depth", "disk", "7"]);
        readings.add(parse(&text(50, 10)).unwrap(), begun + Duration::from_secs(2));
        let second = readings.sections();
        assert_eq!(second[0].rows[0][2..4], ["10", "100.0 %"]);
        assert_eq!(second[0].header[2], "HITS/s");
        // The process was restarted.
        readings.add(parse(&text(1, 0)).unwrap(), begun + Duration::from_secs(3));
        assert_eq!(readings.sections()[0].rows[0][2], "0");
    }
}
