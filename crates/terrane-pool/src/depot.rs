//! The shared queue of one class, and the cap on all that is cached.

use crossbeam_utils::CachePadded;
use terrane_core::Memory;

use crate::slot::Batch;
use crate::sync::{AtomicU64, AtomicUsize, Ordering, Queue};

/// The free blocks of a class that are in no magazine, in batches, so that one operation on
/// the shared line moves several blocks.
#[derive(Debug)]
pub(crate) struct Depot<M: Memory> {
    queue: Queue<Batch<M>>,
    /// Never less than what is in the queue: counted before it goes in and after it has come out.
    blocks: AtomicUsize,
    most: usize,
    last_used: AtomicU64,
    pub(crate) shared_hits: AtomicU64,
    pub(crate) misses: AtomicU64,
    pub(crate) evictions: AtomicU64,
}

impl<M: Memory> Depot<M> {
    /// A queue of `most` blocks at most.
    pub(crate) fn new(most: usize) -> Self {
        Self {
            queue: Queue::new(),
            blocks: AtomicUsize::new(0),
            most,
            last_used: AtomicU64::new(0),
            shared_hits: AtomicU64::new(0),
            misses: AtomicU64::new(0),
            evictions: AtomicU64::new(0),
        }
    }

    /// Takes the oldest batch. `now` is the time, and 0 for an eviction, which is no use.
    pub(crate) fn pop(&self, now: u64) -> Option<Batch<M>> {
        // A look at an empty queue writes nothing.
        if self.blocks.load(Ordering::SeqCst) == 0 {
            return None;
        }
        let batch = self.queue.pop()?;
        self.blocks.fetch_sub(batch.len(), Ordering::SeqCst);
        self.touch(now);
        Some(batch)
    }

    /// Notes that the class was used, without a write if that is known.
    fn touch(&self, now: u64) {
        if self.last_used.load(Ordering::Relaxed) < now {
            self.last_used.fetch_max(now, Ordering::Relaxed);
        }
    }

    /// Puts a batch in, and answers what does not fit.
    pub(crate) fn push(&self, mut batch: Batch<M>, now: u64) -> Option<Batch<M>> {
        let wanted = batch.len();
        let mut granted = 0;
        let _ = self.blocks.fetch_update(Ordering::SeqCst, Ordering::Relaxed, |blocks| {
            granted = wanted.min(self.most.saturating_sub(blocks));
            blocks.checked_add(granted)
        });
        self.touch(now);
        let mut over = None;
        while batch.len() > granted
            && let Some(block) = batch.pop()
        {
            // As large as the batch that it is filled from.
            let _ = over.get_or_insert_with(Batch::new).push(block);
        }
        if granted > 0 {
            self.queue.push(batch);
        }
        over
    }

    pub(crate) fn blocks(&self) -> usize {
        self.blocks.load(Ordering::SeqCst)
    }

    pub(crate) fn last_used(&self) -> u64 {
        self.last_used.load(Ordering::Relaxed)
    }
}

/// The cap on cached bytes, by reservation: bytes are reserved before a block is cached and given
/// back after it has gone, so what is cached never exceeds it. A thread reserves for several
/// blocks at a time and keeps what is left as credit, so that a hit reserves nothing.
#[derive(Debug)]
pub(crate) struct Budget {
    /// On a line of its own: what is read on every hit must not lie beside it.
    reserved: CachePadded<AtomicU64>,
    /// `None`: nothing is counted.
    cap: Option<u64>,
}

impl Budget {
    pub(crate) fn new(cap: Option<u64>) -> Self {
        Self { reserved: CachePadded::new(AtomicU64::new(0)), cap }
    }

    #[inline]
    pub(crate) fn is_limited(&self) -> bool {
        self.cap.is_some()
    }

    /// Reserves `bytes`, exactly or not at all. A refusal never makes another, fitting request
    /// fail, as nothing is added that would have to be taken off again.
    pub(crate) fn reserve(&self, bytes: u64) -> bool {
        let Some(cap) = self.cap else { return true };
        let within = |reserved: u64| reserved.checked_add(bytes).filter(|&sum| sum <= cap);
        self.reserved.fetch_update(Ordering::Relaxed, Ordering::Relaxed, within).is_ok()
    }

    /// The bytes that are reserved: those that are cached, and the credit of all threads.
    pub(crate) fn reserved(&self) -> u64 {
        self.reserved.load(Ordering::Relaxed)
    }

    pub(crate) fn give_back(&self, bytes: u64) {
        if bytes > 0 && self.cap.is_some() {
            self.reserved.fetch_sub(bytes, Ordering::Relaxed);
        }
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    #[test]
    fn reserves_exactly_or_not_at_all() {
        let budget = Budget::new(Some(100));
        assert!(budget.reserve(60));
        assert!(!budget.reserve(41));
        assert!(!budget.reserve(u64::MAX));
        assert!(budget.reserve(40));
        assert!(!budget.reserve(1));
        budget.give_back(100);
        assert!(budget.reserve(100));
    }
}
