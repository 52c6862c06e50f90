//! The free blocks of one class outside the magazines, and the limit on all cached bytes.

use std::collections::VecDeque;
use std::sync::Arc;
// No algorithm depends on the order of these, so they are invisible to the model checker.
use std::sync::atomic::AtomicU64 as Word;

use crossbeam_utils::CachePadded;

use crate::cache::stack::Stack;
use crate::sync::{AtomicU64, AtomicUsize, Mutex, Ordering};
use terrane_core::convert::to_u64;

/// The most blocks that are evicted at a time.
pub(crate) const BATCH: usize = 14;

/// Evicted blocks of a class.
pub(crate) type Batch<B> = Stack<B, BATCH>;

/// The shared queue of a class: blocks behind a lock that is held for a few instructions. The
/// blocks that were added last are removed first. The oldest block is evicted first.
#[derive(Debug)]
pub(crate) struct ClassQueue<B> {
    queue: Mutex<Queue<B>>,
    /// The number of blocks in the queue. It is written under the lock, and read without it.
    count: AtomicUsize,
    pub(crate) class: usize,
    size: u64,
    most: usize,
    occupied: Arc<Occupied>,
    last_used: AtomicU64,
    pub(crate) shared_hits: AtomicU64,
    pub(crate) misses: AtomicU64,
    pub(crate) evictions: AtomicU64,
}

#[derive(Debug)]
struct Queue<B> {
    blocks: VecDeque<B>,
    /// Whether the queue refuses further blocks.
    is_closed: bool,
}

impl<B> ClassQueue<B> {
    /// Creates a queue of at most `most` blocks, of `size` bytes each.
    pub(crate) fn new(class: usize, size: u64, most: usize, occupied: Arc<Occupied>) -> Self {
        Self {
            queue: Mutex::new(Queue { blocks: VecDeque::new(), is_closed: false }),
            count: AtomicUsize::new(0),
            class,
            size,
            most,
            occupied,
            last_used: AtomicU64::new(0),
            shared_hits: AtomicU64::new(0),
            misses: AtomicU64::new(0),
            evictions: AtomicU64::new(0),
        }
    }

    /// Runs `work` on the queue. Takes no lock if the queue is empty.
    fn with_blocks<R>(&self, work: impl FnOnce(&mut VecDeque<B>) -> Option<R>) -> Option<R> {
        if self.blocks() == 0 {
            return None;
        }
        let mut queue = self.queue.lock();
        let result = work(&mut queue.blocks);
        self.count.store(queue.blocks.len(), Ordering::Release);
        result
    }

    /// Removes the block that was added last. `now` is the time of the pool's clock.
    pub(crate) fn take_one(&self, now: u64) -> Option<B> {
        self.take(0, now, drop)
    }

    /// Removes the block that was added last. Passes the blocks before it to `keep`, at most
    /// `further`, under the lock.
    pub(crate) fn take(&self, further: usize, now: u64, mut keep: impl FnMut(B)) -> Option<B> {
        let block = self.with_blocks(|blocks| {
            let block = blocks.pop_back()?;
            for _ in 0..further {
                let Some(block) = blocks.pop_back() else { break };
                keep(block);
            }
            Some(block)
        })?;
        self.touch(now);
        Some(block)
    }

    /// Removes the blocks that were freed first, at most `count` and at most a batch. An eviction
    /// does not count as a use.
    pub(crate) fn take_oldest(&self, count: usize) -> Option<Batch<B>> {
        self.with_blocks(|blocks| {
            let mut taken = Batch::new();
            for _ in 0..count.min(BATCH) {
                let Some(block) = blocks.pop_front() else { break };
                // A batch has capacity for its own length.
                let _ = taken.push(block);
            }
            (taken.len() > 0).then_some(taken)
        })
    }

    /// Removes all blocks, the earliest freed first.
    pub(crate) fn take_all(&self) -> VecDeque<B> {
        self.with_blocks(|blocks| Some(std::mem::take(blocks))).unwrap_or_default()
    }

    /// Removes all blocks, and refuses further blocks.
    pub(crate) fn close(&self) -> VecDeque<B> {
        self.queue.lock().is_closed = true;
        self.take_all()
    }

    /// Records that the class was used. Writes only if the value changes.
    fn touch(&self, now: u64) {
        if self.last_used.load(Ordering::Relaxed) < now {
            self.last_used.fetch_max(now, Ordering::Relaxed);
        }
    }

    /// Inserts the blocks of `next`, until it returns `None` or the queue is full.
    pub(crate) fn put(&self, mut next: impl FnMut() -> Option<B>, now: u64) {
        let mut queue = self.queue.lock();
        while !queue.is_closed
            && queue.blocks.len() < self.most
            && let Some(block) = next()
        {
            queue.blocks.push_back(block);
        }
        self.count.store(queue.blocks.len(), Ordering::Release);
        if !queue.blocks.is_empty() {
            self.occupied.set(self.class);
        }
        drop(queue);
        self.touch(now);
    }

