//! Gets.

use std::sync::Arc;

use smallvec::{SmallVec, smallvec};

use crate::error::StoreError;
use crate::slab::{SlabDirection, SlabRequest, SlabSink};
use crate::store::arrivals::{Arrivals, SharedHold};
use crate::store::builder::WritePolicy;
use crate::store::claims::Claim;
use crate::store::commit::not_read;
use crate::store::copies;
use crate::store::executor::yield_now;
use crate::store::load::Load;
use crate::store::presence::TierId;
use crate::store::request::{Keys, Payload, PayloadUse};
use crate::store::result::BlockResult;
use crate::store::room::PinnedSlot;
use crate::store::task::JobTask;
use crate::store::tier::count;
use crate::store::transfers::{BlockCopies, BlockCopy, StartedCopy};

/// Copies of more bytes do not run on the caller's thread: they would take it 20 microseconds or more.
pub(crate) const MOST_ON_CALLER: u64 = 256 << 10;

/// Where a block is.
enum Located {
    Pinned(PinnedSlot),
    /// A put writes it.
    Writing(Arc<Claim>),
    Absent,
}

/// The blocks of a get, by the way that they take.
#[derive(Default)]
struct Plan {
    /// From the disk tier into the destination.
    from_disk: Vec<(usize, PinnedSlot)>,
    /// From host memory into the destination, on this thread.
    on_thread: Vec<(usize, PinnedSlot)>,
    /// By a copy engine, from each tier.
    by_engine: SmallVec<[(usize, BlockCopies<PinnedSlot>); 1]>,
    /// By way of the host tier.
    relayed: Vec<usize>,
    waits: Vec<(usize, Arc<Claim>)>,
    /// The keys that each tier has.
    hits: SmallVec<[u64; 4]>,
}

impl Plan {
    fn count_hit(&mut self, tier: TierId) {
        let index = tier.index();
        if self.hits.len() <= index {
            self.hits.resize(index + 1, 0);
        }
        if let Some(hits) = self.hits.get_mut(index) {
            *hits += 1;
        }
    }
}

/// Copies in flight, and the tier that they read.
type StartedCopies = SmallVec<[(TierId, StartedCopy<PinnedSlot>); 1]>;

struct Get<'a> {
    task: &'a JobTask,
    keys: &'a Keys,
    destination: Arc<Payload>,
    results: Vec<Option<BlockResult>>,
}

pub(crate) async fn run(
    task: &JobTask,
    keys: &Keys,
    destination: Arc<Payload>,
) -> Vec<BlockResult> {
    let results = vec![None; keys.len()];
    let mut get = Get { task, keys, destination, results };
    let mut pending: SmallVec<[usize; 4]> = (0..keys.len()).collect();
    while !pending.is_empty() {
        if let Some(stopped) = task.control.stopped() {
            pending.iter().for_each(|&index| get.set(index, stopped.into()));
            break;
        }
        let mut plan = get.plan(&pending);
        let waits = std::mem::take(&mut plan.waits);
        get.execute(&mut plan).await;
        pending.clear();
        for (index, claim) in waits {
            match task.control.until(claim.wait()).await {
                Ok(()) => pending.push(index),
                Err(stopped) => {
                    count(&task.core.counters.missed_writing, 1);
                    get.set(index, stopped.into());
                }
            }
        }
    }
    get.results.into_iter().map(|result| result.unwrap_or(BlockResult::Cancelled)).collect()
}

