//! The keys that were removed or found damaged lately, for [`why`](crate::Store::why).

use std::collections::{HashMap, VecDeque};
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, Ordering};

use terrane_core::sync::lock;

use crate::KeyHash;
use crate::store::query::event::StoreEventKind;

/// The latest keys that were removed or found damaged, and were not stored again.
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
