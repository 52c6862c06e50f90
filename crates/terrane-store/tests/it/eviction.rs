//! The policies against reference implementations: written from the papers, over maps and queues.

use std::collections::{HashMap, VecDeque};

use terrane_store::{EvictionPolicy, KeyHash, Lru, S3Fifo};

/// A cache of keys, of which only hits are counted.
trait Cache {
    /// Uses a key. Returns whether it was present.
    fn access(&mut self, key: u64) -> bool;
}

/// A cache over one of the policies.
struct Policed<P> {
    policy: P,
    slots: HashMap<u64, u32>,
    keys: Vec<Option<u64>>,
    free: Vec<u32>,
}

impl<P: EvictionPolicy> Policed<P> {
    fn new(policy: P, capacity: u32) -> Self {
        let keys = vec![None; usize::try_from(capacity).unwrap()];
        Self { policy, slots: HashMap::new(), keys, free: (0..capacity).collect() }
    }
}

fn hash(key: u64) -> KeyHash {
    KeyHash::new(u128::from(key) << 64 | u128::from(key))
}

fn index(slot: u32) -> usize {
    usize::try_from(slot).unwrap()
}

impl<P: EvictionPolicy> Cache for Policed<P> {
    fn access(&mut self, key: u64) -> bool {
        if let Some(&slot) = self.slots.get(&key) {
            self.policy.hit(slot);
            return true;
        }
        let slot = self.free.pop().unwrap_or_else(|| {
            let (slots, keys) = (&mut self.slots, &mut self.keys);
            let evicted = self.policy.evict(&mut |slot| {
                let key = keys[index(slot)].take().unwrap();
                slots.remove(&key).unwrap();
                Some(hash(key))
            });
            evicted.unwrap()
        });
        self.slots.insert(key, slot);
        self.keys[index(slot)] = Some(key);
        self.policy.insert(slot, hash(key));
        false
    }
}

/// LRU over a queue that is searched.
struct ReferenceLru {
    capacity: usize,
    used: VecDeque<u64>,
}

impl Cache for ReferenceLru {
    fn access(&mut self, key: u64) -> bool {
        let found = self.used.iter().position(|&other| other == key);
        if let Some(place) = found {
            self.used.remove(place);
        } else if self.used.len() == self.capacity {
            self.used.pop_front();
        }
        self.used.push_back(key);
        found.is_some()
    }
}

/// S3-FIFO by the paper's algorithm, over queues of keys. A key's count is in a map.
struct ReferenceS3Fifo {
    capacity: usize,
    small: VecDeque<u64>,
    main: VecDeque<u64>,
    ghost: VecDeque<u64>,
    counts: HashMap<u64, u8>,
}

impl ReferenceS3Fifo {
    fn new(capacity: usize) -> Self {
        let [small, main, ghost] = [const { VecDeque::new() }; 3];
        Self { capacity, small, main, ghost, counts: HashMap::new() }
    }

    fn main_share(&self) -> usize {
        self.capacity - self.capacity.div_ceil(10)
    }

    fn evict(&mut self) {
        if self.main.len() > self.main_share() {
            return self.evict_main();
        }
        while let Some(key) = self.small.pop_front() {
            if self.counts[&key] > 1 {
                self.counts.insert(key, 0);
                self.main.push_back(key);
            } else {
                self.counts.remove(&key);
                if self.ghost.len() == self.main_share() {
                    self.ghost.pop_front();
                }
                self.ghost.push_back(key);
                return;
            }
        }
        self.evict_main();
    }

    fn evict_main(&mut self) {
        while let Some(key) = self.main.pop_front() {
            let count = self.counts[&key];
            if count == 0 {
                self.counts.remove(&key);
                return;
            }
            self.counts.insert(key, count - 1);
            self.main.push_back(key);
        }
    }
}

impl Cache for ReferenceS3Fifo {
    fn access(&mut self, key: u64) -> bool {
        if let Some(count) = self.counts.get_mut(&key) {
            *count = (*count + 1).min(3);
            return true;
        }
        if self.counts.len() == self.capacity {
            self.evict();
        }
        self.counts.insert(key, 0);
        // A key that is found stays as a hole: the queue forgets it when it is the oldest.
        match self.ghost.iter().position(|&other| other == key) {
            Some(place) => {
                self.ghost[place] = u64::MAX;
                self.main.push_back(key);
            }
            None => self.small.push_back(key),
        }
        false
    }
}

