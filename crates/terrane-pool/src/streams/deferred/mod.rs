//! Items that are kept until the streams that use them have passed their marks.

use std::collections::VecDeque;
use std::mem::ManuallyDrop;
use std::sync::Arc;
use std::time::{Duration, Instant};

use smallvec::SmallVec;
use terrane_core::AllocateError;

use crate::streams::fence::{
    FailingSince, Fence, FenceError, FenceSource, RETRY, StreamId, deadline_after,
};
use crate::sync::{AtomicUsize, Mutex, Ordering};

/// Fences that are created once and recorded repeatedly.
#[derive(Debug)]
pub(crate) struct FencePool {
    source: Arc<dyn FenceSource>,
    idle: Mutex<Vec<Arc<dyn Fence>>>,
}

impl FencePool {
    pub(crate) fn new(source: Arc<dyn FenceSource>) -> Self {
        Self { source, idle: Mutex::new(Vec::new()) }
    }

    fn mark(&self, stream: StreamId) -> Result<Arc<dyn Fence>, FenceError> {
        let idle = self.idle.lock().pop();
        let fence = match idle {
            Some(fence) => fence,
            None => self.source.create()?,
        };
        match fence.record(stream) {
            Ok(()) => Ok(fence),
            Err(error) => {
                self.idle.lock().push(fence);
                Err(error)
            }
        }
    }
}

/// Marks in streams: the work that must have run before an item is free.
#[derive(Debug, Default)]
pub(crate) struct Marks {
    fences: SmallVec<[Arc<dyn Fence>; 2]>,
    /// Streams without a mark, because work may still be submitted to them, or because recording
    /// failed. A later mark proves at least as much.
    unmarked: SmallVec<[StreamId; 2]>,
}

impl Marks {
    /// Marks the current position of each of `streams`.
    pub(crate) fn new(fences: &FencePool, streams: impl IntoIterator<Item = StreamId>) -> Self {
        let mut marks = Self::unmarked(streams);
        marks.mark(fences);
        marks
    }

    /// Returns the value for `streams` whose current position is marked later.
    pub(crate) fn unmarked(streams: impl IntoIterator<Item = StreamId>) -> Self {
        Self { fences: SmallVec::new(), unmarked: streams.into_iter().collect() }
    }

    /// Marks the current position of each stream without a mark.
    pub(crate) fn mark(&mut self, fences: &FencePool) {
        // A mark that fails is tried again at each query.
        let _ = self.make(fences);
    }

    /// Returns whether all the marked work has run. Never blocks.
    pub(crate) fn are_passed(&mut self, fences: &FencePool) -> Result<bool, FenceError> {
        self.pass(fences, |fence| fence.is_complete())
    }

    /// Waits until all the marked work has run, or until `deadline`. Returns whether it has run.
    pub(crate) fn wait(
        &mut self,
        fences: &FencePool,
        deadline: Instant,
    ) -> Result<bool, FenceError> {
        self.pass(fences, |fence| fence.wait(deadline.saturating_duration_since(Instant::now())))
    }

    /// Removes the fences that have passed, up to the first that has not.
    fn pass(
        &mut self,
        fences: &FencePool,
        has_passed: impl Fn(&dyn Fence) -> Result<bool, FenceError>,
    ) -> Result<bool, FenceError> {
        self.make(fences)?;
        while let Some(fence) = self.fences.last() {
            if !has_passed(&**fence)? {
                return Ok(false);
            }
            fences.idle.lock().extend(self.fences.pop());
        }
        Ok(true)
    }

    fn make(&mut self, fences: &FencePool) -> Result<(), FenceError> {
        while let Some(&stream) = self.unmarked.last() {
            self.fences.push(fences.mark(stream)?);
            self.unmarked.pop();
        }
        Ok(())
    }
}

