//! The thread that takes transfers from hop to hop.

use std::collections::VecDeque;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::time::Instant;

use crossbeam_channel::{Receiver, Sender};
use rustc_hash::FxHashMap;
use slab::Slab;
use terrane_core::{ByteCount, StorageKind};

use super::bounce::Slot;
use super::cut::Chunk;
use super::lanes::{Lanes, at_a_time};
use super::route::{Route, Sample, Shared, has_durability};
use super::step::{self, Failure, Part, RelayStep};
use crate::{CopyJob, Progress, Terms, TransferError, TransferPlan};

/// What the thread is told.
pub(super) enum Message {
    Begin(Box<Begin>),
    /// A part of a transfer has ended.
    Ended(Part, Result<(), TransferError>),
    /// The engine has dropped. Nothing begins after this.
    Close,
}

/// A transfer that begins.
pub(super) struct Begin {
    pub(super) transfer: u64,
    pub(super) job: CopyJob,
    /// `None` where it has not been looked for yet.
    pub(super) route: Option<Result<Route, Failure>>,
    /// Whether a part that waits for the device's order is in flight.
    pub(super) ordered: bool,
}

pub(super) struct Worker {
    shared: Arc<Shared>,
    inbox: Receiver<Message>,
    /// To the inbox, for parts to tell of their ends.
    outbox: Sender<Message>,
    transfers: FxHashMap<u64, Active>,
    /// The transfers that want a slot, each for its next chunk, in turn.
    turns: VecDeque<u64>,
    lanes: Lanes,
    /// No slot was to be had, and none has come back since.
    is_out_of_slots: bool,
    closed: bool,
}

/// A transfer in work.
struct Active {
    job: CopyJob,
    route: Route,
    /// The pairs of blocks in the order in which they are copied.
    sources: Vec<u32>,
    destinations: Vec<u32>,
    /// The chunk that begins next.
    next: usize,
    /// Chunks that have a slot: each is on a hop, or waits for one.
    chunks: Slab<Held>,
    /// How many of them an engine has at a time.
    most: usize,
    /// Parts that have not ended.
    in_flight: usize,
    /// Of each group of layers, the chunks that have not arrived.
    to_arrive: Vec<usize>,
    /// Whether there is something left to make durable.
    to_sync: bool,
    /// Whether the peer has still to be told.
    to_tell: bool,
    failure: Option<Failure>,
}

/// A chunk, and the slot that it goes through.
struct Held {
    number: usize,
    chunk: Chunk,
    slot: Slot,
}

impl Worker {
    pub(super) fn new(
        shared: Arc<Shared>,
        inbox: Receiver<Message>,
        outbox: Sender<Message>,
    ) -> Self {
        let (transfers, turns) = (FxHashMap::default(), VecDeque::new());
        let lanes = Lanes::default();
        Self {
            shared,
            inbox,
            outbox,
            transfers,
            turns,
            lanes,
            is_out_of_slots: false,
            closed: false,
        }
    }

    /// Serves transfers until the engine has dropped and all of them have ended.
    pub(super) fn serve(mut self) {
        while !(self.closed && self.transfers.is_empty()) {
            let Ok(message) = self.inbox.recv() else { return };
            self.take_in(message);
            while let Ok(message) = self.inbox.try_recv() {
                self.take_in(message);
            }
            // An allocator that refused may have changed its mind by now.
            self.is_out_of_slots = false;
            while self.fill_slots() || self.feed_engines() {}
        }
    }

    fn take_in(&mut self, message: Message) {
        match message {
            Message::Begin(begin) => self.begin(*begin),
            Message::Ended(part, result) => self.ended(part, result),
            Message::Close => self.closed = true,
        }
    }

