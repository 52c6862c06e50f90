//! The table of pending blocks and of the streams that they wait for. It calls no foreign code, so
//! it can be used under a lock.

use std::collections::VecDeque;
use std::sync::Arc;

use rustc_hash::FxHashMap;
use smallvec::SmallVec;
use terrane_core::Memory;

use crate::record::Record;
use crate::{Fence, StreamId};

/// The number of blocks freed last on a stream that are searched for one to reuse there at once.
/// Only blocks that other streams also use fail the search.
const LOOK_BACK: usize = 4;

/// The class of the blocks in a row, and the stream that they were released on.
pub(super) type Row = (usize, Option<StreamId>);

/// The tickets that a block waits for, at most one per stream.
pub(super) type Tickets = SmallVec<[(StreamId, u64); 2]>;

/// Recorded fences with the tickets that they close, the oldest first.
pub(super) type Fences = SmallVec<[(u64, Arc<dyn Fence>); 1]>;

pub(super) struct Lot<M: Memory> {
    /// Streams with tickets that are not done, and others until the next reap.
    pub(super) streams: FxHashMap<StreamId, Stream>,
    /// Above the tickets of all streams that were removed from the table. All of those are done.
    floor: u64,
    rows: FxHashMap<Row, VecDeque<Parked<M>>>,
    /// Fences that can be recorded again.
    spare: Vec<Arc<dyn Fence>>,
    /// The number of blocks parked so far.
    pub(super) arrivals: u64,
}

pub(super) struct Stream {
    /// The tickets below this number are done.
    done: u64,
    /// The ticket of the next free.
    open: u64,
    /// Whether a block waits for the open ticket, or for one whose fence could not be recorded.
    wanted: bool,
    /// The fences of tickets that are not done, in the order of the tickets.
    fences: VecDeque<(u64, Arc<dyn Fence>)>,
    /// Whether the failure to record a fence has been reported.
    is_reported: bool,
}

pub(super) struct Parked<M: Memory> {
    pub(super) record: Box<Record<M>>,
    /// Increases along a row.
    arrival: u64,
    tickets: Tickets,
}

impl Stream {
    /// Makes a stream whose tickets begin with this number.
    fn beginning(first: u64) -> Self {
        let fences = VecDeque::new();
        Self { done: first, open: first, wanted: false, fences, is_reported: false }
    }

    /// Returns whether the stream has no state to keep.
    fn is_idle(&self) -> bool {
        !self.wanted && self.fences.is_empty() && self.done == self.open
    }

    /// Closes the open ticket for a fence that the caller records next.
    fn close(&mut self) -> u64 {
        self.wanted = false;
        self.open += 1;
        self.open - 1
    }
}

impl<M: Memory> Parked<M> {
    /// Returns whether every stream except `own` is done with the block.
    fn is_free(&self, streams: &FxHashMap<StreamId, Stream>, own: Option<StreamId>) -> bool {
        self.tickets.iter().all(|&(id, ticket)| {
            Some(id) == own || streams.get(&id).is_none_or(|stream| ticket < stream.done)
        })
    }
}

impl<M: Memory> Lot<M> {
    pub(super) fn new() -> Self {
        let (streams, rows) = (FxHashMap::default(), FxHashMap::default());
        Self { streams, floor: 0, rows, spare: Vec::new(), arrivals: 0 }
    }

    // ---- blocks

    /// Adds a block, which waits for the open tickets of its streams.
    pub(super) fn park(&mut self, record: Box<Record<M>>) {
        let mut tickets = Tickets::new();
        for id in record.order.streams() {
            let floor = self.floor;
            let stream = self.streams.entry(id).or_insert_with(|| Stream::beginning(floor));
            stream.wanted = true;
            tickets.push((id, stream.open));
        }
        self.arrivals += 1;
        let row = self.rows.entry((record.class, record.order.home)).or_default();
        row.push_back(Parked { record, arrival: self.arrivals, tickets });
    }

    /// Returns the number of blocks of each class.
    pub(super) fn census(&self) -> FxHashMap<usize, usize> {
        let mut census = FxHashMap::default();
        for ((class, _), row) in &self.rows {
            *census.entry(*class).or_default() += row.len();
        }
        census
    }

