//! When dirty blocks are written to slower tiers: if a job lacks slots, by a sync, and in a close.

use std::collections::HashSet;
use std::sync::Arc;
use std::thread;
use std::time::Instant;

use terrane_core::convert::to_usize;

use crate::KeyHash;
use crate::slab::Priority;
use crate::store::job::request::Keys;
use crate::store::job::result::{BlockResult, NoRoom};
use crate::store::job::task::{JobTask, begin_internal, start};
use crate::store::put::write_down::{BLOCKS_AT_ONCE, WriteDown};
use crate::store::query::presence::TierId;
use crate::store::shared::StoreCore;
use crate::store::slot_table::waiting::BETWEEN_CHECKS;
use crate::store::slot_table::{PinnedSlot, SlotTable};
use crate::store::upkeep::maintenance::Request;

/// Keys that are looked up together: their cache misses overlap.
const KEYS_AT_ONCE: usize = 64;

/// A write-back writes this many blocks or more, if there are as many.
const LEAST_AT_ONCE: usize = 8;

/// The most attempts of a durable put. The disk tier may evict blocks of the job for others of it.
const MOST_ROUNDS: usize = 4;

/// Makes the blocks of a put durable: those that are not on disk are written there. A block that left
/// the disk tier meanwhile is [`Absent`](BlockResult::Absent).
pub(crate) async fn make_durable(task: &JobTask, keys: &Keys, results: &mut [Option<BlockResult>]) {
    let on_disk = task.core.tiers.last().filter(|tier| tier.is_disk());
    let Some(on_disk) = on_disk.and_then(|tier| tier.table(task.group)) else { return };
    let stored =
        |&index: &usize| matches!(results.get(index), Some(Some(result)) if result.is_ok());
    let indices: Vec<usize> = (0..keys.len()).filter(stored).collect();
    let hashes: Vec<KeyHash> = indices.iter().map(|&index| keys.hash(index)).collect();
    let is_stored = |key: &KeyHash| on_disk.index.get(*key).is_some();
    let requested = hashes.iter().collect::<HashSet<_>>().len();
    let slots = to_usize(on_disk.limit().into());
    let mut written = vec![BlockResult::AlreadyStored; hashes.len()];
    // Nothing is evicted for blocks that cannot fit.
    for _ in 0..if requested > slots { 0 } else { MOST_ROUNDS } {
        written = WriteDown::new(task, TierId::new(0)).keys(hashes.clone()).await;
        // A part of the job may have evicted an earlier one.
        if hashes.iter().all(is_stored) || !written.iter().all(BlockResult::is_ok) {
            break;
        }
    }
    for (key, result) in hashes.iter().zip(&mut written) {
        if result.is_ok() && !is_stored(key) {
            let too_small = NoRoom::TierTooSmall { requested, slots };
            let is_too_small = requested > slots;
            *result =
                if is_too_small { BlockResult::NoRoom(too_small) } else { BlockResult::Absent };
        }
    }
    for &index in &indices {
        // A job that has just added the block to the index appends its record under this lock.
        drop(task.core.order.lock(keys.hash(index)));
    }
    let refused = task.core.refuses_writes().map(BlockResult::Failed);
    let synced = match refused {
        Some(refused) => Err(refused),
        None => sync_disk(task, Request::Sync).await,
    };
    for (index, written) in indices.into_iter().zip(written) {
        let result = if written.is_ok() { synced.as_ref().err() } else { Some(&written) };
        if let (Some(result), Some(slot)) = (result, results.get_mut(index)) {
            *slot = Some(result.clone());
        }
    }
}

/// Waits for a sync: of everything, or of the records.
pub(crate) async fn sync_disk(task: &JobTask, request: Request) -> Result<(), BlockResult> {
    let synced = task.control.until(task.core.maintenance.request(request)).await;
    synced?.map_err(BlockResult::Failed)
}

