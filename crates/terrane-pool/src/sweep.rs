//! Taking blocks out of the magazines of all threads: trim, clear, close, and making room.
//!
//! A sweep shuts every gate, runs one heavy barrier, waits until the owners are out (a handful of
//! instructions), and then has all magazines and shared queues to itself: whoever finds its gate
//! shut waits for the sweepers' lock, for microseconds, as blocks are dropped after the gates are
//! open again. Nothing is on its way between a magazine and a queue meanwhile, so there is an
//! instant at which a clear has everything that was cached, and that is where it takes effect.

use std::sync::OnceLock;
use std::sync::atomic::Ordering::Relaxed;

use crossbeam_utils::CachePadded;
use rustc_hash::FxHashMap;
use terrane_core::{ByteCount, Memory};

use crate::barrier;
use crate::record::Record;
use crate::slot::{Batch, Shelf, Slot};
use crate::stock::{Stock, batches};
use crate::sync::{MutexGuard, Ordering};
use crate::tags::Tag;

/// After how many trips of others to the upstream or the cap a class counts as idle.
const IDLE: u64 = 64;

/// A cache of so many bytes is no burden: 64 MiB.
const UNSHED: u64 = 64 << 20;

/// How many such trips have to lie between two sweeps for unused credit, so that a pool that is
/// full does not sweep at each release.
const SETTLING: u64 = 256;

/// All magazines, with no owner in any.
pub(crate) struct Frozen<'stock, M: Memory> {
    stock: &'stock Stock<M>,
    _sweeping: MutexGuard<'stock, ()>,
    reopens: bool,
}

impl<'stock, M: Memory> Frozen<'stock, M> {
    pub(crate) fn new(stock: &'stock Stock<M>) -> Self {
        Self::with_lock(stock, stock.sweeping.lock())
    }

    fn try_new(stock: &'stock Stock<M>) -> Option<Self> {
        Some(Self::with_lock(stock, stock.sweeping.try_lock()?))
    }