    fn begin(&mut self, begin: Begin) {
        let Begin { transfer, job, route, ordered } = begin;
        let route = match route.unwrap_or_else(|| self.shared.route_job(&job)) {
            Ok(route) => route,
            Err(failure) => return failure.end(job),
        };
        let (sources, destinations) = in_order(job.plan());
        let to_arrive = vec![route.cut.groups_of_blocks(); route.cut.groups_of_layers()];
        let to_sync = has_durability(job.plan(), job.terms());
        let to_tell = job.terms().notification.is_some();
        let most = at_a_time(route.cut.slot.total_bytes(), self.shared.bounce.slots().most);
        let active = Active {
            job,
            route,
            sources,
            destinations,
            next: 0,
            chunks: Slab::new(),
            most,
            in_flight: usize::from(ordered),
            to_arrive,
            to_sync,
            to_tell,
            failure: None,
        };
        self.transfers.insert(transfer, active);
        if !ordered {
            self.go_on(transfer);
        }
    }

    /// A part has ended: does what comes after it.
    fn ended(&mut self, part: Part, result: Result<(), TransferError>) {
        let Some(active) = self.transfers.get_mut(&part.transfer) else { return };
        active.in_flight -= 1;
        let is_hop = matches!(part.step, RelayStep::IntoBounce | RelayStep::OutOfBounce);
        if is_hop {
            self.lanes.end(active.route.lane(part.step));
        }
        match result {
            Ok(()) if part.step == RelayStep::OutOfBounce => active.arrived(part.chunk),
            Ok(()) => {}
            Err(error) => active.fail_at(part, error),
        }
        if part.step == RelayStep::IntoBounce && active.failure.is_none() {
            let step = RelayStep::OutOfBounce;
            return self.lanes.push(active.route.lane(step), Part { step, ..part });
        }
        if is_hop {
            self.release(part.transfer, part.chunk);
        }
        if part.step == RelayStep::Order {
            self.go_on(part.transfer);
        } else {
            self.settle(part.transfer);
        }
    }

    /// Queues a transfer whose order has been reached, or ends it if there is nothing to copy.
    fn go_on(&mut self, transfer: u64) {
        let Some(active) = self.transfers.get(&transfer) else { return };
        if active.wants_slot() {
            self.turns.push_back(transfer);
        } else {
            self.settle(transfer);
        }
    }

    /// Gives slots to chunks, of one transfer after the other, while there are slots, and an engine
    /// has none to go on with. Says whether anything has come of it.
    ///
    /// A chunk has all that it needs once it has a slot, as engines come to every chunk in turn. So
    /// slots always come back; and a transfer waits for its turn behind each other one once at most.
    fn fill_slots(&mut self) -> bool {
        let (mut has_filled, mut blocked) = (false, 0);
        while !self.is_out_of_slots
            && blocked < self.turns.len()
            && let Some(transfer) = self.turns.pop_front()
        {
            let active = self.transfers.get_mut(&transfer);
            let Some(active) = active.filter(|active| active.wants_slot()) else { continue };
            if active.job.terms().deadline.is_some_and(|deadline| deadline <= Instant::now()) {
                active.failure = Some(Failure::DeadlineExceeded);
                self.settle(transfer);
                continue;
            }
            if self.lanes.has_next(active.route.lane(RelayStep::IntoBounce)) {
                self.turns.push_back(transfer);
                blocked += 1;
                continue;
            }
            let Some(chunk) = active.route.cut.chunk(active.next) else {
                active.failure.get_or_insert(TransferError::EngineStopped.into());
                self.settle(transfer);
                continue;
            };
            let bounce = &self.shared.bounce;
            let Some(slot) = catch_unwind(AssertUnwindSafe(|| bounce.take())).unwrap_or(None)
            else {
                self.turns.push_front(transfer);
                self.is_out_of_slots = true;
                return has_filled;
            };
            active.begin_chunk(transfer, chunk, slot, &mut self.lanes);
            if active.wants_slot() {
                self.turns.push_back(transfer);
            }
            (has_filled, blocked) = (true, 0);
        }
        has_filled
    }