/// Writes all blocks that no slower tier has to the slowest tier, and syncs it.
pub(crate) async fn sync(task: &JobTask) -> BlockResult {
    let core = &task.core;
    let mut result = BlockResult::Done { bytes: 0 };
    for tier in &core.tiers {
        for table in &tier.tables {
            let (mut lacking, evicted) = core.lacking_keys(table);
            match core.exceeds_disk(table) {
                // Blocks that the disk tier evicted would evict each other again.
                Some(too_small) => result = BlockResult::NoRoom(too_small),
                None => lacking.extend(evicted),
            }
            for keys in lacking.chunks(BLOCKS_AT_ONCE) {
                let pin = |&key: &KeyHash| table.pin(key).map(|pin| (key, pin));
                let blocks: Vec<_> = keys.iter().filter_map(pin).collect();
                let written = WriteDown::new(task, tier.id).blocks(blocks).await;
                if let Some(failed) = written.into_iter().find(|result| !result.is_ok()) {
                    result = failed;
                }
            }
        }
    }
    if core.disk.is_some()
        && let Err(failed) = sync_disk(task, Request::Sync).await
    {
        return failed;
    }
    result
}

/// Makes its owner the only job that writes the dirty blocks of a slot table back.
struct WriteBackTurn {
    core: Arc<StoreCore>,
    table: Arc<SlotTable>,
    /// The blocks that the job writes. They are in no list meanwhile.
    blocks: Vec<(KeyHash, u32)>,
}

impl WriteBackTurn {
    /// `None` if another job has it.
    fn take(core: &Arc<StoreCore>, table: &Arc<SlotTable>) -> Option<Self> {
        let (core, table) = (Arc::clone(core), Arc::clone(table));
        table.begin_write_back().then(|| Self { core, table, blocks: Vec::new() })
    }
}

impl Drop for WriteBackTurn {
    fn drop(&mut self) {
        self.table.end_write_back();
        if !thread::panicking() {
            return;
        }
        let (table, blocks) = (Arc::clone(&self.table), std::mem::take(&mut self.blocks));
        // Not during the panic: another write-back may begin.
        self.core.executor.call(move || {
            // A copy engine panicked. The blocks count as those that cannot be written.
            for (key, slot) in blocks {
                let pin = table.pin(key).filter(|pin| pin.block.slot == slot);
                if let Some(pin) = pin.filter(|pin| table.is_pin_dirty(pin)) {
                    table.allow_loss(pin.block.slot);
                }
            }
            table.retry();
        });
    }
}

impl StoreCore {
    /// Begins to write dirty blocks of a slot table to the tier below, because a job lacks this many slots.
    pub(crate) fn write_back(self: &Arc<Self>, tier: TierId, group: u16, lacks: usize) {
        let found = self.tiers.get(tier.index());
        let Some(table) = found.and_then(|found| found.table(group)).cloned() else { return };
        let Some(mut turn) = WriteBackTurn::take(self, &table) else { return };
        let priority = table.waiting_priority().unwrap_or(Priority::Low);
        let Some((_job, task, end)) = begin_internal(self, group, priority) else { return };
        let most = lacks.clamp(LEAST_AT_ONCE, BLOCKS_AT_ONCE);
        self.executor.spawn(async move {
            loop {
                let blocks = table.take_dirty(most);
                if !blocks.is_empty() {
                    turn.blocks = blocks.iter().map(|(key, pin)| (*key, pin.block.slot)).collect();
                    let results = WriteDown::internal(&task, tier).blocks(blocks).await;
                    let has_no_room = results.iter().any(|it| matches!(it, BlockResult::NoRoom(_)));
                    if has_no_room && WriteDown::internal(&task, tier).may_have_room_later(group) {
                        // Leases end in time. An orphaned copy may never end.
                        if results.iter().any(is_too_small) {
                            table.refuse_waiters();
                        }
                        let _ = task.control.pause(BETWEEN_CHECKS).await;
                    }
                    drop(turn);
                    // No waiting job starts the write of blocks beyond the limit: go on with those.
                    let is_stopped = task.control.stopped().is_some();
                    if !is_stopped
                        && table.has_dirty_beyond()
                        && let Some(next) = WriteBackTurn::take(&task.core, &table)
                    {
                        turn = next;
                        table.retry_for_waiters();
                        continue;
                    }
                    end.finish(results);
                    return table.retry();
                }
                drop(turn);
                // A job whose block became dirty before this end has left the write-back to this one.
                // Blocks that other jobs write are tried again when they are clean.
                let next = table.has_dirty().then(|| WriteBackTurn::take(&task.core, &table));
                let Some(next) = next.flatten() else { return end.finish(Vec::new()) };
                turn = next;
            }
        });
    }

