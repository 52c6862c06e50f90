//! Takes blocks out of the magazines of all threads: trim, clear, close, and making room.
//!
//! A sweep shuts every gate, runs one heavy barrier and waits until the owners are out (a few
//! instructions). Then it has exclusive access to all magazines and shared queues. A thread that
//! finds its gate shut waits for the sweepers' lock for microseconds, because blocks are dropped
//! after the gates are open again. No block is between a magazine and a queue meanwhile. So there
//! is an instant at which a clear holds every block that was cached. It takes effect at that
//! instant.

use std::ops::RangeInclusive;
use std::sync::OnceLock;
use std::sync::atomic::Ordering::Relaxed;

use crossbeam_utils::CachePadded;
use rustc_hash::FxHashMap;
use terrane_core::{ByteCount, Memory};

use crate::barrier;
use crate::depot::Depot;
use crate::record::Record;
use crate::slot::{BATCH, Batch, Shelf, Slot};
use crate::stock::Stock;
use crate::sync::{MutexGuard, Ordering};
use crate::tags::Tag;

/// A class counts as idle after this many accesses of other classes to the upstream or the cap.
const IDLE: u64 = 64;

/// Caches up to this size are left alone: 64 MiB.
const UNSHED: u64 = 64 << 20;

/// The number of such accesses between two sweeps for unused credit, so that a full pool does not
/// sweep at each release.
const SETTLING: u64 = 256;

/// All magazines, with no owner in any.
pub(crate) struct Frozen<'stock, M: Memory> {
    stock: &'stock Stock<M>,
    reopens: bool,
    // Fields drop in this order: the report is made after the lock is released.
    _sweeping: MutexGuard<'stock, ()>,
    _report: Report,
}

/// On drop, reports a failure of the barrier.
struct Report;

impl Drop for Report {
    fn drop(&mut self) {
        barrier::report();
    }
}

impl<'stock, M: Memory> Frozen<'stock, M> {
    pub(crate) fn new(stock: &'stock Stock<M>) -> Self {
        Self::with_lock(stock, stock.sweeping.lock())
    }

    fn try_new(stock: &'stock Stock<M>) -> Option<Self> {
        Some(Self::with_lock(stock, stock.sweeping.try_lock()?))
    }

    fn with_lock(stock: &'stock Stock<M>, sweeping: MutexGuard<'stock, ()>) -> Self {
        let reopens = !stock.closed.load(Relaxed);
        let frozen = Self { stock, reopens, _sweeping: sweeping, _report: Report };
        frozen.slots().for_each(|slot| slot.shut());
        barrier::heavy();
        frozen.slots().for_each(|slot| slot.wait());
        frozen
    }

    fn slots(&self) -> impl Iterator<Item = &'stock CachePadded<Slot<M>>> + use<'stock, M> {
        self.stock.slots.iter().filter_map(OnceLock::get).map(|slot| &**slot)
    }

    /// Runs `work` on each shelf in turn.
    pub(crate) fn for_each(&mut self, mut work: impl FnMut(&mut Shelf<M>)) {
        for slot in self.slots() {
            // SAFETY: the lock is held, every gate is shut, and the owners were waited for.
            unsafe { slot.sweep(&mut work) };
        }
    }

    /// Releases the credit that threads have not used to the cap.
    fn settle_credit(&mut self) {
        let mut credit = 0;
        self.for_each(|shelf| credit += std::mem::take(&mut shelf.credit));
        self.stock.budget.give_back(credit);
    }

    /// Empties all magazines. The blocks still count to the cap.
    fn empty(&mut self) -> Vec<Box<Record<M>>> {
        let (mut blocks, mut credit) = (Vec::new(), 0);
        self.for_each(|shelf| credit += shelf.empty_into(&mut blocks));
        self.stock.budget.give_back(credit);
        blocks
    }

    /// Empties all lanes. The blocks no longer count to the cap.
    fn empty_lanes(&mut self) -> Vec<Box<Record<M>>> {
        let (mut records, mut credit) = (Vec::new(), 0);
        let weight = |class| self.stock.weight(class);
        for slot in self.slots() {
            let work = |shelf: &mut Shelf<M>| shelf.empty_lane_into(&mut records, weight);
            // SAFETY: as in `for_each`.
            credit += unsafe { slot.sweep(work) };
        }
        self.stock.budget.give_back(credit);
        records
    }
}

impl<M: Memory> Drop for Frozen<'_, M> {
    fn drop(&mut self) {
        if self.reopens {
            self.slots().for_each(|slot| slot.open());
        }
    }
}

