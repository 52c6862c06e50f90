//! Copies into a tier of memory: promotions, and the first hop of gets into device memory.

use std::sync::Arc;

use terrane_core::convert::to_usize;

use crate::KeyHash;
use crate::slab::{SlabDirection, SlabFailure};
use crate::store::claims::{Claim, ClaimKind, HeldClaim};
use crate::store::job::arrivals::{Arrivals, SharedHold};
use crate::store::job::request::Keys;
use crate::store::job::result::{BlockResult, NoRoom, not_read, set};
use crate::store::job::task::{DiskBlock, JobTask};
use crate::store::put::commit::{Committed, Place, WrittenBlock};
use crate::store::query::presence::TierId;
use crate::store::slot_table::{PinnedSlot, TakenSlots};
use crate::store::tier::{Tier, TierBlocks};

/// The most blocks that are loaded together.
const BLOCKS_AT_ONCE: usize = 64;

/// How often a promotion to a device tier begins again, because the block left the host tier between
/// the two hops.
const MOST_ROUNDS: usize = 4;

/// Copies blocks from other tiers into one.
///
/// It holds no pins and no claims while it waits for slots. So two tiers that wait for each other's
/// slots do not block each other, and a write-back does not wait for a claim here.
pub(crate) struct Load<'a> {
    task: &'a JobTask,
    to: TierId,
}

/// Called with each block that is in the tier, pinned.
pub(crate) type OnReady<'a> = &'a mut (dyn FnMut(usize, PinnedSlot) + Send);

/// A block that this job loads.
struct OwnLoad {
    index: usize,
    /// The place of its slot among those of the part.
    at: usize,
    key: KeyHash,
    claim: HeldClaim,
}

/// A block that is being copied into the tier.
struct Moving {
    own: OwnLoad,
    /// Its slot in the tier.
    slot: u32,
    source: Arc<PinnedSlot>,
    /// Keeps transfers from the slot while the disk fills it.
    hold: SharedHold,
}

impl<'a> Load<'a> {
    pub(crate) const fn new(task: &'a JobTask, to: TierId) -> Self {
        Self { task, to }
    }

    /// Loads blocks, and returns the result of each.
    pub(crate) async fn run(&self, keys: &[KeyHash], ready: OnReady<'_>) -> Vec<BlockResult> {
        let (task, core) = (self.task, &self.task.core);
        let mut results = vec![BlockResult::Absent; keys.len()];
        let tier = core.tiers.get(self.to.index());
        let Some((tier, table)) = tier.and_then(|tier| Some((tier, tier.table(task.group)?)))
        else {
            return results;
        };
        let mut pending: Vec<usize> = (0..keys.len()).collect();
        while !pending.is_empty() {
            let (mut absent, mut others) = (Vec::new(), Vec::new());
            for index in std::mem::take(&mut pending) {
                let Some(&key) = keys.get(index) else { continue };
                match table.pin(key) {
                    Some(pin) => {
                        set(&mut results, index, BlockResult::AlreadyStored);
                        ready(index, pin);
                    }
                    None => absent.push((index, key)),
                }
            }
            while !absent.is_empty() {
                self.load_part(tier, &mut absent, ready, (&mut results, &mut others)).await;
            }
            for (index, claim) in others {
                match task.control.until(claim.wait()).await {
                    Ok(()) => pending.push(index),
                    Err(stopped) => set(&mut results, index, stopped),
                }
            }
        }
        results
    }

    /// Removes the last ones of the absent keys, as many as get slots at once. Claims them, and loads
    /// those that no other job has. Adds the others to a list.
    async fn load_part(
        &self,
        tier: &Tier,
        absent: &mut Vec<(usize, KeyHash)>,
        ready: OnReady<'_>,
        (results, others): (&mut [BlockResult], &mut Vec<(usize, Arc<Claim>)>),
    ) {
        let (task, core) = (self.task, &self.task.core);
        let Some(table) = tier.table(task.group) else { return absent.clear() };
        let taken = table.take_part(absent.len().min(BLOCKS_AT_ONCE), &task.control).await;
        // The head of a prefix comes last, so that its tail is evicted first.
        let count = taken.as_ref().map_or(1, TakenSlots::len);
        let part = absent.split_off(absent.len().saturating_sub(count));
        let mut taken = match taken {
            Ok(taken) => taken,
            Err(result) => {
                return part.iter().for_each(|(index, _)| set(results, *index, result.clone()));
            }
        };
        let mut own = Vec::with_capacity(part.len());
        for (at, (index, key)) in part.into_iter().enumerate() {
            let claim = core.claims.claim(key, ClaimKind::Load);
            // Another job may have loaded it meanwhile.
            if let Some(pin) = table.pin(key) {
                taken.free(at);
                set(results, index, BlockResult::AlreadyStored);
                ready(index, pin);
                continue;
            }
            match claim {
                Ok(claim) => own.push(OwnLoad { index, at, key, claim }),
                Err(claim) => {
                    taken.free(at);
                    others.push((index, claim));
                }
            }
        }
        self.load(tier, (taken, own), ready, results).await;
    }

