//! A transfer in progress: its chunks and their jobs.

use std::collections::VecDeque;
use std::sync::{Arc, Weak};
use std::time::Instant;

use crossbeam_channel::Sender;
use slab::Slab;
use terrane_core::StorageKind;
use terrane_core::convert::to_usize;

use super::bounce::{BounceSlots, Slot};
use super::chunks::Chunk;
use super::engine_queues::{EngineNumber, EngineQueues, at_a_time};
use super::hop::{self, PartProgress};
use super::message::{Message, PartSums};
use super::part_invitations::PartInvitations;
use super::route::{ChunkTransfers, RelayRoute, RelayShared, has_durability};
use super::step::{PartId, RelayFailure, RelayStep};
use super::sums::ChunkSums;
use crate::completion::progress::CopyProgress;
use crate::engine::job::{CopyFailure, CopyJob};
use crate::error::TransferError;
use crate::hazard::ticket::Cancel;
use crate::plan::TransferPlan;
use crate::transfer::TransferOptions;

/// A transfer in progress.
pub(super) struct TransferState {
    shared: Arc<RelayShared>,
    pub(super) job: CopyJob,
    pub(super) route: RelayRoute,
    /// The pairs of blocks in the order of their copies.
    pub(super) sources: Vec<u32>,
    pub(super) destinations: Vec<u32>,
    /// The chunk that begins next.
    pub(super) next: usize,
    /// Chunks with a slot. Each is on a hop, or waits for its engine.
    pub(super) chunks: Slab<ChunkInSlot>,
    /// The maximum number of chunks in an engine.
    pub(super) most: usize,
    /// Parts that have not ended.
    pub(super) in_flight: usize,
    /// The number of chunks of each layer group that have not arrived.
    pub(super) to_arrive: Vec<usize>,
    /// The steps that remain after the last chunk, in their order.
    last_steps: VecDeque<RelayStep>,
    pub(super) failure: Option<RelayFailure>,
    /// Whether a part was orphaned, so that its copy may continue.
    pub(super) is_orphaned: bool,
    /// The checksums of chunks, if they are requested.
    sums: Option<ChunkSums>,
    invitations: Arc<PartInvitations>,
    _cancellation: Arc<Cancellation>,
}

/// Reports the cancellation of a transfer to the relay's thread. Without it, a waiting transfer
/// would end only at its turn, which can take long if an engine hangs.
pub(super) struct Cancellation {
    transfer: u64,
    to: Sender<Message>,
}

impl Cancellation {
    /// Lets the ticket of the job report to `to` while the returned value lives.
    pub(super) fn of(job: &CopyJob, transfer: u64, to: &Sender<Message>) -> Arc<Self> {
        let reports = Arc::new(Self { transfer, to: to.clone() });
        let canceller: Weak<Self> = Arc::downgrade(&reports);
        job.ticket().add_canceller(canceller);
        reports
    }
}

impl Cancel for Cancellation {
    fn cancel(&self) {
        // The relay's thread may have exited, and the transfer has ended then.
        let _ = self.to.send(Message::Cancelled(self.transfer));
    }
}

/// A chunk and its slot.
pub(super) struct ChunkInSlot {
    pub(super) number: usize,
    pub(super) chunk: Chunk,
    pub(super) slot: Slot,
}

impl TransferState {
    pub(super) fn new(
        job: CopyJob,
        route: RelayRoute,
        shared: &Arc<RelayShared>,
        ordered: bool,
        cancellation: Arc<Cancellation>,
    ) -> Self {
        let invitations = Arc::new(PartInvitations::new(job.waiters()));
        let (sources, destinations) = in_order(job.plan());
        let to_arrive = vec![route.chunking.groups_of_blocks(); route.chunking.groups_of_layers()];
        let durability = has_durability(job.plan(), job.options()).then_some(RelayStep::Durability);
        let notification = job.options().notification.as_ref().map(|_| RelayStep::Notification);
        let layers = route.chunking.groups_of_layers();
        let sums = (job.checksums() > 0).then(|| ChunkSums::new(sources.len(), layers));
        let most = at_a_time(route.chunking.slot.total_bytes(), shared.bounce.slots().most);
        Self {
            shared: Arc::clone(shared),
            job,
            route,
            sources,
            destinations,
            next: 0,
            chunks: Slab::new(),
            most,
            in_flight: usize::from(ordered),
            to_arrive,
            last_steps: durability.into_iter().chain(notification).collect(),
            failure: None,
            is_orphaned: false,
            sums,
            invitations,
            _cancellation: cancellation,
        }
    }