impl Get<'_> {
    fn set(&mut self, index: usize, result: BlockResult) {
        if let Some(slot) = self.results.get_mut(index) {
            *slot = Some(result);
        }
    }

    fn locate(&self, index: usize) -> Located {
        let (core, group) = (&self.task.core, self.task.group);
        let key = self.keys.hash(index);
        let find = || core.tiers.iter().find_map(|tier| tier.room(group)?.pin(key));
        let found = match find() {
            Some(pin) => pin,
            None => match core.claims.get(key) {
                Some(claim) => return Located::Writing(claim),
                // A put may have ended between the two looks.
                None => match find() {
                    Some(pin) => pin,
                    None => return Located::Absent,
                },
            },
        };
        if core.is_name(key, self.keys.bytes(index)) {
            Located::Pinned(found)
        } else {
            Located::Absent
        }
    }

    fn plan(&mut self, pending: &[usize]) -> Plan {
        let mut plan = Plan::default();
        for &index in pending {
            match self.locate(index) {
                Located::Pinned(pin) => self.add(&mut plan, index, pin),
                Located::Writing(claim) => plan.waits.push((index, claim)),
                Located::Absent => {
                    self.task.core.count_absent(self.task.group, self.keys.hash(index));
                    self.set(index, BlockResult::Absent);
                }
            }
        }
        for (tier, &hits) in self.task.core.tiers.iter().zip(&plan.hits) {
            if hits > 0 {
                tier.counters.hits(hits);
            }
        }
        plan
    }

    fn add(&mut self, plan: &mut Plan, index: usize, pin: PinnedSlot) {
        let (core, group) = (&self.task.core, self.task.group);
        let (stored, asked) = (pin.block.length, self.destination.length(index));
        if stored != asked {
            count(&core.counters.missed_length, 1);
            return self.set(index, BlockResult::WrongLength { stored, asked });
        }
        let Some(tier) = core.tiers.get(pin.room.tier.index()) else { return };
        plan.count_hit(tier.id);
        let uses = pin.room.hit(pin.block.slot);
        if core.policy == WritePolicy::AfterUses(uses)
            && pin.room.is_pin_dirty(&pin)
            && let Some(own) = pin.room.pin(self.keys.hash(index))
        {
            core.write_used(tier.id, self.keys.hash(index), own);
        }
        let Some(memory) = tier.blocks(group) else {
            if self.destination.is_host() {
                plan.from_disk.push((index, pin));
            } else {
                plan.relayed.push(index);
            }
            return;
        };
        let tokens = core
            .group(group)
            .ok()
            .zip(self.destination.facts())
            .and_then(|(info, to)| info.transfer_tokens((&memory.facts, to), stored));
        match (tokens, self.destination.block(index)) {
            (Some(tokens), Some(to)) => {
                let copy = BlockCopy { index, from: pin.block.slot, to, tokens, keeps: pin };
                match plan.by_engine.iter_mut().find(|(other, _)| *other == tier.id.index()) {
                    Some((_, copies)) => copies.push(copy),
                    None => plan.by_engine.push((tier.id.index(), smallvec![copy])),
                }
            }
            _ if memory.facts.is_host && self.destination.is_host() => {
                plan.on_thread.push((index, pin))
            }
            _ if core.host_tier(group).is_some() => plan.relayed.push(index),
            _ => self.set(
                index,
                BlockResult::failed(StoreError::NeedsHostTier { kind: memory.endpoint.kind() }),
            ),
        }
    }

    async fn execute(&mut self, plan: &mut Plan) {
        let task = self.task;
        let mut started = StartedCopies::new();
        for (tier, copies) in plan.by_engine.drain(..) {
            let Some(tier) = task.core.tiers.get(tier) else { continue };
            if let (Some(memory), Some(to)) = (tier.blocks(task.group), self.destination.endpoint())
            {
                let copies = task.start_copies((&memory.endpoint, to), copies);
                started.extend(copies.into_iter().map(|copy| (tier.id, copy)));
            }
        }
        let reading = self.submit(std::mem::take(&mut plan.from_disk));
        let bytes: u64 = plan.on_thread.iter().map(|(_, pin)| u64::from(pin.block.length)).sum();
        if bytes > MOST_ON_CALLER {
            yield_now().await;
        }
        self.copy_out(std::mem::take(&mut plan.on_thread));
        // Futures of rarer ways are boxed, so that a job whose blocks are in memory stays small.
        if let Some(reading) = reading {
            Box::pin(self.read(reading)).await;
        }
        if !plan.relayed.is_empty() {
            // It waits for slots, and pins nothing meanwhile: the other blocks leave when they can.
            let executor = &task.core.executor;
            let watched = |(tier, copy): (_, StartedCopy<_>)| (tier, copy.watched(executor));
            started = started.into_iter().map(watched).collect();
            let relayed = std::mem::take(&mut plan.relayed);
            Box::pin(self.relay(relayed, &mut started)).await;
        }
        for (tier, copy) in started {
            let ended = copy.end().await;
            let took = task.begun.elapsed();
            let tier = task.core.tiers.get(tier.index());
            for (index, result) in ended {
                let bytes = self.destination.length(index);
                if let Some(tier) = tier {
                    tier.counters.copied(&result, bytes, took);
                }
                let result = result.map_or_else(|result| result, |()| BlockResult::Done { bytes });
                self.set(index, result);
            }
        }
    }

    /// Copies blocks from host memory on this thread.
    fn copy_out(&mut self, blocks: Vec<(usize, PinnedSlot)>) {
        let (core, group) = (&self.task.core, self.task.group);
        let hold =
            self.destination.hold(blocks.iter().map(|(index, _)| *index), PayloadUse::Destination);
        for (index, pin) in blocks {
            let tier = core.tiers.get(pin.room.tier.index());
            let memory = tier.and_then(|tier| tier.blocks(group));
            let (Some(tier), Some(memory), Ok(info)) = (tier, memory, core.group(group)) else {
                continue;
            };
            if hold.is_err() {
                self.set(index, BlockResult::failed(StoreError::SourceInUse));
                continue;
            }
            let from = memory.buffers(info, pin.block.slot, pin.block.length);
            // SAFETY: the pin keeps the slot, whose block is only read. The destination is valid until the
            // job has ended, and held against transfers.
            #[expect(unsafe_code, reason = "the memory is named by addresses")]
            unsafe {
                copies::copy(&from, &self.destination.buffers(index));
            }
            tier.counters.got(pin.block.length, self.task.begun.elapsed());
            self.set(index, BlockResult::Done { bytes: pin.block.length });
        }
    }

    /// Copies blocks by way of the host tier. The second hop of a block begins when its first one ends.
    async fn relay(&mut self, indices: Vec<usize>, started: &mut StartedCopies) {
        let task = self.task;
        let (core, group) = (&task.core, task.group);
        let host = core.host_tier(group);
        let (Some(host), Ok(info)) = (host, core.group(group)) else { return };
        let Some(memory) = host.blocks(group) else { return };
        let keys: Vec<_> = indices.iter().map(|&index| self.keys.hash(index)).collect();
        let destination = Arc::clone(&self.destination);
        let mut ready = |at: usize, pin: PinnedSlot| {
            let Some(&index) = indices.get(at) else { return };
            let own = destination.facts();
            let tokens =
                own.and_then(|to| info.transfer_tokens((&memory.facts, to), pin.block.length));
            let to = destination.endpoint().zip(destination.block(index));
            let (Some(tokens), Some((to, block))) = (tokens, to) else {
                // At once: the next blocks need the slots that these pins keep.
                return self.copy_relayed(index, pin);
            };
            let copy = BlockCopy { index, from: pin.block.slot, to: block, tokens, keeps: pin };
            let copies = task.start_copies((&memory.endpoint, to), smallvec![copy]);
            let copies = copies.into_iter();
            started.extend(copies.map(|copy| (host.id, copy.watched(&core.executor))));
        };
        let results = Load::new(task, host.id).run(&keys, &mut ready).await;
        for (&index, result) in indices.iter().zip(results) {
            if !result.is_ok() {
                self.set(index, result);
            }
        }
    }

    /// Copies a block that is in the host tier now, where no engine can.
    fn copy_relayed(&mut self, index: usize, pin: PinnedSlot) {
        if self.destination.is_host() {
            self.copy_out(vec![(index, pin)]);
        } else {
            let error = StoreError::OtherShape { group: self.task.group.into() };
            self.set(index, BlockResult::failed(error));
        }
    }

    fn submit(&mut self, blocks: Vec<(usize, PinnedSlot)>) -> Option<Reading> {
        let (task, core) = (self.task, &self.task.core);
        if blocks.is_empty() {
            return None;
        }
        let disk = core.disk.as_ref()?;
        let indices = blocks.iter().map(|(index, _)| *index);
        let hold = match self.destination.hold(indices, PayloadUse::Destination) {
            Ok(hold) => SharedHold::new(hold),
            Err(error) => {
                let result = BlockResult::failed(error);
                blocks.iter().for_each(|(index, _)| self.set(*index, result.clone()));
                return None;
            }
        };
        let (indices, pins): (Vec<usize>, Vec<PinnedSlot>) = blocks.into_iter().unzip();
        let pins = Arc::new(pins);
        let (destination, guard) = (Arc::clone(&self.destination), Arc::clone(&task.guard));
        // They drop in this order: the guard last.
        let keeps = (hold.clone(), Arc::clone(&pins), destination, guard);
        let arrivals = Arc::new(Arrivals::new(Arc::new(keeps)));
        let request = |(at, (&index, pin)): (usize, (&usize, &PinnedSlot))| SlabRequest {
            job: task.control.id(),
            index: at,
            group: task.group,
            slot: pin.block.slot,
            buffers: self.destination.buffers(index),
            direction: SlabDirection::Read { checksum: pin.block.checksum },
            deadline: task.control.deadline(),
            priority: task.control.priority(),
            sink: Arc::clone(&arrivals) as Arc<dyn SlabSink>,
        };
        let requests: Vec<SlabRequest> =
            indices.iter().zip(pins.iter()).enumerate().map(request).collect();
        // SAFETY: the sink keeps the destination, its hold, the pins and the guard until the last request
        // has ended, also after a panic in this task. The caller keeps spans valid until the guard drops.
        #[expect(unsafe_code, reason = "the memory is named by addresses")]
        unsafe {
            disk.slabs.submit(requests);
        }
        if task.control.stopped().is_some() {
            disk.slabs.cancel(task.control.id());
        }
        Some(Reading { indices, pins, arrivals, hold })
    }

    async fn read(&mut self, reading: Reading) {
        let core = &self.task.core;
        let mut left = reading.indices.len();
        while left > 0 {
            for (at, result) in reading.arrivals.next().await {
                left -= 1;
                let (Some(&index), Some(pin)) = (reading.indices.get(at), reading.pins.get(at))
                else {
                    continue;
                };
                let tier = core.tiers.get(pin.room.tier.index());
                let result = match result {
                    Ok(_) => {
                        if let Some(tier) = tier {
                            tier.counters.got(pin.block.length, self.task.begun.elapsed());
                        }
                        BlockResult::Done { bytes: pin.block.length }
                    }
                    Err(failure) => {
                        if let Some(tier) = tier.filter(|_| failure.is_of_device()) {
                            tier.counters.read_failed();
                        }
                        core.drop_damaged(self.keys.hash(index), pin, &failure).await;
                        not_read(failure)
                    }
                };
                self.set(index, result);
            }
        }
        reading.hold.release();
    }
}

/// Disk requests in flight.
struct Reading {
    indices: Vec<usize>,
    pins: Arc<Vec<PinnedSlot>>,
    arrivals: Arc<Arrivals>,
    hold: SharedHold,
}
