//! Gets, and copies into faster tiers.
//!
//! A get of few blocks in memory is one transfer without a task (`direct`). Other gets plan a way
//! for each block (`plan`) and follow it here. Promotions and relayed gets load blocks into a tier
//! (`load`).

pub(crate) mod direct;
pub(crate) mod load;
pub(crate) mod plan;

use std::sync::Arc;

use smallvec::SmallVec;
use terrane_transfer::Hold;

use crate::error::StoreError;
use crate::slab::SlabDirection;
use crate::store::claims::Claim;
use crate::store::copy::copies::{self, COPY_BYTES_AT_ONCE, YieldingCopies};
use crate::store::copy::transfers::{BlockCopy, CopyList, StartedCopy};
use crate::store::get::load::Load;
use crate::store::get::plan::Plan;
use crate::store::job::arrivals::{Arrivals, SharedHold};
use crate::store::job::executor::yield_now;
use crate::store::job::request::{Keys, Payload, PayloadUse};
use crate::store::job::result::{BlockResult, not_read};
use crate::store::job::task::{DiskBlock, JobTask};
use crate::store::slot_table::PinnedSlot;
use crate::store::tier::count;

/// The parts of a get that its task waits for.
struct Started {
    copies: StartedCopies,
    reading: Option<Box<Reading>>,
    /// From host memory into the destination on the store's thread: too many bytes for the
    /// caller's.
    on_thread: Vec<(usize, PinnedSlot)>,
    /// By way of the host tier.
    relayed: Vec<usize>,
    /// Keys that other jobs write.
    waits: Vec<(usize, Arc<Claim>)>,
}

/// Copies in flight.
type StartedCopies = SmallVec<[StartedCopy<PinnedSlot>; 1]>;

/// A get whose task runs.
pub(super) struct Get<'a> {
    pub(super) task: &'a JobTask,
    pub(super) keys: &'a Keys,
    pub(super) destination: &'a Arc<Payload>,
    results: SmallVec<[Option<BlockResult>; 1]>,
}

/// Reads the blocks of a get, and returns the result of each.
pub(crate) async fn run(
    task: &JobTask,
    keys: &Keys,
    destination: &Arc<Payload>,
) -> Vec<BlockResult> {
    let results = keys.hashes.iter().map(|_| None).collect();
    let mut get = Get { task, keys, destination, results };
    let mut pending: SmallVec<[usize; 4]> = (0..keys.len()).collect();
    while !pending.is_empty() {
        if let Some(stopped) = task.control.stopped() {
            pending.iter().for_each(|&index| get.set(index, stopped.clone()));
            break;
        }
        // The plan lives in `start` only, so that this future stays small.
        let mut started = get.start(&pending);
        pending.clear();
        if started.has_more() {
            Box::pin(get.finish_more(&mut started, &mut pending)).await;
        }
        if pending.is_empty() {
            get.report_layers(&started.copies);
        }
        get.end_copies(&mut started.copies).await;
    }
    get.results.into_iter().map(|result| result.unwrap_or(BlockResult::Cancelled)).collect()
}

impl Started {
    /// Whether the task waits for more than copies.
    fn has_more(&self) -> bool {
        self.reading.is_some()
            || !self.on_thread.is_empty()
            || !self.relayed.is_empty()
            || !self.waits.is_empty()
    }
}