/// Pseudo-random numbers: xorshift64*.
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        self.0.wrapping_mul(0x2545_F491_4F6C_DD1D)
    }

    fn below(&mut self, bound: u64) -> u64 {
        self.next() % bound
    }
}

const KEYS: u64 = 2_000;
const CAPACITY: u32 = 200;
const ACCESSES: usize = 60_000;

/// Keys by a Zipf law with exponent 1: the weight of key k is 1 / (k + 1).
fn zipf() -> Vec<u64> {
    let mut sums = Vec::new();
    let mut sum = 0;
    for key in 0..KEYS {
        sum += 1_000_000 / (key + 1);
        sums.push(sum);
    }
    let mut random = Random(7);
    let mut draw = || {
        let drawn = random.below(sum);
        u64::try_from(sums.partition_point(|&up_to| up_to <= drawn)).unwrap()
    };
    (0..ACCESSES).map(|_| draw()).collect()
}

/// Popular keys, with scans of keys that never come again.
fn scans() -> Vec<u64> {
    let mut fresh = 1_000_000;
    let mut trace = Vec::new();
    for chunk in zipf().chunks(1_000) {
        trace.extend_from_slice(chunk);
        trace.extend(fresh..fresh + 500);
        fresh += 500;
    }
    trace
}

/// A loop over somewhat more keys than fit.
fn cycles() -> Vec<u64> {
    (0..u64::from(CAPACITY) * 5 / 4).cycle().take(ACCESSES).collect()
}

fn hits(cache: &mut dyn Cache, trace: &[u64]) -> usize {
    trace.iter().filter(|&&key| cache.access(key)).count()
}

