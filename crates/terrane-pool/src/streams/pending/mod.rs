//! Freed blocks that streams may still be using.
//!
//! Every stream numbers its frees with *epochs*. All frees since the last fence share the open
//! epoch. Recording a fence closes it. When the fence completes, that epoch and all earlier ones
//! are done. A block waits for one epoch of each stream that used it. So a fence is recorded only
//! for a request that needs a block of the open epoch, and one fence covers all frees before it.
//! For several uses on one stream, only the latest counts.
//!
//! A request on the block's last stream needs no fence, because its work runs after the earlier
//! work of that stream.
//!
//! Fences are foreign code: they are created, recorded, queried and waited for without the lock.

mod table;

use std::mem::ManuallyDrop;
use std::sync::Arc;
use std::time::{Duration, Instant};

use rustc_hash::FxHashMap;
use smallvec::SmallVec;
use terrane_core::ByteCount;

use crate::streams::fence::{
    FailingSince, FenceError, FenceSource, RETRY, StreamId, deadline_after,
};
use crate::sync::{AtomicU64, AtomicUsize, Mutex, Ordering, yield_now};
pub(crate) use table::PendingBlock;
use table::{PendingEntry, PendingTable};

/// The first and the longest time to wait for one fence before checking the others.
const WAIT_SLICES: [Duration; 2] = [Duration::from_micros(50), Duration::from_millis(5)];

/// The freed blocks of one pool that streams may still be using.
pub(crate) struct PendingFrees<B: PendingBlock> {
    source: Arc<dyn FenceSource>,
    /// The longest wait of a closed pool for its last blocks.
    pending_wait: Duration,
    table: Mutex<PendingTable<B>>,
    /// The bytes in the table, readable without its lock.
    bytes: AtomicU64,
    /// The number of fences that threads are recording now.
    recording: AtomicUsize,
    abandoned: AtomicU64,
}

impl<B: PendingBlock> PendingFrees<B> {
    pub(crate) fn new(source: Arc<dyn FenceSource>, pending_wait: Duration) -> Self {
        Self {
            source,
            pending_wait,
            table: Mutex::new(PendingTable::new()),
            bytes: AtomicU64::new(0),
            recording: AtomicUsize::new(0),
            abandoned: AtomicU64::new(0),
        }
    }

    /// Returns the bytes of all pending blocks.
    pub(crate) fn bytes(&self) -> u64 {
        self.bytes.load(Ordering::SeqCst)
    }

    /// Returns the bytes that were never freed, because their streams did not finish.
    pub(crate) fn abandoned(&self) -> u64 {
        self.abandoned.load(Ordering::Relaxed)
    }

    /// Returns the number of pending blocks of each class.
    pub(crate) fn counts(&self) -> FxHashMap<usize, usize> {
        self.table.lock().counts()
    }

    /// Calls `visit` with every pending block, under the lock. `visit` must be code of this crate.
    pub(crate) fn for_each(&self, visit: impl FnMut(&B)) {
        self.table.lock().blocks().for_each(visit);
    }

    /// Adds a block that its user has released.
    pub(crate) fn insert(&self, block: B) {
        let mut table = self.table.lock();
        self.bytes.fetch_add(block.bytes(), Ordering::SeqCst);
        table.insert(block);
    }

    /// Removes a block of `class` that was freed on `stream` and can be reused there at once.
    pub(crate) fn take_on(&self, class: usize, stream: StreamId) -> Option<B> {
        let entry = self.table.lock().take_latest_on(class, stream)?;
        Some(self.remove(entry))
    }

    /// Removes a pending block of `class` that is ready for `stream`, or for the host if `None`.
    pub(crate) fn take_ready(&self, class: usize, stream: Option<StreamId>) -> Option<B> {
        let entry = self.table.lock().take_any(class, stream)?;
        Some(self.remove(entry))
    }

