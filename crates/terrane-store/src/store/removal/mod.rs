//! Removals: of keys, of damaged blocks, of the last blocks of slots, and of everything.
//! `removed_keys` lets the puts in flight learn of them, and `recent` the queries.

pub(crate) mod recent;
pub(crate) mod removed_keys;

use crate::KeyHash;
use crate::disk::{CatalogError, CheckpointWriter, PutRecord};
use crate::error::StoreError;
use crate::slab::SlabFailure;
use crate::store::job::request::Keys;
use crate::store::job::result::BlockResult;
use crate::store::job::task::JobTask;
use crate::store::put::write_back::sync_disk;
use crate::store::query::event::StoreEventKind;
use crate::store::shared::StoreCore;
use crate::store::slot_table::{PinnedSlot, SlotTable};
use crate::store::tier::{DiskParts, count};
use crate::store::upkeep::maintenance::Request;

/// Removes keys, and waits until their tombstones are durable.
pub(crate) async fn remove(task: &JobTask, keys: &Keys) -> Vec<BlockResult> {
    let core = &task.core;
    let mut results = Vec::with_capacity(keys.len());
    for &key in &keys.hashes {
        results.push(core.remove_key(task.group, key).await);
    }
    if core.disk.is_none() {
        return results;
    }
    let synced = sync_disk(task, Request::SyncRecords).await;
    synced.map_or_else(|failed| vec![failed; keys.len()], |()| results)
}

/// Removes everything.
pub(crate) async fn clear(task: &JobTask) -> BlockResult {
    match task.control.until(task.core.maintenance.request(Request::Clear)).await {
        Ok(Ok(())) => BlockResult::Done { bytes: 0 },
        Ok(Err(error)) => BlockResult::Failed(error),
        Err(stopped) => stopped,
    }
}

impl StoreCore {
    async fn remove_key(&self, group: u16, key: KeyHash) -> BlockResult {
        let entry = self.gate.enter().await;
        let order = self.order.lock(key);
        let tables = || self.tiers.iter().filter_map(|tier| tier.table(group));
        let is_read_only = self.disk.as_ref().is_some_and(|disk| disk.is_read_only);
        let has_disk = || tables().next_back().is_some_and(|table| table.index.get(key).is_some());
        if is_read_only && has_disk() {
            // The next opening would find it again, so it stays in all tiers.
            return BlockResult::failed(StoreError::ReadOnly);
        }
        self.removed_keys.insert(key);
        self.claims.remove(key);
        let removed = tables().fold(None, |found, table| table.remove(key).or(found));
        let appended = match &self.disk {
            Some(disk) if disk.is_read_only => Ok(()),
            // Also for a key that no tier has: an older record of it may be in the journal.
            Some(disk) => disk.catalog.append_removes(&[key]).map_err(StoreError::from),
            None => Ok(()),
        };
        let name = removed.as_ref().map(|_| self.key_name(key));
        self.names.remove(key);
        self.recent.insert(key, StoreEventKind::Removed);
        if name.is_some() {
            self.publish_named(StoreEventKind::Removed, None, group, name);
        }
        drop(order);
        drop(entry);
        tables().for_each(|table| table.retry_for_waiters());
        match (appended, removed) {
            (Err(error), _) => BlockResult::failed(error),
            (Ok(()), Some(block)) => BlockResult::Done { bytes: block.length },
            (Ok(()), None) => BlockResult::Absent,
        }
    }

    /// Drops a block whose read failed, if the failure is of its bytes or of their place on the
    /// device.
    pub(crate) async fn drop_damaged(&self, key: KeyHash, pin: &PinnedSlot, failure: &SlabFailure) {
        let (event, sums) = match failure {
            SlabFailure::Corrupt { expected, found } => {
                (StoreEventKind::Corrupt, Some((expected, found)))
            }
            _ if failure.is_of_place() => (StoreEventKind::Unreadable, None),
            _ => return,
        };
        tracing::warn!(%key, slot = pin.block.slot, ?event, ?sums, "a block on disk is damaged");
        let is_corrupt = event == StoreEventKind::Corrupt;
        if is_corrupt {
            count(&self.counters.missed_corrupt, 1);
        }
        let entry = self.gate.enter().await;
        let order = self.order.lock(key);
        let table = &pin.table;
        let is_dropped = table.remove_block(key, &pin.block);
        // A read-only tier writes nothing, and finds the damage again after the next opening. A block that
        // cannot be read is not removed for good: the device may be back after the next opening.
        let is_for_good = is_dropped && is_corrupt;
        let disk = self.disk.as_ref().filter(|disk| is_for_good && !disk.is_read_only);
        if let Some(disk) = disk {
            let _ = disk.catalog.append_removes(&[key]);
        }
        if is_dropped {
            self.recent.insert(key, event);
            self.publish(event, Some(table.tier), table.group, Some(key));
            if table.note_damage(pin, is_corrupt) {
                let event = StoreEventKind::SlotQuarantined;
                self.publish(event, Some(table.tier), table.group, Some(key));
            }
            self.forget_name_in_order(table.group, key);
        }
        drop(order);
        drop(entry);
        table.retry_for_waiters();
    }

