//! Numbers about a store.

use terrane_core::ByteCount;
use terrane_core::metrics::HistogramSnapshot;

use terrane_transfer::TransferSnapshot;

use crate::disk::CatalogSnapshot;

/// Numbers about a store, since it was opened.
///
/// They are exact while no job runs. Otherwise each is exact at some moment of the call.
#[derive(Clone, Debug, Default)]
#[non_exhaustive]
pub struct StoreSnapshot {
    /// The tiers, the fastest first.
    pub tiers: Vec<TierSnapshot>,
    /// The keys that a get did not find.
    pub misses: Misses,
    /// The jobs that run.
    pub running_jobs: usize,
    /// The jobs that ended.
    pub ended_jobs: u64,
    /// The jobs that were refused.
    pub refused_jobs: u64,
    /// The keys that puts found in the store.
    pub already_stored: u64,
    /// The blocks of jobs that timed out.
    pub timed_out: u64,
    /// The blocks of jobs that were cancelled.
    pub cancelled: u64,
    /// The blocks of jobs that failed.
    pub failed: u64,
    /// The times of the ended jobs, in nanoseconds.
    pub job_times: HistogramSnapshot,
    /// The keys that a put or a copy into another tier writes now.
    pub keys_in_flight: usize,
    /// The jobs that wait for slots of a tier.
    pub jobs_waiting_for_room: usize,
    /// The copies between memory, by path. `None` if the caller passed the manager, which
    /// [has its own](terrane_transfer::TransferManager::snapshot), or if no tier is memory.
    pub transfers: Option<TransferSnapshot>,
    /// The catalog of the disk tier, if there is one.
    pub catalog: Option<CatalogSnapshot>,
}

/// The keys that gets did not find, by the reason.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Misses {
    /// The store does not remember the key.
    pub absent: u64,
    /// A put wrote the block, and had not ended by the deadline of the get.
    pub writing: u64,
    /// The bytes on disk differed from the checksum.
    pub corrupt: u64,
    /// The block was evicted lately.
    pub evicted: u64,
    /// The block has another length than the destination.
    pub wrong_length: u64,
}

/// Numbers about a tier.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct TierSnapshot {
    /// The name of the tier.
    pub name: String,
    /// Whether this is the disk tier.
    pub is_disk: bool,
    /// The groups, in their order.
    pub groups: Vec<GroupSnapshot>,
    /// The bytes of all slots.
    pub capacity: ByteCount,
    /// The bytes of the files of a disk tier.
    pub file_bytes: ByteCount,
    /// The keys that gets found in this tier.
    pub hits: u64,
    /// The blocks that were stored in this tier.
    pub stored: u64,
    /// The blocks that were evicted from this tier.
    pub evictions: u64,
    /// The bytes that gets and promotions read from this tier.
    pub read_bytes: u64,
    /// The bytes that were written to this tier.
    pub written_bytes: u64,
    /// The blocks that could not be read from this tier, or had other bytes than their checksum says.
    pub read_failures: u64,
    /// The blocks that could not be written to this tier.
    pub write_failures: u64,
    /// For each block that a get read from this tier: the time from the submission to the block, in
    /// nanoseconds. Blocks that come by way of another tier count there.
    pub get_times: HistogramSnapshot,
    /// For each block that a put stored in this tier: the time from the submission until the tier had
    /// it, in nanoseconds. Later copies from tier to tier are not counted.
    pub put_times: HistogramSnapshot,
    /// The blocks to read that wait for the device or are in it now: of a disk tier.
    pub reads_queued: u64,
    /// The blocks to write that wait for the device or are in it now: of a disk tier.
    pub writes_queued: u64,
    /// The requests to the device so far, of a disk tier. Large blocks are split into several.
    pub requests: u64,
    /// Why the tier takes no more blocks, if it does not.
    pub read_only: Option<String>,
}

/// Numbers about a group in a tier.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct GroupSnapshot {
    /// The slots that the tier has for the group.
    pub slots: usize,
    /// The blocks in the tier.
    pub blocks: usize,
    /// The slots without a block.
    pub free: usize,
    /// The slots that a job fills, or whose block has left while a job reads it. An orphaned copy keeps a
    /// slot in use after its job, until the copy has ended.
    pub in_use: usize,
    /// The slots that no job gets any more, because the device damaged their blocks twice, or cannot
    /// read them. They are tried again when the store is opened again.
    pub quarantined: usize,
    /// The blocks that leases pin.
    pub pinned: usize,
    /// The blocks that were not written to a slower tier.
    pub dirty: usize,
}
