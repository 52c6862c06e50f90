//! The sync thread: its requests (`maintenance`), and its work: syncs, clears, checkpoints, freed
//! disk blocks, exports of metrics.

pub(crate) mod maintenance;

use std::fs;
use std::path::Path;
use std::sync::Arc;
use std::thread::{self, JoinHandle};
use std::time::Duration;

use terrane_core::convert::to_u64;
use terrane_core::sync::lock;

use crate::disk::CatalogError;
use crate::error::StoreError;
use crate::store::Store;
use crate::store::shared::StoreCore;
use crate::store::slot_table::{Retired, SlotTable};
use crate::store::tier::DiskParts;
use crate::store::upkeep::maintenance::{Answer, Request, Step};

/// A journal of fewer bytes is not replaced by a checkpoint.
const SMALL_JOURNAL: u64 = 8 << 20;

/// The bytes of a record of a block in a checkpoint, without the rest of a long key.
const RECORD_BYTES: u64 = 128;

impl Store {
    /// Writes the snapshot as OpenMetrics text to `path` at each interval, and replaces the file with
    /// each. It stops when the store closes.
    ///
    /// # Errors
    ///
    /// [`StoreError::Export`] if the first file cannot be written, [`StoreError::Closed`] and
    /// [`StoreError::Forked`].
    pub fn export_metrics(&self, path: &Path, interval: Duration) -> Result<(), StoreError> {
        let core = self.core();
        core.check()?;
        core.write_metrics(path)?;
        core.maintenance.export(path, interval);
        Ok(())
    }
}

/// The results of a sync.
struct Synced {
    payloads: Answer,
    records: Answer,
}

impl StoreCore {
    /// Starts the sync thread.
    pub(crate) fn start_upkeep(self: &Arc<Self>) -> Result<JoinHandle<()>, StoreError> {
        let core = Arc::clone(self);
        let name = "terrane-store-sync";
        let thread = thread::Builder::new().name(name.to_owned());
        let started = thread.spawn(move || core.run_upkeep());
        started.map_err(|source| StoreError::Thread { name, source })
    }

    fn run_upkeep(&self) {
        loop {
            match self.maintenance.next() {
                Step::Syncs(replies) => {
                    let Synced { payloads, records } = self.sync_now();
                    for (request, reply) in replies {
                        let is_all = request == Request::Sync;
                        let answer = if is_all { payloads.clone() } else { Ok(()) };
                        reply.send(answer.and(records.clone()));
                    }
                }
                Step::Clear(reply) => reply.send(self.clear_now().map_err(Arc::new)),
                Step::Checkpoint => self.checkpoint_now(),
                Step::Punch => self.punch_now(),
                Step::Export(path) => {
                    if let Err(error) = self.write_metrics(&path) {
                        tracing::warn!(%error, "metrics were not exported");
                    }
                }
                Step::Stop => return,
            }
            self.report_health();
        }
    }

    /// Asks for a checkpoint if the journal is long. Called after a record was added.
    pub(crate) fn recorded(&self) {
        if !self.maintenance.recorded() {
            return;
        }
        let Some(disk) = &self.disk else { return };
        let Ok(snapshot) = disk.catalog.snapshot() else { return };
        let tables = self.tiers.last().map(|tier| tier.tables.as_slice()).unwrap_or_default();
        let blocks: usize = tables.iter().map(|table| table.index.len()).sum();
        if snapshot.journal_bytes > SMALL_JOURNAL.max(2 * RECORD_BYTES * to_u64(blocks)) {
            self.maintenance.request_checkpoint();
        }
    }

    /// Syncs the payloads, then the records: also after a failure, since removals have no payload. A
    /// block whose bytes did not reach the disk fails its checksum.
    fn sync_now(&self) -> Synced {
        let Some(disk) = &self.disk else { return Synced { payloads: Ok(()), records: Ok(()) } };
        let payloads = disk.slabs.sync().map_err(Arc::new);
        let records = disk.catalog.sync().map_err(|error| Arc::new(error.into()));
        Synced { payloads, records }
    }

    fn checkpoint_now(&self) {
        let Some(disk) = &self.disk else { return };
        match disk.catalog.checkpoint(|writer| self.add_live(writer)) {
            Ok(report) => tracing::debug!(?report, "checkpoint written"),
            Err(CatalogError::CheckpointAbandoned) => {}
            Err(error) => tracing::warn!(%error, "no checkpoint was written"),
        }
    }

    /// Frees the disk blocks of slots beyond the limit of the disk tier.
    fn punch_now(&self) {
        let Some(disk) = self.disk.as_ref().filter(|_| self.refuses_writes().is_none()) else {
            return;
        };
        // Such a slot stays unused as long as the tier does not grow.
        let resizing = lock(&self.resizing);
        let tables = self.disk_tables();
        let removed = tables.map(|table| Ok((table, self.remove_retired(table, disk)?)));
        let removed: Result<Vec<_>, StoreError> = removed.collect();
        drop(resizing);
        // A crash must not bring the records back without the bytes.
        let synced = removed.map_err(Arc::new).and_then(|removed| {
            self.sync_now().records?;
            Ok(removed)
        });
        let removed = match synced {
            Ok(removed) => removed,
            Err(error) => {
                tracing::debug!(%error, "disk blocks of a smaller tier stay reserved");
                return;
            }
        };
        let resizing = lock(&self.resizing);
        // Not those that were returned during the sync: a crash may bring their records back.
        let punched = removed.into_iter().map(|(table, slots)| table.punch(&disk.slabs, slots));
        let errors: Vec<_> = punched.filter_map(Result::err).collect();
        // A subscriber of the trace may resize the store.
        drop(resizing);
        for error in errors {
            // Without holes in files, the disk blocks stay reserved.
            tracing::debug!(%error, "disk blocks of a smaller tier stay reserved");
        }
    }

