//! The table of pending blocks and of the streams that they wait for. It calls no foreign code, so
//! it can be used under a lock.

use std::collections::VecDeque;
use std::sync::Arc;

use rustc_hash::FxHashMap;
use smallvec::SmallVec;
use terrane_core::Location;

use crate::streams::fence::{Fence, StreamId};
use crate::streams::uses::StreamUses;

/// The number of blocks, the latest of a stream, that are searched for one to reuse there at once.
/// The search skips only blocks that other streams also use.
const LOOK_BACK: usize = 4;

/// The class of the blocks in a queue, and the stream that they were released on.
pub(super) type QueueKey = (usize, Option<StreamId>);

/// The epochs that a block waits for, at most one per stream.
pub(super) type Epochs = SmallVec<[(StreamId, u64); 2]>;

/// Recorded fences with the epochs that they close, the oldest first.
pub(super) type Fences = SmallVec<[(u64, Arc<dyn Fence>); 1]>;

/// A freed block, as this module uses it.
pub(crate) trait PendingBlock {
    /// The size class.
    fn class(&self) -> usize;
    /// The length in bytes.
    fn bytes(&self) -> u64;
    /// Where the block is.
    fn location(&self) -> Location;
    /// The streams that use the block.
    fn uses(&self) -> &StreamUses;
    /// Removes all uses.
    fn clear_uses(&mut self);
}

pub(super) struct PendingTable<B> {
    /// Streams with epochs that are not done, and further streams until the next reap.
    pub(super) streams: FxHashMap<StreamId, Stream>,
    /// The first epoch of a stream that is added. It is above all epochs of removed streams, which
    /// are done.
    first_epoch: u64,
    queues: FxHashMap<QueueKey, VecDeque<PendingEntry<B>>>,
    /// Fences that can be recorded again.
    pub(super) idle: Vec<Arc<dyn Fence>>,
    /// The number of blocks inserted so far.
    pub(super) inserted: u64,
}

pub(super) struct Stream {
    /// The epochs below this number are done.
    done: u64,
    /// The epoch of the next free.
    open: u64,
    /// Whether a block waits for the open epoch, or for an epoch whose fence could not be recorded.
    wanted: bool,
    /// The fences of epochs that are not done, in the order of the epochs.
    fences: VecDeque<(u64, Arc<dyn Fence>)>,
    /// Whether the failure to record a fence has been reported.
    is_reported: bool,
}

pub(super) struct PendingEntry<B> {
    pub(super) block: B,
    /// Increases along a queue.
    sequence: u64,
    epochs: Epochs,
}

impl Stream {
    /// Whether a fence is to be recorded for the open epoch.
    fn wants_fence(&self) -> bool {
        self.wanted && self.fences.is_empty()
    }

    /// Creates a stream whose epochs begin with this number.
    fn beginning(first: u64) -> Self {
        let fences = VecDeque::new();
        Self { done: first, open: first, wanted: false, fences, is_reported: false }
    }

    /// Returns whether the stream has no state to keep.
    fn is_idle(&self) -> bool {
        !self.wanted && self.fences.is_empty() && self.done == self.open
    }

    /// Closes the open epoch for a fence that the caller records next.
    fn close(&mut self) -> u64 {
        self.wanted = false;
        self.open += 1;
        self.open - 1
    }
}

impl<B> PendingEntry<B> {
    /// Returns whether every stream except `own` is done with the block.
    fn is_ready(&self, streams: &FxHashMap<StreamId, Stream>, own: Option<StreamId>) -> bool {
        self.epochs.iter().all(|&(id, epoch)| {
            Some(id) == own || streams.get(&id).is_none_or(|stream| epoch < stream.done)
        })
    }
}

impl<B: PendingBlock> PendingTable<B> {
    pub(super) fn new() -> Self {
        let (streams, queues) = (FxHashMap::default(), FxHashMap::default());
        Self { streams, first_epoch: 0, queues, idle: Vec::new(), inserted: 0 }
    }

    // ---- blocks