    /// Begins to write blocks back before a job lacks room.
    pub(crate) fn write_back_early(self: &Arc<Self>, tier: TierId, group: u16) {
        let found = self.tiers.get(tier.index());
        let is_early = |table: &Arc<SlotTable>| table.is_mostly_dirty() || table.has_dirty_beyond();
        if found.and_then(|found| found.table(group)).is_some_and(is_early) {
            self.write_back(tier, group, BLOCKS_AT_ONCE);
        }
    }

    /// Writes one block to the tier below, as it was used often enough.
    pub(crate) fn write_used(self: &Arc<Self>, tier: TierId, key: KeyHash, pin: PinnedSlot) {
        let group = pin.table.group;
        let Some(begun) = begin_internal(self, group, Priority::Low) else { return };
        let blocks = vec![(key, pin)];
        let _job = start(begun, move |task| async move {
            WriteDown::internal(&task, tier).blocks(blocks).await
        });
    }

    /// The keys of the blocks of a slot table that no slower tier has: those that were not written, and those
    /// that the slower tiers evicted.
    fn lacking_keys(&self, table: &SlotTable) -> (Vec<KeyHash>, Vec<KeyHash>) {
        let (dirty, clean) = table.keys_by_mark();
        if self.disk.is_none() {
            // Memory need not have a block twice: it does not outlive the store.
            return (dirty, Vec::new());
        }
        let slower = self.tiers.get(table.tier.index() + 1..).unwrap_or_default();
        let slower = || slower.iter().filter_map(|tier| tier.table(table.group));
        let mut evicted = Vec::new();
        for keys in clean.chunks(KEYS_AT_ONCE) {
            slower().for_each(|table| table.index.prefetch(keys.iter().copied()));
            let is_lacking = |key: &KeyHash| slower().all(|table| table.index.get(*key).is_none());
            evicted.extend(keys.iter().copied().filter(is_lacking));
        }
        (dirty, evicted)
    }

    /// The number of blocks that no slower tier has.
    pub(crate) fn dirty_blocks(&self) -> usize {
        let tables = self.tiers.iter().flat_map(|tier| &tier.tables);
        let lacking = tables.map(|table| self.lacking_keys(table));
        lacking.map(|(dirty, evicted)| dirty.len() + evicted.len()).sum()
    }

    /// Why the disk tier cannot have all blocks of a slot table, if it is smaller.
    fn exceeds_disk(&self, table: &SlotTable) -> Option<NoRoom> {
        let disk = self.tiers.last().filter(|tier| tier.is_disk())?;
        let slots = to_usize(disk.table(table.group)?.limit().into());
        let requested = table.index.len();
        (requested > slots).then_some(NoRoom::TierTooSmall { requested, slots })
    }

    /// Writes all dirty blocks to the slowest tier and syncs it, until the deadline.
    pub(crate) fn write_all_back(self: &Arc<Self>, deadline: Instant) {
        if self.disk.is_none() {
            return;
        }
        let Some(begun) = begin_internal(self, 0, Priority::Normal) else { return };
        let job = start(begun, |task| async move { vec![sync(&task).await] });
        if let Err(job) = job.wait_until(deadline) {
            job.cancel();
        }
    }
}

fn is_too_small(result: &BlockResult) -> bool {
    matches!(result, BlockResult::NoRoom(NoRoom::TierTooSmall { .. }))
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc;
    use std::time::Duration;

    use super::*;
    use crate::store::open::builder::tests::of_16_blocks;

    #[test]
    fn a_durable_put_waits_for_the_record_of_a_block_that_another_put_stores() {
        let directory = tempfile::tempdir().unwrap();
        let (store, _) = of_16_blocks(directory.path()).open().unwrap();
        let core = Arc::clone(store.core());
        let keys = Keys::new(&core, 0, &[b"key"]).unwrap();
        let (done, is_done) = mpsc::channel();
        // The other put is between the index and its record.
        let order = core.order.lock(keys.hash(0));
        thread::scope(|scope| {
            let other = &core;
            scope.spawn(move || {
                let (_job, task, end) = begin_internal(other, 0, Priority::Normal).unwrap();
                other.executor.spawn(async move {
                    make_durable(&task, &keys, &mut [Some(BlockResult::AlreadyStored)]).await;
                    end.finish(Vec::new());
                    done.send(()).unwrap();
                });
            });
            assert!(is_done.recv_timeout(Duration::from_millis(200)).is_err());
            drop(order);
            is_done.recv_timeout(Duration::from_secs(60)).unwrap();
        });
        drop(core);
        assert_eq!(store.close(Instant::now()).left, 0);
    }
}
