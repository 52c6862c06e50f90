//! The I/O thread: its loop here, a block in progress (`block`), and the requests for parts of
//! blocks (`parts`).

mod block;
mod parts;

use std::collections::{BTreeSet, VecDeque};
use std::sync::Arc;
use std::time::Instant;

use slab::Slab;
use terrane_core::ByteCount;
use terrane_storage::{IoBuffer, IoCompletion, IoQueue, StorageError};

use crate::error::StoreError;
use crate::slab::Shared;
use crate::slab::bounce::BounceBuffers;
use crate::slab::inbox::Message;
use crate::slab::options::SlabOptions;
use crate::slab::request::{JobId, Priority, SlabDirection, SlabFailure, SlabRequest};
use crate::slab::waiting::{InFlight, Turn, WaitingBlocks};
use block::{Block, Ended};
use parts::Part;

/// The bytes of reads in flight that keep one device busy. Drives split a request of this size into
/// many commands.
const WINDOW: u64 = 2 << 20;

/// The state of the I/O thread.
///
/// The queue drops first: it waits for the requests in flight before bounce buffers are freed.
pub(super) struct Worker {
    queue: IoQueue,
    bounce: BounceBuffers,
    shared: Arc<Shared>,
    blocks: Slab<Block>,
    parts: Slab<Part>,
    waiting: WaitingBlocks,
    /// The deadlines of blocks that have parts left to submit.
    deadlines: BTreeSet<(Instant, usize)>,
    in_flight: InFlight,
    /// The bytes of waiting reads that were not submitted.
    reads_left: u64,
    /// The bytes of reads in flight that keep the devices busy.
    window: u64,
    /// Blocks that have bytes to add to their checksum.
    to_sum: VecDeque<usize>,
    ended: Vec<Ended>,
    request_bytes: u64,
    arrivals: u64,
    /// Set once the inbox is closed: when requests in flight are cancelled.
    closing: Option<Closing>,
    /// Reused.
    messages: Vec<Message>,
    buffers: Vec<IoBuffer>,
}

#[derive(Clone, Copy)]
struct Closing {
    deadline: Instant,
    has_cancelled: bool,
}

impl Worker {
    pub(super) fn new(queue: IoQueue, shared: Arc<Shared>, options: &SlabOptions) -> Self {
        let granule = shared.files.granule();
        let request = options.request.get().max(granule.get());
        Self {
            queue,
            bounce: BounceBuffers::new(granule),
            blocks: Slab::new(),
            parts: Slab::new(),
            waiting: WaitingBlocks::new(options.max_writes_while_reads_wait),
            deadlines: BTreeSet::new(),
            in_flight: InFlight::default(),
            reads_left: 0,
            window: WINDOW * shared.files.folders(),
            to_sum: VecDeque::new(),
            ended: Vec::new(),
            request_bytes: request - request % granule.get(),
            arrivals: 0,
            closing: None,
            messages: Vec::new(),
            buffers: Vec::new(),
            shared,
        }
    }

    /// Serves requests until the inbox is closed and all have ended.
    pub(super) fn serve(mut self) {
        let mut completions = Vec::new();
        while self.accept() {
            self.expire();
            // The device gets new requests before sinks are called and checksums computed.
            self.fill_queue();
            self.deliver();
            self.compute_sum();
            let result = self.wait(&mut completions);
            if let Err(error) = result {
                self.turn_off(error);
            }
            for completion in completions.drain(..) {
                self.complete(completion);
            }
        }
    }

    /// Takes messages, and waits for one if there is nothing else to do. Returns whether there is
    /// anything to do at all.
    fn accept(&mut self) -> bool {
        let is_idle = self.blocks.is_empty() && self.ended.is_empty();
        if is_idle && self.closing.is_some() {
            return false;
        }
        let mut messages = std::mem::take(&mut self.messages);
        self.shared.inbox.take(is_idle, &mut messages);
        for message in messages.drain(..) {
            match message {
                Message::Submit(requests) => {
                    let now = Instant::now();
                    requests.into_iter().for_each(|request| self.begin(request, now));
                }
                Message::Cancel(job) => self.cancel(job),
                Message::Raise(job, priority) => self.raise(job, priority),
                Message::Close(deadline) => self.close(deadline),
            }
        }
        self.messages = messages;
        true
    }

    fn begin(&mut self, request: SlabRequest, now: Instant) {
        let is_write = request.direction == SlabDirection::Write;
        let lengths = request.buffers.iter().map(|buffer| buffer.length);
        let total = lengths.collect::<Result<ByteCount, _>>().map_or(u64::MAX, ByteCount::get);
        let (group, slot) = (request.group, request.slot);
        let outside = || Arc::new(StoreError::OutsideSlabs { group, slot, bytes: total });
        let place = self.shared.files.place(group, slot, total);
        let place = place.ok_or_else(|| SlabFailure::Refused(outside()));
        let refusal = self.shared.health.refusal(is_write);
        let place = match (place, refusal, request.deadline) {
            (Err(failure), ..) | (_, Some(failure), _) => Err(failure),
            (Ok(_), None, Some(deadline)) if deadline <= now => Err(SlabFailure::TimedOut),
            (Ok(place), None, _) => Ok(place),
        };
        let place = match place {
            Ok(place) => place,
            Err(failure) => return self.ended.push(Ended::new(request, Err(failure))),
        };
        self.arrivals += 1;
        let turn = Turn {
            priority: request.priority,
            number: self.arrivals,
            urgent: is_write.then(|| WaitingBlocks::urgent_at(now, request.deadline)),
        };
        let deadline = request.deadline;
        let block = Block::new(request, turn, place.file.target(), place.offset, total);
        let key = self.blocks.insert(block);
        self.shared.counts.begun(is_write);
        if !is_write {
            self.reads_left += total;
            self.in_flight.last_read = Some(now);
        }
        self.waiting.insert(turn, key);
        self.deadlines.extend(deadline.map(|deadline| (deadline, key)));
    }