impl<M: Memory> Stock<M> {
    /// Drops cached blocks until at most `to` bytes are cached, and returns the bytes freed. Blocks
    /// of the least recently used class are dropped first, and those in magazines last.
    ///
    /// Slabs are dropped whole or not at all.
    pub(crate) fn trim(&self, to: u64) -> u64 {
        if self.table.blocks_per_slab().is_some() {
            return self.trim_slabs(to);
        }
        let mut evicted = Vec::new();
        let mut frozen = Frozen::new(self);
        frozen.settle_credit();
        if to == 0 {
            evicted = frozen.empty();
        }
        let mut cached = self.cached_in(&mut frozen);
        while cached > to
            && let Some(blocks) = self.evict_oldest(None, u64::MAX)
        {
            cached = cached.saturating_sub(self.sum(blocks.iter()));
            evicted.extend(blocks);
        }
        if cached > to {
            evicted.extend(frozen.empty());
        }
        drop(frozen);
        self.drop_all(evicted)
    }

    fn trim_slabs(&self, to: u64) -> u64 {
        let (class, mut frozen) = (0, Frozen::new(self));
        let mut records = frozen.empty();
        records.extend(self.depots.iter().flat_map(|depot| depot.take_all()));
        let mut cached = self.bytes(class, records.len());
        let mut slabs: FxHashMap<_, Vec<Box<Record<M>>>> = FxHashMap::default();
        for record in records {
            slabs.entry(record.slab()).or_default().push(record);
        }
        let whole = self.table.blocks_per_slab().and_then(|count| usize::try_from(count).ok());
        let (mut evicted, mut over) = (Vec::new(), Vec::new());
        for records in slabs.into_values() {
            if Some(records.len()) == whole && cached > to {
                cached -= self.bytes(class, records.len());
                evicted.extend(records);
            } else {
                over.extend(records.into_iter().filter_map(|record| self.shelve(class, record)));
            }
        }
        drop(frozen);
        drop(over);
        self.drop_all(evicted)
    }

    /// Frees `wanted` bytes of the blocks in shared queues, if there are as many. Returns the bytes
    /// freed. No thread is stopped.
    pub(crate) fn evict(&self, wanted: u64) -> u64 {
        if self.table.blocks_per_slab().is_some() {
            return 0;
        }
        let mut freed = 0;
        while freed < wanted
            && self.budget.reserved() > 0
            && let Some(blocks) = self.evict_oldest(None, wanted - freed)
        {
            freed += self.drop_evicted(blocks);
        }
        freed
    }

    /// Moves the blocks that threads keep for their streams to the parking, where others find them.
    pub(crate) fn park_lanes(&self) {
        if let Some(parking) = &self.parking {
            let mut frozen = Frozen::new(self);
            frozen.empty_lanes().into_iter().for_each(|record| parking.park(record));
        }
    }

    /// Called before `bytes` more are requested from the upstream. If that would raise the peak of
    /// held bytes, frees cached blocks, as many as the peak would rise by. Stops when the cache is
    /// at most `percent` of the held bytes.
    pub(crate) fn shed(&self, bytes: u64, percent: u8) {
        let (held, peak) = (self.account.held(), self.account.peak());
        let mut surplus = held.saturating_add(bytes).saturating_sub(peak);
        let most = (held / 100 * u64::from(percent)).max(UNSHED);
        while surplus > 0
            && let Some(over) = self.budget.reserved().checked_sub(most).filter(|&over| over > 0)
            && let Some(blocks) = self.evict_oldest(None, over.min(surplus))
        {
            surplus = surplus.saturating_sub(self.drop_evicted(blocks));
        }
    }

    /// Refuses requests from now on, and drops all cached blocks. Gates stay shut, so that late
    /// releases go to the upstream.
    pub(crate) fn close(&self) {
        if self.closed.swap(true, Ordering::SeqCst) {
            return;
        }
        let mut frozen = Frozen::new(self);
        let (mut evicted, lanes) = (frozen.empty(), frozen.empty_lanes());
        evicted.extend(self.depots.iter().flat_map(|depot| depot.close()));
        if let Some(parking) = &self.parking {
            lanes.into_iter().for_each(|record| parking.park(record));
        }
        drop(frozen);
        self.drop_all(evicted);
        if let Some(parking) = &self.parking {
            parking.evacuate();
        }
    }

