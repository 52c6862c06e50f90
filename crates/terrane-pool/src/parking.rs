//! Freed blocks that streams may still be using.
//!
//! Every stream numbers its frees with *tickets*. All frees since the last fence share the open
//! ticket. Recording a fence closes it. When the fence completes, that ticket and all before it are
//! done. A block waits for one ticket per stream that used it. So a fence is recorded only for a
//! request that needs a block of the open ticket, and one fence serves all frees before it. For
//! several uses on one stream, only the latest counts.
//!
//! A request on the block's last stream needs no fence: its work runs after the earlier work of
//! that stream.
//!
//! Fences are foreign code: they are made, recorded, queried and waited for without the lock.

use std::fmt;
use std::mem::ManuallyDrop;
use std::sync::Arc;
use std::time::{Duration, Instant};

use rustc_hash::FxHashMap;
use smallvec::SmallVec;
use terrane_core::{ByteCount, Memory};

use crate::block::StreamOrder;
use crate::fence::deadline_after;
use crate::record::{Record, UNPOOLED};
use crate::sync::{AtomicU64, AtomicUsize, Mutex, Ordering, yield_now};
use crate::{FenceError, FenceSource, StreamId};

mod lot;

use lot::{Lot, Parked};

/// The first and the longest time to wait for one fence before checking the others.
const WAIT_SLICES: [Duration; 2] = [Duration::from_micros(50), Duration::from_millis(5)];

pub(crate) struct Parking<M: Memory> {
    source: Arc<dyn FenceSource>,
    /// The longest wait of a closed pool for its last blocks.
    patience: Duration,
    lot: Mutex<Lot<M>>,
    /// The bytes in the lot, readable without its lock.
    bytes: AtomicU64,
    /// The number of fences that threads are recording now.
    recording: AtomicUsize,
    abandoned: AtomicU64,
}

impl<M: Memory> Parking<M> {
    pub(crate) fn new(source: Arc<dyn FenceSource>, patience: Duration) -> Self {
        Self {
            source,
            patience,
            lot: Mutex::new(Lot::new()),
            bytes: AtomicU64::new(0),
            recording: AtomicUsize::new(0),
            abandoned: AtomicU64::new(0),
        }
    }

    /// Returns the bytes of all parked blocks.
    pub(crate) fn bytes(&self) -> u64 {
        self.bytes.load(Ordering::SeqCst)
    }

    /// Returns the bytes that were never freed, because it was unknown when their streams would
    /// end.
    pub(crate) fn abandoned(&self) -> u64 {
        self.abandoned.load(Ordering::Relaxed)
    }

    /// Returns the number of parked blocks of each class, and the bytes of those of no class.
    pub(crate) fn census(&self) -> FxHashMap<usize, usize> {
        self.lot.lock().census()
    }

    /// Calls `visit`, which must be code of this crate, with every parked block, under the lock.
    pub(crate) fn for_each(&self, visit: impl FnMut(&Record<M>)) {
        self.lot.lock().records().for_each(visit);
    }

    /// Adds a block that its user has released.
    pub(crate) fn park(&self, record: Box<Record<M>>) {
        let bytes = record.granted;
        let mut lot = self.lot.lock();
        self.bytes.fetch_add(bytes, Ordering::SeqCst);
        lot.park(record);
    }

    /// Takes a block of `class` that was freed on `stream` and can be reused there at once.
    pub(crate) fn take_on(&self, class: usize, stream: StreamId) -> Option<Box<Record<M>>> {
        let parked = self.lot.lock().take_latest_on(class, stream)?;
        Some(self.leave(parked))
    }

    /// Takes any parked block of `class` that is ready for `stream`, or for the host if `None`.
    pub(crate) fn take_free(
        &self,
        class: usize,
        stream: Option<StreamId>,
    ) -> Option<Box<Record<M>>> {
        let parked = self.lot.lock().take_any(class, stream)?;
        Some(self.leave(parked))
    }

    /// Takes a parked block of `class` for `stream`, after making `stream` wait for the other
    /// streams that use the block.
    ///
    /// # Errors
    ///
    /// [`FenceError`]. After it, the stream may wait for more work than necessary.
    pub(crate) fn take_after(
        &self,
        class: usize,
        stream: StreamId,
    ) -> Result<Option<Box<Record<M>>>, FenceError> {
        let Some((row, arrival, tickets)) = self.lot.lock().oldest(class) else { return Ok(None) };
        for (other, ticket) in tickets {
            if other != stream && !self.delay(stream, other, ticket)? {
                return Ok(None);
            }
        }
        let parked = self.lot.lock().take(row, arrival);
        Ok(parked.map(|parked| self.leave(parked)))
    }

    /// Makes `stream` wait until `other` is done with `ticket`. Returns whether it can.
    fn delay(&self, stream: StreamId, other: StreamId, ticket: u64) -> Result<bool, FenceError> {
        let open = {
            let mut lot = self.lot.lock();
            if lot.is_done(other, ticket) {
                return Ok(true);
            }
            lot.close(other, ticket)
        };
        if let Some(closed) = open {
            self.record(other, closed)?;
        }
        let fence = self.lot.lock().fence_after(other, ticket);
        fence.map_or(Ok(false), |fence| fence.delay(stream))
    }

    /// Checks which fences have completed, and records those that are wanted. Returns all blocks
    /// that are free for any stream now. Never blocks.
    pub(crate) fn reap(&self) -> Vec<Box<Record<M>>> {
        self.poll();
        if self.record_wanted() {
            // An idle stream has passed its fence already.
            self.poll();
        }
        let mut lot = self.lot.lock();
        let free = lot.take_free();
        lot.forget_idle();
        drop(lot);
        free.into_iter().map(|parked| self.leave(parked)).collect()
    }

