//! The order in which blocks that wait for the device are submitted.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet};
use std::time::{Duration, Instant};

use crate::slab::request::Priority;

/// The next load is expected for this long after a load.
const LOAD_EXPECTED_FOR: Duration = Duration::from_millis(100);

/// The factor by which the limit on stores in flight grows while a load is expected but none is in
/// flight. The next load waits for these stores, and a device with few requests is slow.
const EXPECTING_FACTOR: usize = 4;

/// A store without a deadline goes before loads after it has waited this long.
const LONGEST_WAIT: Duration = Duration::from_secs(1);

/// The place of a waiting block among those of its direction.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Turn {
    pub(super) priority: Priority,
    /// The order of arrival.
    pub(super) number: u64,
    /// For a store: when it goes before loads.
    pub(super) urgent: Option<Instant>,
}

/// The requests in the in_flight.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct InFlight {
    pub(super) loads: usize,
    pub(super) stores: usize,
    /// The bytes of the loads.
    pub(super) load_bytes: u64,
    /// When the last load was seen.
    pub(super) last_load: Option<Instant>,
}

impl InFlight {
    /// Whether there was a load shortly before.
    fn expects_loads(&self, now: Instant) -> bool {
        let lingers = |last: Instant| now.saturating_duration_since(last) < LOAD_EXPECTED_FOR;
        self.last_load.is_some_and(lingers)
    }
}

/// Blocks that have parts to submit: by priority, and first come, first served.
///
/// Loads go before stores. While loads are in flight, at most `max_writes_while_reads_wait` requests of
/// stores are. Shortly after, a few more are, and later as many as the queue takes. A store whose time is half over
/// goes before loads, within the same limit: loads that never pause must not keep it from its deadline.
#[derive(Debug)]
pub(super) struct WaitingBlocks {
    loads: BTreeMap<(Reverse<Priority>, u64), usize>,
    stores: BTreeMap<(Reverse<Priority>, u64), usize>,
    urgent: BTreeSet<(Instant, u64, usize)>,
    max_writes_while_reads_wait: usize,
}

impl WaitingBlocks {
    pub(super) fn new(max_writes_while_reads_wait: usize) -> Self {
        Self {
            loads: BTreeMap::new(),
            stores: BTreeMap::new(),
            urgent: BTreeSet::new(),
            max_writes_while_reads_wait: max_writes_while_reads_wait.max(1),
        }
    }

    pub(super) fn is_empty(&self) -> bool {
        self.loads.is_empty() && self.stores.is_empty()
    }

    /// When a store that arrives now goes before loads.
    pub(super) fn urgent_at(now: Instant, deadline: Option<Instant>) -> Instant {
        match deadline {
            Some(deadline) => now + deadline.saturating_duration_since(now) / 2,
            None => now + LONGEST_WAIT,
        }
    }

    pub(super) fn insert(&mut self, turn: Turn, block: usize) {
        let key = (Reverse(turn.priority), turn.number);
        match turn.urgent {
            None => self.loads.insert(key, block),
            Some(at) => {
                self.urgent.insert((at, turn.number, block));
                self.stores.insert(key, block)
            }
        };
    }

    pub(super) fn remove(&mut self, turn: Turn, block: usize) {
        let key = (Reverse(turn.priority), turn.number);
        match turn.urgent {
            None => self.loads.remove(&key),
            Some(at) => {
                self.urgent.remove(&(at, turn.number, block));
                self.stores.remove(&key)
            }
        };
    }

    /// The block whose next part is submitted now.
    pub(super) fn next(&self, now: Instant, in_flight: InFlight) -> Option<usize> {
        let limited = in_flight.stores < self.max_writes_while_reads_wait;
        if limited
            && let Some(&(at, _, block)) = self.urgent.first()
            && at <= now
        {
            return Some(block);
        }
        if let Some((_, &block)) = self.loads.first_key_value() {
            return Some(block);
        }
        let may_store = match in_flight.loads {
            0 if in_flight.expects_loads(now) => {
                in_flight.stores < EXPECTING_FACTOR * self.max_writes_while_reads_wait
            }
            0 => true,
            _ => limited,
        };
        self.stores.values().next().copied().filter(|_| may_store)
    }

    /// When [`next`](Self::next) may change without a completion: a store goes before loads.
    pub(super) fn next_change(&self, now: Instant) -> Option<Instant> {
        let first = self.urgent.first().map(|&(at, ..)| at);
        first.filter(|&at| at > now && !self.loads.is_empty())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn load(priority: Priority, number: u64) -> Turn {
        Turn { priority, number, urgent: None }
    }

    #[test]
    fn loads_go_before_stores_by_priority_and_arrival() {
        let (now, mut waiting) = (Instant::now(), WaitingBlocks::new(2));
        let later = Some(now + LONGEST_WAIT);
        waiting.insert(Turn { urgent: later, ..load(Priority::High, 0) }, 10);
        waiting.insert(load(Priority::Low, 1), 11);
        waiting.insert(load(Priority::Normal, 2), 12);
        waiting.insert(load(Priority::Normal, 3), 13);
        let mut in_flight = InFlight::default();
        for (expected, turn) in [
            (12, load(Priority::Normal, 2)),
            (13, load(Priority::Normal, 3)),
            (11, load(Priority::Low, 1)),
        ] {
            assert_eq!(waiting.next(now, in_flight), Some(expected));
            waiting.remove(turn, expected);
            in_flight.loads += 1;
        }
        assert_eq!(waiting.next(now, in_flight), Some(10));
        in_flight.stores = 2;
        assert_eq!(waiting.next(now, in_flight), None, "K requests of stores are in the device");
        in_flight.loads = 0;
        in_flight.last_load = Some(now);
        assert_eq!(waiting.next(now, in_flight), Some(10));
        in_flight.stores = 2 * EXPECTING_FACTOR;
        assert_eq!(waiting.next(now, in_flight), None, "the next load is expected");
        assert_eq!(waiting.next(now + LOAD_EXPECTED_FOR, in_flight), Some(10));
    }

    #[test]
    fn a_store_whose_time_is_half_over_goes_before_loads() {
        let (now, mut waiting) = (Instant::now(), WaitingBlocks::new(1));
        let deadline = now + Duration::from_secs(2);
        let urgent = WaitingBlocks::urgent_at(now, Some(deadline));
        assert_eq!(urgent, now + Duration::from_secs(1));
        let store = Turn { urgent: Some(urgent), ..load(Priority::Low, 5) };
        waiting.insert(store, 1);
        waiting.insert(load(Priority::High, 6), 2);
        let in_flight = InFlight { loads: 3, ..InFlight::default() };
        assert_eq!(waiting.next(now, in_flight), Some(2));
        assert_eq!(waiting.next_change(now), Some(urgent));
        assert_eq!(waiting.next(urgent, in_flight), Some(1));
        assert_eq!(waiting.next(urgent, InFlight { stores: 1, ..in_flight }), Some(2));
        waiting.remove(store, 1);
        assert_eq!(waiting.next_change(now), None);
        assert_eq!(waiting.next(urgent, in_flight), Some(2));
    }
}
