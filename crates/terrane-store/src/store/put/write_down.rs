//! Copies of blocks into the tier below.

use std::sync::Arc;

use crate::KeyHash;
use crate::error::StoreError;
use crate::slab::SlabDirection;
use crate::store::claims::{ClaimKind, HeldClaim};
use crate::store::job::result::{BlockResult, not_written, set};
use crate::store::job::task::{DiskBlock, JobTask};
use crate::store::put::commit::{Place, WrittenBlock};
use crate::store::query::presence::TierId;
use crate::store::slot_table::{PinnedSlot, TakenSlots};
use crate::store::tier::Tier;

/// The most blocks that are written together.
pub(crate) const BLOCKS_AT_ONCE: usize = 64;

/// A dirty block, and its place in the results.
struct DirtyBlock {
    index: usize,
    key: KeyHash,
    pin: Arc<PinnedSlot>,
}

/// A dirty block that this job writes.
struct OwnBlock {
    dirty: DirtyBlock,
    claim: HeldClaim,
}

/// Copies dirty blocks of a tier into the tier below.
pub(crate) struct WriteDown<'a> {
    task: &'a JobTask,
    from: TierId,
    /// Whether the store itself writes back, because jobs wait for slots.
    is_internal: bool,
}

impl<'a> WriteDown<'a> {
    pub(crate) const fn new(task: &'a JobTask, from: TierId) -> Self {
        Self { task, from, is_internal: false }
    }

    /// A write-back of the store itself.
    pub(crate) const fn internal(task: &'a JobTask, from: TierId) -> Self {
        Self { task, from, is_internal: true }
    }

    /// Writes the blocks of these keys to the slower tiers as far as those lack them, one tier after
    /// the other. A block is [`Done`](BlockResult::Done) if the slowest tier got it.
    pub(crate) async fn keys(self, keys: Vec<KeyHash>) -> Vec<BlockResult> {
        let core = &self.task.core;
        let mut results = vec![BlockResult::AlreadyStored; keys.len()];
        for tier in core.tiers.iter().skip(self.from.index()) {
            let Some(table) = tier.table(self.task.group) else { continue };
            let pinned = keys.iter().enumerate().filter_map(|(index, &key)| {
                let pin = table.pin(key)?;
                self.is_lacking(key, &pin).then_some((index, (key, pin)))
            });
            let (indices, blocks): (Vec<usize>, Vec<_>) = pinned.unzip();
            let written = WriteDown::new(self.task, tier.id).blocks(blocks).await;
            let is_last = core.below(tier.id).is_some_and(|below| core.below(below.id).is_none());
            for (index, result) in indices.into_iter().zip(written) {
                if let Some(slot) = results.get_mut(index).filter(|_| is_last || !result.is_ok()) {
                    *slot = result;
                }
            }
        }
        results
    }

    /// Whether a block has to be written: it is dirty, or the slower tiers evicted it.
    fn is_lacking(&self, key: KeyHash, pin: &PinnedSlot) -> bool {
        let slower = self.task.core.tiers.iter().skip(pin.table.tier.index() + 1);
        let mut slower = slower.filter_map(|tier| tier.table(pin.table.group));
        pin.table.is_pin_dirty(pin) || slower.all(|table| table.index.get(key).is_none())
    }

    /// Writes pinned blocks of one group to the tier below.
    pub(crate) async fn blocks(self, blocks: Vec<(KeyHash, PinnedSlot)>) -> Vec<BlockResult> {
        let mut results = vec![BlockResult::AlreadyStored; blocks.len()];
        let core = &self.task.core;
        let (Some(from), Some(below)) = (core.tiers.get(self.from.index()), core.below(self.from))
        else {
            return results;
        };
        let enumerated = blocks.into_iter().enumerate();
        let mut pending: Vec<DirtyBlock> = enumerated
            .map(|(index, (key, pin))| DirtyBlock { index, key, pin: Arc::new(pin) })
            .collect();
        while !pending.is_empty() {
            let (mut own, mut others) = (Vec::new(), Vec::new());
            for dirty in pending {
                match core.claims.claim(dirty.key, ClaimKind::WriteBack) {
                    Ok(_) if !self.is_lacking(dirty.key, &dirty.pin) => {}
                    Ok(claim) => own.push(OwnBlock { dirty, claim }),
                    Err(claim) => others.push((dirty, claim)),
                }
            }
            while !own.is_empty() {
                self.write_part(from, below, &mut own, &mut results).await;
            }
            pending = Vec::new();
            for (dirty, claim) in others {
                match self.task.control.until(claim.wait()).await {
                    Ok(()) => pending.push(dirty),
                    Err(stopped) => set(&mut results, dirty.index, stopped),
                }
            }
        }
        results
    }

    /// Removes the last ones of these blocks, as many as get slots at once, and writes them.
    async fn write_part(
        &self,
        from: &Tier,
        below: &Tier,
        own: &mut Vec<OwnBlock>,
        results: &mut [BlockResult],
    ) {
        let group = own.first().map_or(0, |own| own.dirty.pin.table.group);
        let Some(table) = below.table(group) else { return own.clear() };
        if let Some(error) = self.task.core.refuses_writes().filter(|_| below.is_disk()) {
            return self.give_up(std::mem::take(own), &BlockResult::Failed(error), results);
        }
        let taken = table.take_part(own.len().min(BLOCKS_AT_ONCE), &self.task.control).await;
        // The head of a prefix comes last, so that its tail is evicted first.
        let count = taken.as_ref().map_or(1, TakenSlots::len);
        let part = own.split_off(own.len().saturating_sub(count));
        match taken {
            Ok(taken) if below.is_disk() => {
                self.write_to_disk(from, below, (taken, part), results).await;
            }
            Ok(taken) => self.write_to_memory(below, (taken, part), results).await,
            Err(result) => self.give_up(part, &result, results),
        }
    }