    async fn load(
        &self,
        tier: &Tier,
        (mut taken, own): (TakenSlots, Vec<OwnLoad>),
        ready: OnReady<'_>,
        results: &mut [BlockResult],
    ) {
        let Some(memory) = tier.blocks(self.task.group) else { return };
        let (mut from_disk, mut from_memory) = (Vec::new(), Vec::new());
        for own in own {
            let Some(slot) = taken.slot(own.at) else { continue };
            let Some((source, is_disk)) = self.find(own.key) else { continue };
            let hold = SharedHold::new(None);
            let mut moving = Moving { own, slot, source: Arc::new(source), hold };
            if !is_disk {
                from_memory.push(moving);
            } else if memory.facts.is_host {
                match memory.hold(slot) {
                    Err(result) => set(results, moving.own.index, result),
                    Ok(hold) => {
                        moving.hold = SharedHold::new(Some(hold));
                        from_disk.push(moving);
                    }
                }
            } else {
                // The host tier has to have it first.
                let host = self.task.core.host_tier(self.task.group);
                let table = host.and_then(|host| host.table(self.task.group));
                let slots = table.map_or(0, |table| to_usize(table.limit().into()));
                let left = BlockResult::NoRoom(NoRoom::LeftHostTier { slots });
                set(results, moving.own.index, left);
            }
        }
        let reads = self.submit(memory, (&taken, &from_disk));
        let moves = from_memory.iter().enumerate();
        let moves = moves.map(|(number, moving)| (number, &moving.source, moving.slot));
        let started = self.task.start_moves(self.task.group, (memory, &taken), moves).await;
        if let Some(reads) = reads {
            self.end_reads((&reads, from_disk), &mut taken, ready, results).await;
        }
        let mut from_memory: Vec<Option<Moving>> = from_memory.into_iter().map(Some).collect();
        for mut copy in started {
            let result = copy.end().await;
            for &number in &copy.indices {
                let Some(moving) = from_memory.get_mut(number).and_then(Option::take) else {
                    continue;
                };
                match &result {
                    Ok(()) => {
                        let checksum = moving.source.block.checksum;
                        self.commit((moving, checksum), &mut taken, ready, results).await;
                    }
                    Err(result) => set(results, moving.own.index, result.clone()),
                }
            }
        }
    }

    /// Commits blocks as they arrive from disk.
    async fn end_reads(
        &self,
        (reads, moving): (&Arrivals, Vec<Moving>),
        taken: &mut TakenSlots,
        ready: OnReady<'_>,
        results: &mut [BlockResult],
    ) {
        let mut moving: Vec<Option<Moving>> = moving.into_iter().map(Some).collect();
        while let Some(arrived) = reads.next().await {
            for (number, result) in arrived {
                let Some(moving) = moving.get_mut(number).and_then(Option::take) else { continue };
                match result {
                    Ok(done) => self.commit((moving, done.checksum), taken, ready, results).await,
                    Err(failure) => self.fail(moving, failure, results).await,
                }
            }
        }
    }

    /// The block in another tier, a slower one first, and whether that is the disk tier.
    fn find(&self, key: KeyHash) -> Option<(PinnedSlot, bool)> {
        let (faster, slower) = self.task.core.tiers.split_at_checked(self.to.index())?;
        slower.iter().skip(1).chain(faster).find_map(|tier| {
            let pin = tier.table(self.task.group)?.pin(key)?;
            Some((pin, tier.is_disk()))
        })
    }

