//! The order in which blocks that wait for the device are submitted.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet};
use std::time::{Duration, Instant};

use crate::slab::request::Priority;

/// After a read, the next one is expected for this long.
const READ_EXPECTED_FOR: Duration = Duration::from_millis(100);

/// The factor by which the limit of writes grows while a read is expected but none is in flight. The
/// next read waits for these writes. With fewer requests, the device would be slow.
const EXPECTING_FACTOR: usize = 4;

/// A write without a deadline goes before reads after it has waited this long.
const LONGEST_WAIT: Duration = Duration::from_secs(1);

/// The place of a waiting block among those of its direction.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Turn {
    pub(super) priority: Priority,
    /// The order of arrival.
    pub(super) number: u64,
    /// For a write: when it goes before reads.
    pub(super) urgent: Option<Instant>,
}

/// The requests in flight.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct InFlight {
    pub(super) reads: usize,
    pub(super) writes: usize,
    /// The bytes of the reads.
    pub(super) read_bytes: u64,
    /// When the last read began or ended.
    pub(super) last_read: Option<Instant>,
}

impl InFlight {
    /// Whether there was a read shortly before.
    fn expects_reads(&self, now: Instant) -> bool {
        let lingers = |last: Instant| now.saturating_duration_since(last) < READ_EXPECTED_FOR;
        self.last_read.is_some_and(lingers)
    }
}

/// Blocks that have parts to submit: by priority, and first come, first served.
///
/// Reads go before writes. While reads are in flight, at most `max_writes_while_reads_wait` requests to
/// write are. For 100 ms after the last read, the limit is four times as high. Then there is none.
///
/// A write goes before reads once half of its time to the deadline has passed. The same limit applies.
/// So it ends in time, even if reads never pause.
#[derive(Debug)]
pub(super) struct WaitingBlocks {
    reads: BTreeMap<(Reverse<Priority>, u64), usize>,
    writes: BTreeMap<(Reverse<Priority>, u64), usize>,
    urgent: BTreeSet<(Instant, u64, usize)>,
    max_writes_while_reads_wait: usize,
}

impl WaitingBlocks {
    pub(super) fn new(max_writes_while_reads_wait: usize) -> Self {
        Self {
            reads: BTreeMap::new(),
            writes: BTreeMap::new(),
            urgent: BTreeSet::new(),
            max_writes_while_reads_wait: max_writes_while_reads_wait.max(1),
        }
    }

    pub(super) fn is_empty(&self) -> bool {
        self.reads.is_empty() && self.writes.is_empty()
    }

    /// When a write that arrives now goes before reads.
    pub(super) fn urgent_at(now: Instant, deadline: Option<Instant>) -> Instant {
        match deadline {
            Some(deadline) => now + deadline.saturating_duration_since(now) / 2,
            None => now + LONGEST_WAIT,
        }
    }

    pub(super) fn insert(&mut self, turn: Turn, block: usize) {
        self.urgent.extend(turn.urgent.map(|at| (at, turn.number, block)));
        self.queue(turn).insert((Reverse(turn.priority), turn.number), block);
    }

    pub(super) fn remove(&mut self, turn: Turn, block: usize) {
        if let Some(at) = turn.urgent {
            self.urgent.remove(&(at, turn.number, block));
        }
        self.queue(turn).remove(&(Reverse(turn.priority), turn.number));
    }

    fn queue(&mut self, turn: Turn) -> &mut BTreeMap<(Reverse<Priority>, u64), usize> {
        if turn.urgent.is_some() { &mut self.writes } else { &mut self.reads }
    }

    /// The block whose next part is submitted now.
    pub(super) fn next(&self, now: Instant, in_flight: InFlight) -> Option<usize> {
        let limited = in_flight.writes < self.max_writes_while_reads_wait;
        if limited
            && let Some(&(at, _, block)) = self.urgent.first()
            && at <= now
        {
            return Some(block);
        }
        if let Some((_, &block)) = self.reads.first_key_value() {
            return Some(block);
        }
        let may_write = match in_flight.reads {
            0 if in_flight.expects_reads(now) => {
                in_flight.writes < EXPECTING_FACTOR * self.max_writes_while_reads_wait
            }
            0 => true,
            _ => limited,
        };
        self.writes.values().next().copied().filter(|_| may_write)
    }

    /// When [`next`](Self::next) may change without a completion: a write goes before reads.
    pub(super) fn next_change(&self, now: Instant) -> Option<Instant> {
        let first = self.urgent.first().map(|&(at, ..)| at);
        first.filter(|&at| at > now && !self.reads.is_empty())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(priority: Priority, number: u64) -> Turn {
        Turn { priority, number, urgent: None }
    }

    #[test]
    fn reads_go_before_writes_by_priority_and_arrival() {
        let (now, mut waiting) = (Instant::now(), WaitingBlocks::new(2));
        let later = Some(now + LONGEST_WAIT);
        waiting.insert(Turn { urgent: later, ..read(Priority::High, 0) }, 10);
        waiting.insert(read(Priority::Low, 1), 11);
        waiting.insert(read(Priority::Normal, 2), 12);
        waiting.insert(read(Priority::Normal, 3), 13);
        let mut in_flight = InFlight::default();
        for (expected, turn) in [
            (12, read(Priority::Normal, 2)),
            (13, read(Priority::Normal, 3)),
            (11, read(Priority::Low, 1)),
        ] {
            assert_eq!(waiting.next(now, in_flight), Some(expected));
            waiting.remove(turn, expected);
            in_flight.reads += 1;
        }
        assert_eq!(waiting.next(now, in_flight), Some(10));
        in_flight.writes = 2;
        assert_eq!(waiting.next(now, in_flight), None, "the limit of writes is reached");
        in_flight.reads = 0;
        in_flight.last_read = Some(now);
        assert_eq!(waiting.next(now, in_flight), Some(10));
        in_flight.writes = 2 * EXPECTING_FACTOR;
        assert_eq!(waiting.next(now, in_flight), None, "the next read is expected");
        assert_eq!(waiting.next(now + READ_EXPECTED_FOR, in_flight), Some(10));
    }

    #[test]
    fn a_write_goes_before_reads_after_half_of_its_time() {
        let (now, mut waiting) = (Instant::now(), WaitingBlocks::new(1));
        let deadline = now + Duration::from_secs(2);
        let urgent = WaitingBlocks::urgent_at(now, Some(deadline));
        assert_eq!(urgent, now + Duration::from_secs(1));
        let write = Turn { urgent: Some(urgent), ..read(Priority::Low, 5) };
        waiting.insert(write, 1);
        waiting.insert(read(Priority::High, 6), 2);
        let in_flight = InFlight { reads: 3, ..InFlight::default() };
        assert_eq!(waiting.next(now, in_flight), Some(2));
        assert_eq!(waiting.next_change(now), Some(urgent));
        assert_eq!(waiting.next(urgent, in_flight), Some(1));
        assert_eq!(waiting.next(urgent, InFlight { writes: 1, ..in_flight }), Some(2));
        waiting.remove(write, 1);
        assert_eq!(waiting.next_change(now), None);
        assert_eq!(waiting.next(urgent, in_flight), Some(2));
    }
}
