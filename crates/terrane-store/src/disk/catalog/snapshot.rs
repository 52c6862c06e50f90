//! Numbers about a catalog.

use std::sync::Arc;

use crate::disk::error::ReadOnlyReason;

/// Numbers about a catalog.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct CatalogSnapshot {
    /// The number of clears since the store was created, plus one.
    pub epoch: u64,
    /// The number of the next record.
    pub next_sequence: u64,
    /// The highest number that is durable.
    pub durable: u64,
    /// The removals of this epoch.
    pub tombstones: u64,
    /// The number of the journal that is written, if the catalog is not read-only.
    pub journal: Option<u64>,
    /// The bytes of that journal. A checkpoint begins a new one.
    pub journal_bytes: u64,
    /// The number of the last checkpoint.
    pub checkpoint: Option<u64>,
    /// Why the catalog does not write.
    pub read_only: Option<Arc<ReadOnlyReason>>,
}
