//! The thread that moves transfers from hop to hop.

use std::collections::{BTreeSet, VecDeque};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::time::Instant;

use crossbeam_channel::{Receiver, Sender};
use rustc_hash::FxHashMap;

use super::engine_queues::EngineQueues;
use super::hop::guarded;
use super::message::{Message, NewTransfer, PartEnded};
use super::route::RelayShared;
use super::step::{PartId, RelayStep};
use super::transfer_state::{Cancellation, TransferState};
use crate::checksums::Checksums;
use crate::error::TransferError;
use crate::hazard::notify::catch_foreign_panic;

pub(super) struct RelayWorker {
    shared: Arc<RelayShared>,
    inbox: Receiver<Message>,
    /// A sender to the inbox, for parts to report their ends.
    outbox: Sender<Message>,
    /// Messages that were received during a recovery. They precede those of the inbox.
    backlog: VecDeque<Message>,
    transfers: FxHashMap<u64, TransferState>,
    /// The deadlines of the transfers.
    deadlines: BTreeSet<(Instant, u64)>,
    queues: EngineQueues,
    /// Whether no slot was available, and none has been returned since.
    is_out_of_slots: bool,
    closed: bool,
}

impl RelayWorker {
    pub(super) fn new(
        shared: Arc<RelayShared>,
        inbox: Receiver<Message>,
        outbox: Sender<Message>,
    ) -> Self {
        Self {
            shared,
            inbox,
            outbox,
            backlog: VecDeque::new(),
            transfers: FxHashMap::default(),
            deadlines: BTreeSet::new(),
            queues: EngineQueues::default(),
            is_out_of_slots: false,
            closed: false,
        }
    }

    /// Serves transfers until the engine has dropped and all of them have ended.
    pub(super) fn serve(mut self) {
        // Only foreign code can panic, such as an engine or a subscriber of `tracing`. Known calls
        // are guarded. After any other panic, the transfers in progress fail.
        while catch_unwind(AssertUnwindSafe(|| self.serve_on())).is_err() {
            self.recover();
        }
    }

    fn serve_on(&mut self) {
        while !(self.closed && self.transfers.is_empty() && self.backlog.is_empty()) {
            if let Some(message) = self.next() {
                self.take_in(message);
            }
            while let Some(message) = self.backlog.pop_front() {
                self.take_in(message);
            }
            while let Ok(message) = self.inbox.try_recv() {
                self.take_in(message);
            }
            self.end_late();
            // An allocator that refused may have memory by now.
            self.is_out_of_slots = false;
            while self.fill_slots() || self.feed_engines() {}
        }
    }

    /// Waits for the next message; `None` if a deadline passes first.
    fn next(&mut self) -> Option<Message> {
        self.backlog.pop_front().or_else(|| match self.deadlines.first() {
            Some(&(deadline, _)) => self.inbox.recv_deadline(deadline).ok(),
            // This thread owns a sender, so the channel stays open.
            None => self.inbox.recv().ok(),
        })
    }

    /// Fails transfers whose deadline has passed. A transfer without parts in flight ends at once.
    /// Any other ends once its engines have ended its parts.
    fn end_late(&mut self) {
        while let Some(&(deadline, transfer)) = self.deadlines.first()
            && deadline <= Instant::now()
        {
            self.deadlines.pop_first();
            self.end_if_stopped(transfer);
        }
    }

    /// Fails a transfer that must stop.
    fn end_if_stopped(&mut self, transfer: u64) {
        if self.transfers.get_mut(&transfer).is_some_and(TransferState::stops) {
            self.finish_if_done(transfer);
        }
    }