    /// Adds a block, which waits for the open epochs of its streams.
    pub(super) fn insert(&mut self, block: B) {
        let mut epochs = Epochs::new();
        for id in block.uses().streams() {
            let first_epoch = self.first_epoch;
            let stream = self.streams.entry(id).or_insert_with(|| Stream::beginning(first_epoch));
            stream.wanted = true;
            epochs.push((id, stream.open));
        }
        self.inserted += 1;
        let queue = self.queues.entry((block.class(), block.uses().own)).or_default();
        queue.push_back(PendingEntry { block, sequence: self.inserted, epochs });
    }

    /// Returns the number of blocks of each class.
    pub(super) fn counts(&self) -> FxHashMap<usize, usize> {
        let mut counts = FxHashMap::default();
        for ((class, _), queue) in &self.queues {
            *counts.entry(*class).or_default() += queue.len();
        }
        counts
    }

    pub(super) fn blocks(&self) -> impl Iterator<Item = &B> {
        self.queues.values().flatten().map(|entry| &entry.block)
    }

    /// Removes one of the latest blocks of `class` that were released on `stream` and that no other
    /// stream uses.
    pub(super) fn take_latest_on(
        &mut self,
        class: usize,
        stream: StreamId,
    ) -> Option<PendingEntry<B>> {
        let queue = self.queues.get_mut(&(class, Some(stream)))?;
        let streams = &self.streams;
        let is_ready =
            |at: &usize| queue.get(*at).is_some_and(|p| p.is_ready(streams, Some(stream)));
        let at = (0..queue.len()).rev().take(LOOK_BACK).find(is_ready)?;
        queue.remove(at)
    }

    /// Removes a block of `class` that every stream except `own` is done with.
    pub(super) fn take_any(
        &mut self,
        class: usize,
        own: Option<StreamId>,
    ) -> Option<PendingEntry<B>> {
        let queues = self.queues.iter_mut().filter(|((of, _), _)| *of == class);
        for (_, queue) in queues {
            if let Some(at) = queue.iter().position(|entry| entry.is_ready(&self.streams, own)) {
                return queue.remove(at);
            }
        }
        None
    }

    /// Removes all blocks that every stream is done with.
    pub(super) fn take_ready(&mut self) -> Vec<PendingEntry<B>> {
        let mut ready = Vec::new();
        for queue in self.queues.values_mut() {
            let mut at = 0;
            while let Some(entry) = queue.get(at) {
                if entry.is_ready(&self.streams, None) {
                    ready.extend(queue.remove(at));
                } else {
                    at += 1;
                }
            }
        }
        self.queues.retain(|_, queue| !queue.is_empty());
        ready
    }

    /// Removes all blocks up to this sequence number, ready or not.
    pub(super) fn take_up_to(&mut self, sequence: u64) -> Vec<PendingEntry<B>> {
        let mut taken = Vec::new();
        for queue in self.queues.values_mut() {
            let is_earlier = |entry: &mut PendingEntry<B>| entry.sequence <= sequence;
            taken.extend(std::iter::from_fn(|| queue.pop_front_if(is_earlier)));
        }
        taken
    }

    /// Returns the oldest block of a queue of `class`: the queue, the block's sequence and its
    /// epochs.
    pub(super) fn oldest(&self, class: usize) -> Option<(QueueKey, u64, Epochs)> {
        let mut queues = self.queues.iter().filter(|((of, _), _)| *of == class);
        queues.find_map(|(key, queue)| {
            let oldest = queue.front()?;
            Some((*key, oldest.sequence, oldest.epochs.clone()))
        })
    }

    /// Removes a block by its sequence number, if it is still in the table.
    pub(super) fn take(&mut self, key: QueueKey, sequence: u64) -> Option<PendingEntry<B>> {
        let queue = self.queues.get_mut(&key)?;
        let at = queue.iter().position(|entry| entry.sequence == sequence)?;
        queue.remove(at)
    }

    // ---- streams and fences

    /// Returns whether a stream is done with an epoch.
    pub(super) fn is_done(&self, id: StreamId, epoch: u64) -> bool {
        self.streams.get(&id).is_none_or(|stream| epoch < stream.done)
    }