    /// Hands the engines the chunks that wait for them, as far as each is to have more. Says
    /// whether there were any.
    fn feed_engines(&mut self) -> bool {
        let mut has_fed = false;
        for lane in 0..self.shared.engines.len() {
            let transfers = &self.transfers;
            // Of a transfer that has gone, there is nothing to wait for.
            let most = |part: &Part| transfers.get(&part.transfer).map_or(usize::MAX, |it| it.most);
            let Some(part) = self.lanes.begin(lane, most) else { continue };
            has_fed = true;
            if !self.copy(part) {
                self.lanes.end(lane);
                self.release(part.transfer, part.chunk);
                self.settle(part.transfer);
            }
        }
        has_fed
    }

    /// Begins a hop of a chunk. Says whether it could; if not, the transfer has failed.
    fn copy(&mut self, part: Part) -> bool {
        let Some(active) = self.transfers.get_mut(&part.transfer) else { return false };
        if active.failure.is_some() {
            return false;
        }
        let plan = match active.plan_hop(&self.shared, part) {
            Ok(plan) => plan,
            Err(error) => {
                active.failure.get_or_insert(error.into());
                return false;
            }
        };
        // What has arrived at the destination is what the transfer has come to.
        let progress = match part.step {
            RelayStep::OutOfBounce => Arc::clone(active.job.progress()),
            _ => Arc::default(),
        };
        let terms = self.shared.terms(part.step, active.job.plan(), active.job.terms());
        active.submit(plan, terms, progress, part, &self.outbox)
    }

    fn release(&mut self, transfer: u64, chunk: usize) {
        let Some(active) = self.transfers.get_mut(&transfer) else { return };
        if let Some(held) = active.chunks.try_remove(chunk) {
            self.is_out_of_slots = false;
            self.shared.bounce.give_back(held.slot);
        }
    }

    /// Makes a transfer's files durable when all has been written, tells the peer, and finishes it
    /// when that is done too, or when it has failed and nothing of it is in flight any more.
    fn settle(&mut self, transfer: u64) {
        let Some(active) = self.transfers.get_mut(&transfer) else { return };
        let has_more = active.wants_slot() || !active.chunks.is_empty();
        if active.in_flight > 0 || (active.failure.is_none() && has_more) {
            return;
        }
        if active.failure.is_none() && active.to_sync {
            active.to_sync = false;
            let part = Part { transfer, step: RelayStep::Durability, chunk: 0 };
            let terms = Terms {
                durability: active.job.terms().durability,
                more_follows: false,
                ..self.shared.terms(part.step, active.job.plan(), active.job.terms())
            };
            match self.shared.durability_plan(&active.route, active.job.plan()) {
                Ok(plan) => {
                    if active.submit(plan, terms, Arc::default(), part, &self.outbox) {
                        return;
                    }
                }
                Err(error) => active.failure = Some(error.into()),
            }
        }
        if active.failure.is_none() && active.to_tell {
            active.to_tell = false;
            let part = Part { transfer, step: RelayStep::Notification, chunk: 0 };
            let terms = Terms {
                notification: active.job.terms().notification.clone(),
                ..self.shared.terms(part.step, active.job.plan(), active.job.terms())
            };
            match self.shared.notification_plan(&active.route, active.job.plan()) {
                Ok(plan) => {
                    if active.submit(plan, terms, Arc::default(), part, &self.outbox) {
                        return;
                    }
                }
                Err(error) => active.failure = Some(error.into()),
            }
        }
        let Some(Active { job, failure, chunks, .. }) = self.transfers.remove(&transfer) else {
            return;
        };
        // Those of a failed transfer that wait for an engine: nothing will be made of them.
        self.is_out_of_slots &= chunks.is_empty();
        chunks.into_iter().for_each(|(_, held)| self.shared.bounce.give_back(held.slot));
        match failure {
            Some(failure) => failure.end(job),
            None => {
                job.start();
                job.finish(Ok(()));
            }
        }
    }
}

impl Active {
    fn wants_slot(&self) -> bool {
        self.failure.is_none() && self.next < self.route.cut.chunks()
    }