    /// Recovers from a panic. The state of the transfers is unknown, so all transfers that have
    /// begun fail. Each job keeps the memory of its parts, and so ends once none of them is in
    /// flight.
    fn recover(&mut self) {
        let is_in_flight = |active: &TransferState| active.in_flight > 0;
        while self.transfers.values().any(is_in_flight) {
            // This thread owns a sender, so the channel stays open.
            let Ok(message) = self.inbox.recv() else { break };
            match message {
                Message::Ended(end) if self.transfers.contains_key(&end.part.transfer) => {
                    let PartEnded { part, is_orphaned, .. } = end;
                    if let Some(active) = self.transfers.get_mut(&part.transfer) {
                        active.in_flight -= 1;
                        active.is_orphaned |= is_orphaned;
                        if is_orphaned {
                            active.release(part.chunk, true, &self.shared.bounce);
                        }
                    }
                }
                // This transfer has not begun, or has ended.
                other => self.backlog.push_back(other),
            }
        }
        self.deadlines.clear();
        self.queues = EngineQueues::default();
        for (_, active) in self.transfers.drain() {
            // The values that a job owns drop with it.
            catch_foreign_panic(|| {
                let mut active = active;
                active.failure.get_or_insert(TransferError::EngineStopped.into());
                active.end(&self.shared.bounce);
            });
        }
        // The panic may have lost a slot.
        self.shared.bounce.count_free();
    }

    fn take_in(&mut self, message: Message) {
        match message {
            Message::NewTransfer(begin) => self.begin(*begin),
            Message::Ended(end) => self.ended(end),
            Message::Cancelled(transfer) => self.end_if_stopped(transfer),
            Message::Close => self.closed = true,
        }
    }

    fn begin(&mut self, begin: NewTransfer) {
        let NewTransfer { transfer, job, route, ordered } = begin;
        let route = match route {
            Ok(route) => route,
            Err(failure) => return failure.end(job),
        };
        let cancellation = Cancellation::of(&job, transfer, &self.outbox);
        let active = TransferState::new(job, route, &self.shared, ordered, cancellation);
        self.deadlines.extend(active.deadline().map(|deadline| (deadline, transfer)));
        self.transfers.insert(transfer, active);
        // It may have been cancelled before.
        self.end_if_stopped(transfer);
        if !ordered {
            self.begin_chunks(transfer);
        }
    }

    /// Handles the end of a part, and starts what follows.
    fn ended(&mut self, end: PartEnded) {
        let PartEnded { part, result, is_orphaned } = end;
        let Some(active) = self.transfers.get_mut(&part.transfer) else { return };
        active.in_flight -= 1;
        active.is_orphaned |= is_orphaned;
        let is_hop = matches!(part.step, RelayStep::IntoBounce | RelayStep::OutOfBounce);
        if is_hop {
            self.queues.end(active.route.engine_number(part.step));
        }
        match result {
            Ok(sums) => {
                active.summed(part.chunk, sums);
                if part.step == RelayStep::OutOfBounce {
                    active.arrived(part.chunk);
                }
            }
            Err(error) => active.fail_at(part, error),
        }
        if part.step == RelayStep::IntoBounce && active.failure.is_none() {
            let step = RelayStep::OutOfBounce;
            return self.queues.push(active.route.engine_number(step), PartId { step, ..part });
        }
        if is_hop {
            self.is_out_of_slots = false;
            active.release(part.chunk, is_orphaned, &self.shared.bounce);
        }
        if part.step == RelayStep::Order {
            self.begin_chunks(part.transfer);
        } else {
            self.finish_if_done(part.transfer);
        }
    }

    /// Queues a transfer whose order is satisfied, or ends it if there is nothing to copy.
    fn begin_chunks(&mut self, transfer: u64) {
        let Some(active) = self.transfers.get(&transfer) else { return };
        match active.turn() {
            Some(engine_number) => self.queues.queue_turn(engine_number, transfer),
            None => self.finish_if_done(transfer),
        }
    }

