//! The blocks that a recovery found.

use std::time::Duration;

use crate::key::KeyHash;

/// A block that is on disk according to its record. Its payload has not been read: the checksum
/// decides at the first read whether the slot still holds it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LiveRecord {
    /// The keyed hash of the key.
    pub key_hash: KeyHash,
    /// The number of the record. Blocks with higher numbers were stored later; the blocks of a
    /// checkpoint have the same number.
    pub sequence: u64,
    /// The bytes of the payload.
    pub length: u64,
    /// The checksum of the payload.
    pub checksum: u64,
    /// The slot within the group.
    pub slot: u32,
    /// The group.
    pub group: u16,
    /// The key, if keys were asked for and all its records are valid.
    pub key: Option<Box<[u8]>>,
}

/// The blocks of a recovery, each key and each slot once, in parts that threads can share out.
#[derive(Debug, Default)]
pub struct LiveRecords {
    parts: Vec<Vec<LiveRecord>>,
}

impl LiveRecords {
    pub(crate) const fn new(parts: Vec<Vec<LiveRecord>>) -> Self {
        Self { parts }
    }

    /// The number of blocks.
    #[must_use]
    pub fn len(&self) -> usize {
        self.parts.iter().map(Vec::len).sum()
    }

    /// Whether there are no blocks.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// All blocks, in any order.
    pub fn iter(&self) -> impl Iterator<Item = &LiveRecord> {
        self.parts.iter().flatten()
    }

    /// The parts. A key is in one part only.
    #[must_use]
    pub fn into_parts(self) -> Vec<Vec<LiveRecord>> {
        self.parts
    }
}

impl IntoIterator for LiveRecords {
    type Item = LiveRecord;
    type IntoIter = std::iter::Flatten<std::vec::IntoIter<Vec<LiveRecord>>>;

    /// All blocks, in any order. The memory of a part is freed when its last block has been taken.
    fn into_iter(self) -> Self::IntoIter {
        self.parts.into_iter().flatten()
    }
}

/// The result of a recovery.
#[derive(Debug, Default)]
#[non_exhaustive]
pub struct Recovered {
    /// The blocks.
    pub live: LiveRecords,
    /// The number of blocks.
    pub found: u64,
    /// Records that a crash cut short or lost before they were durable.
    pub torn: u64,
    /// Records that were durable and are damaged or missing.
    pub damaged: u64,
    /// Blocks whose records are valid and not used: a later removal of their keys may be among the
    /// damaged records, or their slots no longer exist.
    pub dropped: u64,
    /// Whether one of the superblocks was missing, old or damaged, and was written again.
    pub superblock_repaired: bool,
    /// The bytes of the journals and the checkpoint.
    pub bytes: u64,
    /// The number of the journals: each session begins one, and a checkpoint replaces all of them.
    pub journals: u64,
    /// The time that the opening took.
    pub took: Duration,
}
