//! Freed blocks that streams may still be using.
//!
//! Every stream numbers its frees with *tickets*. All frees since the last fence share the open
//! ticket; recording a fence closes it, and when the fence completes, that ticket and all before
//! it are done. A block waits for one ticket per stream that used it. So a fence is recorded only
//! when somebody wants a block that waits for the open ticket, one fence serves all frees before
//! it, and of all uses on a stream only the latest counts.
//!
//! A block whose last stream is that of the asker needs no fence at all: what the asker submits
//! runs after what was submitted there before.

use std::collections::VecDeque;
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
use crate::sync::{AtomicU64, Mutex, Ordering};
use crate::tags::Tag;
use crate::{Fence, FenceError, FenceSource, StreamId};

/// How many of the blocks freed last on a stream are looked at for one that can be reused there
/// at once; only those that other streams use as well cannot.
const LOOK_BACK: usize = 4;

/// The first and the longest time to wait for one fence before looking at the others.
const WAIT_SLICES: [Duration; 2] = [Duration::from_micros(50), Duration::from_millis(5)];

pub(crate) struct Parking<M: Memory> {
    source: Arc<dyn FenceSource>,
    /// How long a closed pool waits for its last blocks.
    patience: Duration,
    lot: Mutex<Lot<M>>,
    /// The bytes in the lot, readable without its lock.
    bytes: AtomicU64,
    abandoned: AtomicU64,
}

struct Lot<M: Memory> {
    /// Those with tickets that are not done, and others until the next reap.
    streams: FxHashMap<StreamId, Stream>,
    /// Above the tickets of all streams that have gone from the table, all of which are done.
    floor: u64,
    rows: FxHashMap<(usize, Option<StreamId>), VecDeque<Parked<M>>>,
    /// Fences that can be recorded again.
    spare: Vec<Arc<dyn Fence>>,
    /// How many blocks have been parked so far.
    arrivals: u64,
}

struct Stream {
    /// The tickets below this number are done.
    done: u64,
    /// The ticket of the next free.
    open: u64,
    /// Whether a block waits for the open ticket.
    wanted: bool,
    /// Recorded fences with the tickets that they close, the oldest first.
    fences: VecDeque<(u64, Arc<dyn Fence>)>,
    /// Whether it has been said that no fence can be recorded.
    is_reported: bool,
}

impl Stream {
    /// One whose tickets begin with this number.
    fn beginning(first: u64) -> Self {
        let fences = VecDeque::new();
        Self { done: first, open: first, wanted: false, fences, is_reported: false }
    }

    /// Whether there is nothing to remember of it.
    fn is_idle(&self) -> bool {
        !self.wanted && self.fences.is_empty() && self.done == self.open
    }
}

struct Parked<M: Memory> {
    record: Box<Record<M>>,
    /// Rises along a row.
    arrival: u64,
    tickets: SmallVec<[(StreamId, u64); 2]>,
}

impl<M: Memory> Parking<M> {
    pub(crate) fn new(source: Arc<dyn FenceSource>, patience: Duration) -> Self {
        let lot = Lot {
            streams: FxHashMap::default(),
            floor: 0,
            rows: FxHashMap::default(),
            spare: vec![],
            arrivals: 0,
        };
        Self {
            source,
            patience,
            lot: Mutex::new(lot),
            bytes: AtomicU64::new(0),
            abandoned: AtomicU64::new(0),
        }
    }

    /// The bytes of all parked blocks.
    pub(crate) fn bytes(&self) -> u64 {
        self.bytes.load(Ordering::SeqCst)
    }

    /// The bytes that were never given back, as nobody could tell when their streams would end.
    pub(crate) fn abandoned(&self) -> u64 {
        self.abandoned.load(Ordering::Relaxed)
    }

    /// How many parked blocks of each class there are, and the bytes of those of no class.
    pub(crate) fn census(&self) -> FxHashMap<usize, usize> {
        let lot = self.lot.lock();
        let mut census = FxHashMap::default();
        for ((class, _), row) in &lot.rows {
            *census.entry(*class).or_default() += row.len();
        }
        census
    }

    /// Shows every parked block to `visit`, under the lock.
    pub(crate) fn for_each(&self, visit: impl FnMut(&Record<M>)) {
        let lot = self.lot.lock();
        lot.rows.values().flatten().map(|parked| &*parked.record).for_each(visit);
    }

    /// Takes in a block that its user has released.
    pub(crate) fn park(&self, record: Box<Record<M>>) {
        let bytes = record.granted;
        let mut lot = self.lot.lock();
        let mut tickets = SmallVec::new();
        for id in record.order.streams() {
            let stream = lot.stream(id);
            stream.wanted = true;
            tickets.push((id, stream.open));
        }
        let row = (record.class, record.order.home);
        self.bytes.fetch_add(bytes, Ordering::SeqCst);
        lot.arrivals += 1;
        let arrival = lot.arrivals;
        lot.rows.entry(row).or_default().push_back(Parked { record, arrival, tickets });
    }

