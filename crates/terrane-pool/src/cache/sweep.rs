//! Removes blocks from the magazines of all threads, to trim, clear or close, or to make room.
//!
//! A sweep closes every gate, runs one heavy barrier and waits until the owners have left (a few
//! instructions). Then it has exclusive access to all magazines and shared queues. A thread that
//! finds its gate closed waits for the sweepers' lock for microseconds, because blocks are dropped
//! after the gates are open again. No block is between a magazine and a queue meanwhile. So at one
//! instant a clear has every block that was cached. It takes effect at that instant.

use std::ops::RangeInclusive;
use std::sync::OnceLock;
use std::sync::atomic::Ordering::Relaxed;

use crossbeam_utils::CachePadded;
use rustc_hash::FxHashMap;
use terrane_core::Memory;
use terrane_core::convert::to_u64;

use crate::cache::class_queue::{BATCH, Batch, ClassQueue};
use crate::cache::membarrier;
use crate::cache::shared_cache::SharedCache;
use crate::cache::thread_cache::{ThreadCache, ThreadMagazines};
use crate::pool::record::Block;
use crate::sync::{MutexGuard, Ordering};
use crate::tags::{LiveBytes, Tag};

/// A class counts as idle after this many accesses of other classes to the upstream or the limit.
const IDLE: u64 = 64;

/// Caches up to this size, 64 MiB, are never trimmed by a miss.
const ALWAYS_CACHED: u64 = 64 << 20;

/// The number of such accesses between two sweeps for unused credit, so that a full pool does not
/// sweep on each release.
const COLLECT_INTERVAL: u64 = 256;

type Thread<M> = CachePadded<ThreadCache<Block<M>>>;

/// Exclusive access to all magazines, while it lives.
pub(crate) struct SweepGuard<'cache, M: Memory> {
    cache: &'cache SharedCache<M>,
    reopens: bool,
    // Fields drop in this order, so the lock is released before the report.
    _sweeping: MutexGuard<'cache, ()>,
    _report: Report,
}

/// On drop, reports a failure of the barrier.
struct Report;

impl Drop for Report {
    fn drop(&mut self) {
        membarrier::report();
    }
}

impl<'cache, M: Memory> SweepGuard<'cache, M> {
    pub(crate) fn new(cache: &'cache SharedCache<M>) -> Self {
        Self::with_lock(cache, cache.sweeping.lock())
    }

    fn with_lock(cache: &'cache SharedCache<M>, sweeping: MutexGuard<'cache, ()>) -> Self {
        let reopens = !cache.closed.load(Relaxed);
        let sweep = Self { cache, reopens, _sweeping: sweeping, _report: Report };
        sweep.threads().for_each(|thread_cache| thread_cache.close());
        membarrier::heavy();
        sweep.threads().for_each(|thread_cache| thread_cache.wait());
        sweep
    }

    fn threads(&self) -> impl Iterator<Item = &'cache Thread<M>> + use<'cache, M> {
        self.cache.threads.iter().filter_map(OnceLock::get).map(|thread| &**thread)
    }

    /// Runs `work` on the magazines of each thread in turn.
    pub(crate) fn for_each(&mut self, mut work: impl FnMut(&mut ThreadMagazines<Block<M>>)) {
        for thread_cache in self.threads() {
            // SAFETY: the lock is held, every gate is closed, and the owners have left.
            unsafe { thread_cache.sweep(&mut work) };
        }
    }

    /// Returns unused credit of threads to the limit.
    fn collect_credit(&mut self) {
        let mut credit = 0;
        self.for_each(|magazines| credit += std::mem::take(&mut magazines.credit));
        self.cache.limit.release(credit);
    }

    /// Empties all magazines. The blocks still count to the limit.
    fn empty(&mut self) -> Vec<Block<M>> {
        let (mut blocks, mut credit) = (Vec::new(), 0);
        self.for_each(|magazines| credit += magazines.drain_into(&mut blocks));
        self.cache.limit.release(credit);
        blocks
    }

    /// Empties all stream magazines. The blocks no longer count to the limit.
    fn drain_streams(&mut self) -> Vec<Block<M>> {
        let (mut records, mut credit) = (Vec::new(), 0);
        let cache = self.cache;
        self.for_each(|magazines| {
            credit += magazines.drain_stream_into(&mut records, |class| cache.weight(class));
        });
        cache.limit.release(credit);
        records
    }
}

impl<M: Memory> Drop for SweepGuard<'_, M> {
    fn drop(&mut self) {
        if self.reopens {
            self.threads().for_each(|thread_cache| thread_cache.open());
        }
    }
}