    /// Begins to read blocks from disk. `None` if there are none.
    fn submit(
        &self,
        memory: &TierBlocks,
        (taken, moving): (&TakenSlots, &[Moving]),
    ) -> Option<Arc<Arrivals>> {
        if moving.is_empty() {
            return None;
        }
        let (task, core) = (self.task, &self.task.core);
        let (disk, info) = (core.disk.as_ref()?, core.group(task.group).ok()?);
        let holds: Vec<SharedHold> = moving.iter().map(|moving| moving.hold.clone()).collect();
        let pins: Vec<Arc<PinnedSlot>> =
            moving.iter().map(|moving| Arc::clone(&moving.source)).collect();
        let keeps = (holds, pins, taken.share(), memory.endpoint.clone());
        let block = |moving: &Moving| DiskBlock {
            slot: moving.source.block.slot,
            buffers: memory.buffers(info, moving.slot, moving.source.block.length),
            memory: memory.io_memory(),
            direction: SlabDirection::Read { checksum: moving.source.block.checksum },
        };
        let blocks = moving.iter().map(block);
        // SAFETY: the slots, their holds, the pins and the endpoint are kept until the last request has
        // ended, also after a panic in this task. No other job uses the slots until then.
        #[expect(unsafe_code, reason = "the memory is named by addresses")]
        let arrivals = unsafe { task.submit_blocks(disk, task.group, Arc::new(keeps), blocks) };
        Some(arrivals)
    }

    async fn commit(
        &self,
        (moving, checksum): (Moving, u64),
        taken: &mut TakenSlots,
        ready: OnReady<'_>,
        results: &mut [BlockResult],
    ) {
        let core = &self.task.core;
        let Moving { own, source, hold, .. } = moving;
        // Transfers may read the block as soon as it is in the index.
        hold.release();
        let name = core.names.get(own.key);
        let length = source.block.length;
        let name = (own.key, name.as_deref().unwrap_or_default());
        let block = WrittenBlock::copy(&source, name, &own.claim, (checksum, false));
        let mut places = [Place::pinned(self.to, taken, own.at)];
        let committed = core.commit(&block, &mut places).await;
        let [place] = places;
        // Without a pin it is not in the tier, and no job learns that it is ready.
        let (result, pin) = match (committed, place.pin) {
            (Ok(Committed::Stored), Some(pin)) => (BlockResult::Done { bytes: length }, Some(pin)),
            (Ok(_), _) => (BlockResult::Absent, None),
            (Err(error), _) => (BlockResult::failed(error), None),
        };
        if let Some(tier) = core.tiers.get(source.table.tier.index()) {
            tier.counters.read(length);
        }
        set(results, own.index, result);
        if let Some(pin) = pin {
            ready(own.index, pin);
        }
    }

    async fn fail(&self, moving: Moving, failure: SlabFailure, results: &mut [BlockResult]) {
        if let Some(disk) = self.task.core.tiers.last() {
            disk.counters.read_failed(&failure);
        }
        self.task.core.drop_damaged(moving.own.key, &moving.source, &failure).await;
        moving.hold.release();
        set(results, moving.own.index, not_read(failure));
    }
}

/// Promotes blocks: to a device tier by way of the host tier.
pub(crate) async fn promote(task: &JobTask, keys: &Keys, tier: TierId) -> Vec<BlockResult> {
    let core = &task.core;
    let is_host = core.tiers.get(tier.index()).is_some_and(|tier| tier.is_host(task.group));
    let host = core.host_tier(task.group).map(|tier| tier.id);
    let hops: Vec<TierId> = match host {
        Some(host) if !is_host && host > tier => vec![host, tier],
        _ => vec![tier],
    };
    let is_between =
        |result: &BlockResult| matches!(result, BlockResult::NoRoom(NoRoom::LeftHostTier { .. }));
    let mut results = vec![BlockResult::Absent; keys.len()];
    let mut pending: Vec<usize> = (0..keys.len()).collect();
    for _ in 0..MOST_ROUNDS {
        for &hop in &hops {
            let hashes: Vec<KeyHash> = pending.iter().map(|&index| keys.hash(index)).collect();
            let loaded = Load::new(task, hop).run(&hashes, &mut |_, pin| drop(pin)).await;
            for (&index, result) in pending.iter().zip(loaded) {
                let is_failed = results.get(index).is_some_and(|before| !before.is_ok());
                // Then the first hop says why the block was not there for the second one.
                if !(hop == tier && hops.len() > 1 && is_failed && is_between(&result)) {
                    set(&mut results, index, result);
                }
            }
        }
        pending.retain(|&index| results.get(index).is_some_and(is_between));
        if pending.is_empty() {
            break;
        }
    }
    results
}