    fn disk_tables(&self) -> impl Iterator<Item = &Arc<SlotTable>> {
        self.tiers.last().into_iter().flat_map(|tier| &tier.tables)
    }

    /// Records that the last blocks of the retired slots are gone, and returns these slots.
    fn remove_retired(&self, table: &SlotTable, disk: &DiskParts) -> Result<Retired, StoreError> {
        let retired = table.retired();
        retired.slots.iter().try_for_each(|&slot| self.remove_last(table, disk, slot))?;
        Ok(retired)
    }

    /// Writes the file aside and renames it, so that a reader sees a whole one.
    fn write_metrics(&self, path: &Path) -> Result<(), StoreError> {
        let mut text = String::new();
        // Writing to a string does not fail.
        let _ = self.snapshot().write_openmetrics(&mut text);
        let mut aside = path.as_os_str().to_owned();
        aside.push(".new");
        let written = fs::write(&aside, text).and_then(|()| fs::rename(&aside, path));
        written.map_err(|source| StoreError::Export { path: path.to_owned(), source })
    }
}

#[cfg(test)]
mod tests {
    use std::ptr::NonNull;
    use std::time::Instant;

    use terrane_testkit::needs::or_skipped;
    use terrane_testkit::process::{forbid, in_child};

    use super::*;
    use crate::store::job::blocks::{Blocks, Spans};
    use crate::store::job::options::JobOptions;
    use crate::store::open::builder::tests::of_16_blocks;

    #[test]
    fn a_removal_becomes_durable_after_a_failed_sync_of_the_slabs() {
        const TEST: &str = "store::upkeep::tests::\
                            a_removal_becomes_durable_after_a_failed_sync_of_the_slabs";
        in_child(TEST, || {
            let directory = tempfile::tempdir().unwrap();
            let open = || of_16_blocks(directory.path()).open().unwrap();
            let (store, _) = open();
            let put = |key: &[u8]| {
                let mut block = vec![7_u8; 4096];
                let mut spans = Spans::new();
                spans.add(NonNull::from(&mut block[..]).cast(), block.len());
                // SAFETY: the job gets the block as its guard.
                #[expect(unsafe_code, reason = "the memory is named by addresses")]
                let source = unsafe { Blocks::spans(spans) };
                store.put(&[key], source, JobOptions::new(), block).unwrap().wait()
            };
            assert!(put(b"first").is_ok() && store.sync().unwrap().wait().is_ok());
            assert!(put(b"second").is_ok());
            let disk = store.core().disk.as_ref().unwrap();
            let failed = thread::scope(|scope| {
                let sync = || forbid(&[libc::SYS_fdatasync], libc::EIO).map(|()| disk.slabs.sync());
                scope.spawn(sync).join().unwrap()
            });
            let Some(failed) = or_skipped(TEST, failed.map_err(Into::into)) else { return };
            assert!(matches!(failed, Err(StoreError::SyncFailed { .. })), "{failed:?}");
            assert!(!store.sync().unwrap().wait().is_ok());
            let next = disk.catalog.snapshot().unwrap().next_sequence;
            let outcome = store.remove(0, &[b"first"]).unwrap().wait();
            assert!(outcome.is_ok(), "{outcome:?}");
            assert!(disk.catalog.snapshot().unwrap().durable >= next);
            // An outcome arrives shortly before its job has left the store.
            assert_eq!(store.close(Instant::now() + Duration::from_secs(10)).left, 0);
            drop(store);
            assert_eq!(open().0.prefix(0, &[b"first"]), 0);
        });
    }
    #[test]
    fn a_slot_that_is_returned_after_its_tier_shrank_is_not_punched_with_those_before_it() {
        let directory = tempfile::tempdir().unwrap();
        let (store, _) = of_16_blocks(directory.path()).open().unwrap();
        let core = store.core();
        let disk = core.disk.as_ref().unwrap();
        let table = &core.tiers[0].tables[0];
        let taken = table.try_take(1).unwrap();
        let slot = taken.slot(0).unwrap();
        table.set_limit(0);
        let before = core.remove_retired(table, disk).unwrap();
        assert_eq!(before.slots.len(), 15);
        // The sync runs now, and knows nothing of the removal for this slot.
        drop(taken);
        assert!(table.retired().slots.contains(&slot));
        let punched = table.still_retired(before);
        assert!(punched.len() == 15 && !punched.contains(&slot), "{punched:?}");
        // Slots that a larger tier had in between may have got blocks.
        let before = core.remove_retired(table, disk).unwrap();
        table.set_limit(16);
        table.set_limit(0);
        assert!(table.still_retired(before).is_empty());
    }
}
