//! The hash table of an index: slots by the hash of their key, in buckets of one cache line.

use terrane_core::convert::{to_u64, to_usize};

use crate::KeyHash;
use crate::sync::atomic::{AtomicU64, Ordering};
use crate::table_memory::{filled, prefetch};

/// Enough that threads rarely meet.
pub(super) const SHARDS: usize = 64;
const SHARD_BITS: u32 = SHARDS.trailing_zeros();

/// The entries of a bucket.
const ENTRIES: usize = 7;

/// The part of an entry that comes from the hash. The other half is the slot plus one.
const TAG: u64 = 0xffff_ffff_0000_0000;

/// The table: a range of buckets for each shard. It never grows and entries never move.
///
/// A slot that finds its bucket full goes to the next one of the shard, in a circle. Each bucket
/// counts those that went past it, so that a search ends at the first bucket without any.
///
/// The atomics are relaxed: the lock of the shard, or its count of changes, orders them.
pub(super) struct Buckets {
    buckets: Box<[Bucket]>,
    /// The buckets of a shard.
    per_shard: usize,
}

#[derive(Default)]
#[repr(align(64))]
struct Bucket {
    /// The number of slots that went to a later bucket because this one was full.
    passed: AtomicU64,
    entries: [AtomicU64; ENTRIES],
}

/// The place of a key in the table.
#[derive(Clone, Copy)]
pub(super) struct Home {
    pub(super) shard: usize,
    first: usize,
    tag: u64,
}

/// The place of an entry: the number of buckets after its first one, and the number in its bucket.
pub(super) struct Found {
    after: usize,
    entry: usize,
    pub(super) slot: u32,
}

impl Buckets {
    /// Room for the keys of so many slots.
    pub(super) fn new(slots: usize) -> Self {
        // Keyed hashes give a shard its mean and some standard deviations, which are square roots of
        // the mean: with ten of them, no shard is full in practice.
        let mean = slots.div_ceil(SHARDS);
        let most = mean + mean / 4 + 8 * mean.isqrt() + ENTRIES;
        let per_shard = most.min(slots).div_ceil(ENTRIES);
        Self { buckets: filled(per_shard * SHARDS, Default::default), per_shard }
    }

    /// The bytes of the table.
    pub(super) fn bytes(&self) -> usize {
        size_of_val(&*self.buckets)
    }

    pub(super) fn home(&self, key: KeyHash) -> Home {
        let mixed = key.mixed();
        let shard = to_usize(mixed >> (u64::BITS - SHARD_BITS));
        let place = u128::from(mixed << SHARD_BITS) * u128::from(to_u64(self.per_shard));
        let first = usize::try_from(place >> u64::BITS).unwrap_or(0);
        // Not zero, so that no free entry has it.
        Home { shard, first, tag: key.low() << 32 | 1 << 32 }
    }

    fn bucket(&self, home: Home, after: usize) -> Option<&Bucket> {
        let number = home.first + after;
        let number = if number < self.per_shard { number } else { number - self.per_shard };
        self.buckets.get(home.shard * self.per_shard + number)
    }

    /// Loads the first bucket of a key into the cache.
    pub(super) fn prefetch(&self, home: Home) {
        self.bucket(home, 0).into_iter().for_each(prefetch);
    }

    /// The slot that probably has the block of a key. It needs no lock, and may be wrong.
    pub(super) fn guess(&self, home: Home) -> Option<u32> {
        let bucket = self.bucket(home, 0)?;
        let found = bucket.matches(home.tag);
        bucket.slot(to_usize(found.trailing_zeros().into()))
    }

    /// The entry of a key whose slot is the right one.
    pub(super) fn find(&self, home: Home, is_key: impl Fn(u32) -> bool) -> Option<Found> {
        for after in 0..self.per_shard {
            let bucket = self.bucket(home, after)?;
            let mut matches = bucket.matches(home.tag);
            while matches != 0 {
                let entry = to_usize(matches.trailing_zeros().into());
                if let Some(slot) = bucket.slot(entry).filter(|slot| is_key(*slot)) {
                    return Some(Found { after, entry, slot });
                }
                matches &= matches - 1;
            }
            if bucket.passed.load(Ordering::Relaxed) == 0 {
                return None;
            }
        }
        None
    }