    fn with_lock(stock: &'stock Stock<M>, sweeping: MutexGuard<'stock, ()>) -> Self {
        let frozen = Self { stock, _sweeping: sweeping, reopens: !stock.closed.load(Relaxed) };
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

    /// Gives the credit that threads have not used back to the cap.
    fn settle_credit(&mut self) {
        let mut credit = 0;
        self.for_each(|shelf| credit += std::mem::take(&mut shelf.credit));
        self.stock.budget.give_back(credit);
    }

    /// Empties all magazines, whose blocks still weigh on the cap.
    fn empty(&mut self) -> Vec<(usize, Batch<M>)> {
        let (mut batches, mut credit) = (Vec::new(), 0);
        self.for_each(|shelf| credit += shelf.empty_into(&mut batches));
        self.stock.budget.give_back(credit);
        batches
    }

    /// Empties all lanes, whose blocks do not weigh on the cap any more.
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
    /// Drops cached blocks until at most `to` bytes are cached, those of the class that was used
    /// least recently first and those in magazines last; answers how many bytes went.
    ///
    /// Slabs go as a whole or not at all.
    pub(crate) fn trim(&self, to: u64) -> u64 {
        if self.table.blocks_per_slab().is_some() {
            return self.trim_slabs(to);
        }
        let mut evicted: Vec<(usize, Batch<M>)> = Vec::new();
        let mut frozen = Frozen::new(self);
        frozen.settle_credit();
        if to == 0 {
            evicted = frozen.empty();
        }
        let weigh = |(class, batch): &(usize, Batch<M>)| self.bytes(*class, batch.len());
        let mut cached = self.cached_in(&mut frozen);
        while cached > to
            && let Some((class, batch)) = self.evict_oldest(None)
        {
            cached = cached.saturating_sub(self.bytes(class, batch.len()));
            evicted.push((class, batch));
        }
        if cached > to {
            evicted.extend(frozen.empty());
        }
        drop(frozen);
        let freed = evicted.iter().map(weigh).sum();
        self.drop_batches(evicted);
        freed
    }

    fn trim_slabs(&self, to: u64) -> u64 {
        let (class, mut frozen) = (0, Frozen::new(self));
        let mut records: Vec<_> = frozen.empty().into_iter().flat_map(|(_, batch)| batch).collect();
        while let Some(batch) = self.depots.first().and_then(|depot| depot.pop(0)) {
            records.extend(batch);
        }
        let mut cached = self.bytes(class, records.len());
        let mut slabs: FxHashMap<_, Vec<Box<Record<M>>>> = FxHashMap::default();
        for record in records {
            slabs.entry(record.slab()).or_default().push(record);
        }
        let whole = self.table.blocks_per_slab().and_then(|count| usize::try_from(count).ok());
        let mut evicted = Vec::new();
        for records in slabs.into_values() {
            if Some(records.len()) == whole && cached > to {
                cached -= self.bytes(class, records.len());
                evicted.extend(records);
            } else {
                // Slabs have no cap that they could be over.
                batches(records).for_each(|batch| drop(self.shelve(class, batch)));
            }
        }
        drop(frozen);
        self.note_eviction(class, evicted.len());
        self.bytes(class, evicted.len())
    }

    /// Moves what threads keep of their streams to the parking, where others find it.
    pub(crate) fn park_lanes(&self) {
        if let Some(parking) = &self.parking {
            let mut frozen = Frozen::new(self);
            frozen.empty_lanes().into_iter().for_each(|record| parking.park(record));
        }
    }

    /// Before the upstream is asked for more: gives cached blocks back while they are more than
    /// `percent` of what is held.
    pub(crate) fn shed(&self, percent: u8) {
        let most = (self.account.held() / 100 * u64::from(percent)).max(UNSHED);
        while self.budget.reserved() > most
            && let Some((class, batch)) = self.evict_oldest(None)
        {
            self.drop_batch(class, batch);
        }
    }

    /// Refuses from now on, and drops everything that is cached. Gates stay shut, so that late
    /// releases find their way to the upstream.
    pub(crate) fn close(&self) {
        if self.closed.swap(true, Ordering::SeqCst) {
            return;
        }
        let mut frozen = Frozen::new(self);
        let (mut evicted, lanes) = (frozen.empty(), frozen.empty_lanes());
        evicted.extend(std::iter::from_fn(|| self.evict_oldest(None)));
        if let Some(parking) = &self.parking {
            lanes.into_iter().for_each(|record| parking.park(record));
        }
        drop(frozen);
        self.drop_batches(evicted);
        if let Some(parking) = &self.parking {
            parking.evacuate();
        }
    }

    /// Tries to reserve `weight` bytes of a full cap for a block of `class`: first by credit that
    /// threads do not use, then by evicting classes that have been idle.
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
            let Some((victim, batch)) = self.evict_oldest(Some((class, now))) else { return false };
            self.drop_batch(victim, batch);
        }
    }

    /// A block of `class`, or of the smallest larger class that has one, from wherever it is.
    pub(crate) fn take_anywhere(&self, class: usize, tag: Tag) -> Option<Box<Record<M>>> {
        let mut frozen = Frozen::new(self);
        let mut found = None;
        let mut over = None;
        for larger in class..self.table.len() {
            frozen.for_each(|shelf| {
                if found.is_none() {
                    found = shelf.take(larger, self.weight(larger), Tag::NONE);
                }
            });
            if found.is_none()
                && let Some(mut batch) = self.depots.get(larger).and_then(|depot| depot.pop(0))
            {
                found = batch.pop();
                self.lighten(larger, 1);
                over = self.shelve(larger, batch);
            }
            if found.is_some() {
                break;
            }
        }
        drop(frozen);
        drop(over);
        let record = found?;
        self.count(tag, record.granted, true);
        Some(record)
    }

    /// The oldest batch of the class that was used least recently; of `other` classes than one,
    /// only an idle one.
    fn evict_oldest(&self, other: Option<(usize, u64)>) -> Option<(usize, Batch<M>)> {
        let mut candidates = self.depots.iter().enumerate().filter(|&(class, depot)| {
            let idle = |(than, now): (usize, u64)| {
                class != than && now.checked_sub(depot.last_used()).is_some_and(|age| age >= IDLE)
            };
            depot.blocks() > 0 && other.is_none_or(idle)
        });
        let (class, depot) = candidates.clone().min_by_key(|(_, depot)| depot.last_used())?;
        let oldest = depot.pop(0).map(|batch| (class, batch));
        // Somebody else may be just about to discount the last batch there. That must not hide
        // what the other classes have, or a close would leave it behind.
        oldest.or_else(|| candidates.find_map(|(class, depot)| Some((class, depot.pop(0)?))))
    }

    fn drop_batch(&self, class: usize, batch: Batch<M>) {
        self.discount(class, &batch);
        drop(batch);
    }

    /// All of them are off the cap before the first drops: what the upstream does then may panic.
    fn drop_batches(&self, evicted: Vec<(usize, Batch<M>)>) {
        evicted.iter().for_each(|(class, batch)| self.discount(*class, batch));
        drop(evicted);
    }

    fn discount(&self, class: usize, batch: &Batch<M>) {
        self.lighten(class, batch.len());
        self.note_eviction(class, batch.len());
    }

    pub(crate) fn bytes(&self, class: usize, count: usize) -> u64 {
        self.table.size(class) * ByteCount::from_usize(count).get()
    }

    /// The bytes that are cached in magazines and shared queues.
    pub(crate) fn cached_in(&self, frozen: &mut Frozen<'_, M>) -> u64 {
        let mut cached = 0;
        frozen.for_each(|shelf| {
            for (class, magazine) in shelf.magazines.iter().enumerate() {
                cached += self.bytes(class, magazine.blocks.len());
            }
        });
        let depots = self.depots.iter().enumerate();
        cached + depots.map(|(class, depot)| self.bytes(class, depot.blocks())).sum::<u64>()
    }
}