    /// Closes an epoch of a stream, if it is open; the caller records a fence for it.
    pub(super) fn close(&mut self, id: StreamId, epoch: u64) -> Option<u64> {
        let stream = self.streams.get_mut(&id).filter(|stream| stream.open == epoch)?;
        Some(stream.close())
    }

    /// Returns the streams that want a fence and have none in flight.
    pub(super) fn wanted(&self) -> SmallVec<[StreamId; 8]> {
        let wanted = self.streams.iter().filter(|(_, stream)| stream.wants_fence());
        wanted.map(|(&id, _)| id).collect()
    }

    /// Closes the epoch of a stream that wants a fence and has none in flight; the caller records
    /// it.
    pub(super) fn close_if_wanted(&mut self, id: StreamId) -> Option<u64> {
        Some(self.streams.get_mut(&id).filter(|stream| stream.wants_fence())?.close())
    }

    /// Returns a fence whose completion proves that `epoch` is done.
    pub(super) fn fence_after(&self, id: StreamId, epoch: u64) -> Option<Arc<dyn Fence>> {
        let fences = &self.streams.get(&id)?.fences;
        fences.iter().find(|&&(closes, _)| closes >= epoch).map(|(_, fence)| Arc::clone(fence))
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

    /// Marks epochs as done, and removes the fences that this completes.
    pub(super) fn complete(&mut self, done: &[(StreamId, u64)]) -> Vec<Arc<dyn Fence>> {
        let mut completed = Vec::new();
        for &(id, epoch) in done {
            let Some(stream) = self.streams.get_mut(&id) else { continue };
            stream.done = stream.done.max(epoch + 1);
            let is_complete = |fence: &mut (u64, Arc<dyn Fence>)| fence.0 <= epoch;
            while let Some((_, fence)) = stream.fences.pop_front_if(is_complete) {
                completed.push(fence);
            }
        }
        completed
    }

    /// Adds a fence that was recorded for a closed epoch. Returns it if no block waits for that
    /// epoch any more.
    pub(super) fn add_fence(
        &mut self,
        id: StreamId,
        epoch: u64,
        fence: Arc<dyn Fence>,
    ) -> Option<Arc<dyn Fence>> {
        let Some(stream) = self.streams.get_mut(&id).filter(|stream| epoch >= stream.done) else {
            return Some(fence);
        };
        stream.is_reported = false;
        // Another thread may have recorded a fence for a later epoch meanwhile.
        let at = stream.fences.partition_point(|&(other, _)| other < epoch);
        stream.fences.insert(at, (epoch, fence));
        None
    }

    /// Records that no fence could be recorded. A later fence proves at least as much.
    pub(super) fn mark_unrecorded(&mut self, id: StreamId) {
        if let Some(stream) = self.streams.get_mut(&id) {
            stream.wanted = true;
        }
    }

    /// Returns whether the failure to record a fence on a stream is not yet reported. If no block
    /// waits for the stream, marks all its epochs as done.
    pub(super) fn should_report(&mut self, id: StreamId) -> bool {
        let is_awaited = self.is_awaited(id);
        let Some(stream) = self.streams.get_mut(&id) else { return false };
        if !is_awaited {
            (stream.wanted, stream.done) = (false, stream.open);
            return false;
        }
        !std::mem::replace(&mut stream.is_reported, true)
    }

    /// Returns whether a block waits for a stream. The block may have been removed meanwhile.
    fn is_awaited(&self, id: StreamId) -> bool {
        let done = self.streams.get(&id).map_or(self.first_epoch, |stream| stream.done);
        let mut entries = self.queues.values().flatten();
        entries.any(|entry| entry.epochs.iter().any(|&(of, epoch)| of == id && epoch >= done))
    }

    /// Removes the streams that no block waits for, because their numbers may never be used again.
    /// Blocks that other streams still use may have epochs of a removed stream. If its number is
    /// used again, the new epochs are higher, so the old epochs stay done.
    pub(super) fn forget_idle(&mut self) {
        let first_epoch = &mut self.first_epoch;
        self.streams.retain(|_, stream| {
            let is_idle = stream.is_idle();
            if is_idle {
                *first_epoch = stream.open.max(*first_epoch);
            }
            !is_idle
        });
    }
}