    /// Tries to reserve `weight` bytes of a full cap for a block of `class`. Uses credit that
    /// threads do not need first, then evicts classes that have been idle.
    pub(crate) fn make_room(&self, class: usize, weight: u64) -> bool {
        let now = self.tick();
        let last = self.settled.load(Relaxed);
        if now >= last
            && now - last >= SETTLING
            && let Some(mut frozen) = Frozen::try_new(self)
        {
            self.settled.store(now, Relaxed);
            frozen.settle_credit();
            drop(frozen);
        }
        loop {
            if self.budget.reserve(weight) {
                return true;
            }
            let Some(blocks) = self.evict_oldest(Some((class, now)), weight) else { return false };
            self.drop_evicted(blocks);
        }
    }

    /// Takes a block of the smallest of `classes` that has one, from a shared queue or another
    /// thread.
    ///
    /// Threads are stopped only if they have blocks or credit.
    pub(crate) fn take_anywhere(
        &self,
        classes: RangeInclusive<usize>,
        tag: Tag,
    ) -> Option<Box<Record<M>>> {
        if self.budget.reserved() == 0 {
            return None;
        }
        let record = if self.is_in_threads() {
            let mut frozen = Frozen::new(self);
            classes.into_iter().find_map(|class| {
                let mut found = None;
                frozen.for_each(|shelf| {
                    if found.is_none() {
                        found = shelf.take(class, self.weight(class), Tag::NONE);
                    }
                });
                found.or_else(|| self.take_queued(class))
            })
        } else {
            let mut occupied = self.occupied.iter().filter(|class| classes.contains(class));
            occupied.find_map(|class| self.take_queued(class))
        }?;
        self.count(tag, record.granted, true);
        Some(record)
    }

    /// Takes a block of the shared queue of `class`.
    fn take_queued(&self, class: usize) -> Option<Box<Record<M>>> {
        let record = self.depots.get(class)?.take_one(0)?;
        self.lighten(class, 1);
        Some(record)
    }

    /// Takes the oldest blocks of the least recently used class, for `wanted` bytes. With `other`,
    /// takes only from classes other than that one, and only if they are idle.
    fn evict_oldest(&self, other: Option<(usize, u64)>, wanted: u64) -> Option<Batch<M>> {
        let take = |depot: &Depot<M>| {
            let count = wanted.div_ceil(self.table.size(depot.class()));
            depot.take_oldest(usize::try_from(count).unwrap_or(BATCH).max(1))
        };
        let occupied = self.occupied.iter().filter_map(|class| self.depots.get(class));
        let mut candidates = occupied.filter(|depot| {
            let idle = |(than, now): (usize, u64)| {
                let age = now.checked_sub(depot.last_used());
                depot.class() != than && age.is_some_and(|age| age >= IDLE)
            };
            other.is_none_or(idle) && !depot.is_vacant()
        });
        let oldest = candidates.clone().min_by_key(|depot| depot.last_used())?;
        // Another thread may take the last block of that class. Other classes may still have
        // blocks.
        take(oldest).or_else(|| candidates.find_map(|depot| take(depot)))
    }

    /// Drops blocks of a class, and returns their bytes. All are released from the cap before the
    /// first drops, because the upstream may panic when it frees one.
    fn drop_evicted(&self, evicted: Batch<M>) -> u64 {
        let Some(class) = evicted.iter().next().map(|record| record.class) else { return 0 };
        self.lighten(class, evicted.len());
        self.note_eviction(class, evicted.len());
        self.bytes(class, evicted.len())
    }

    /// [`drop_evicted`](Self::drop_evicted) for blocks of all classes.
    fn drop_all(&self, evicted: Vec<Box<Record<M>>>) -> u64 {
        for record in &evicted {
            self.lighten(record.class, 1);
            self.note_eviction(record.class, 1);
        }
        self.sum(evicted.iter())
    }

    fn sum<'records>(&self, blocks: impl Iterator<Item = &'records Box<Record<M>>>) -> u64 {
        blocks.map(|record| self.table.size(record.class)).sum()
    }

    pub(crate) fn bytes(&self, class: usize, count: usize) -> u64 {
        self.table.size(class) * ByteCount::from_usize(count).get()
    }

    /// Returns the bytes that are cached in magazines and shared queues.
    pub(crate) fn cached_in(&self, frozen: &mut Frozen<'_, M>) -> u64 {
        let mut cached = 0;
        frozen.for_each(|shelf| {
            for (class, magazine) in shelf.magazines.iter().enumerate() {
                cached += self.bytes(class, magazine.blocks.len());
            }
        });
        cached + self.depots.iter().map(|depot| depot.bytes()).sum::<u64>()
    }
}
