//! Counts of a tier, since the store was opened.

use std::time::Duration;

use terrane_core::metrics::{HISTOGRAM_CELLS, ShardedCounters};

use crate::slab::SlabFailure;
use crate::store::job::result::BlockResult;
use crate::store::metrics::snapshot::TierSnapshot;

/// The counts and latencies of a tier. A block is counted in one update, whatever is counted of it.
pub(crate) struct TierCounters {
    counters: ShardedCounters,
}

// A block that is read or stored changes one cache line, and its latency two.
const HITS: usize = 0;
const READ_BYTES: usize = 1;
const STORED: usize = 2;
const WRITTEN_BYTES: usize = 3;
const EVICTIONS: usize = 4;
const READ_FAILURES: usize = 5;
const WRITE_FAILURES: usize = 6;
const GET_TIMES: usize = 8;
const PUT_TIMES: usize = GET_TIMES + HISTOGRAM_CELLS;

impl TierCounters {
    pub(crate) fn new() -> Self {
        Self { counters: ShardedCounters::new(PUT_TIMES + HISTOGRAM_CELLS) }
    }

    /// Gets found so many keys in the tier.
    pub(crate) fn hits(&self, keys: u64) {
        self.counters.add(HITS, keys);
    }

    /// A get has the bytes of a block, so long after its submission.
    pub(crate) fn got(&self, bytes: u32, took: Duration) {
        self.counters.update(|shard| {
            shard.add(READ_BYTES, bytes.into());
            shard.record(GET_TIMES, nanoseconds(took));
        });
    }

    /// A copy of a block for a get has ended.
    pub(crate) fn copied(&self, result: &Result<(), BlockResult>, bytes: u32, took: Duration) {
        match result {
            Ok(()) => self.got(bytes, took),
            Err(BlockResult::Failed(_)) => self.counters.add(READ_FAILURES, 1),
            Err(_) => {}
        }
    }

    /// A block was copied from the tier to another one.
    pub(crate) fn read(&self, bytes: u32) {
        self.counters.add(READ_BYTES, bytes.into());
    }

    /// The tier has a block: so long after the submission of the put, if a put brought it.
    pub(crate) fn stored(&self, bytes: u32, took: Option<Duration>) {
        self.counters.update(|shard| {
            shard.add(STORED, 1);
            shard.add(WRITTEN_BYTES, bytes.into());
            if let Some(took) = took {
                shard.record(PUT_TIMES, nanoseconds(took));
            }
        });
    }

    pub(crate) fn evicted(&self, blocks: u64) {
        self.counters.add(EVICTIONS, blocks);
    }

    /// A block could not be read, or had other bytes.
    pub(crate) fn read_failed(&self, failure: &SlabFailure) {
        self.counters.add(READ_FAILURES, failure.is_of_device().into());
    }

    /// A block could not be written.
    pub(crate) fn write_failed(&self, failure: &SlabFailure) {
        self.counters.add(WRITE_FAILURES, failure.is_of_device().into());
    }

    /// Adds the counts to a snapshot.
    pub(crate) fn write_to(&self, snapshot: &mut TierSnapshot) {
        let get = |cell| self.counters.get(cell);
        snapshot.hits = get(HITS);
        snapshot.stored = get(STORED);
        snapshot.evictions = get(EVICTIONS);
        snapshot.read_bytes = get(READ_BYTES);
        snapshot.written_bytes = get(WRITTEN_BYTES);
        snapshot.read_failures = get(READ_FAILURES);
        snapshot.write_failures = get(WRITE_FAILURES);
        snapshot.get_times = self.counters.histogram(GET_TIMES);
        snapshot.put_times = self.counters.histogram(PUT_TIMES);
    }
}

/// Six centuries fit.
pub(crate) fn nanoseconds(time: Duration) -> u64 {
    u64::try_from(time.as_nanos()).unwrap_or(u64::MAX)
}
