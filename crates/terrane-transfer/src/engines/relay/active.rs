//! A transfer in progress: its chunks and their jobs.

use std::sync::Arc;
use std::time::Instant;

use crossbeam_channel::Sender;
use slab::Slab;
use terrane_core::{ByteCount, StorageKind};

use super::bounce::{Bounce, Slot};
use super::cut::Chunk;
use super::lanes::{Lanes, at_a_time};
use super::route::{Route, Sample, Shared, has_durability};
use super::step::{self, Failure, Part, RelayStep};
use super::worker::Message;
use crate::{CopyJob, Progress, Terms, TransferError, TransferPlan};

/// A transfer in progress.
pub(super) struct Active {
    shared: Arc<Shared>,
    pub(super) job: CopyJob,
    pub(super) route: Route,
    /// The pairs of blocks in the order in which they are copied.
    pub(super) sources: Vec<u32>,
    pub(super) destinations: Vec<u32>,
    /// The chunk that begins next.
    pub(super) next: usize,
    /// Chunks that have a slot: each is on a hop, or waits for its engine.
    pub(super) chunks: Slab<Held>,
    /// The most chunks that an engine has at a time.
    pub(super) most: usize,
    /// Parts that have not ended.
    pub(super) in_flight: usize,
    /// The number of chunks of each layer group that have not arrived.
    pub(super) to_arrive: Vec<usize>,
    /// Whether there is something left to make durable.
    pub(super) to_sync: bool,
    /// Whether the peer has yet to be notified.
    pub(super) to_tell: bool,
    pub(super) failure: Option<Failure>,
    /// Whether a part was given up, so that its copy may continue.
    pub(super) has_remains: bool,
}

/// A chunk and its slot.
pub(super) struct Held {
    pub(super) number: usize,
    pub(super) chunk: Chunk,
    pub(super) slot: Slot,
}

impl Active {
    pub(super) fn new(job: CopyJob, route: Route, shared: &Arc<Shared>, ordered: bool) -> Self {
        let (sources, destinations) = in_order(job.plan());
        let to_arrive = vec![route.cut.groups_of_blocks(); route.cut.groups_of_layers()];
        let to_sync = has_durability(job.plan(), job.terms());
        let to_tell = job.terms().notification.is_some();
        let most = at_a_time(route.cut.slot.total_bytes(), shared.bounce.slots().most);
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
            to_sync,
            to_tell,
            failure: None,
            has_remains: false,
        }
    }

    pub(super) fn wants_slot(&self) -> bool {
        self.failure.is_none() && self.next < self.route.cut.chunks()
    }

    /// Starts the next chunk in this slot, and queues it for its engine.
    pub(super) fn begin_chunk(
        &mut self,
        transfer: u64,
        chunk: Chunk,
        slot: Slot,
        lanes: &mut Lanes,
    ) {
        self.job.start();
        let chunk = self.chunks.insert(Held { number: self.next, chunk, slot });
        self.next += 1;
        let step = RelayStep::IntoBounce;
        lanes.push(self.route.lane(step), Part { transfer, step, chunk });
    }

    pub(super) fn plan_hop(&mut self, part: Part) -> Result<TransferPlan, TransferError> {
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
        self.shared.planner.plan(&match part.step {
            RelayStep::OutOfBounce => chunk.outwards(&slot, plan),
            _ => chunk.inwards(plan, &slot),
        })
    }

    /// Submits a part to its engine. Returns whether it could; if not, the transfer has failed.
    pub(super) fn submit(
        &mut self,
        plan: TransferPlan,
        terms: Terms,
        progress: Arc<Progress>,
        part: Part,
        outbox: &Sender<Message>,
    ) -> bool {
        let engine = Arc::clone(self.shared.engine(&self.route, part.step));
        let claims = self.job.claims();
        let job = match step::job(&engine, claims, plan, terms, progress, part, outbox) {
            Ok(job) => job,
            Err(failure) => {
                self.failure.get_or_insert(failure);
                return false;
            }
        };
        self.in_flight += 1;
        step::submit(&engine, job);
        true
    }

    /// The deadline, unless the transfer has failed already.
    pub(super) fn deadline(&self) -> Option<Instant> {
        self.job.terms().deadline.filter(|_| self.failure.is_none())
    }

    /// Fails the transfer if it is to stop. Returns whether it did so now.
    pub(super) fn stops(&mut self) -> bool {
        if self.failure.is_some() {
            return false;
        }
        self.failure = self.job.reason_to_stop().map(Failure::Stopped);
        self.failure.is_some()
    }

    /// Handles the end of a part: takes the slot from the chunk, if it has one, and returns it or
    /// leaves it to the copy.
    pub(super) fn release(&mut self, chunk: usize, has_remains: bool, bounce: &Bounce) {
        match self.chunks.try_remove(chunk) {
            Some(held) if has_remains => bounce.leave(held.slot),
            Some(held) => bounce.give_back(held.slot),
            None => {}
        }
    }

    /// Ends the transfer, which has nothing in flight.
    pub(super) fn end(self, bounce: &Bounce) {
        let Self { job, failure, chunks, has_remains, .. } = self;
        // The chunks of a failed transfer that wait for an engine are discarded.
        chunks.into_iter().for_each(|(_, held)| bounce.give_back(held.slot));
        if has_remains {
            // Another relay's transfer may have this job as a part.
            job.leaves_remains();
        }
        match failure {
            Some(failure) => failure.end(job),
            None => {
                job.start();
                job.finish(Ok(()));
            }
        }
    }

    /// Reports the layers that have arrived with this chunk.
    pub(super) fn arrived(&mut self, chunk: usize) {
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

    pub(super) fn fail_at(&mut self, part: Part, error: TransferError) {
        let pairs = self.chunks.get(part.chunk).map(|held| held.chunk.pairs.clone());
        let pair = |in_slot: u32| {
            let index = pairs.as_ref()?.start + ByteCount::new(in_slot.into()).to_usize();
            Some((*self.sources.get(index)?, *self.destinations.get(index)?))
        };
        let engine = self.shared.engine(&self.route, part.step).name();
        let failure = Failure::of(error, part.step, engine, pair);
        self.failure.get_or_insert(failure);
    }
}

/// The pairs of blocks in the order of the source file. Without one, in the order of the plan,
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
