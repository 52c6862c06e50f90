//! Counts of the store.

use std::sync::atomic::AtomicU64;

/// Counts of a store since it was opened.
#[derive(Default)]
pub(crate) struct StoreCounters {
    pub(crate) refused_jobs: AtomicU64,
    pub(crate) already_stored: AtomicU64,
    pub(crate) timed_out: AtomicU64,
    pub(crate) cancelled: AtomicU64,
    pub(crate) failed: AtomicU64,
    pub(crate) missed_absent: AtomicU64,
    pub(crate) missed_writing: AtomicU64,
    pub(crate) missed_corrupt: AtomicU64,
    pub(crate) missed_evicted: AtomicU64,
    pub(crate) missed_length: AtomicU64,
}