    /// Records the removal of the last block of a slot, because its bytes are lost. An eviction
    /// writes no record. No block and no other job has the slot. If the key's block is in another
    /// slot by now, a later record is in force, and none is written.
    pub(crate) fn remove_last(
        &self,
        table: &SlotTable,
        disk: &DiskParts,
        slot: u32,
    ) -> Result<(), StoreError> {
        let Some(key) = table.index.last_key(slot) else { return Ok(()) };
        let order = self.order.lock(key);
        if table.index.get(key).is_none() {
            disk.catalog.append_removes(&[key])?;
        }
        table.index.forget_last_key(slot);
        drop(order);
        self.recorded();
        Ok(())
    }

    /// Removes everything, on the sync thread.
    pub(crate) fn clear_now(&self) -> Result<(), StoreError> {
        if self.disk.as_ref().is_some_and(|disk| disk.is_read_only) {
            return Err(StoreError::ReadOnly);
        }
        let closed = self.gate.close();
        let tables = || self.tiers.iter().flat_map(|tier| &tier.tables);
        let mut removed = Vec::new();
        for table in tables() {
            let mut keys = Vec::new();
            table.index.for_each(|key, _| keys.push(key));
            for &key in &keys {
                table.remove(key);
            }
            removed.extend(keys);
        }
        let cleared = self.disk.as_ref().map_or(Ok(()), |disk| disk.catalog.clear());
        // Before the gate opens: a block that is put later keeps its name.
        for key in removed {
            self.names.remove(key);
            self.recent.insert(key, StoreEventKind::Removed);
        }
        self.publish(StoreEventKind::Cleared, None, 0, None);
        drop(closed);
        tables().for_each(|table| table.retry_for_waiters());
        Ok(cleared?)
    }

    /// Adds every block of the disk tier to a checkpoint. It ends early when a close has no time left.
    pub(crate) fn add_live(&self, writer: &mut CheckpointWriter<'_>) -> Result<(), CatalogError> {
        let Some(tier) = self.tiers.last() else { return Ok(()) };
        let mut result = Ok(());
        for table in &tier.tables {
            table.index.for_each(|key, block| {
                if result.is_err() {
                    return;
                }
                if self.maintenance.is_overdue() {
                    result = Err(CatalogError::CheckpointAbandoned);
                    return;
                }
                let name = self.names.get(key);
                result = writer.add(&PutRecord {
                    key_hash: key,
                    group: table.group,
                    slot: block.slot,
                    length: block.length.into(),
                    checksum: block.checksum,
                    key: name.as_deref().unwrap_or_default(),
                });
            });
        }
        result
    }
}

#[cfg(test)]
mod tests {
    use std::ptr::NonNull;
    use std::time::{Duration, Instant};

    use super::*;
    use crate::index::StoredBlock;
    use crate::store::job::blocks::{Blocks, Spans};
    use crate::store::job::options::JobOptions;
    use crate::store::open::builder::tests::of_16_blocks;

    #[test]
    fn only_a_slot_that_requests_may_have_written_loses_its_evicted_block() {
        for is_written in [false, true] {
            let directory = tempfile::tempdir().unwrap();
            let open = || of_16_blocks(directory.path()).open().unwrap();
            let (store, _) = open();
            let source = [7_u8; 4096];
            let mut spans = Spans::new();
            spans.add(NonNull::from(&source).cast(), source.len());
            // SAFETY: the source outlives the wait, and nothing writes it.
            #[expect(unsafe_code, reason = "the memory is named by addresses")]
            let blocks = unsafe { Blocks::spans(spans) };
            let put = store.put(&[b"evicted"], blocks, JobOptions::new(), ()).unwrap();
            assert!(put.wait().is_ok());
            let taken = store.core().tiers[0].tables[0].try_take(16).unwrap();
            assert_eq!(store.prefix(0, &[b"evicted"]), 0);
            let requests = is_written.then(|| taken.share());
            drop((taken, requests));
            assert_eq!(store.close(Instant::now() + Duration::from_secs(60)).left, 0);
            drop(store);
            assert_eq!(open().1.found, u64::from(!is_written), "{is_written}");
        }
    }

    #[test]
    fn a_close_without_time_ends_a_checkpoint_and_the_older_files_stay_valid() {
        let directory = tempfile::tempdir().unwrap();
        let open = || of_16_blocks(directory.path()).open().unwrap();
        let (store, _) = open();
        let core = store.core();
        let disk = core.disk.as_ref().unwrap();
        let key_hash = core.hasher.hash(b"key").unwrap();
        let (slot, length, checksum) = (0, 4096, 0);
        core.tiers[0].tables[0].insert(
            key_hash,
            &StoredBlock { slot, length, checksum },
            false,
            false,
        );
        let length = length.into();
        let record = PutRecord { key_hash, group: 0, slot, length, checksum, key: b"key" };
        disk.catalog.append_puts(&[record]).unwrap();
        core.maintenance.stop(Instant::now());
        let written = disk.catalog.checkpoint(|writer| core.add_live(writer));
        assert_eq!(written, Err(CatalogError::CheckpointAbandoned));
        drop(store);
        let folder = directory.path().join("model");
        let names = std::fs::read_dir(&folder).unwrap().map(|entry| entry.unwrap().file_name());
        let mut names: Vec<_> = names.filter_map(|name| name.into_string().ok()).collect();
        names.retain(|name| name.starts_with("journal") || name.starts_with("checkpoint"));
        assert_eq!(names, ["journal.1"]);
        assert_eq!(open().1.found, 1);
    }
}
