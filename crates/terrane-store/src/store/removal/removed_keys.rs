//! Keys that are removed while puts are in flight.

use std::collections::{BTreeMap, HashMap, VecDeque};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};

use terrane_core::sync::lock;

use crate::KeyHash;

/// The removals since the oldest put in flight began.
///
/// A removal marks the claim of a key. A put that began before it, and claims the key later, finds the
/// removal here.
#[derive(Default)]
pub(crate) struct RemovedKeys {
    state: Mutex<RemovedKeysState>,
    /// The number of keys with a removal, to read without the lock.
    keys: AtomicUsize,
}

#[derive(Default)]
struct RemovedKeysState {
    /// The number of removals so far.
    count: u64,
    /// The number of puts in flight, by the number of removals before them.
    puts: BTreeMap<u64, usize>,
    /// The last removal of each key.
    last: HashMap<KeyHash, u64>,
    /// The oldest first.
    order: VecDeque<(u64, KeyHash)>,
}

/// A put from its submission to its end.
pub(crate) struct PutInFlight {
    removed: Arc<RemovedKeys>,
    /// The number of removals before the put.
    before: u64,
}

impl RemovedKeys {
    pub(crate) fn begin_put(self: &Arc<Self>) -> PutInFlight {
        let mut state = lock(&self.state);
        let before = state.count;
        *state.puts.entry(before).or_default() += 1;
        PutInFlight { removed: Arc::clone(self), before }
    }

    /// Records a removal for the puts in flight. The caller marks the claim of the key afterwards.
    pub(crate) fn insert(&self, key: KeyHash) {
        let mut state = lock(&self.state);
        state.count += 1;
        if !state.puts.is_empty() {
            let count = state.count;
            state.last.insert(key, count);
            state.order.push_back((count, key));
            self.keys.store(state.last.len(), Ordering::SeqCst);
        }
    }
}

impl PutInFlight {
    /// Whether the key was removed after the put began. The put has claimed the key before, so a later
    /// removal marks the claim.
    pub(crate) fn was_removed(&self, key: KeyHash) -> bool {
        self.removed.keys.load(Ordering::SeqCst) > 0
            && lock(&self.removed.state).last.get(&key).is_some_and(|&last| last > self.before)
    }
}

impl Drop for PutInFlight {
    fn drop(&mut self) {
        let state = &mut *lock(&self.removed.state);
        if let Some(puts) = state.puts.get_mut(&self.before) {
            *puts -= 1;
            if *puts == 0 {
                state.puts.remove(&self.before);
            }
        }
        // Every put that remains began after these removals.
        let oldest = state.puts.first_key_value().map_or(state.count, |(&before, _)| before);
        while let Some(&(count, key)) = state.order.front()
            && count <= oldest
        {
            state.order.pop_front();
            if state.last.get(&key) == Some(&count) {
                state.last.remove(&key);
            }
        }
        self.removed.keys.store(state.last.len(), Ordering::SeqCst);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn key(number: u8) -> KeyHash {
        crate::KeyHasher::new(&[0; 16]).hash(&[number]).unwrap()
    }

    #[test]
    fn only_puts_that_began_before_a_removal_are_removed() {
        let removed = Arc::new(RemovedKeys::default());
        let early = removed.begin_put();
        removed.insert(key(1));
        let late = removed.begin_put();
        assert!(early.was_removed(key(1)) && !late.was_removed(key(1)));
        assert!(!early.was_removed(key(2)));
        removed.insert(key(1));
        assert!(late.was_removed(key(1)));
    }

    #[test]
    fn removals_are_forgotten_with_the_puts_before_them() {
        let removed = Arc::new(RemovedKeys::default());
        removed.insert(key(1));
        assert_eq!(removed.keys.load(Ordering::SeqCst), 0, "no put is in flight");
        let puts = [removed.begin_put(), removed.begin_put()];
        removed.insert(key(1));
        let late = removed.begin_put();
        removed.insert(key(2));
        removed.insert(key(1));
        drop(puts);
        assert_eq!(removed.keys.load(Ordering::SeqCst), 2);
        assert!(late.was_removed(key(1)) && late.was_removed(key(2)));
        drop(late);
        let state = lock(&removed.state);
        assert!(state.order.is_empty() && state.last.is_empty() && state.puts.is_empty());
    }
}