    /// Removes a pending block of `class` for `stream`, after ordering `stream` behind the other
    /// streams that use the block.
    ///
    /// # Errors
    ///
    /// [`FenceError`]. In that case, the stream may wait for more work than necessary.
    pub(crate) fn take_after(
        &self,
        class: usize,
        stream: StreamId,
    ) -> Result<Option<B>, FenceError> {
        let oldest = self.table.lock().oldest(class);
        let Some((queue, sequence, epochs)) = oldest else { return Ok(None) };
        for (other, epoch) in epochs {
            if other != stream && !self.delay(stream, other, epoch)? {
                return Ok(None);
            }
        }
        let entry = self.table.lock().take(queue, sequence);
        Ok(entry.map(|entry| self.remove(entry)))
    }

    /// Makes `stream` wait until `other` has completed `epoch`. Returns whether this is possible.
    fn delay(&self, stream: StreamId, other: StreamId, epoch: u64) -> Result<bool, FenceError> {
        let open = {
            let mut table = self.table.lock();
            if table.is_done(other, epoch) {
                return Ok(true);
            }
            table.close(other, epoch)
        };
        if let Some(closed) = open {
            self.record(other, closed)?;
        }
        let fence = self.table.lock().fence_after(other, epoch);
        fence.map_or(Ok(false), |fence| fence.delay(stream))
    }

    /// Checks which fences have completed, and records the fences that are wanted. Returns all
    /// blocks that are free for any stream now. Never blocks.
    pub(crate) fn reap(&self) -> Vec<B> {
        self.poll();
        if self.record_wanted() {
            // The fence of an idle stream is complete at once.
            self.poll();
        }
        let mut table = self.table.lock();
        let free = table.take_ready();
        table.forget_idle();
        drop(table);
        free.into_iter().map(|entry| self.remove(entry)).collect()
    }

    /// Queries the recorded fences, the oldest of each stream first, and marks the completed ones.
    fn poll(&self) {
        let all_fences = self.table.lock().fences();
        let mut done = SmallVec::<[(StreamId, u64); 8]>::new();
        for (id, fences) in &all_fences {
            for (epoch, fence) in fences {
                match fence.is_complete() {
                    Ok(true) => done.push((*id, *epoch)),
                    Ok(false) => break,
                    Err(error) => {
                        tracing::warn!(%error, "a fence could not be queried");
                        break;
                    }
                }
            }
        }
        let completed = self.table.lock().complete(&done);
        drop(all_fences);
        // A waiter may still own a fence, which is then dropped here or by the waiter. The other
        // fences have no other owner.
        let idle = completed.into_iter().filter(|fence| Arc::strong_count(fence) == 1);
        let idle: SmallVec<[_; 8]> = idle.collect();
        self.table.lock().idle.extend(idle);
    }

    /// Records a fence on each stream whose open epoch is wanted, if the stream has no other fence
    /// in flight. Returns whether it recorded any.
    fn record_wanted(&self) -> bool {
        let wanted = self.table.lock().wanted();
        for &id in &wanted {
            // One by one, because the source may panic.
            let Some(epoch) = self.table.lock().close_if_wanted(id) else { continue };
            let Err(error) = self.record(id, epoch) else { continue };
            // Each miss tries again, and most failures are permanent, so only the first failure is
            // reported.
            if self.table.lock().should_report(id) {
                tracing::warn!(
                    %error,
                    stream = %id,
                    "no fence could be recorded; the blocks of the stream stay pending until one can"
                );
            }
        }
        !wanted.is_empty()
    }

    /// Records a fence for an epoch that the caller closed for it.
    fn record(&self, id: StreamId, epoch: u64) -> Result<(), FenceError> {
        self.recording.fetch_add(1, Ordering::SeqCst);
        let mut recording = Recording { pending: self, id, is_done: false };
        let idle = self.table.lock().idle.pop();
        let recorded = idle.map_or_else(|| self.source.create(), Ok).and_then(|fence| match fence
            .record(id)
        {
            Ok(()) => Ok(fence),
            Err(error) => {
                self.table.lock().idle.push(fence);
                Err(error)
            }
        });
        let fence = recorded?;
        let unused = self.table.lock().add_fence(id, epoch, fence);
        recording.is_done = true;
        drop(recording);
        drop(unused);
        Ok(())
    }

