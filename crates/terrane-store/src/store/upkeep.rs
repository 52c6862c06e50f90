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
use crate::store::maintenance::Step;
use crate::store::shared::StoreCore;

/// A journal of fewer bytes is not replaced by a checkpoint.
const SMALL_JOURNAL: u64 = 8 << 20;

/// The bytes of a record of a block in a checkpoint, without the rest of a long key.
const RECORD_BYTES: u64 = 128;

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
        let Some(disk) = &self.disk else { return };
        if self.refuses_writes().is_some() {
            return;
        }
        // Such a slot stays unused as long as the tier does not grow.
        let turn = lock(&self.resizing);
        let rooms = self.tiers.last().into_iter().flat_map(|tier| &tier.rooms);
        let errors: Vec<_> = rooms.filter_map(|room| room.punch(&disk.slabs).err()).collect();
        // A subscriber of the trace may resize the store.
        drop(turn);
        for error in errors {
            // Without holes in files, the disk blocks stay reserved.
            tracing::debug!(%error, "disk blocks of a smaller tier stay reserved");
        }
    }

    pub(crate) fn export_metrics(&self, path: &Path, interval: Duration) -> Result<(), StoreError> {
        self.check()?;
        self.write_metrics(path)?;
        self.maintenance.export(path, interval);
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