    /// Removes the mark of the class as occupied, if the queue is empty. Returns whether it is.
    pub(crate) fn unmark_if_empty(&self) -> bool {
        let is_empty = self.blocks() == 0;
        if is_empty {
            let queue = self.queue.lock();
            if queue.blocks.is_empty() {
                self.occupied.clear(self.class);
            }
        }
        is_empty
    }

    /// Calls `visit` with every block, under the lock. `visit` must be code of this crate.
    pub(crate) fn for_each(&self, visit: impl FnMut(&B)) {
        self.queue.lock().blocks.iter().for_each(visit);
    }

    pub(crate) fn blocks(&self) -> usize {
        self.count.load(Ordering::Acquire)
    }

    /// Returns the bytes of the blocks in the queue.
    pub(crate) fn bytes(&self) -> u64 {
        self.size * to_u64(self.blocks())
    }

    pub(crate) fn last_used(&self) -> u64 {
        self.last_used.load(Ordering::Relaxed)
    }
}

/// The classes that may have a block in their queues. A class with a block is always included. The
/// set is written under the lock of the class, and only if it changes.
#[derive(Debug)]
pub(crate) struct Occupied(Box<[Word]>);

const WORD: usize = 64;

impl Occupied {
    pub(crate) fn new(classes: usize) -> Arc<Self> {
        Arc::new(Self((0..classes.div_ceil(WORD)).map(|_| Word::new(0)).collect()))
    }

    #[inline]
    fn set(&self, class: usize) {
        if let Some(word) = self.0.get(class / WORD)
            && word.load(Ordering::Relaxed) >> (class % WORD) & 1 == 0
        {
            word.fetch_or(1 << (class % WORD), Ordering::Relaxed);
        }
    }

    #[inline]
    fn clear(&self, class: usize) {
        if let Some(word) = self.0.get(class / WORD) {
            word.fetch_and(!(1 << (class % WORD)), Ordering::Relaxed);
        }
    }

    /// Iterates over the classes, the smallest first.
    #[inline]
    pub(crate) fn iter(&self) -> impl Iterator<Item = usize> + Clone {
        self.0.iter().enumerate().flat_map(|(index, word)| {
            let mut bits = word.load(Ordering::Relaxed);
            std::iter::from_fn(move || {
                let bit = (bits != 0).then(|| bits.trailing_zeros())?;
                bits &= bits - 1;
                Some(index * WORD + usize::try_from(bit).unwrap_or(0))
            })
        })
    }
}

/// The limit on cached bytes, by reservation. Bytes are reserved before a block is cached, and
/// released after it has left the cache. So cached bytes never exceed the limit. A thread reserves
/// bytes for several blocks at a time and keeps the rest as credit, so a hit reserves nothing.
#[derive(Debug)]
pub(crate) struct CacheLimit {
    /// On its own cache line, which no data that every hit reads may share.
    reserved: CachePadded<AtomicU64>,
    limit: u64,
}

impl CacheLimit {
    pub(crate) fn new(limit: u64) -> Self {
        Self { reserved: CachePadded::new(AtomicU64::new(0)), limit }
    }

    /// Reserves `bytes` completely or not at all. A refused reservation is never added, so it
    /// cannot make a concurrent request fail that fits.
    #[inline]
    pub(crate) fn reserve(&self, bytes: u64) -> bool {
        let within = |reserved: u64| reserved.checked_add(bytes).filter(|&sum| sum <= self.limit);
        self.reserved.fetch_update(Ordering::Relaxed, Ordering::Relaxed, within).is_ok()
    }

    /// Returns the reserved bytes: the bytes of cached blocks, and the credit of all threads.
    #[inline]
    pub(crate) fn reserved(&self) -> u64 {
        self.reserved.load(Ordering::Relaxed)
    }

    /// Returns `bytes`, but at most 1/64 of the limit, so that a few threads cannot reserve all.
    #[inline]
    pub(crate) fn share(&self, bytes: u64) -> u64 {
        bytes.min(self.limit / 64)
    }

    #[inline]
    pub(crate) fn release(&self, bytes: u64) {
        if bytes > 0 {
            self.reserved.fetch_sub(bytes, Ordering::Relaxed);
        }
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    #[test]
    fn reserves_exactly_or_not_at_all() {
        let limit = CacheLimit::new(100);
        assert!(limit.reserve(60));
        assert!(!limit.reserve(41));
        assert!(!limit.reserve(u64::MAX));
        assert!(limit.reserve(40));
        assert!(!limit.reserve(1));
        limit.release(100);
        assert!(limit.reserve(100));
    }
}