impl<M: Memory> SharedCache<M> {
    /// Drops cached blocks until at most `to` bytes are cached, and returns the bytes freed. Blocks
    /// of the least recently used class are dropped first, and blocks in magazines last.
    ///
    /// Slabs are dropped whole or not at all.
    pub(crate) fn trim(&self, to: u64) -> u64 {
        if self.table.blocks_per_slab().is_some() {
            return self.trim_slabs(to);
        }
        // A full queue refuses blocks, which then no longer count.
        let (mut evicted, mut refused) = (Vec::new(), Vec::new());
        let mut sweep = SweepGuard::new(self);
        sweep.collect_credit();
        if to == 0 {
            evicted = sweep.empty();
        }
        let mut cached = self.cached_in(&mut sweep);
        while cached > to
            && let Some(blocks) = self.evict_oldest(None, cached - to)
        {
            cached = cached.saturating_sub(self.sum(blocks.iter()));
            evicted.extend(blocks);
        }
        if cached > to {
            for block in sweep.empty() {
                if cached > to {
                    cached = cached.saturating_sub(self.weight(block.class));
                    evicted.push(block);
                } else {
                    refused.extend(self.enqueue(block.class, block));
                }
            }
        }
        drop(sweep);
        self.drop_all(evicted) + self.sum(refused.iter())
    }

