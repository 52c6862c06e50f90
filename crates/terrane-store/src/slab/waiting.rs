//! The order in which blocks that wait for the device are submitted.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet};
use std::time::{Duration, Instant};

use crate::slab::request::Priority;

/// The next load is expected for this long after a load.
const LINGER: Duration = Duration::from_millis(100);

/// While loads are expected, so many times the requests of stores are in the device as while loads are.
/// The next load waits for them, and a device with few requests is slow.
const EXPECTING: usize = 4;

/// A store without a deadline goes before loads after it has waited this long.
const PATIENCE: Duration = Duration::from_secs(1);

/// The place of a waiting block among those of its direction.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Turn {
    pub(super) priority: Priority,
    /// The order of arrival.
    pub(super) number: u64,
    /// For a store: when it goes before loads.
    pub(super) urgent: Option<Instant>,
}

/// The requests in the device.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct InDevice {
    pub(super) loads: usize,
    pub(super) stores: usize,
    /// The bytes of the loads.
    pub(super) load_bytes: u64,
    /// When the last load was seen.
    pub(super) last_load: Option<Instant>,
}

impl InDevice {
    /// Whether there was a load shortly before.
    fn expects_loads(&self, now: Instant) -> bool {
        let lingers = |last: Instant| now.saturating_duration_since(last) < LINGER;
        self.last_load.is_some_and(lingers)
    }
}

/// Blocks that have parts to submit: by priority, and first come, first served.
///
/// Loads go before stores. While loads are in the device, at most `stores_in_device` requests of stores
/// are; shortly after, a few more; later, as many as there is room for. A store whose time is half over
/// goes before loads, within the same limit: loads that never pause must not keep it from its deadline.
#[derive(Debug)]
pub(super) struct WaitingBlocks {
    loads: BTreeMap<(Reverse<Priority>, u64), usize>,
    stores: BTreeMap<(Reverse<Priority>, u64), usize>,
    urgent: BTreeSet<(Instant, u64, usize)>,
    stores_in_device: usize,
}

impl WaitingBlocks {
    pub(super) fn new(stores_in_device: usize) -> Self {
        Self {
            loads: BTreeMap::new(),
            stores: BTreeMap::new(),
            urgent: BTreeSet::new(),
            stores_in_device: stores_in_device.max(1),
        }
    }

    pub(super) fn is_empty(&self) -> bool {
        self.loads.is_empty() && self.stores.is_empty()
    }

    /// When a store that arrives now goes before loads.
    pub(super) fn urgent_at(now: Instant, deadline: Option<Instant>) -> Instant {
        match deadline {
            Some(deadline) => now + deadline.saturating_duration_since(now) / 2,
            None => now + PATIENCE,
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
    pub(super) fn next(&self, now: Instant, device: InDevice) -> Option<usize> {
        let limited = device.stores < self.stores_in_device;
        if limited
            && let Some(&(at, _, block)) = self.urgent.first()
            && at <= now
        {
            return Some(block);
        }
        if let Some((_, &block)) = self.loads.first_key_value() {
            return Some(block);
        }
        let may_store = match device.loads {
            0 if device.expects_loads(now) => device.stores < EXPECTING * self.stores_in_device,
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
        let later = Some(now + PATIENCE);
        waiting.insert(Turn { urgent: later, ..load(Priority::High, 0) }, 10);
        waiting.insert(load(Priority::Low, 1), 11);
        waiting.insert(load(Priority::Normal, 2), 12);
        waiting.insert(load(Priority::Normal, 3), 13);
        let mut device = InDevice::default();
        for (expected, turn) in [
            (12, load(Priority::Normal, 2)),
            (13, load(Priority::Normal, 3)),
            (11, load(Priority::Low, 1)),
        ] {
            assert_eq!(waiting.next(now, device), Some(expected));
            waiting.remove(turn, expected);
            device.loads += 1;
        }
        assert_eq!(waiting.next(now, device), Some(10));
        device.stores = 2;
        assert_eq!(waiting.next(now, device), None, "K requests of stores are in the device");
        device.loads = 0;
        device.last_load = Some(now);
        assert_eq!(waiting.next(now, device), Some(10));
        device.stores = 2 * EXPECTING;
        assert_eq!(waiting.next(now, device), None, "the next load is expected");
        assert_eq!(waiting.next(now + LINGER, device), Some(10));
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
        let device = InDevice { loads: 3, ..InDevice::default() };
        assert_eq!(waiting.next(now, device), Some(2));
        assert_eq!(waiting.next_change(now), Some(urgent));
        assert_eq!(waiting.next(urgent, device), Some(1));
        assert_eq!(waiting.next(urgent, InDevice { stores: 1, ..device }), Some(2));
        waiting.remove(store, 1);
        assert_eq!(waiting.next_change(now), None);
        assert_eq!(waiting.next(urgent, device), Some(2));
    }
}