    /// Ends the blocks of a job that have parts left to submit, and cancels its other requests.
    fn cancel(&mut self, job: JobId) {
        let keys = self.keys_of(|block| block.request.job == job);
        let (to_fail, to_stop): (Vec<usize>, Vec<usize>) = keys
            .into_iter()
            .partition(|&key| self.blocks.get(key).is_some_and(Block::has_parts_left));
        for key in to_fail {
            self.fail(key, SlabFailure::Cancelled);
        }
        self.stop_parts(|block| to_stop.contains(&block));
    }

    fn raise(&mut self, job: JobId, priority: Priority) {
        for key in self.keys_of(|block| block.request.job == job && block.has_parts_left()) {
            if let Some(block) = self.blocks.get_mut(key)
                && block.turn.priority < priority
            {
                self.waiting.remove(block.turn, key);
                block.turn.priority = priority;
                self.waiting.insert(block.turn, key);
            }
        }
    }

    fn close(&mut self, deadline: Instant) {
        self.closing = Some(Closing { deadline, has_cancelled: false });
        for key in self.keys_of(Block::has_parts_left) {
            self.fail(key, SlabFailure::Closed);
        }
    }

    fn keys_of(&self, select: impl Fn(&Block) -> bool) -> Vec<usize> {
        self.blocks.iter().filter(|(_, block)| select(block)).map(|(key, _)| key).collect()
    }

    /// Ends the blocks that have parts left to submit and whose deadline has passed.
    fn expire(&mut self) {
        let mut now = None;
        while let Some(&(deadline, key)) = self.deadlines.first()
            && deadline <= *now.get_or_insert_with(Instant::now)
        {
            self.fail(key, SlabFailure::TimedOut);
            self.deadlines.remove(&(deadline, key));
        }
        if let Some(closing) = &mut self.closing
            && !closing.has_cancelled
            && closing.deadline <= Instant::now()
        {
            closing.has_cancelled = true;
            self.stop_parts(|_| true);
        }
    }

    /// Sets the failure of a block. The block ends when its requests in flight have ended.
    fn fail(&mut self, key: usize, failure: SlabFailure) {
        let Some(block) = self.blocks.get_mut(key) else { return };
        if block.failure.is_none() {
            let is_waiting = block.has_parts_left();
            block.failure = Some(failure);
            if is_waiting {
                self.stop_waiting(key);
            }
        }
        self.end_if_done(key);
    }

    /// Takes a block from the waiting ones.
    fn stop_waiting(&mut self, key: usize) {
        let Some(block) = self.blocks.get(key) else { return };
        self.waiting.remove(block.turn, key);
        if !block.is_write() {
            self.reads_left -= block.total - block.submitted.position;
        }
        if let Some(deadline) = block.request.deadline {
            self.deadlines.remove(&(deadline, key));
        }
    }

    fn end_if_done(&mut self, key: usize) {
        let Some(block) = self.blocks.get(key).filter(|block| block.has_ended()) else { return };
        if block.sum.is_listed {
            self.to_sum.retain(|&listed| listed != key);
        }
        if let Some(block) = self.blocks.try_remove(key) {
            self.shared.counts.ended(block.is_write());
            self.ended.push(block.into_ended());
        }
    }

    /// Reports what has ended.
    fn deliver(&mut self) {
        Ended::deliver_all(self.ended.drain(..));
    }

    /// Waits for completions, or only looks for them if there is other work.
    fn wait(&mut self, completions: &mut Vec<IoCompletion>) -> Result<(), StorageError> {
        let has_work = !self.to_sum.is_empty() || !self.ended.is_empty();
        if has_work || self.queue.in_flight() == 0 || !self.shared.inbox.enter_queue() {
            return self.queue.poll(completions).map(|_| ());
        }
        self.queue.wait(self.next_time(), completions).map(|_| ())
    }

    /// When something happens without a completion or a message.
    fn next_time(&self) -> Option<Instant> {
        let deadline = self.deadlines.first().map(|&(deadline, _)| deadline);
        let closing = self.closing.filter(|closing| !closing.has_cancelled);
        let urgent = self.waiting.next_change(Instant::now());
        [deadline, urgent, closing.map(|closing| closing.deadline)].into_iter().flatten().min()
    }

    /// Refuses all waiting and later requests, because the queue no longer works.
    pub(super) fn turn_off(&mut self, error: StorageError) {
        tracing::error!(%error, "the I/O queue of the slab files failed");
        self.shared.health.turn_off(StoreError::Storage(error));
        self.refuse_waiting();
    }

    /// Ends the waiting blocks that the files' health refuses.
    fn refuse_waiting(&mut self) {
        for key in self.keys_of(Block::has_parts_left) {
            let is_write = self.blocks.get(key).is_some_and(Block::is_write);
            if let Some(failure) = self.shared.health.refusal(is_write) {
                self.fail(key, failure);
            }
        }
    }
}