    /// Has the next chunk, in this slot, wait for its engine.
    fn begin_chunk(&mut self, transfer: u64, chunk: Chunk, slot: Slot, lanes: &mut Lanes) {
        self.job.start();
        let chunk = self.chunks.insert(Held { number: self.next, chunk, slot });
        self.next += 1;
        let step = RelayStep::IntoBounce;
        lanes.push(self.route.lane(step), Part { transfer, step, chunk });
    }

    fn plan_hop(&mut self, shared: &Shared, part: Part) -> Result<TransferPlan, TransferError> {
        let Some(held) = self.chunks.get_mut(part.chunk) else {
            return Err(TransferError::EngineStopped);
        };
        let slot = held.slot.endpoint(&self.route.cut.slot)?;
        let pairs = held.chunk.pairs.clone();
        let chunk = Sample {
            sources: self.sources.get(pairs.clone()).unwrap_or_default(),
            destinations: self.destinations.get(pairs).unwrap_or_default(),
            chunk: Some(held.chunk.clone()),
        };
        let plan = self.job.plan();
        shared.planner.plan(&match part.step {
            RelayStep::OutOfBounce => chunk.outwards(&slot, plan),
            _ => chunk.inwards(plan, &slot),
        })
    }

    /// Hands a part to its engine. Says whether it could; if not, the transfer has failed.
    fn submit(
        &mut self,
        plan: TransferPlan,
        terms: Terms,
        progress: Arc<Progress>,
        part: Part,
        outbox: &Sender<Message>,
    ) -> bool {
        let engine = Arc::clone(self.route.engine(part.step));
        // Another engine's code, whose panic must not end this thread and all its transfers.
        let made = AssertUnwindSafe(|| step::job(&*engine, plan, terms, progress, part, outbox));
        let job = match catch_unwind(made) {
            Ok(Ok(job)) => job,
            Ok(Err(declined)) => {
                let failure = Failure::declined(declined, part.step, engine.name());
                self.failure.get_or_insert(failure);
                return false;
            }
            Err(_) => {
                self.failure.get_or_insert(TransferError::EngineStopped.into());
                return false;
            }
        };
        self.in_flight += 1;
        // A job that is lost in a panic tells of its end as it drops.
        let _ = catch_unwind(AssertUnwindSafe(|| engine.submit(job)));
        true
    }

    /// Tells of the layers that have arrived with this chunk.
    fn arrived(&mut self, chunk: usize) {
        let Some(layers) = self.job.layers() else { return };
        let cut = &self.route.cut;
        let Some(held) = self.chunks.get(chunk) else { return };
        let Some(group) = cut.group_of_layers(held.number) else { return };
        let Some(left) = self.to_arrive.get_mut(group) else { return };
        *left -= 1;
        if *left == 0
            && let Some(range) = cut.layers_of(group)
        {
            layers.done(range);
        }
    }

    fn fail_at(&mut self, part: Part, error: TransferError) {
        let pairs = self.chunks.get(part.chunk).map(|held| held.chunk.pairs.clone());
        let pair = |in_slot: u32| {
            let index = pairs.as_ref()?.start + ByteCount::new(in_slot.into()).to_usize();
            Some((*self.sources.get(index)?, *self.destinations.get(index)?))
        };
        let engine = self.route.engine(part.step).name();
        let failure = Failure::of(error, part.step, engine, pair);
        self.failure.get_or_insert(failure);
    }
}

/// The pairs of blocks in the order of the file that is read; else as they are, which is that of
/// the destination.
fn in_order(plan: &TransferPlan) -> (Vec<u32>, Vec<u32>) {
    let (sources, destinations) = (plan.source_blocks(), plan.destination_blocks());
    if plan.source().kind() != StorageKind::Disk || sources.is_sorted() {
        return (sources.to_vec(), destinations.to_vec());
    }
    let pairs = sources.iter().copied().zip(destinations.iter().copied());
    let mut pairs: Vec<(u32, u32)> = pairs.collect();
    pairs.sort_unstable();
    pairs.into_iter().unzip()
}
