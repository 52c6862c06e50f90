//! The bytes of keys.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use crate::KeyHash;
use crate::store::sharded::Sharded;

/// The bytes of keys, by their hash: of all keys, or of those whose records are not written yet.
#[derive(Default)]
pub(crate) struct KeyNames {
    pub(crate) keeps_all: bool,
    shards: Sharded<HashMap<KeyHash, Arc<[u8]>>>,
    count: AtomicUsize,
}

impl KeyNames {
    pub(crate) fn new(keeps_all: bool) -> Self {
        Self { keeps_all, ..Self::default() }
    }

    pub(crate) fn insert(&self, key: KeyHash, bytes: &[u8]) {
        if self.shards.lock(key).insert(key, bytes.into()).is_none() {
            self.count.fetch_add(1, Ordering::Relaxed);
        }
    }

    pub(crate) fn get(&self, key: KeyHash) -> Option<Arc<[u8]>> {
        if self.is_empty() {
            return None;
        }
        self.shards.lock(key).get(&key).cloned()
    }

    pub(crate) fn remove(&self, key: KeyHash) {
        if self.shards.lock(key).remove(&key).is_some() {
            self.count.fetch_sub(1, Ordering::Relaxed);
        }
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.count.load(Ordering::Relaxed) == 0
    }
}
