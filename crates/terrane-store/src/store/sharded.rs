//! The order of changes of one key: the index first, then the record, and no other thread between.

use std::sync::{Mutex, MutexGuard};

use crossbeam_utils::CachePadded;
use terrane_core::sync::lock;

use crate::KeyHash;

const SHARDS: usize = 64;

/// One lock for each shard of keys.
pub(crate) struct KeyOrder {
    shards: Box<[CachePadded<Mutex<()>>]>,
}

impl KeyOrder {
    pub(crate) fn new() -> Self {
        Self { shards: (0..SHARDS).map(|_| CachePadded::new(Mutex::new(()))).collect() }
    }

    /// Excludes other changes of the key. A query does not take this lock.
    pub(crate) fn lock(&self, key: KeyHash) -> Option<MutexGuard<'_, ()>> {
        let number = usize::try_from(key.high() & 63).unwrap_or(0);
        self.shards.get(number).map(|shard| lock(shard))
    }
}