    pub(super) fn records(&self) -> impl Iterator<Item = &Record<M>> {
        self.rows.values().flatten().map(|parked| &*parked.record)
    }

    /// Takes one of the latest blocks of `class` that were released on `stream` and that no other
    /// stream uses.
    pub(super) fn take_latest_on(&mut self, class: usize, stream: StreamId) -> Option<Parked<M>> {
        let row = self.rows.get_mut(&(class, Some(stream)))?;
        let streams = &self.streams;
        let is_free = |at: &usize| row.get(*at).is_some_and(|p| p.is_free(streams, Some(stream)));
        let at = (0..row.len()).rev().take(LOOK_BACK).find(is_free)?;
        row.remove(at)
    }

    /// Takes a block of `class` that every stream except `own` is done with.
    pub(super) fn take_any(&mut self, class: usize, own: Option<StreamId>) -> Option<Parked<M>> {
        let rows = self.rows.iter_mut().filter(|((of, _), _)| *of == class);
        for (_, row) in rows {
            if let Some(at) = row.iter().position(|parked| parked.is_free(&self.streams, own)) {
                return row.remove(at);
            }
        }
        None
    }

    /// Takes all blocks that every stream is done with.
    pub(super) fn take_free(&mut self) -> Vec<Parked<M>> {
        let mut free = Vec::new();
        for row in self.rows.values_mut() {
            let mut at = 0;
            while let Some(parked) = row.get(at) {
                if parked.is_free(&self.streams, None) {
                    free.extend(row.remove(at));
                } else {
                    at += 1;
                }
            }
        }
        self.rows.retain(|_, row| !row.is_empty());
        free
    }

    /// Takes all blocks up to this arrival, free or not.
    pub(super) fn take_until(&mut self, arrival: u64) -> Vec<Parked<M>> {
        let mut taken = Vec::new();
        for row in self.rows.values_mut() {
            let arrived = |parked: &mut Parked<M>| parked.arrival <= arrival;
            taken.extend(std::iter::from_fn(|| row.pop_front_if(arrived)));
        }
        taken
    }

    /// Returns the oldest block of a row of `class`: the row, the block's arrival and its tickets.
    pub(super) fn oldest(&self, class: usize) -> Option<(Row, u64, Tickets)> {
        let mut rows = self.rows.iter().filter(|((of, _), _)| *of == class);
        rows.find_map(|(row, parked)| {
            let oldest = parked.front()?;
            Some((*row, oldest.arrival, oldest.tickets.clone()))
        })
    }

    /// Takes a block by its arrival, if it is still there.
    pub(super) fn take(&mut self, row: Row, arrival: u64) -> Option<Parked<M>> {
        let row = self.rows.get_mut(&row)?;
        let at = row.iter().position(|parked| parked.arrival == arrival)?;
        row.remove(at)
    }

    // ---- streams and fences

    /// Returns whether a stream is done with a ticket.
    pub(super) fn is_done(&self, id: StreamId, ticket: u64) -> bool {
        self.streams.get(&id).is_none_or(|stream| ticket < stream.done)
    }

    /// Closes a ticket of a stream, if it is open; the caller records a fence for it.
    pub(super) fn close(&mut self, id: StreamId, ticket: u64) -> Option<u64> {
        let stream = self.streams.get_mut(&id).filter(|stream| stream.open == ticket)?;
        Some(stream.close())
    }

    /// Closes the ticket of each stream that is wanted and has no fence in flight.
    pub(super) fn close_wanted(&mut self) -> SmallVec<[(StreamId, u64); 8]> {
        let wanted = |stream: &Stream| stream.wanted && stream.fences.is_empty();
        let streams = self.streams.iter_mut().filter(|(_, stream)| wanted(stream));
        streams.map(|(&id, stream)| (id, stream.close())).collect()
    }

    /// Returns a fence whose completion proves that `ticket` is done.
    pub(super) fn fence_after(&self, id: StreamId, ticket: u64) -> Option<Arc<dyn Fence>> {
        let fences = &self.streams.get(&id)?.fences;
        fences.iter().find(|&&(closes, _)| closes >= ticket).map(|(_, fence)| Arc::clone(fence))
    }