/// Items that some stream may still use.
///
/// No lock is held while a fence is queried or waited for. On drop, it waits for the remaining
/// items. An item that a stream still uses after the wait is leaked, because freeing it would
/// invalidate memory under the stream's work.
#[derive(Debug)]
pub(crate) struct DeferredFrees<T> {
    fences: FencePool,
    waiting: Mutex<VecDeque<Waiting<T>>>,
    /// The number of items that threads have removed to query, to wait for or to free. It increases
    /// under the lock. It decreases under the lock for items that are put back.
    in_progress: AtomicUsize,
    /// The number of items freed so far.
    freed: AtomicUsize,
    pending_wait: Duration,
}

/// One of the items in progress, until it is put back or freed.
#[derive(Debug)]
struct InProgress<'deferred>(&'deferred AtomicUsize);

impl Drop for InProgress<'_> {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::SeqCst);
    }
}

/// The result of a wait for an item.
enum Waited<'deferred, T> {
    /// No stream uses the item any more.
    Free((InProgress<'deferred>, T)),
    /// A stream still uses it.
    InUse,
    /// Its fence failed, so it stays.
    Failed,
    /// There is none, or other threads have them all.
    NoItem,
}

/// An item with its marks. It is taken out and dropped only after its streams have passed the
/// marks. If a fence panics, the item is leaked.
type Waiting<T> = (Marks, ManuallyDrop<T>);

impl<T> DeferredFrees<T> {
    /// Creates an empty collection. On drop, it waits for at most `pending_wait` in all.
    pub(crate) fn new(source: Arc<dyn FenceSource>, pending_wait: Duration) -> Self {
        let waiting = Mutex::new(VecDeque::new());
        let (in_progress, freed) = (AtomicUsize::new(0), AtomicUsize::new(0));
        Self { fences: FencePool::new(source), waiting, in_progress, freed, pending_wait }
    }

    pub(crate) fn fences(&self) -> &FencePool {
        &self.fences
    }

    /// Keeps `item` until its marks have been passed.
    pub(crate) fn keep(&self, marks: Marks, item: T) {
        self.waiting.lock().push_back((marks, ManuallyDrop::new(item)));
    }

    fn put_back(&self, progress: InProgress<'_>, kept: Waiting<T>) {
        let mut waiting = self.waiting.lock();
        waiting.push_back(kept);
        drop(progress);
    }

    pub(crate) fn len(&self) -> usize {
        let waiting = self.waiting.lock();
        waiting.len() + self.in_progress.load(Ordering::SeqCst)
    }

    /// Frees the items that no stream uses any more, and returns their number.
    pub(crate) fn reap(&self, free: impl FnMut(T)) -> usize {
        self.reap_of(self.len(), free)
    }

    /// Like [`reap`](Self::reap), but checks at most `count` items, the oldest if none was checked
    /// before.
    fn reap_of(&self, count: usize, mut free: impl FnMut(T)) -> usize {
        let mut freed = 0;
        for _ in 0..count {
            let Some((progress, (mut marks, item))) = self.pop() else { break };
            match marks.are_passed(&self.fences) {
                // At once: a fence of a later item may panic.
                Ok(true) => {
                    self.free((progress, ManuallyDrop::into_inner(item)), &mut free);
                    freed += 1;
                }
                Ok(false) | Err(_) => self.put_back(progress, (marks, item)),
            }
        }
        freed
    }

    fn free(&self, (progress, item): (InProgress<'_>, T), free: impl FnOnce(T)) {
        free(item);
        // In this order, other threads never see zero items before the free is counted.
        self.freed.fetch_add(1, Ordering::SeqCst);
        drop(progress);
    }

    /// Waits for the oldest item until `deadline`, and removes it.
    fn wait_for_one(&self, deadline: Instant) -> Waited<'_, T> {
        let Some((progress, (mut marks, item))) = self.pop() else { return Waited::NoItem };
        let outcome = marks.wait(&self.fences, deadline);
        if matches!(outcome, Ok(true)) {
            return Waited::Free((progress, ManuallyDrop::into_inner(item)));
        }
        self.put_back(progress, (marks, item));
        if outcome.is_err() { Waited::Failed } else { Waited::InUse }
    }

    /// Checks a few items, and then calls `allocate`. The check prevents items from accumulating if
    /// memory is never exhausted. If the request is refused for exhaustion, it is repeated whenever
    /// items have been freed: first those that need no wait, then any other until the wait ends.
    pub(crate) fn allocate_or_reclaim<M>(
        &self,
        mut allocate: impl FnMut() -> Result<M, AllocateError>,
        mut free: impl FnMut(T),
    ) -> Result<M, AllocateError> {
        // More than the one item that each allocation can leave.
        const LOOKS: usize = 2;
        /// The first and the longest wait for one item, after which all are checked.
        const SLICES: [Duration; 2] = [Duration::from_micros(100), Duration::from_millis(2)];
        // Read before the request: if other threads free items meanwhile, another request may
        // succeed.
        let had_items = self.len() > 0;
        if had_items {
            self.reap_of(LOOKS, &mut free);
        }
        let mut freed = self.freed.load(Ordering::SeqCst);
        let mut refusal = match allocate() {
            Err(error) if error.is_exhaustion() && had_items => error,
            outcome => return outcome,
        };
        let deadline = deadline_after(self.pending_wait);
        let [mut slice, longest] = SLICES;
        loop {
            // An item was freed since the last round, so not every fence fails.
            let mut failing = FailingSince::default();
            self.reap(&mut free);
            // Until a thread has freed an item.
            while self.freed.load(Ordering::SeqCst) == freed {
                let left = deadline.saturating_duration_since(Instant::now());
                if left.is_zero() || self.len() == 0 {
                    // Another thread counts its free before its item is gone.
                    if self.freed.load(Ordering::SeqCst) == freed {
                        return Err(refusal);
                    }
                    break;
                }
                let until = Instant::now() + slice.min(left);
                match self.wait_for_one(until) {
                    Waited::Free(passed) => {
                        self.free(passed, &mut free);
                        continue;
                    }
                    Waited::InUse => failing = FailingSince::default(),
                    Waited::Failed if failing.lasts_too_long() => return Err(refusal),
                    // The fence of an item that another thread has may fail, too.
                    Waited::Failed | Waited::NoItem => {}
                }
                // A wait that failed ended at once, and other threads may have all items.
                std::thread::sleep(until.saturating_duration_since(Instant::now()));
                slice = (slice * 2).min(longest);
                self.reap(&mut free);
            }
            freed = self.freed.load(Ordering::SeqCst);
            refusal = match allocate() {
                Err(error) if error.is_exhaustion() => error,
                outcome => return outcome,
            };
        }
    }

    fn pop(&self) -> Option<(InProgress<'_>, Waiting<T>)> {
        let mut waiting = self.waiting.lock();
        let kept = waiting.pop_front()?;
        self.in_progress.fetch_add(1, Ordering::SeqCst);
        Some((InProgress(&self.in_progress), kept))
    }
}

impl<T> Drop for DeferredFrees<T> {
    fn drop(&mut self) {
        let deadline = deadline_after(self.pending_wait);
        let mut failing = FailingSince::default();
        while let Some((_progress, (mut marks, item))) = self.pop() {
            let outcome = loop {
                let outcome = marks.wait(&self.fences, deadline);
                let left = deadline.saturating_duration_since(Instant::now());
                if outcome.is_ok() || left.is_zero() || failing.lasts_too_long() {
                    break outcome;
                }
                // The driver may be able to later.
                std::thread::sleep(RETRY.min(left));
            };
            match outcome {
                Ok(true) => {
                    failing = FailingSince::default();
                    drop(ManuallyDrop::into_inner(item));
                }
                outcome => {
                    tracing::error!(?outcome, "memory is leaked, as a stream may still use it");
                }
            }
        }
    }
}

#[cfg(test)]
#[cfg(not(loom))]
mod tests;