fn traces() -> [(&'static str, Vec<u64>); 3] {
    [("Zipf", zipf()), ("Zipf with scans", scans()), ("loop", cycles())]
}

#[test]
fn lru_hits_as_often_as_the_reference() {
    for (name, trace) in traces() {
        let capacity = index(CAPACITY);
        let expected = hits(&mut ReferenceLru { capacity, used: VecDeque::new() }, &trace);
        let found = hits(&mut Policed::new(Lru::new(CAPACITY), CAPACITY), &trace);
        assert_eq!(found, expected, "{name}");
    }
}

#[test]
fn s3_fifo_hits_as_often_as_the_reference() {
    for (name, trace) in traces() {
        let expected = hits(&mut ReferenceS3Fifo::new(index(CAPACITY)), &trace);
        let found = hits(&mut Policed::new(S3Fifo::new(CAPACITY), CAPACITY), &trace);
        assert_eq!(found, expected, "{name}");
    }
}

#[test]
fn s3_fifo_of_a_tier_that_shrank_or_grew_hits_as_often_as_the_reference() {
    for (name, trace) in traces() {
        let policy = S3Fifo::new(10 * CAPACITY);
        policy.set_limit(CAPACITY);
        let expected = hits(&mut ReferenceS3Fifo::new(index(CAPACITY)), &trace);
        assert_eq!(hits(&mut Policed::new(policy, CAPACITY), &trace), expected, "{name}");
        let policy = S3Fifo::new(CAPACITY);
        policy.set_limit(1);
        policy.set_limit(CAPACITY);
        assert_eq!(hits(&mut Policed::new(policy, CAPACITY), &trace), expected, "{name}");
    }
}

#[test]
fn s3_fifo_keeps_popular_blocks_through_scans() {
    let trace = scans();
    let lru = hits(&mut Policed::new(Lru::new(CAPACITY), CAPACITY), &trace);
    let s3_fifo = hits(&mut Policed::new(S3Fifo::new(CAPACITY), CAPACITY), &trace);
    assert!(s3_fifo > lru, "{s3_fifo} hits of S3-FIFO, {lru} of LRU");
}

fn policies(slots: u32) -> [Box<dyn EvictionPolicy>; 2] {
    [Box::new(Lru::new(slots)), Box::new(S3Fifo::new(slots))]
}

#[test]
fn a_block_that_cannot_be_taken_stays() {
    for policy in policies(4) {
        (0..4).for_each(|slot| policy.insert(slot, hash(slot.into())));
        let only_two = &mut |slot: u32| (slot == 2).then(|| hash(slot.into()));
        assert_eq!(policy.evict(only_two), Some(2), "{policy:?}");
        assert_eq!(policy.evict(only_two), None, "{policy:?}");
        let mut rest: Vec<u32> =
            (0..3).filter_map(|_| policy.evict(&mut |slot| Some(hash(slot.into())))).collect();
        rest.sort_unstable();
        assert_eq!(rest, [0, 1, 3], "{policy:?}");
        assert_eq!(policy.evict(&mut |slot| Some(hash(slot.into()))), None);
    }
}

#[test]
fn a_removed_block_is_no_candidate_and_its_slot_can_be_used_again() {
    for policy in policies(3) {
        (0..3).for_each(|slot| policy.insert(slot, hash(slot.into())));
        policy.remove(1);
        policy.remove(1);
        policy.insert(1, hash(11));
        policy.remove(0);
        let mut left: Vec<u32> =
            (0..3).filter_map(|_| policy.evict(&mut |slot| Some(hash(slot.into())))).collect();
        left.sort_unstable();
        assert_eq!(left, [1, 2], "{policy:?}");
    }
}

#[test]
fn slots_beyond_the_tier_change_nothing() {
    for policy in policies(0).into_iter().chain(policies(2)) {
        policy.insert(2, hash(2));
        policy.hit(7);
        policy.remove(u32::MAX);
        assert_eq!(policy.evict(&mut |slot| Some(hash(slot.into()))), None, "{policy:?}");
    }
}

#[test]
fn s3_fifo_remembers_the_keys_that_it_evicted_from_the_small_queue() {
    let policy = S3Fifo::new(10);
    (0..10).for_each(|slot| policy.insert(slot, hash(slot.into())));
    let evicted = policy.evict(&mut |slot| Some(hash(slot.into()))).unwrap();
    assert!(policy.was_evicted(hash(evicted.into())));
    assert!(!policy.was_evicted(hash(99)));
    policy.insert(evicted, hash(evicted.into()));
    assert!(!policy.was_evicted(hash(evicted.into())), "it is back");
}

#[test]
fn s3_fifo_evicts_a_block_that_it_moves_from_the_small_queue() {
    let policy = S3Fifo::new(20);
    let use_twice = |slot| (0..2).for_each(|_| policy.hit(slot));
    for slot in 0..20 {
        policy.insert(slot, hash(slot.into()));
        use_twice(slot);
    }
    // All blocks move to the main queue, which is then longer than its share.
    assert_eq!(policy.evict(&mut |_| None), None);
    policy.remove(19);
    policy.insert(19, hash(19));
    use_twice(19);
    let mut take = |slot| (slot == 19).then(|| hash(19));
    assert_eq!(policy.evict(&mut take), Some(19));
}

/// The slots in the order in which a policy evicts them.
fn order_of<P: EvictionPolicy>(policy: &P) -> Vec<u32> {
    std::iter::from_fn(|| policy.evict(&mut |slot| Some(hash(slot.into())))).collect()
}

#[test]
fn blocks_that_are_inserted_together_leave_as_if_one_after_the_other() {
    fn check<P: EvictionPolicy>(new: impl Fn() -> P) {
        let slots = [4, 0, 7, 2, 9, 1];
        for remembers in [false, true] {
            let (one, all) = (new(), new());
            if remembers {
                // S3-FIFO keeps a key longer that it evicted lately.
                for policy in [&one, &all] {
                    policy.insert(0, hash(0));
                    assert_eq!(order_of(policy), [0]);
                }
            }
            slots.iter().for_each(|&slot| one.insert(slot, hash(slot.into())));
            all.insert_all(&mut slots.iter().copied(), &|slot| Some(hash(slot.into())));
            let expected = order_of(&one);
            assert_eq!(expected.len(), slots.len());
            assert_eq!(order_of(&all), expected);
        }
    }
    check(|| Lru::new(10));
    check(|| S3Fifo::new(10));
}