    /// Adds the slot of a key that the table does not have. Returns whether there was room.
    pub(super) fn add(&self, home: Home, slot: u32) -> bool {
        for after in 0..self.per_shard {
            let Some(entry) = self.bucket(home, after).and_then(Bucket::free_entry) else {
                continue;
            };
            for passed in (0..after).filter_map(|before| self.bucket(home, before)) {
                passed.change_passed(|count| count + 1);
            }
            entry.store(home.tag | (u64::from(slot) + 1), Ordering::Relaxed);
            return true;
        }
        false
    }

    /// Gives an entry another slot.
    pub(super) fn replace(&self, home: Home, found: &Found, slot: u32) {
        self.set(home, found, home.tag | (u64::from(slot) + 1));
    }

    pub(super) fn remove(&self, home: Home, found: &Found) {
        self.set(home, found, 0);
        for passed in (0..found.after).filter_map(|before| self.bucket(home, before)) {
            passed.change_passed(|count| count.saturating_sub(1));
        }
    }

    fn set(&self, home: Home, found: &Found, value: u64) {
        let bucket = self.bucket(home, found.after);
        if let Some(entry) = bucket.and_then(|bucket| bucket.entries.get(found.entry)) {
            entry.store(value, Ordering::Relaxed);
        }
    }

    /// The slots of a shard.
    pub(super) fn slots(&self, shard: usize) -> impl Iterator<Item = u32> {
        let begin = shard * self.per_shard;
        let buckets = self.buckets.get(begin..begin + self.per_shard).unwrap_or_default();
        buckets.iter().flat_map(|bucket| (0..ENTRIES).filter_map(|entry| bucket.slot(entry)))
    }
}

impl Bucket {
    /// A bit for each entry with this tag.
    fn matches(&self, tag: u64) -> u32 {
        let mut matches = 0;
        for (bit, entry) in self.entries.iter().enumerate() {
            let is_match = entry.load(Ordering::Relaxed) & TAG == tag;
            matches |= u32::from(is_match) << bit;
        }
        matches
    }

    fn slot(&self, entry: usize) -> Option<u32> {
        let value = self.entries.get(entry)?.load(Ordering::Relaxed);
        u32::try_from((value & !TAG).checked_sub(1)?).ok()
    }

    fn free_entry(&self) -> Option<&AtomicU64> {
        self.entries.iter().find(|entry| entry.load(Ordering::Relaxed) == 0)
    }

    fn change_passed(&self, change: impl Fn(u64) -> u64) {
        self.passed.store(change(self.passed.load(Ordering::Relaxed)), Ordering::Relaxed);
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    /// Keys of one home: the tags differ.
    fn keys() -> impl Iterator<Item = KeyHash> {
        (0_u64..).map(|number| KeyHash::from_halves(number << 1, number << 1))
    }

    #[test]
    fn entries_beyond_a_full_bucket_are_found_until_they_are_removed() {
        let buckets = Buckets::new(100);
        let room = buckets.per_shard * ENTRIES;
        assert!((2 * ENTRIES..100).contains(&room));
        let keys: Vec<(u32, Home)> =
            (0..).zip(keys()).map(|(slot, key)| (slot, buckets.home(key))).take(room).collect();
        for (slot, home) in &keys {
            assert!(buckets.add(*home, *slot));
        }
        let (_, first) = keys[0];
        assert!(!buckets.add(first, 99), "the shard is full");
        let has = |slot: u32, home: Home| buckets.find(home, |other| other == slot).is_some();
        assert!(keys.iter().all(|(slot, home)| has(*slot, *home)));
        assert_eq!(buckets.slots(first.shard).count(), room);
        // The first bucket has room again, and those that went past it are found.
        for (removed, (slot, home)) in keys.iter().enumerate() {
            let found = buckets.find(*home, |other| other == *slot).unwrap();
            buckets.remove(*home, &found);
            assert!(!has(*slot, *home));
            assert!(keys.iter().skip(removed + 1).all(|(slot, home)| has(*slot, *home)));
        }
        let passed = |bucket: &Bucket| bucket.passed.load(Ordering::Relaxed);
        assert!(buckets.buckets.iter().all(|bucket| passed(bucket) == 0));
    }
}