    /// Assigns slots to chunks, of one transfer after the other, while slots are free and an engine
    /// needs more chunks. Returns whether a chunk got a slot.
    ///
    /// A chunk needs only a slot, because engines serve all chunks in turn. So every slot returns.
    /// A transfer waits at most once for each other transfer's turn.
    fn fill_slots(&mut self) -> bool {
        let mut has_filled = false;
        while !self.is_out_of_slots
            && let Some((engine_number, transfer)) = self.queues.next_turn()
        {
            let active = self.transfers.get_mut(&transfer);
            let Some(active) = active.filter(|active| active.wants_slot()) else { continue };
            if active.stops() {
                self.finish_if_done(transfer);
                continue;
            }
            let Some(chunk) = active.route.chunking.chunk(active.next) else {
                active.failure.get_or_insert(TransferError::EngineStopped.into());
                self.finish_if_done(transfer);
                continue;
            };
            let bounce = &self.shared.bounce;
            let taken = guarded(|| bounce.take()).and_then(|taken| Ok(taken?));
            let slot = match taken {
                Ok(Some(slot)) => slot,
                // No chunk uses a slot that could return.
                Err(failure) if bounce.slots().held == 0 => {
                    active.failure = Some(failure);
                    self.finish_if_done(transfer);
                    continue;
                }
                Ok(None) | Err(_) => {
                    self.queues.keep_turn(engine_number, transfer);
                    self.is_out_of_slots = true;
                    return has_filled;
                }
            };
            active.begin_chunk(transfer, chunk, slot, &mut self.queues);
            self.queues.got_slot(engine_number);
            if active.wants_slot() {
                self.queues.queue_turn(engine_number, transfer);
            }
            has_filled = true;
        }
        has_filled
    }

    /// Submits waiting chunks to the engines, up to the limit of each. Returns whether there were
    /// any.
    fn feed_engines(&mut self) -> bool {
        let mut has_fed = false;
        for engine_number in 0..self.shared.engines.len() {
            let transfers = &self.transfers;
            // A part of a transfer that has ended has no limit.
            let most =
                |part: &PartId| transfers.get(&part.transfer).map_or(usize::MAX, |it| it.most);
            let Some(part) = self.queues.begin(engine_number, most) else { continue };
            has_fed = true;
            if !self.copy(part) {
                self.queues.end(engine_number);
                self.release(part.transfer, part.chunk);
                self.finish_if_done(part.transfer);
            }
        }
        has_fed
    }

    /// Begins a hop of a chunk. Returns whether that succeeded; if not, the transfer has failed.
    fn copy(&mut self, part: PartId) -> bool {
        let Some(active) = self.transfers.get_mut(&part.transfer) else { return false };
        if active.stops() || active.failure.is_some() {
            return false;
        }
        let plan = match active.plan_hop(part) {
            Ok(plan) => plan,
            Err(error) => {
                active.failure.get_or_insert(error.into());
                return false;
            }
        };
        // Only bytes that arrive at the destination count as progress of the transfer.
        let progress = match part.step {
            RelayStep::OutOfBounce => Arc::clone(active.job.progress()),
            _ => Arc::default(),
        };
        let mut options = self.shared.options(part.step, active.job.plan(), active.job.options());
        if active.route.checksum_hop == Some(part.step) {
            options.checksums = Some(Checksums::Compute);
        }
        active.submit(plan, options, progress, part, &self.outbox)
    }

    fn release(&mut self, transfer: u64, chunk: usize) {
        let Some(active) = self.transfers.get_mut(&transfer) else { return };
        self.is_out_of_slots = false;
        active.release(chunk, false, &self.shared.bounce);
    }

    /// Makes a transfer's files durable after its last write, notifies the peer, and then finishes
    /// the transfer. A failed transfer is finished once it has nothing in flight.
    fn finish_if_done(&mut self, transfer: u64) {
        let Some(active) = self.transfers.get_mut(&transfer) else { return };
        let has_more = active.wants_slot() || !active.chunks.is_empty();
        if active.in_flight > 0 || (active.failure.is_none() && has_more) {
            return;
        }
        if active.submit_last_step(transfer, &self.outbox) {
            return;
        }
        let Some(active) = self.transfers.remove(&transfer) else { return };
        if let Some(deadline) = active.job.options().deadline {
            self.deadlines.remove(&(deadline, transfer));
        }
        self.is_out_of_slots &= active.chunks.is_empty();
        active.end(&self.shared.bounce);
    }
}