    async fn write_to_disk(
        &self,
        from: &Tier,
        below: &Tier,
        (mut taken, own): (TakenSlots, Vec<OwnBlock>),
        results: &mut [BlockResult],
    ) {
        let (task, core) = (self.task, &self.task.core);
        let group = own.first().map_or(0, |own| own.dirty.pin.table.group);
        let (Some(disk), Some(memory), Ok(info)) =
            (&core.disk, from.blocks(group), core.group(group))
        else {
            return self.give_up(own, &BlockResult::failed(StoreError::Closed), results);
        };
        let pins: Vec<Arc<PinnedSlot>> = own.iter().map(|own| Arc::clone(&own.dirty.pin)).collect();
        let keeps = Arc::new((pins, taken.share(), memory.endpoint.clone()));
        let block = |(at, own): (usize, &OwnBlock)| DiskBlock {
            slot: taken.slot(at).unwrap_or(u32::MAX),
            buffers: memory.buffers(info, own.dirty.pin.block.slot, own.dirty.pin.block.length),
            memory: memory.io_memory(),
            direction: SlabDirection::Write,
        };
        let blocks = own.iter().enumerate().map(block);
        // SAFETY: the pins keep the slots from reuse, and the endpoint keeps their memory. These
        // and the slots of the tier below are kept until the last request has ended. Pinned blocks
        // are only read.
        #[expect(unsafe_code, reason = "the memory is named by addresses")]
        let arrivals = unsafe { task.submit_blocks(disk, group, keeps, blocks) };
        let mut own: Vec<Option<OwnBlock>> = own.into_iter().map(Some).collect();
        while let Some(arrived) = arrivals.next().await {
            for (at, result) in arrived {
                let Some(own) = own.get_mut(at).and_then(Option::take) else { continue };
                match result {
                    Ok(done) => {
                        let place = Place::new(below.id, &mut taken, at);
                        self.commit(own, done.checksum, place, results).await;
                    }
                    Err(failure) => {
                        below.counters.write_failed(&failure);
                        self.give_up(vec![own], &not_written(failure), results);
                    }
                }
            }
        }
    }

    async fn write_to_memory(
        &self,
        below: &Tier,
        (mut taken, own): (TakenSlots, Vec<OwnBlock>),
        results: &mut [BlockResult],
    ) {
        let group = own.first().map_or(0, |own| own.dirty.pin.table.group);
        let Some(memory) = below.blocks(group) else {
            return self.give_up(own, &BlockResult::failed(StoreError::Closed), results);
        };
        let mut copied: Vec<Result<(), BlockResult>> = own.iter().map(|_| Ok(())).collect();
        let slots = own.iter().enumerate();
        let moves = slots.filter_map(|(at, own)| Some((at, &own.dirty.pin, taken.slot(at)?)));
        for copy in &mut self.task.start_moves(group, (memory, &taken), moves).await {
            let result = copy.end().await;
            for &at in &copy.indices {
                if let Some(slot) = copied.get_mut(at) {
                    *slot = result.clone();
                }
            }
        }
        for (at, (own, copied)) in own.into_iter().zip(copied).enumerate() {
            match copied {
                Ok(()) => {
                    let checksum = own.dirty.pin.block.checksum;
                    let place = Place::new(below.id, &mut taken, at);
                    self.commit(own, checksum, place, results).await;
                }
                Err(result) => self.give_up(vec![own], &result, results),
            }
        }
    }

    async fn commit(
        &self,
        own: OwnBlock,
        checksum: u64,
        place: Place<'_>,
        results: &mut [BlockResult],
    ) {
        let core = &self.task.core;
        let OwnBlock { dirty: DirtyBlock { index, key, pin }, claim } = own;
        let is_last = core.below(place.tier).is_none();
        let name = core.names.get(key);
        let name = (key, name.as_deref().unwrap_or_default());
        let block = WrittenBlock::copy(&pin, name, &claim, (checksum, !is_last));
        match core.commit(&block, &mut [place]).await {
            Ok(_) => {
                set(results, index, BlockResult::Done { bytes: pin.block.length });
                pin.table.set_clean(pin.block.slot);
            }
            Err(error) => {
                let own = OwnBlock { dirty: DirtyBlock { index, key, pin }, claim };
                self.give_up(vec![own], &BlockResult::failed(error), results);
            }
        }
    }

    /// Whether the tier below may have room for a block of the group later.
    pub(crate) fn may_have_room_later(&self, group: u16) -> bool {
        let below = self.task.core.below(self.from).and_then(|below| below.table(group));
        below.is_some_and(|table| table.may_have_room_later())
    }

    /// Ends the write of blocks that cannot be written. Dirty ones may be evicted now, so that nothing
    /// waits for them without end. They stay dirty if the job was stopped, and if the caller's job
    /// found no room: then the store itself may find some later. They also stay so if there may be room
    /// once copies have ended.
    fn give_up(&self, blocks: Vec<OwnBlock>, result: &BlockResult, results: &mut [BlockResult]) {
        for OwnBlock { dirty: DirtyBlock { index, key, pin }, claim } in blocks {
            drop(claim);
            let is_stopped = matches!(result, BlockResult::Cancelled | BlockResult::TimedOut);
            let is_no_room = matches!(result, BlockResult::NoRoom(_));
            let may_be_later = || !self.is_internal || self.may_have_room_later(pin.table.group);
            if is_stopped || is_no_room && may_be_later() {
                pin.table.requeue_dirty(key, pin.block.slot);
            } else if pin.table.is_pin_dirty(&pin) {
                pin.table.allow_loss(pin.block.slot);
            }
            set(results, index, result.clone());
        }
    }
}
