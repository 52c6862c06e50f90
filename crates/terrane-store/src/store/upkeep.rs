//! The thread that makes blocks durable: syncs, clears, checkpoints, exports of metrics.

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
use crate::store::maintenance::Step;
use crate::store::room::Room;
use crate::store::shared::StoreCore;
use crate::store::tier::DiskParts;

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
                    let answer = self.sync_now().map_err(Arc::new);
                    replies.iter().for_each(|reply| reply.send(answer.clone()));
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
        let rooms = self.tiers.last().map(|tier| tier.rooms.as_slice()).unwrap_or_default();
        let blocks: usize = rooms.iter().map(|room| room.index.len()).sum();
        if snapshot.journal_bytes > SMALL_JOURNAL.max(2 * RECORD_BYTES * to_u64(blocks)) {
            self.maintenance.request_checkpoint();
        }
    }

    /// Syncs the payloads, then the records.
    fn sync_now(&self) -> Result<(), StoreError> {
        let Some(disk) = &self.disk else { return Ok(()) };
        disk.slabs.sync()?;
        Ok(disk.catalog.sync()?)
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
        let turn = lock(&self.resizing);
        let removed = self.disk_rooms().try_for_each(|room| self.remove_retired(room, disk));
        drop(turn);
        // A crash must not bring the records back without the bytes.
        if let Err(error) = removed.and_then(|()| self.sync_now()) {
            tracing::debug!(%error, "disk blocks of a smaller tier stay reserved");
            return;
        }
        let turn = lock(&self.resizing);
        let errors: Vec<_> =
            self.disk_rooms().filter_map(|room| room.punch(&disk.slabs).err()).collect();
        // A subscriber of the trace may resize the store.
        drop(turn);
        for error in errors {
            // Without holes in files, the disk blocks stay reserved.
            tracing::debug!(%error, "disk blocks of a smaller tier stay reserved");
        }
    }

    fn disk_rooms(&self) -> impl Iterator<Item = &Arc<Room>> {
        self.tiers.last().into_iter().flat_map(|tier| &tier.rooms)
    }

    /// Records that the last blocks of the retired slots are gone: eviction writes no record. A block that
    /// is in another slot has a later record, which is in force.
    fn remove_retired(&self, room: &Room, disk: &DiskParts) -> Result<(), StoreError> {
        for slot in room.retired() {
            let Some(key) = room.index.last_key(slot) else { continue };
            let order = self.order.lock(key);
            if room.index.get(key).is_none() {
                disk.catalog.append_removes(&[key])?;
            }
            room.index.forget_last_key(slot);
            drop(order);
            self.recorded();
        }
        Ok(())
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