    /// A block of `class` that was freed on `stream` and can be reused there at once.
    pub(crate) fn take_on(&self, class: usize, stream: StreamId) -> Option<Box<Record<M>>> {
        let mut lot = self.lot.lock();
        let Lot { streams, rows, .. } = &mut *lot;
        let row = rows.get_mut(&(class, Some(stream)))?;
        let at = (0..row.len())
            .rev()
            .take(LOOK_BACK)
            .find(|&at| row.get(at).is_some_and(|parked| parked.is_free(streams, Some(stream))))?;
        Some(self.leave(row.remove(at)?))
    }

    /// Any parked block of `class` that `stream`, or with none the host, can have now.
    pub(crate) fn take_free(
        &self,
        class: usize,
        stream: Option<StreamId>,
    ) -> Option<Box<Record<M>>> {
        let mut lot = self.lot.lock();
        let Lot { streams, rows, .. } = &mut *lot;
        for ((of, _), row) in rows {
            if *of == class
                && let Some(at) = row.iter().position(|parked| parked.is_free(streams, stream))
            {
                return Some(self.leave(row.remove(at)?));
            }
        }
        None
    }

    /// A parked block of `class` that `stream` can have after it has been made to wait for the
    /// others that use it.
    ///
    /// # Errors
    ///
    /// [`FenceError`], after which the stream may wait for more than it need have.
    pub(crate) fn take_after(
        &self,
        class: usize,
        stream: StreamId,
    ) -> Result<Option<Box<Record<M>>>, FenceError> {
        let mut lot = self.lot.lock();
        let Some((row, tickets)) = lot.rows.iter().find_map(|(row, parked)| {
            (row.0 == class).then_some((*row, parked.front()?.tickets.clone()))
        }) else {
            return Ok(None);
        };
        for (id, ticket) in tickets {
            if id != stream && !lot.delay(&*self.source, stream, id, ticket)? {
                return Ok(None);
            }
        }
        let parked = lot.rows.get_mut(&row).and_then(VecDeque::pop_front);
        Ok(parked.map(|parked| self.leave(parked)))
    }

    /// Looks which fences have completed, records those that somebody waits for, and answers all
    /// blocks that are free for anyone now. Never blocks.
    pub(crate) fn reap(&self) -> Vec<Box<Record<M>>> {
        let mut lot = self.lot.lock();
        lot.poll();
        if lot.record_wanted(&*self.source) {
            // A stream that was idle has come to its fence already.
            lot.poll();
        }
        let Lot { streams, rows, .. } = &mut *lot;
        let mut free = Vec::new();
        for row in rows.values_mut() {
            let mut at = 0;
            while let Some(parked) = row.get(at) {
                if parked.is_free(streams, None) {
                    free.extend(row.remove(at).map(|parked| self.leave(parked)));
                } else {
                    at += 1;
                }
            }
        }
        rows.retain(|_, row| !row.is_empty());
        lot.forget_idle();
        free
    }

