//! One value, under its own lock, for each shard of the keys.

use std::array;
use std::sync::{Mutex, MutexGuard};

use crossbeam_utils::CachePadded;
use terrane_core::convert::to_usize;
use terrane_core::sync::lock;

use crate::KeyHash;

const SHARDS: usize = 64;

/// One value for each shard of the keys, under a lock of its own.
pub(crate) struct Sharded<T> {
    shards: Box<[CachePadded<Mutex<T>>; SHARDS]>,
}

impl<T> Sharded<T> {
    /// Locks the value of the key's shard.
    pub(crate) fn lock(&self, key: KeyHash) -> MutexGuard<'_, T> {
        lock(&self.shards[to_usize(key.low()) % SHARDS])
    }
}

impl<T: Default> Default for Sharded<T> {
    fn default() -> Self {
        Self { shards: Box::new(array::from_fn(|_| CachePadded::default())) }
    }
}