    /// Returns the recorded fences of each stream.
    pub(super) fn fences(&self) -> Vec<(StreamId, Fences)> {
        let busy = self.streams.iter().filter(|(_, stream)| !stream.fences.is_empty());
        busy.map(|(&id, stream)| (id, stream.fences.iter().cloned().collect())).collect()
    }

    /// Returns the oldest fence of each stream.
    pub(super) fn oldest_fences(&self) -> SmallVec<[Arc<dyn Fence>; 4]> {
        let oldest = self.streams.values().filter_map(|stream| stream.fences.front());
        oldest.map(|(_, fence)| Arc::clone(fence)).collect()
    }

    /// Marks tickets as done, and takes out the fences that have thereby been passed.
    pub(super) fn pass(&mut self, done: &[(StreamId, u64)]) -> Vec<Arc<dyn Fence>> {
        let mut passed = Vec::new();
        for &(id, ticket) in done {
            let Some(stream) = self.streams.get_mut(&id) else { continue };
            stream.done = stream.done.max(ticket + 1);
            let is_passed = |fence: &mut (u64, Arc<dyn Fence>)| fence.0 <= ticket;
            while let Some((_, fence)) = stream.fences.pop_front_if(is_passed) {
                passed.push(fence);
            }
        }
        passed
    }

    /// Keeps fences that have no other owner, to record them again.
    pub(super) fn keep_spare(&mut self, fences: impl IntoIterator<Item = Arc<dyn Fence>>) {
        self.spare.extend(fences);
    }

    pub(super) fn take_spare(&mut self) -> Option<Arc<dyn Fence>> {
        self.spare.pop()
    }

    /// Adds a fence that was recorded for a closed ticket. Returns it if no block waits for that
    /// ticket any more.
    pub(super) fn enter(
        &mut self,
        id: StreamId,
        ticket: u64,
        fence: Arc<dyn Fence>,
    ) -> Option<Arc<dyn Fence>> {
        let Some(stream) = self.streams.get_mut(&id).filter(|stream| ticket >= stream.done) else {
            return Some(fence);
        };
        stream.is_reported = false;
        // Another thread may have recorded a fence for a later ticket meanwhile.
        let at = stream.fences.partition_point(|&(other, _)| other < ticket);
        stream.fences.insert(at, (ticket, fence));
        None
    }

    /// Marks that no fence could be recorded. A later fence proves the same and more.
    pub(super) fn fail(&mut self, id: StreamId) {
        if let Some(stream) = self.streams.get_mut(&id) {
            stream.wanted = true;
        }
    }

    /// Returns whether the failure to record a fence on a stream is not yet reported. If no block
    /// waits for the stream, marks all its tickets as done.
    pub(super) fn is_news(&mut self, id: StreamId) -> bool {
        let is_awaited = self.is_awaited(id);
        let Some(stream) = self.streams.get_mut(&id) else { return false };
        if !is_awaited {
            (stream.wanted, stream.done) = (false, stream.open);
            return false;
        }
        !std::mem::replace(&mut stream.is_reported, true)
    }

    /// Returns whether a block waits for a stream. The blocks that did may be taken by now.
    fn is_awaited(&self, id: StreamId) -> bool {
        let done = self.streams.get(&id).map_or(self.floor, |stream| stream.done);
        let mut parked = self.rows.values().flatten();
        parked.any(|parked| parked.tickets.iter().any(|&(of, ticket)| of == id && ticket >= done))
    }

    /// Removes the streams that nothing is pending on, because their numbers may never be used
    /// again. Blocks that other streams still use may have tickets of them. If such a number is
    /// used again, its tickets start above those, so those stay done.
    pub(super) fn forget_idle(&mut self) {
        let floor = &mut self.floor;
        self.streams.retain(|_, stream| {
            let is_idle = stream.is_idle();
            if is_idle {
                *floor = stream.open.max(*floor);
            }
            !is_idle
        });
    }
}
