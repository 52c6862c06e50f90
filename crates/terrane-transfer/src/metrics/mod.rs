//! Counts the transfers of a manager by engine, path and kinds of storage.

#[cfg(feature = "metrics")]
mod facade;
pub(crate) mod snapshot;

use std::sync::{Arc, OnceLock};
use std::time::Duration;

use terrane_core::StorageKind;
use terrane_core::convert::to_u64;
use terrane_core::metrics::{HISTOGRAM_CELLS, ShardedCounters};

use crate::explain::Explanation;
use snapshot::{PathSnapshot, TransferSnapshot};

/// The transfers of a manager and all its clones.
pub(crate) struct TransferMetrics {
    /// One entry for each used path, in the order of first use. All paths beyond the maximum share
    /// the last entry.
    paths: Box<[OnceLock<Arc<PathMetrics>>]>,
    refused: ShardedCounters,
}

/// More than the number of paths of a manager's engines.
const MOST_PATHS: usize = 64;

/// The transfers of one path. Each transfer in flight has a reference.
pub(crate) struct PathMetrics {
    key: PathKey,
    counters: ShardedCounters,
}

/// The names by which paths differ: the engine, the path, the source and the destination.
type PathKey = [&'static str; 4];

/// Whether two keys are equal. Names are nearly always the same constants, so their addresses are
/// compared first.
fn same(one: &PathKey, other: &PathKey) -> bool {
    one.iter().zip(other).all(|(one, other)| std::ptr::eq(*one, *other) || one == other)
}

// The counters of a path. Those of every transfer are in one cache line.
const SUCCEEDED: usize = 0;
const BYTES: usize = 1;
const BUSY: usize = 2;
const QUEUED: usize = 3;
const PIECES: usize = 4;
const RUNS: usize = 5;
const FAILED: usize = 6;
const CANCELLED: usize = 7;
const RETRIES: usize = 8;
const LATENCY: usize = 9;

/// How a transfer ended.
pub(crate) enum Ended {
    Succeeded { queued: Duration, copied: Duration },
    Failed,
    Cancelled,
}

impl TransferMetrics {
    pub(crate) fn new() -> Self {
        let paths = (0..MOST_PATHS).map(|_| OnceLock::new()).collect();
        Self { paths, refused: ShardedCounters::new(1) }
    }

    /// Returns the counters for the transfers of an engine by the path of this label.
    pub(crate) fn path_of(
        &self,
        engine: &'static str,
        label: &'static str,
        source: StorageKind,
        destination: StorageKind,
    ) -> Option<Arc<PathMetrics>> {
        let key = [engine, label, kind_name(source), kind_name(destination)];
        let mut known = self.paths.iter().map_while(OnceLock::get);
        match known.find(|path| same(&path.key, &key)) {
            Some(path) => Some(Arc::clone(path)),
            None => self.add_path(key),
        }
    }

    #[cold]
    fn add_path(&self, key: PathKey) -> Option<Arc<PathMetrics>> {
        let mut last = None;
        for slot in &self.paths {
            // Another thread may add the same path.
            let path = slot.get_or_init(|| Arc::new(PathMetrics::new(key)));
            last = Some(path);
            if path.key == key {
                break;
            }
        }
        last.cloned()
    }

    /// Counts a transfer that was refused at its submission.
    #[cold]
    pub(crate) fn refused(&self) {
        self.refused.add(0, 1);
    }

    pub(crate) fn snapshot(&self) -> TransferSnapshot {
        let paths = self.paths.iter().map_while(OnceLock::get).map(|path| path.snapshot());
        TransferSnapshot { paths: paths.collect(), refused: self.refused.get(0) }
    }
}

terrane_core::debug_fields!(TransferMetrics {});

impl PathMetrics {
    fn new(key: PathKey) -> Self {
        Self { key, counters: ShardedCounters::new(LATENCY + HISTOGRAM_CELLS) }
    }

    /// Counts a transfer that has ended.
    pub(crate) fn ended(&self, explanation: &Explanation, ended: &Ended, retries: u32) {
        self.counters.update(|shard| {
            match *ended {
                Ended::Succeeded { queued, copied } => {
                    shard.add(SUCCEEDED, 1);
                    shard.add(BYTES, explanation.bytes.get());
                    shard.add(BUSY, nanoseconds(copied));
                    shard.add(QUEUED, nanoseconds(queued));
                    shard.record(LATENCY, nanoseconds(queued + copied));
                }
                Ended::Failed => shard.add(FAILED, 1),
                Ended::Cancelled => shard.add(CANCELLED, 1),
            }
            shard.add(PIECES, explanation.pieces);
            shard.add(RUNS, explanation.runs);
            if retries > 0 {
                shard.add(RETRIES, retries.into());
            }
        });
    }

    fn snapshot(self: &Arc<Self>) -> PathSnapshot {
        let [engine, path, source, destination] = self.key;
        let count = |cell| self.counters.get(cell);
        PathSnapshot {
            engine,
            path,
            source,
            destination,
            succeeded: count(SUCCEEDED),
            failed: count(FAILED),
            cancelled: count(CANCELLED),
            // The table has one reference.
            in_flight: to_u64(Arc::strong_count(self).saturating_sub(1)),
            retries: count(RETRIES),
            bytes: count(BYTES).into(),
            pieces: count(PIECES),
            runs: count(RUNS),
            busy: Duration::from_nanos(count(BUSY)),
            queued: Duration::from_nanos(count(QUEUED)),
            latency: self.counters.histogram(LATENCY),
        }
    }
}

fn nanoseconds(duration: Duration) -> u64 {
    // 64 bits are enough for six centuries.
    u64::try_from(duration.as_nanos()).unwrap_or(u64::MAX)
}

/// The kind without the number of the device or peer.
fn kind_name(kind: StorageKind) -> &'static str {
    match kind {
        StorageKind::System => "system",
        StorageKind::Pinned => "pinned",
        StorageKind::Disk => "disk",
        kind if kind.is_device() => "device",
        kind if kind.is_remote() => "remote",
        _ => "other",
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use terrane_core::{Alignment, ByteCount};

    use super::*;
    use crate::engine::quote::{OnlyPath, SharedDecision};

    fn explanation(decision: &'static OnlyPath) -> Explanation {
        Explanation {
            source: StorageKind::System,
            destination: StorageKind::Disk,
            bytes: ByteCount::new(7),
            pieces: 1,
            runs: 1,
            source_alignment: Alignment::BYTE,
            destination_alignment: Alignment::BYTE,
            engine: "test",
            predicted: Duration::ZERO,
            declined: Vec::new(),
            decision: SharedDecision::Constant(decision),
        }
    }

    #[test]
    fn paths_beyond_the_table_share_the_last_entry() {
        let metrics = TransferMetrics::new();
        for number in 0..2 * MOST_PATHS {
            let path: &'static str = Box::leak(number.to_string().into_boxed_str());
            let decision: &'static OnlyPath = Box::leak(Box::new(OnlyPath { path, reason: "" }));
            for _ in 0..2 {
                let (source, destination) = (StorageKind::System, StorageKind::Disk);
                let counted = metrics.path_of("test", path, source, destination).unwrap();
                counted.ended(&explanation(decision), &Ended::Failed, 3);
            }
        }
        let paths = metrics.snapshot().paths;
        assert_eq!(paths.len(), MOST_PATHS);
        let failed: Vec<u64> = paths.iter().map(|path| path.failed).collect();
        assert!(failed[..MOST_PATHS - 1].iter().all(|&failed| failed == 2));
        assert_eq!(failed[MOST_PATHS - 1], 2 + 2 * to_u64(MOST_PATHS));
        assert_eq!((paths[0].retries, paths[0].in_flight), (6, 0));
    }
}