    pub(super) fn wants_slot(&self) -> bool {
        self.failure.is_none() && self.next < self.route.chunking.chunks()
    }

    /// The engine of the first hop, if the next chunk needs a slot.
    pub(super) fn turn(&self) -> Option<EngineNumber> {
        self.wants_slot().then(|| self.route.engine_number(RelayStep::IntoBounce))
    }

    /// Starts the next chunk in this slot, and queues it for its engine.
    pub(super) fn begin_chunk(
        &mut self,
        transfer: u64,
        chunk: Chunk,
        slot: Slot,
        queues: &mut EngineQueues,
    ) {
        self.job.start();
        let chunk = self.chunks.insert(ChunkInSlot { number: self.next, chunk, slot });
        self.next += 1;
        let step = RelayStep::IntoBounce;
        queues.push(self.route.engine_number(step), PartId { transfer, step, chunk });
    }

    pub(super) fn plan_hop(&mut self, part: PartId) -> Result<TransferPlan, TransferError> {
        let Some(held) = self.chunks.get_mut(part.chunk) else {
            return Err(TransferError::EngineStopped);
        };
        let slot = held.slot.endpoint(&self.route.chunking.slot)?;
        let pairs = held.chunk.pairs.clone();
        let chunk = ChunkTransfers {
            sources: self.sources.get(pairs.clone()).unwrap_or_default(),
            destinations: self.destinations.get(pairs).unwrap_or_default(),
            chunk: Some(held.chunk.clone()),
        };
        self.shared.planner.plan(&chunk.of_hop(part.step, self.job.plan(), &slot))
    }

    /// Submits the next step after the last chunk. Returns whether that succeeded; if not, no step
    /// remains, or the transfer has failed.
    pub(super) fn submit_last_step(&mut self, transfer: u64, outbox: &Sender<Message>) -> bool {
        if self.failure.is_some() {
            return false;
        }
        let Some(step) = self.last_steps.pop_front() else { return false };
        let (plan, stated) = (self.job.plan(), self.job.options());
        let mut options = self.shared.options(self.route.hop(step), plan, stated);
        if step == RelayStep::Durability {
            options.durability = stated.durability;
            options.more_follows = false;
        } else {
            options.notification.clone_from(&stated.notification);
        }
        match self.shared.empty_plan(&self.route, plan, step) {
            Ok(plan) => {
                let part = PartId { transfer, step, chunk: 0 };
                self.submit(plan, options, Arc::default(), part, outbox)
            }
            Err(error) => {
                self.failure = Some(error.into());
                false
            }
        }
    }

    /// Submits a part to its engine. Returns whether that succeeded; if not, the transfer has
    /// failed.
    pub(super) fn submit(
        &mut self,
        plan: TransferPlan,
        options: TransferOptions,
        copied: Arc<CopyProgress>,
        part: PartId,
        outbox: &Sender<Message>,
    ) -> bool {
        let engine = Arc::clone(self.shared.engine(&self.route, part.step));
        let claims = self.job.claims();
        let progress = PartProgress { copied, invitations: Arc::clone(&self.invitations) };
        let mut job = match hop::job(&engine, claims, plan, options, progress, part, outbox) {
            Ok(job) => job,
            Err(failure) => {
                self.failure.get_or_insert(failure);
                return false;
            }
        };
        job.compute_checksums(&self.named_in(part));
        self.in_flight += 1;
        hop::submit(&engine, job);
        true
    }