    /// Waits, without the lock, until a fence has completed or `deadline` has passed; answers
    /// whether there is anything left to wait for, and time to do so.
    pub(crate) fn wait(&self, deadline: Instant) -> bool {
        let [mut slice, longest] = WAIT_SLICES;
        loop {
            let fences: SmallVec<[Arc<dyn Fence>; 4]> = {
                let mut lot = self.lot.lock();
                lot.record_wanted(&*self.source);
                let oldest = lot.streams.values().filter_map(|stream| stream.fences.front());
                oldest.map(|(_, fence)| Arc::clone(fence)).collect()
            };
            if fences.is_empty() {
                return false;
            }
            for fence in fences {
                let left = deadline.saturating_duration_since(Instant::now());
                match fence.wait(slice.min(left)) {
                    // Other threads may free blocks as fast as fences complete.
                    Ok(true) => return !left.is_zero(),
                    Ok(false) => {}
                    Err(error) => {
                        tracing::warn!(%error, "a fence cannot be waited for");
                        // A driver that fails does so at once: not in a busy loop.
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

    /// Gives every parked block back to the upstream, once its streams are done with it. Where
    /// they are not in time, the block is abandoned: to leak is better than to hand out memory
    /// that a copy still writes. What is parked meanwhile is left to whoever parked it.
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
        let mut late = Vec::new();
        for row in self.lot.lock().rows.values_mut() {
            let arrived = |parked: &mut Parked<M>| parked.arrival <= arrived;
            late.extend(std::iter::from_fn(|| row.pop_front_if(arrived)));
        }
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
        // It was counted as released when it was parked.
        record.tag = Tag::NONE;
        record
    }
}

impl<M: Memory> Parked<M> {
    /// Whether every stream but `own` is done with the block.
    fn is_free(&self, streams: &FxHashMap<StreamId, Stream>, own: Option<StreamId>) -> bool {
        self.tickets.iter().all(|&(id, ticket)| {
            Some(id) == own || streams.get(&id).is_none_or(|stream| ticket < stream.done)
        })
    }
}

impl<M: Memory> Lot<M> {
    fn stream(&mut self, id: StreamId) -> &mut Stream {
        self.streams.entry(id).or_insert_with(|| Stream::beginning(self.floor))
    }

    /// Forgets the streams that nothing is pending on: their numbers may never come again. Blocks that
    /// other streams still use may have tickets of them. Should one come again, its tickets go on above
    /// those, which therefore stay done.
    fn forget_idle(&mut self) {
        let floor = &mut self.floor;
        self.streams.retain(|_, stream| {
            let is_idle = stream.is_idle();
            if is_idle {
                *floor = stream.open.max(*floor);
            }
            !is_idle
        });
    }

    /// Notes which fences have completed.
    fn poll(&mut self) {
        for stream in self.streams.values_mut() {
            while let Some((_, fence)) = stream.fences.front() {
                let is_complete = fence.is_complete().unwrap_or_else(|error| {
                    tracing::warn!(%error, "a fence cannot be asked");
                    false
                });
                let Some((ticket, fence)) = stream.fences.pop_front_if(|_| is_complete) else {
                    break;
                };
                stream.done = ticket + 1;
                // A waiter may still hold it; then it is dropped in the end.
                if Arc::strong_count(&fence) == 1 {
                    self.spare.push(fence);
                }
            }
        }
    }

    /// Records a fence on each stream whose open ticket is waited for, if none is under way;
    /// answers whether there was one to record.
    fn record_wanted(&mut self, source: &dyn FenceSource) -> bool {
        let wanted = |stream: &Stream| stream.wanted && stream.fences.is_empty();
        let ids: SmallVec<[StreamId; 8]> =
            self.streams.iter().filter(|(_, stream)| wanted(stream)).map(|(&id, _)| id).collect();
        for &id in &ids {
            if let Err(error) = self.record(source, id) {
                if !self.is_awaited(id) {
                    let stream = self.stream(id);
                    (stream.wanted, stream.done) = (false, stream.open);
                    continue;
                }
                // It is tried again at each miss, and mostly fails for good.
                if !std::mem::replace(&mut self.stream(id).is_reported, true) {
                    tracing::warn!(
                        %error,
                        stream = %id,
                        "no fence could be recorded; its blocks are pending until one can"
                    );
                }
            }
        }
        !ids.is_empty()
    }

    /// Whether a block waits for a stream. What did may have been taken by now.
    fn is_awaited(&self, id: StreamId) -> bool {
        let done = self.streams.get(&id).map_or(self.floor, |stream| stream.done);
        let mut parked = self.rows.values().flatten();
        parked.any(|parked| parked.tickets.iter().any(|&(of, ticket)| of == id && ticket >= done))
    }

    /// Closes the open ticket of a stream with a fence.
    fn record(&mut self, source: &dyn FenceSource, id: StreamId) -> Result<(), FenceError> {
        let fence = match self.spare.pop() {
            Some(fence) => fence,
            None => source.create()?,
        };
        if let Err(error) = fence.record(id) {
            self.spare.push(fence);
            return Err(error);
        }
        let stream = self.stream(id);
        stream.fences.push_back((stream.open, fence));
        stream.open += 1;
        (stream.wanted, stream.is_reported) = (false, false);
        Ok(())
    }

    /// Makes `stream` wait until `other` is done with `ticket`; answers whether it can.
    fn delay(
        &mut self,
        source: &dyn FenceSource,
        stream: StreamId,
        other: StreamId,
        ticket: u64,
    ) -> Result<bool, FenceError> {
        let known = self.stream(other);
        if ticket < known.done {
            return Ok(true);
        }
        if ticket == known.open {
            self.record(source, other)?;
        }
        let known = self.stream(other);
        match known.fences.iter().find(|&&(closes, _)| closes >= ticket) {
            Some((_, fence)) => fence.delay(stream),
            None => Ok(false),
        }
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

/// Whether blocks of this class are kept when their streams are done with them.
pub(crate) fn is_kept(class: usize) -> bool {
    class != UNPOOLED
}

#[cfg(all(test, not(loom)))]
mod tests;
