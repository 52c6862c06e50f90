//! Counts of the store, the bytes of keys, the keys that were removed lately, and subscribers of
//! events.

use std::collections::{HashMap, VecDeque};
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, Weak};

use terrane_core::sync::lock;

use crate::KeyHash;
use crate::error::StoreError;
use crate::queue::CompletionQueue;
use crate::store::query::event::{Events, StoreEvent, StoreEventKind, Subscriber};
use crate::store::sharded::Sharded;

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

/// The keys that were removed or found damaged lately, and were not stored again.
#[derive(Default)]
pub(crate) struct Recent {
    keys: Mutex<RecentKeys>,
    /// Whether there are any, to read without the lock.
    has_keys: AtomicBool,
}

#[derive(Default)]
struct RecentKeys {
    /// The cause for each key, and the key's number in `order`.
    causes: HashMap<KeyHash, (StoreEventKind, u64)>,
    /// The oldest first. An entry whose key has another number now is obsolete.
    order: VecDeque<(u64, KeyHash)>,
    next: u64,
}

/// The keys that are remembered.
const MOST_RECENT: usize = 4096;

impl Recent {
    pub(crate) fn insert(&self, key: KeyHash, cause: StoreEventKind) {
        let mut keys = lock(&self.keys);
        let number = keys.next;
        keys.next += 1;
        keys.causes.insert(key, (cause, number));
        keys.order.push_back((number, key));
        if keys.order.len() > MOST_RECENT
            && let Some((oldest, key)) = keys.order.pop_front()
            && keys.causes.get(&key).is_some_and(|(_, number)| *number == oldest)
        {
            keys.causes.remove(&key);
        }
        self.has_keys.store(true, Ordering::Relaxed);
    }

    /// A tier has the block of the key again. The caller has the lock of the key's order.
    pub(crate) fn forget(&self, key: KeyHash) {
        // Most stores remove few keys.
        if self.has_keys.load(Ordering::Relaxed) {
            let mut keys = lock(&self.keys);
            keys.causes.remove(&key);
            self.has_keys.store(!keys.causes.is_empty(), Ordering::Relaxed);
        }
    }

    pub(crate) fn get(&self, key: KeyHash) -> Option<StoreEventKind> {
        lock(&self.keys).causes.get(&key).map(|(cause, _)| *cause)
    }
}

/// The subscribers of events.
#[derive(Default)]
pub(crate) struct Subscribers {
    list: Mutex<Vec<Weak<Subscriber>>>,
    count: AtomicUsize,
}

impl Subscribers {
    pub(crate) fn add(&self, capacity: usize) -> Result<Events, StoreError> {
        let shared = Arc::new(Subscriber::new(CompletionQueue::new(capacity)?));
        let mut list = lock(&self.list);
        list.push(Arc::downgrade(&shared));
        self.count.store(list.len(), Ordering::Relaxed);
        Ok(Events { shared })
    }

    pub(crate) fn are_none(&self) -> bool {
        self.count.load(Ordering::Relaxed) == 0
    }

    pub(crate) fn deliver(&self, event: &StoreEvent) {
        let subscribers: Vec<Arc<Subscriber>> = {
            let mut list = lock(&self.list);
            list.retain(|subscriber| subscriber.strong_count() > 0);
            self.count.store(list.len(), Ordering::Relaxed);
            list.iter().filter_map(Weak::upgrade).collect()
        };
        subscribers.iter().for_each(|subscriber| subscriber.deliver(event.clone()));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::key::KeyHasher;

    #[test]
    fn a_key_that_is_removed_again_is_forgotten_last() {
        let hasher = KeyHasher::new(&[7; 16]);
        let key = |number: usize| hasher.hash(&number.to_le_bytes()).unwrap();
        let recent = Recent::default();
        for number in 0..MOST_RECENT {
            recent.insert(key(number), StoreEventKind::Corrupt);
        }
        recent.insert(key(0), StoreEventKind::Removed);
        for number in 0..MOST_RECENT - 1 {
            recent.insert(key(MOST_RECENT + number), StoreEventKind::Removed);
        }
        assert_eq!(recent.get(key(0)), Some(StoreEventKind::Removed));
        assert_eq!(recent.get(key(1)), None);
    }
}
