//! Hit ratios by capacity, from a trace of keys.

use std::collections::HashMap;

use serde::{Deserialize, Serialize};

use crate::error::PlanError;

/// The keys of blocks in the order in which they were requested.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Trace {
    /// For each use of a key: the number of different keys used since its last use, including this
    /// key. `None` at the first use.
    distances: Vec<Option<usize>>,
    keys: usize,
    requests: usize,
}

/// The hit ratios of a trace.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct TraceReport {
    /// Requests in the trace.
    pub requests: u64,
    /// Uses of a key.
    pub uses: u64,
    /// Different keys.
    pub keys: u64,
    /// The ratio of a cache that never evicts: the share of uses that are not the first use of
    /// their key.
    pub largest_hit_ratio: f64,
    /// The ratio at several capacities, ascending.
    pub by_capacity: Vec<HitRatio>,
}

/// The hit ratio of a cache with a capacity in blocks and LRU eviction.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct HitRatio {
    /// The tiers that have this capacity together, or empty.
    pub tiers: String,
    /// The capacity in blocks.
    pub blocks: u64,
    /// The share of uses that hit.
    pub hit_ratio: f64,
}

impl Trace {
    /// Parses a trace. A line has the keys of one request, separated by spaces or commas, or is a
    /// JSON object with the list `hash_ids`. Empty lines and lines that begin with `#` are skipped.
    ///
    /// # Errors
    ///
    /// [`PlanError::Trace`] with the line, and [`PlanError::EmptyTrace`].
    pub fn parse(text: &str) -> Result<Self, PlanError> {
        let mut order = StackDistances::default();
        let mut trace = Self::default();
        for (number, line) in text.lines().enumerate() {
            let line = line.trim();
            if line.is_empty() || line.starts_with('#') {
                continue;
            }
            trace.requests += 1;
            let keys =
                keys_of(line).map_err(|reason| PlanError::Trace { line: number + 1, reason })?;
            trace.distances.extend(keys.into_iter().map(|key| order.next(key)));
        }
        if trace.distances.is_empty() {
            return Err(PlanError::EmptyTrace);
        }
        trace.keys = order.last_use.len();
        Ok(trace)
    }

    /// The share of uses that hit in a cache with this number of blocks.
    #[must_use]
    pub fn hit_ratio(&self, blocks: u64) -> f64 {
        let hits = self.distances.iter().flatten();
        let hits = hits.filter(|&&distance| terrane_core::convert::to_u64(distance) <= blocks);
        hits.count() as f64 / self.distances.len().max(1) as f64
    }

    /// The ratios at the cumulative capacities of the tiers, and at powers of four in between.
    pub(crate) fn report(&self, tiers: &[(String, u64)]) -> TraceReport {
        let keys = terrane_core::convert::to_u64(self.keys);
        let mut capacities: Vec<(u64, String)> = Vec::new();
        let mut power = 16_u64;
        while power < keys {
            capacities.push((power, String::new()));
            power = power.saturating_mul(4);
        }
        capacities.push((keys, String::new()));
        let (mut sum, mut names) = (0_u64, Vec::new());
        for (name, blocks) in tiers {
            sum = sum.saturating_add(*blocks);
            names.push(name.as_str());
            capacities.push((sum, names.join(" + ")));
        }
        capacities.sort();
        TraceReport {
            requests: terrane_core::convert::to_u64(self.requests),
            uses: terrane_core::convert::to_u64(self.distances.len()),
            keys,
            largest_hit_ratio: self.hit_ratio(u64::MAX),
            by_capacity: capacities
                .into_iter()
                .map(|(blocks, tiers)| HitRatio {
                    tiers,
                    blocks,
                    hit_ratio: self.hit_ratio(blocks),
                })
                .collect(),
        }
    }
}

fn keys_of(line: &str) -> Result<Vec<String>, String> {
    #[derive(Deserialize)]
    struct Request {
        hash_ids: Vec<serde_json::Value>,
    }
    if line.starts_with('{') {
        let request: Request = serde_json::from_str(line).map_err(|error| error.to_string())?;
        return Ok(request.hash_ids.iter().map(ToString::to_string).collect());
    }
    let words = line.split([' ', '\t', ',']).filter(|word| !word.is_empty());
    Ok(words.map(str::to_owned).collect())
}

/// Distances in a stack ordered by last use. A Fenwick tree counts the keys by the time when each
/// was last used.
#[derive(Debug, Default)]
struct StackDistances {
    last_use: HashMap<String, usize>,
    /// `tree[i - 1]` is node `i`.
    tree: Vec<usize>,
}

impl StackDistances {
    fn next(&mut self, key: String) -> Option<usize> {
        let now = self.tree.len() + 1;
        let before = self.last_use.insert(key, now);
        // Node `now` covers the positions after `now - lowest_bit(now)`. All are known except the
        // new one.
        let below = self.sum(now - 1) - self.sum(now - lowest_bit(now));
        self.tree.push(below + 1);
        let before = before?;
        let distance = self.sum(now) - self.sum(before);
        self.remove(before);
        Some(distance)
    }

    fn sum(&self, mut position: usize) -> usize {
        let mut sum = 0;
        while position > 0 {
            sum += self.tree.get(position - 1).copied().unwrap_or(0);
            position -= lowest_bit(position);
        }
        sum
    }

    fn remove(&mut self, mut position: usize) {
        while let Some(node) = self.tree.get_mut(position - 1) {
            *node -= 1;
            position += lowest_bit(position);
        }
    }
}

const fn lowest_bit(number: usize) -> usize {
    number & number.wrapping_neg()
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn ratios_of_a_short_trace() {
        let trace =
            Trace::parse("# one request a line\na b c\n\na b d\n{\"hash_ids\": [1, 2]}\n").unwrap();
        // a and b are used again after c, b and a: 3 keys.
        assert_eq!([2, 3].map(|blocks| trace.hit_ratio(blocks)), [0.0, 2.0 / 8.0]);
        let report = trace.report(&[("device".into(), 2), ("host".into(), 4)]);
        assert_eq!((report.requests, report.uses, report.keys), (3, 8, 6));
        let last = report.by_capacity.last().unwrap();
        assert_eq!((last.tiers.as_str(), last.blocks, last.hit_ratio), ("device + host", 6, 0.25));
    }

    #[test]
    fn a_trace_without_keys_or_with_other_json_is_refused() {
        assert!(matches!(Trace::parse("# nothing\n"), Err(PlanError::EmptyTrace)));
        let error = Trace::parse("a\n{\"ids\": []}").unwrap_err().to_string();
        assert!(error.contains("line 2") && error.contains("hash_ids"), "{error}");
    }

    proptest! {
        #[test]
        fn ratios_are_those_of_a_simulated_cache(uses in prop::collection::vec(0_u8..12, 1..200), blocks in 1_usize..14) {
            let text: Vec<String> = uses.iter().map(u8::to_string).collect();
            let trace = Trace::parse(&text.join(" ")).unwrap();
            let (mut cache, mut hits) = (Vec::new(), 0);
            for key in &uses {
                if let Some(at) = cache.iter().position(|other| other == key) {
                    cache.remove(at);
                    hits += 1;
                }
                cache.push(*key);
                if cache.len() > blocks {
                    cache.remove(0);
                }
            }
            let expected = f64::from(hits) / uses.len() as f64;
            prop_assert!((trace.hit_ratio(blocks as u64) - expected).abs() < 1e-12);
        }
    }
}