impl Get<'_> {
    pub(super) fn set(&mut self, index: usize, result: BlockResult) {
        if let Some(layers) = self.task.control.layers().filter(|_| !result.is_ok()) {
            layers.fail();
        }
        if let Some(slot) = self.results.get_mut(index) {
            *slot = Some(result);
        }
    }

    /// Starts copies and reads of blocks that are in a tier. It does not wait.
    fn start(&mut self, pending: &[usize]) -> Started {
        let Plan { from_disk, on_thread, by_engine, relayed, waits, .. } = self.plan(pending);
        let task = self.task;
        let mut copies = StartedCopies::new();
        for each in by_engine {
            let tier = task.core.tiers.get(each.tier.index());
            let memory = tier.and_then(|tier| tier.blocks(task.group));
            if let (Some(memory), Some(to)) = (memory, self.destination.endpoint()) {
                copies.push(task.start_copy((&memory.endpoint, to), each, task.control.layers()));
            }
        }
        let reading = self.submit(from_disk).map(Box::new);
        let bytes: u64 = on_thread.iter().map(|(_, pin)| u64::from(pin.block.length)).sum();
        let mut started = Started { copies, reading, on_thread, relayed, waits };
        if (1..=COPY_BYTES_AT_ONCE).contains(&bytes) {
            self.copy_out(std::mem::take(&mut started.on_thread));
        }
        started
    }

    /// Finishes all parts but the copies. Adds the keys that other jobs have written to `pending`.
    async fn finish_more(&mut self, started: &mut Started, pending: &mut SmallVec<[usize; 4]>) {
        let task = self.task;
        if !started.on_thread.is_empty() {
            yield_now().await;
            self.copy_out_yielding(std::mem::take(&mut started.on_thread)).await;
        }
        if let Some(reading) = started.reading.take() {
            self.read(*reading).await;
        }
        if !started.relayed.is_empty() {
            // The relay waits for slots. So the pins of the other copies drop as soon as those end.
            let executor = &task.core.executor;
            let copies = std::mem::take(&mut started.copies).into_iter();
            started.copies = copies.map(|copy| copy.watched(executor)).collect();
            // The copies of the relay follow the disk, block by block. Layers of them would be late.
            let mut relayed = StartedCopies::new();
            self.relay(std::mem::take(&mut started.relayed), &mut relayed).await;
            self.end_copies(&mut relayed).await;
        }
        if started.waits.is_empty() {
            return;
        }
        // Their pins must not be kept during the waits.
        self.end_copies(&mut started.copies).await;
        started.copies.clear();
        for (index, claim) in std::mem::take(&mut started.waits) {
            match task.control.until(claim.wait()).await {
                Ok(()) => pending.push(index),
                Err(stopped) => {
                    count(&task.core.counters.missed_writing, 1);
                    self.set(index, stopped);
                }
            }
        }
    }

    /// All blocks but those of these copies have a result.
    fn report_layers(&self, copies: &StartedCopies) {
        let Some(layers) = self.task.control.layers() else { return };
        let ended = self.results.iter().flatten().count();
        let travel: usize = copies.iter().map(|copy| copy.indices.len()).sum();
        if ended + travel == self.results.len() {
            layers.only_copies_are_left();
        } else {
            layers.fail();
        }
    }

    async fn end_copies(&mut self, copies: &mut StartedCopies) {
        for copy in copies {
            let result = copy.end().await;
            let took = self.task.begun.elapsed();
            let tier = self.task.core.tiers.get(copy.tier.index());
            for &index in &copy.indices {
                let bytes = self.destination.length(index);
                if let Some(tier) = tier {
                    tier.counters.copied(&result, bytes, took);
                }
                let done = |()| BlockResult::Done { bytes };
                self.set(index, result.clone().map_or_else(|result| result, done));
            }
        }
    }

    /// Copies blocks from host memory on this thread.
    fn copy_out(&mut self, blocks: Vec<(usize, PinnedSlot)>) {
        let Some(_hold) = self.hold_destination(&blocks) else { return };
        for (index, pin) in blocks {
            let Some(from) = self.task.core.host_memory(&pin) else { continue };
            // SAFETY: the pin keeps the slot, whose block is only read. The destination is valid until the
            // job has ended, and held against transfers.
            #[expect(unsafe_code, reason = "the memory is named by addresses")]
            unsafe {
                copies::copy(&from, &self.destination.buffers(index));
            }
            self.got(index, &pin);
        }
    }

    /// Copies blocks from host memory on this thread, and yields to other tasks.
    async fn copy_out_yielding(&mut self, blocks: Vec<(usize, PinnedSlot)>) {
        let Some(hold) = self.hold_destination(&blocks) else { return };
        let hold = SharedHold::new(hold);
        let mut incomplete: Vec<u32> = Vec::new();
        let mut yielding = YieldingCopies::new(&self.task.control);
        for (index, pin) in blocks {
            let Some(from) = self.task.core.host_memory(&pin) else { continue };
            let to = self.destination.buffers(index);
            // SAFETY: as above, also while other tasks run.
            #[expect(unsafe_code, reason = "the memory is named by addresses")]
            let copied = unsafe { yielding.copy(&from, &to).await };
            match copied {
                Ok(()) => self.got(index, &pin),
                Err(stopped) => {
                    incomplete.extend(self.destination.block(index));
                    self.set(index, stopped);
                }
            }
        }
        hold.release_incomplete(&incomplete);
    }

    /// Keeps transfers from the destination of these blocks. If it is in use, sets their results, and returns
    /// `None`.
    fn hold_destination(&mut self, blocks: &[(usize, PinnedSlot)]) -> Option<Option<Hold>> {
        let indices = || blocks.iter().map(|(index, _)| *index);
        match self.destination.hold(indices(), PayloadUse::Destination) {
            Ok(hold) => Some(hold),
            Err(error) => {
                let failed = BlockResult::failed(error);
                indices().for_each(|index| self.set(index, failed.clone()));
                None
            }
        }
    }

    /// A block was copied from host memory.
    fn got(&mut self, index: usize, pin: &PinnedSlot) {
        if let Some(tier) = self.task.core.tiers.get(pin.table.tier.index()) {
            tier.counters.got(pin.block.length, self.task.begun.elapsed());
        }
        self.set(index, BlockResult::Done { bytes: pin.block.length });
    }

    /// Copies blocks by way of the host tier. The second hop of a block begins when its first one ends.
    async fn relay(&mut self, indices: Vec<usize>, started: &mut StartedCopies) {
        let task = self.task;
        let (core, group) = (&task.core, task.group);
        let host = core.host_tier(group);
        let (Some(host), Ok(info)) = (host, core.group(group)) else { return };
        let Some(memory) = host.blocks(group) else { return };
        let keys: Vec<_> = indices.iter().map(|&index| self.keys.hash(index)).collect();
        let destination = self.destination;
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
            let mut list = CopyList::default();
            list.add(host.id, copy);
            let copies =
                list.into_iter().map(|each| task.start_copy((&memory.endpoint, to), each, None));
            started.extend(copies.map(|copy| copy.watched(&core.executor)));
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

    /// Begins to read blocks from disk into the destination. `None` if there are none.
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
        let (destination, guard) = (Arc::clone(self.destination), Arc::clone(&task.guard));
        // They drop in this order: the guard last.
        let keeps = (hold.clone(), Arc::clone(&pins), destination, guard);
        let block = |(&index, pin): (&usize, &PinnedSlot)| DiskBlock {
            slot: pin.block.slot,
            buffers: self.destination.buffers(index),
            memory: self.destination.io_memory(),
            direction: SlabDirection::Read { checksum: pin.block.checksum },
        };
        let blocks = indices.iter().zip(pins.iter()).map(block);
        // SAFETY: the destination, its hold, the pins and the guard are kept until the last request has
        // ended, also after a panic in this task. The caller keeps spans valid until the guard drops.
        #[expect(unsafe_code, reason = "the memory is named by addresses")]
        let arrivals = unsafe { task.submit_blocks(disk, task.group, Arc::new(keeps), blocks) };
        Some(Reading { indices, pins, arrivals, hold })
    }

    /// Waits for all reads, and sets their results.
    async fn read(&mut self, reading: Reading) {
        let core = &self.task.core;
        let mut incomplete: Vec<u32> = Vec::new();
        while let Some(arrived) = reading.arrivals.next().await {
            for (at, result) in arrived {
                let (Some(&index), Some(pin)) = (reading.indices.get(at), reading.pins.get(at))
                else {
                    continue;
                };
                let tier = core.tiers.get(pin.table.tier.index());
                let result = match result {
                    Ok(_) => {
                        if let Some(tier) = tier {
                            tier.counters.got(pin.block.length, self.task.begun.elapsed());
                        }
                        BlockResult::Done { bytes: pin.block.length }
                    }
                    Err(failure) => {
                        if let Some(tier) = tier {
                            tier.counters.read_failed(&failure);
                        }
                        core.drop_damaged(self.keys.hash(index), pin, &failure).await;
                        incomplete.extend(self.destination.block(index));
                        not_read(failure)
                    }
                };
                self.set(index, result);
            }
        }
        reading.hold.release_incomplete(&incomplete);
    }
}

/// Disk requests in flight.
struct Reading {
    indices: Vec<usize>,
    pins: Arc<Vec<PinnedSlot>>,
    arrivals: Arc<Arrivals>,
    hold: SharedHold,
}
