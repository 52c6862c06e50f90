//! Puts, and copies into slower tiers.
//!
//! A put copies its blocks into a tier here. `commit` adds a written block to the index and the
//! catalog, also for loads. `write_down` copies blocks into the tier below, and `write_back`
//! decides when.

pub(crate) mod commit;
pub(crate) mod write_back;
pub(crate) mod write_down;

use std::sync::Arc;

use smallvec::SmallVec;

use crate::error::StoreError;
use crate::slab::SlabDirection;
use crate::store::claims::{Claim, ClaimKind, HeldClaim};
use crate::store::copy::copies::{COPY_BYTES_AT_ONCE, YieldingCopies};
use crate::store::copy::transfers::{BlockCopy, CopyList};
use crate::store::job::arrivals::SharedHold;
use crate::store::job::executor::yield_now;
use crate::store::job::request::{Keys, Payload, PayloadUse};
use crate::store::job::result::{BlockResult, not_written};
use crate::store::job::task::{DiskBlock, JobTask};
use crate::store::open::builder::WritePolicy;
use crate::store::put::commit::{Committed, Place, WrittenBlock};
use crate::store::put::write_back::make_durable;
use crate::store::put::write_down::WriteDown;
use crate::store::query::presence::TierId;
use crate::store::removal::removed_keys::PutInFlight;
use crate::store::slot_table::TakenSlots;
use crate::store::tier::Tier;

/// A key that this job writes.
struct OwnKey {
    index: usize,
    claim: HeldClaim,
}

/// How a put treats a key.
enum Claimed {
    Stored,
    Own(HeldClaim),
    /// It was removed after the put began.
    Removed,
    /// Another job writes it.
    Other(Arc<Claim>),
}

/// The state of a put.
struct Put<'a> {
    task: &'a JobTask,
    keys: &'a Keys,
    source: Arc<Payload>,
    in_flight: PutInFlight,
    results: Vec<Option<BlockResult>>,
    /// The number of clears before the put. A block that was put before a clear is not stored.
    epoch: u64,
}

/// Stores the blocks of a put, and returns the result of each.
pub(crate) async fn run(
    task: &JobTask,
    keys: &Keys,
    source: Arc<Payload>,
    in_flight: PutInFlight,
) -> Vec<BlockResult> {
    let results = vec![None; keys.len()];
    let epoch = task.core.gate.epoch();
    let mut put = Put { task, keys, source, in_flight, results, epoch };
    put.write_all().await;
    if task.durable {
        Box::pin(make_durable(task, keys, &mut put.results)).await;
    }
    put.results.into_iter().map(|result| result.unwrap_or(BlockResult::Cancelled)).collect()
}