    fn trim_slabs(&self, to: u64) -> u64 {
        let (class, mut sweep) = (0, SweepGuard::new(self));
        let mut records = sweep.empty();
        records.extend(self.queues.iter().flat_map(|queue| queue.take_all()));
        let mut cached = self.bytes(class, records.len());
        let mut slabs: FxHashMap<_, Vec<Block<M>>> = FxHashMap::default();
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
                over.extend(records.into_iter().filter_map(|record| self.enqueue(class, record)));
            }
        }
        drop(sweep);
        drop(over);
        self.drop_all(evicted)
    }

    /// Frees `wanted` bytes of the blocks in shared queues, or all if there are fewer. Returns the
    /// bytes freed. No thread is stopped.
    pub(crate) fn evict(&self, wanted: u64) -> u64 {
        if self.table.blocks_per_slab().is_some() {
            return 0;
        }
        let mut freed = 0;
        while freed < wanted
            && self.limit.reserved() > 0
            && let Some(blocks) = self.evict_oldest(None, wanted - freed)
        {
            freed += self.drop_evicted(blocks);
        }
        freed
    }

    /// Moves the blocks that threads keep for their streams to the pending frees, so that other
    /// threads can use them.
    pub(crate) fn flush_stream_magazines(&self) {
        if let Some(pending) = &self.pending {
            let mut sweep = SweepGuard::new(self);
            sweep.drain_streams().into_iter().for_each(|block| pending.insert(block));
        }
    }

    /// Frees cached bytes before `bytes` more are requested from the upstream, as many as the
    /// [excess](Self::excess). Blocks in magazines stay there.
    pub(crate) fn limit_peak(&self, bytes: u64, percent: u8) {
        // Other threads evict, too, so the excess is read again for each batch.
        while let excess @ 1.. = self.excess(bytes, percent)
            && let Some(blocks) = self.evict_oldest(None, excess)
        {
            self.drop_evicted(blocks);
        }
    }

    /// Returns the amount by which a request of `bytes` would raise the peak of held bytes, but at
    /// most the cached bytes above `percent` of the held bytes. Reserved bytes count as cached.
    pub(crate) fn excess(&self, bytes: u64, percent: u8) -> u64 {
        // A slab is kept until all of its blocks are dropped.
        if percent >= 100 || self.table.blocks_per_slab().is_some() {
            return 0;
        }
        let (held, peak) = (self.account.held(), self.account.peak());
        let kept = (held / 100 * u64::from(percent)).max(ALWAYS_CACHED);
        let rise = held.saturating_add(bytes).saturating_sub(peak);
        rise.min(self.limit.reserved().saturating_sub(kept))
    }

    /// Refuses requests from now on, and drops all cached blocks. Gates stay closed, so late
    /// releases free their blocks to the upstream.
    pub(crate) fn close(&self) {
        if self.closed.swap(true, Ordering::SeqCst) {
            return;
        }
        let mut sweep = SweepGuard::new(self);
        let (mut evicted, of_streams) = (sweep.empty(), sweep.drain_streams());
        evicted.extend(self.queues.iter().flat_map(|queue| queue.close()));
        if let Some(pending) = &self.pending {
            of_streams.into_iter().for_each(|block| pending.insert(block));
        }
        drop(sweep);
        self.drop_all(evicted);
        if let Some(pending) = &self.pending {
            pending.free_all();
        }
    }

    /// Tries to reserve `weight` bytes of a full limit for a block of `class`. Uses credit that
    /// threads do not need first, then evicts classes that have been idle.
    pub(crate) fn make_room(&self, class: usize, weight: u64) -> bool {
        let now = self.tick();
        let last = self.credit_collected.load(Relaxed);
        if now >= last
            && now - last >= COLLECT_INTERVAL
            && let Some(sweeping) = self.sweeping.try_lock()
        {
            let mut sweep = SweepGuard::with_lock(self, sweeping);
            self.credit_collected.store(now, Relaxed);
            sweep.collect_credit();
            drop(sweep);
        }
        loop {
            if self.limit.reserve(weight) {
                return true;
            }
            let Some(blocks) = self.evict_oldest(Some((class, now)), weight) else { return false };
            self.drop_evicted(blocks);
        }
    }

    /// Removes a block from the smallest of `classes` that has one, from a shared queue or another
    /// thread's magazines.
    ///
    /// Threads are stopped only if they have blocks or credit.
    pub(crate) fn take_anywhere(
        &self,
        classes: RangeInclusive<usize>,
        tag: Tag,
    ) -> Option<Block<M>> {
        if self.limit.reserved() == 0 {
            return None;
        }
        let record = if self.is_in_threads() {
            let mut sweep = SweepGuard::new(self);
            classes.into_iter().find_map(|class| {
                let mut found = None;
                sweep.for_each(|magazines| {
                    if found.is_none() {
                        found = magazines.take(class, self.weight(class), Tag::NONE);
                    }
                });
                found.or_else(|| self.take_queued(class))
            })
        } else {
            let mut occupied = self.occupied.iter().filter(|class| classes.contains(class));
            occupied.find_map(|class| self.take_queued(class))
        }?;
        self.count(tag, record.granted, LiveBytes::Added);
        Some(record)
    }

    /// Removes a block from the shared queue of `class`.
    fn take_queued(&self, class: usize) -> Option<Block<M>> {
        let record = self.queues.get(class)?.take_one(0)?;
        self.unreserve(class, 1);
        Some(record)
    }

    /// Removes the oldest blocks of the least recently used class, for `wanted` bytes. With
    /// `other`, considers only classes other than that one, and only if they are idle.
    fn evict_oldest(&self, other: Option<(usize, u64)>, wanted: u64) -> Option<Batch<Block<M>>> {
        let take = |queue: &ClassQueue<Block<M>>| {
            let count = wanted.div_ceil(self.table.size(queue.class));
            queue.take_oldest(usize::try_from(count).unwrap_or(BATCH).max(1))
        };
        let occupied = self.occupied.iter().filter_map(|class| self.queues.get(class));
        let mut candidates = occupied.filter(|queue| {
            let idle = |(than, now): (usize, u64)| {
                let age = now.checked_sub(queue.last_used());
                queue.class != than && age.is_some_and(|age| age >= IDLE)
            };
            other.is_none_or(idle) && !queue.unmark_if_empty()
        });
        let oldest = candidates.clone().min_by_key(|queue| queue.last_used())?;
        // Another thread may remove the last block of that class. Other classes may still have
        // blocks.
        take(oldest).or_else(|| candidates.find_map(|queue| take(queue)))
    }

    /// Drops blocks of a class, and returns their bytes. All bytes are released from the limit
    /// before the first block drops, because the upstream may panic when it frees a block.
    fn drop_evicted(&self, evicted: Batch<Block<M>>) -> u64 {
        let Some(class) = evicted.iter().next().map(|record| record.class) else { return 0 };
        self.unreserve(class, evicted.len());
        self.count_eviction(class, evicted.len());
        self.bytes(class, evicted.len())
    }

    /// [`drop_evicted`](Self::drop_evicted) for blocks of all classes.
    fn drop_all(&self, evicted: Vec<Block<M>>) -> u64 {
        for record in &evicted {
            self.unreserve(record.class, 1);
            self.count_eviction(record.class, 1);
        }
        self.sum(evicted.iter())
    }

    fn sum<'records>(&self, blocks: impl Iterator<Item = &'records Block<M>>) -> u64 {
        blocks.map(|record| self.table.size(record.class)).sum()
    }

    pub(crate) fn bytes(&self, class: usize, count: usize) -> u64 {
        self.table.size(class) * to_u64(count)
    }

    /// Returns the bytes that are cached in magazines and shared queues.
    pub(crate) fn cached_in(&self, sweep: &mut SweepGuard<'_, M>) -> u64 {
        let mut cached = 0;
        sweep.for_each(|magazines| {
            for (class, magazine) in magazines.classes.iter().enumerate() {
                cached += self.bytes(class, magazine.blocks.len());
            }
        });
        cached + self.queues.iter().map(|queue| queue.bytes()).sum::<u64>()
    }
}