    /// Waits, without the lock, until a fence has completed or `deadline` has passed. Returns
    /// whether a fence has completed and time is left. The wait also ends if there is no fence, or
    /// if all fences have failed for too long.
    pub(crate) fn wait(&self, deadline: Instant) -> bool {
        let [mut slice, longest] = WAIT_SLICES;
        let mut failing = FailingSince::default();
        loop {
            self.record_wanted();
            let recording = self.recording.load(Ordering::SeqCst) > 0;
            let fences = self.table.lock().oldest_fences();
            if fences.is_empty() {
                // The only fence may be one that another thread is recording now.
                if !recording || Instant::now() >= deadline {
                    return false;
                }
                yield_now();
                continue;
            }
            let mut is_failing = true;
            for fence in fences {
                let left = deadline.saturating_duration_since(Instant::now());
                match fence.wait(slice.min(left)) {
                    // Other threads may free blocks as fast as fences complete, so this case checks
                    // the deadline too.
                    Ok(true) => return !left.is_zero(),
                    Ok(false) => is_failing = false,
                    Err(error) => {
                        tracing::warn!(%error, "a wait for a fence failed");
                        // A driver may fail at once, so the thread sleeps instead of busy-waiting.
                        std::thread::sleep(slice.min(left));
                    }
                }
                if left.is_zero() {
                    return false;
                }
            }
            if !is_failing {
                failing = FailingSince::default();
            } else if failing.lasts_too_long() {
                return false;
            }
            slice = (slice * 2).min(longest);
        }
    }

    /// Frees every pending block once its streams are done with it. If they are not done in time,
    /// the block is abandoned: a leak is better than reuse of memory that a copy still writes. A
    /// thread that inserts a block meanwhile is responsible for that block.
    pub(crate) fn free_all(&self) {
        let last = self.table.lock().inserted;
        let deadline = deadline_after(self.pending_wait);
        let mut failing = FailingSince::default();
        loop {
            drop(self.reap());
            if self.bytes() == 0 {
                break;
            }
            if self.wait(deadline) {
                failing = FailingSince::default();
            } else {
                let left = deadline.saturating_duration_since(Instant::now());
                if left.is_zero() || failing.lasts_too_long() {
                    break;
                }
                // No fence could be recorded. The source may be able to later.
                std::thread::sleep(RETRY.min(left));
            }
        }
        drop(self.reap());
        let late = self.table.lock().take_up_to(last);
        for entry in late {
            let block = ManuallyDrop::new(self.remove(entry));
            self.abandoned.fetch_add(block.bytes(), Ordering::Relaxed);
            tracing::error!(
                bytes = block.bytes(),
                location = %block.location(),
                "a block is leaked, because the streams that use it did not finish in time"
            );
        }
    }

    fn remove(&self, entry: PendingEntry<B>) -> B {
        let mut block = entry.block;
        self.bytes.fetch_sub(block.bytes(), Ordering::SeqCst);
        block.clear_uses();
        block
    }
}

/// A fence that is being recorded. If that fails, or the source panics, the stream wants one again.
struct Recording<'pending, B: PendingBlock> {
    pending: &'pending PendingFrees<B>,
    id: StreamId,
    is_done: bool,
}

impl<B: PendingBlock> Drop for Recording<'_, B> {
    fn drop(&mut self) {
        if !self.is_done {
            self.pending.table.lock().mark_unrecorded(self.id);
        }
        self.pending.recording.fetch_sub(1, Ordering::SeqCst);
    }
}

terrane_core::debug_fields!(PendingFrees<B: PendingBlock>, |it| { source: it.source,
    bytes: ByteCount::new(it.bytes()) });

#[cfg(test)]
#[cfg(not(loom))]
mod tests;