impl Put<'_> {
    async fn write_all(&mut self) {
        let task = self.task;
        let mut pending: Vec<usize> = (0..self.keys.len()).collect();
        while !pending.is_empty() {
            if let Some(stopped) = task.control.stopped() {
                return self.set_all(pending, &stopped);
            }
            let (mut own, mut others) = (Vec::new(), Vec::new());
            // The head of a prefix is used last, so that its tail is evicted first.
            for index in std::mem::take(&mut pending).into_iter().rev() {
                match self.claim(index) {
                    Claimed::Stored => self.set(index, BlockResult::AlreadyStored),
                    Claimed::Own(claim) => own.push(OwnKey { index, claim }),
                    Claimed::Removed => self.set(index, BlockResult::Done { bytes: 0 }),
                    Claimed::Other(claim) => others.push((index, claim)),
                }
            }
            own.reverse();
            others.reverse();
            // The own claims end with the write. So no job waits for a claim while it has claims.
            if !own.is_empty() {
                self.write(own).await;
            }
            for (index, claim) in others {
                match task.control.until(claim.wait()).await {
                    Ok(()) => pending.push(index),
                    Err(stopped) => self.set(index, stopped),
                }
            }
        }
    }

    fn claim(&self, index: usize) -> Claimed {
        let (core, key) = (&self.task.core, self.keys.hash(index));
        if core.touch_stored(self.task.group, key) {
            return Claimed::Stored;
        }
        match core.claims.claim(key, ClaimKind::Put) {
            // Another put may have ended between the two looks.
            Ok(_) if core.touch_stored(self.task.group, key) => Claimed::Stored,
            Ok(_) if self.in_flight.was_removed(key) => Claimed::Removed,
            Ok(claim) => Claimed::Own(claim),
            Err(_) if core.touch_stored(self.task.group, key) => Claimed::Stored,
            Err(other) => Claimed::Other(other),
        }
    }

    fn set(&mut self, index: usize, result: BlockResult) {
        if let Some(slot) = self.results.get_mut(index) {
            *slot = Some(result);
        }
    }

    fn set_all(&mut self, indices: impl IntoIterator<Item = usize>, result: &BlockResult) {
        indices.into_iter().for_each(|index| self.set(index, result.clone()));
    }

    /// The tier that has to have the blocks when they are written.
    fn target(&self) -> Option<&Tier> {
        let core = &self.task.core;
        let reaches = |tier: &&Tier| {
            let is_memory = !tier.is_disk();
            is_memory && (self.source.endpoint().is_some() || tier.is_host(self.task.group))
        };
        let host = || core.host_tier(self.task.group);
        match core.policy {
            WritePolicy::Through if !self.source.is_host() => host(),
            // Memory still serves when the disk takes no more blocks.
            WritePolicy::Through if core.refuses_writes().is_some() => host().or(core.tiers.last()),
            WritePolicy::Through => core.tiers.last(),
            WritePolicy::Back | WritePolicy::AfterUses(_) => {
                core.tiers.iter().find(reaches).or(core.tiers.last())
            }
        }
    }

    async fn write(&mut self, own: Vec<OwnKey>) {
        let task = self.task;
        let indices = own.iter().map(|own| own.index);
        let target =
            self.target().and_then(|tier| Some((tier.id, tier.table(task.group)?.clone())));
        let Some((target, table)) = target else {
            return self.set_all(indices, &BlockResult::failed(StoreError::Closed));
        };
        let is_disk = task.core.tiers.get(target.index()).is_some_and(|tier| tier.is_disk());
        if let Some(error) = task.core.refuses_writes().filter(|_| is_disk) {
            // Nothing is evicted for a write that cannot succeed.
            return self.set_all(indices, &BlockResult::Failed(error));
        }
        let taken = match table.take(own.len(), &task.control).await {
            Ok(taken) => taken,
            Err(result) => return self.set_all(indices, &result),
        };
        let Some(tier) = task.core.tiers.get(target.index()) else { return };
        if tier.is_disk() {
            self.write_to_disk(tier, taken, own).await;
        } else {
            self.write_to_memory(tier, taken, own).await;
        }
    }

    /// Takes slots in the faster tiers of host memory that have enough now.
    fn spare(&self, below: &Tier, count: usize) -> Vec<(TierId, TakenSlots)> {
        let core = &self.task.core;
        if core.policy != WritePolicy::Through || !self.source.is_host() {
            return Vec::new();
        }
        let faster = core.tiers.iter().take(below.id.index());
        let host = faster.filter(|tier| tier.is_host(self.task.group));
        host.filter_map(|tier| {
            let taken = tier.table(self.task.group)?.try_take(count).ok()?;
            Some((tier.id, taken))
        })
        .collect()
    }

    async fn write_to_disk(&mut self, tier: &Tier, mut taken: TakenSlots, own: Vec<OwnKey>) {
        let task = self.task;
        let Some(disk) = &task.core.disk else { return };
        let hold = self.source.hold(own.iter().map(|own| own.index), PayloadUse::Source);
        let hold = match hold {
            Ok(hold) => SharedHold::new(hold),
            Err(error) => {
                let indices = own.iter().map(|own| own.index);
                return self.set_all(indices, &BlockResult::failed(error));
            }
        };
        let (source, guard) = (Arc::clone(&self.source), Arc::clone(&task.guard));
        // They drop in this order: the guard last.
        let keeps = (hold.clone(), taken.share(), source, guard);
        let block = |(at, own): (usize, &OwnKey)| DiskBlock {
            slot: taken.slot(at).unwrap_or(u32::MAX),
            buffers: self.source.buffers(own.index),
            memory: self.source.io_memory(),
            direction: SlabDirection::Write,
        };
        let blocks = own.iter().enumerate().map(block);
        // SAFETY: the source, its hold, the slots and the guard are kept until the last request has
        // ended, also after a panic in this task. The caller keeps spans valid until the guard drops.
        #[expect(unsafe_code, reason = "the memory is named by addresses")]
        let arrivals = unsafe { task.submit_blocks(disk, task.group, Arc::new(keeps), blocks) };
        let mut spare = self.spare(tier, own.len());
        let bytes = own.iter().map(|own| u64::from(self.source.length(own.index))).sum::<u64>();
        if bytes > COPY_BYTES_AT_ONCE && !spare.is_empty() {
            yield_now().await;
        }
        for (tier, slots) in &mut spare {
            self.copy_in(*tier, slots, &own).await;
        }
        let mut own: Vec<Option<OwnKey>> = own.into_iter().map(Some).collect();
        while let Some(arrived) = arrivals.next().await {
            for (at, result) in arrived {
                let Some(key) = own.get_mut(at).and_then(Option::take) else { continue };
                let result = match result {
                    Err(failure) => {
                        tier.counters.write_failed(&failure);
                        not_written(failure)
                    }
                    Ok(done) => {
                        let mut places = vec![Place::new(tier.id, &mut taken, at)];
                        places.extend(
                            spare.iter_mut().map(|(tier, slots)| Place::new(*tier, slots, at)),
                        );
                        self.commit(&key, done.checksum, &mut places, false).await
                    }
                };
                self.set(key.index, result);
            }
        }
        hold.release();
    }

    /// Copies blocks to the slots of a host tier on this thread. Slots that did not get their block are freed.
    async fn copy_in(&self, tier: TierId, slots: &mut TakenSlots, own: &[OwnKey]) {
        let core = &self.task.core;
        let blocks = core.tier(tier).ok().and_then(|tier| tier.blocks(self.task.group));
        let (Some(blocks), Ok(info)) = (blocks, core.group(self.task.group)) else { return };
        let mut yielding = YieldingCopies::new(&self.task.control);
        for (at, own) in own.iter().enumerate() {
            let Some(slot) = slots.slot(at) else { continue };
            let (from, length) = (self.source.buffers(own.index), self.source.length(own.index));
            // SAFETY: the source is valid until the job has ended and the caller holds it against
            // transfers, and the slot is this job's alone.
            #[expect(unsafe_code, reason = "the memory is named by addresses")]
            let copied =
                unsafe { blocks.copy_in(&mut yielding, info, (slot, length), &from).await };
            if copied.is_err() {
                slots.free(at);
            }
        }
    }

    async fn write_to_memory(&mut self, tier: &Tier, mut taken: TakenSlots, own: Vec<OwnKey>) {
        let task = self.task;
        // Over all copies on this thread, also those to faster tiers. Engines hold for themselves.
        let on_thread = own.iter().map(|own| own.index).filter(|_| self.source.is_host());
        let hold = match self.source.hold(on_thread, PayloadUse::Source) {
            Ok(hold) => hold,
            Err(error) => {
                let indices = own.iter().map(|own| own.index);
                return self.set_all(indices, &BlockResult::failed(error));
            }
        };
        let bytes = own.iter().map(|own| u64::from(self.source.length(own.index))).sum::<u64>();
        if bytes > COPY_BYTES_AT_ONCE && self.source.is_host() {
            yield_now().await;
        }
        let written = self.fill(tier, &taken, &own).await;
        let mut spare = self.spare(tier, own.len());
        for (faster, slots) in &mut spare {
            self.copy_in(*faster, slots, &own).await;
        }
        drop(hold);
        let below = task.core.below(tier.id);
        // Other tiers of memory may be between, which take the blocks later.
        let disk_refuses = task.core.refuses_writes().is_some();
        let is_refused = below.is_some_and(Tier::is_disk) && disk_refuses;
        let has_slower = below.is_some() && !is_refused;
        for (at, (key, written)) in own.into_iter().zip(written).enumerate() {
            let result = match written {
                Err(result) => result,
                Ok(()) => {
                    let mut places = vec![Place::new(tier.id, &mut taken, at)];
                    places
                        .extend(spare.iter_mut().map(|(tier, slots)| Place::new(*tier, slots, at)));
                    let result = self.commit(&key, 0, &mut places, has_slower).await;
                    let table = tier.table(task.group).filter(|_| is_refused);
                    if let Some(pin) = table.and_then(|table| table.pin(self.keys.hash(key.index)))
                    {
                        // It is in memory alone, so a sync must not pass over it.
                        pin.table.allow_loss(pin.block.slot);
                    }
                    result
                }
            };
            self.set(key.index, result);
        }
        drop((taken, spare));
        if has_slower && task.core.policy == WritePolicy::Through && !disk_refuses {
            let done = |&index: &usize| {
                matches!(self.results.get(index), Some(Some(BlockResult::Done { .. })))
            };
            let indices: Vec<usize> = (0..self.keys.len()).filter(done).collect();
            let keys = indices.iter().map(|&index| self.keys.hash(index)).collect();
            let results = Box::pin(WriteDown::new(task, tier.id).keys(keys)).await;
            for (index, result) in indices.into_iter().zip(results) {
                if !result.is_ok() {
                    self.set(index, result);
                }
            }
        } else if has_slower {
            task.core.write_back_early(tier.id, task.group);
        }
    }

    /// Copies blocks to the slots of a memory tier, and returns the result of each.
    async fn fill(
        &self,
        tier: &Tier,
        taken: &TakenSlots,
        own: &[OwnKey],
    ) -> Vec<Result<(), BlockResult>> {
        let task = self.task;
        let (Some(blocks), Ok(info)) = (tier.blocks(task.group), task.core.group(task.group))
        else {
            return own.iter().map(|_| Err(BlockResult::failed(StoreError::Closed))).collect();
        };
        let mut results: Vec<Result<(), BlockResult>> = own.iter().map(|_| Ok(())).collect();
        let (mut copies, mut on_thread) = (CopyList::default(), Vec::new());
        for (at, own) in own.iter().enumerate() {
            let length = self.source.length(own.index);
            let tokens = self
                .source
                .facts()
                .and_then(|own| info.transfer_tokens((own, &blocks.facts), length));
            match (tokens, self.source.block(own.index), taken.slot(at)) {
                (Some(tokens), Some(from), Some(to)) => {
                    let keeps = taken.share();
                    copies.add(tier.id, BlockCopy { index: at, from, to, tokens, keeps });
                }
                (_, _, Some(slot)) if self.source.is_host() && blocks.facts.is_host => {
                    on_thread.push((at, own.index, slot));
                }
                _ => {
                    let error = StoreError::OtherShape { group: task.group.into() };
                    if let Some(result) = results.get_mut(at) {
                        *result = Err(BlockResult::failed(error));
                    }
                }
            }
        }
        let mut started: SmallVec<[_; 1]> = SmallVec::new();
        if let Some(source) = self.source.endpoint() {
            let copies = copies.into_iter();
            started
                .extend(copies.map(|each| task.start_copy((source, &blocks.endpoint), each, None)));
        }
        let mut yielding = YieldingCopies::new(&task.control);
        for (at, index, slot) in on_thread {
            let (from, length) = (self.source.buffers(index), self.source.length(index));
            // SAFETY: the source is valid until the job has ended and the caller holds it against
            // transfers, and the slot is this job's alone.
            #[expect(unsafe_code, reason = "the memory is named by addresses")]
            let copied =
                unsafe { blocks.copy_in(&mut yielding, info, (slot, length), &from).await };
            if let (Err(failure), Some(result)) = (copied, results.get_mut(at)) {
                *result = Err(failure);
            }
        }
        for copy in &mut started {
            let result = copy.end().await;
            for &at in &copy.indices {
                if let Some(slot) = results.get_mut(at) {
                    *slot = result.clone();
                }
            }
        }
        results
    }

    async fn commit(
        &self,
        own: &OwnKey,
        checksum: u64,
        places: &mut [Place<'_>],
        is_dirty: bool,
    ) -> BlockResult {
        let length = self.source.length(own.index);
        let block = WrittenBlock {
            group: self.task.group,
            key: self.keys.hash(own.index),
            name: self.keys.bytes(own.index),
            length,
            checksum,
            claim: &own.claim,
            epoch: Some(self.epoch),
            copy_of: None,
            is_dirty,
            put_at: Some(self.task.begun),
        };
        match self.task.core.commit(&block, places).await {
            Ok(Committed::Stored | Committed::Dropped) => BlockResult::Done { bytes: length },
            Err(error) => BlockResult::failed(error),
        }
    }
}