    /// The destinations of a hop in the order of its chunk, in which its report lists checksums.
    fn named_in(&self, part: PartId) -> Vec<u32> {
        let pairs = self.chunks.get(part.chunk).map(|held| held.chunk.pairs.clone());
        let pairs = pairs.unwrap_or_default();
        match part.step {
            RelayStep::OutOfBounce => self.destinations.get(pairs).unwrap_or_default().to_vec(),
            _ => (0..).take(pairs.len()).collect(),
        }
    }

    /// Stores the checksums of a chunk, if its hop has computed them.
    pub(super) fn summed(&mut self, chunk: usize, found: Option<PartSums>) {
        let (Some(sums), Some(found)) = (&mut self.sums, found) else { return };
        let Some(held) = self.chunks.get(chunk) else { return };
        let Some(group) = self.route.chunking.group_of_layers(held.number) else { return };
        sums.add(held.chunk.pairs.clone(), group, &found.sums, found.bytes);
    }

    /// The deadline, unless the transfer has failed already.
    pub(super) fn deadline(&self) -> Option<Instant> {
        self.job.options().deadline.filter(|_| self.failure.is_none())
    }

    /// Fails the transfer if it must stop. Returns whether it failed now.
    pub(super) fn stops(&mut self) -> bool {
        if self.failure.is_some() {
            return false;
        }
        // A cancellation does not undo a copy whose bytes have all arrived.
        let has_copied = self.next > 0 && !self.wants_slot() && self.chunks.is_empty();
        let reason = match self.job.reason_to_stop() {
            // The deadline still holds for the rest: it ends the wait of the relay's thread.
            Some(CopyFailure::Cancelled) if has_copied => {
                let is_late = self.deadline().is_some_and(|deadline| deadline <= Instant::now());
                is_late.then_some(CopyFailure::DeadlineExceeded)
            }
            other => other,
        };
        self.failure = reason.map(RelayFailure::Stopped);
        self.failure.is_some()
    }

    /// Handles the end of a part: takes the chunk's slot, if it has one, and returns the slot or
    /// gives it to the orphaned copy.
    pub(super) fn release(&mut self, chunk: usize, is_orphaned: bool, bounce: &BounceSlots) {
        match self.chunks.try_remove(chunk) {
            Some(held) if is_orphaned => bounce.orphan(held.slot),
            Some(held) => bounce.give_back(held.slot),
            None => {}
        }
    }

    /// Ends the transfer, which has nothing in flight.
    pub(super) fn end(self, bounce: &BounceSlots) {
        let Self { job, failure, chunks, is_orphaned, sums, destinations, .. } = self;
        // The chunks of a failed transfer that wait for an engine are discarded.
        chunks.into_iter().for_each(|(_, held)| bounce.give_back(held.slot));
        if is_orphaned {
            // Another relay's transfer may have this job as a part.
            job.report_orphaned();
        }
        match failure {
            Some(failure) => failure.end(job),
            None => {
                job.start();
                if let Some(sums) = sums {
                    sums.report(&job, &destinations);
                }
                job.finish(Ok(()));
            }
        }
    }

    /// Reports the layers that have arrived with this chunk.
    pub(super) fn arrived(&mut self, chunk: usize) {
        let Some(layers) = self.job.layers() else { return };
        let chunking = &self.route.chunking;
        let Some(held) = self.chunks.get(chunk) else { return };
        let Some(group) = chunking.group_of_layers(held.number) else { return };
        let Some(left) = self.to_arrive.get_mut(group) else { return };
        *left -= 1;
        if *left == 0
            && let Some(range) = chunking.layers_of(group)
        {
            layers.done(range);
        }
    }

    pub(super) fn fail_at(&mut self, part: PartId, error: TransferError) {
        let pairs = self.chunks.get(part.chunk).map(|held| held.chunk.pairs.clone());
        let pair = |in_slot: u32| {
            let index = pairs.as_ref()?.start + to_usize(in_slot.into());
            Some((*self.sources.get(index)?, *self.destinations.get(index)?))
        };
        let engine = self.shared.engine(&self.route, part.step).name();
        let failure = RelayFailure::of(error, part.step, engine, pair);
        self.failure.get_or_insert(failure);
    }
}

/// The pairs of blocks in the order of the source file. Without a file, in the order of the plan,
/// which is that of the destination.
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