    /// Queries the recorded fences, the oldest of each stream first, and marks the completed ones.
    fn poll(&self) {
        let asked = self.lot.lock().fences();
        let mut done = SmallVec::<[(StreamId, u64); 8]>::new();
        for (id, fences) in &asked {
            for (ticket, fence) in fences {
                match fence.is_complete() {
                    Ok(true) => done.push((*id, *ticket)),
                    Ok(false) => break,
                    Err(error) => {
                        tracing::warn!(%error, "a fence cannot be asked");
                        break;
                    }
                }
            }
        }
        let passed = self.lot.lock().pass(&done);
        drop(asked);
        // A waiter may still hold a fence. That fence is dropped here, or by the waiter. For the
        // others this is the only owner.
        let spare = passed.into_iter().filter(|fence| Arc::strong_count(fence) == 1);
        let spare: SmallVec<[_; 8]> = spare.collect();
        self.lot.lock().keep_spare(spare);
    }

    /// Records a fence on each stream whose open ticket is wanted, if no other fence of it is in
    /// flight. Returns whether there was one to record.
    fn record_wanted(&self) -> bool {
        let wanted = self.lot.lock().close_wanted();
        for &(id, ticket) in &wanted {
            let Err(error) = self.record(id, ticket) else { continue };
            // Each miss tries again, and most failures are permanent, so only the first is
            // reported.
            if self.lot.lock().is_news(id) {
                tracing::warn!(
                    %error,
                    stream = %id,
                    "no fence could be recorded; its blocks are pending until one can"
                );
            }
        }
        !wanted.is_empty()
    }

    /// Records a fence for a ticket of a stream that was closed for it.
    fn record(&self, id: StreamId, ticket: u64) -> Result<(), FenceError> {
        self.recording.fetch_add(1, Ordering::SeqCst);
        let _recording = Recording(&self.recording);
        let spare = self.lot.lock().take_spare();
        let recorded = spare.map_or_else(|| self.source.create(), Ok).and_then(|fence| match fence
            .record(id)
        {
            Ok(()) => Ok(fence),
            Err(error) => {
                self.lot.lock().keep_spare([fence]);
                Err(error)
            }
        });
        let mut lot = self.lot.lock();
        match recorded {
            Ok(fence) => {
                let unused = lot.enter(id, ticket, fence);
                drop(lot);
                drop(unused);
                Ok(())
            }
            Err(error) => {
                lot.fail(id);
                Err(error)
            }
        }
    }

    /// Waits, without the lock, until a fence has completed or `deadline` has passed. Returns
    /// whether there is still something to wait for, and time left.
    pub(crate) fn wait(&self, deadline: Instant) -> bool {
        let [mut slice, longest] = WAIT_SLICES;
        loop {
            self.record_wanted();
            let recording = self.recording.load(Ordering::SeqCst) > 0;
            let fences = self.lot.lock().oldest_fences();
            if fences.is_empty() {
                // The only fence may be one that another thread is recording now.
                if !recording || Instant::now() >= deadline {
                    return false;
                }
                yield_now();
                continue;
            }
            for fence in fences {
                let left = deadline.saturating_duration_since(Instant::now());
                match fence.wait(slice.min(left)) {
                    // Other threads may free blocks as fast as fences complete, so the deadline
                    // counts here too.
                    Ok(true) => return !left.is_zero(),
                    Ok(false) => {}
                    Err(error) => {
                        tracing::warn!(%error, "a fence cannot be waited for");
                        // A driver may fail at once, so sleep instead of looping busily.
                        std::thread::sleep(slice.min(left));
                    }
                }
                if left.is_zero() {
                    return false;
                }
            }
            slice = (slice * 2).min(longest);
        }
    }

    /// Frees every parked block once its streams are done with it. If they are not done in time,
    /// the block is abandoned: a leak is better than reuse of memory that a copy still writes. A
    /// thread that parks a block meanwhile is responsible for that block.
    pub(crate) fn evacuate(&self) {
        let arrived = self.lot.lock().arrivals;
        let deadline = deadline_after(self.patience);
        loop {
            drop(self.reap());
            if self.bytes() == 0 || !self.wait(deadline) {
                break;
            }
        }
        drop(self.reap());
        let late = self.lot.lock().take_until(arrived);
        for parked in late {
            let record = ManuallyDrop::new(self.leave(parked));
            self.abandoned.fetch_add(record.granted, Ordering::Relaxed);
            tracing::error!(
                bytes = record.granted,
                location = %record.location,
                "a block was abandoned, as the streams that use it did not end in time"
            );
        }
    }

    fn leave(&self, parked: Parked<M>) -> Box<Record<M>> {
        let mut record = parked.record;
        self.bytes.fetch_sub(record.granted, Ordering::SeqCst);
        record.order = StreamOrder::default();
        record
    }
}

/// One of the fences being recorded, until it is recorded or the source panics.
struct Recording<'parking>(&'parking AtomicUsize);

impl Drop for Recording<'_> {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::SeqCst);
    }
}

impl<M: Memory> fmt::Debug for Parking<M> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Parking")
            .field("source", &self.source)
            .field("bytes", &ByteCount::new(self.bytes()))
            .finish_non_exhaustive()
    }
}

/// Returns whether blocks of this class are kept when their streams are done with them.
pub(crate) fn is_kept(class: usize) -> bool {
    class != UNPOOLED
}

#[cfg(all(test, not(loom)))]
mod tests;
