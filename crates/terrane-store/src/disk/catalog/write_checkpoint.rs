//! Writes checkpoints.
//!
//! The steps:
//!
//! 1. Create the next journal and sync the directory. New records go there.
//! 2. Write the live blocks to another file, and sync it.
//! 3. Rename it and sync the directory.
//! 4. Remove the older files.
//!
//! A crash between any two of them leaves a store that recovers. Appends wait only while the journal
//! changes.

use std::sync::atomic::Ordering;

use terrane_core::OsError;
use terrane_core::convert::to_u64;
use terrane_core::sync::lock;

use crate::disk::catalog::Catalog;
use crate::disk::error::CatalogError;
use crate::disk::files::{OpenFile, OpenMode};
use crate::disk::format::checkpoint::Header;
use crate::disk::format::journal::Journal;
use crate::disk::format::names;
use crate::disk::format::record::{PutRecord, RECORD, Stamp, encode_put};

/// The bytes that are encoded before they are written.
const BUFFER: usize = 1 << 20;

/// A report of a checkpoint that was written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct CheckpointReport {
    /// The number of the checkpoint.
    pub number: u64,
    /// The live blocks.
    pub blocks: u64,
    /// The bytes of the file.
    pub bytes: u64,
}

impl Catalog {
    /// Writes all live blocks to a checkpoint, which replaces the journal.
    ///
    /// `live` is called once the records of all later appends go to a new journal. It adds every block
    /// of the index. Blocks that are added or removed meanwhile may be in it or not.
    ///
    /// # Errors
    ///
    /// Returns the error of `live` or of the system. The catalog is then as durable as before, and
    /// the checkpoint can be tried again. Returns [`CatalogError::CheckpointAbandoned`] if the store
    /// is cleared meanwhile, and [`CatalogError::ReadOnly`].
    pub fn checkpoint(
        &self,
        live: impl FnOnce(&mut CheckpointWriter<'_>) -> Result<(), CatalogError>,
    ) -> Result<CheckpointReport, CatalogError> {
        self.process.check()?;
        let _maintenance = lock(&self.maintenance);
        let begun = self.begin()?;
        let number = begun.number;
        self.write(begun, live).inspect_err(|error| {
            // One that stays is removed when the store is opened.
            let _ = self.folder.files.unlink(&names::unfinished(number));
            if *error == CatalogError::CheckpointAbandoned {
                lock(&self.state).abandon_checkpoint(number);
            }
        })
    }

    fn begin(&self) -> Result<Header, CatalogError> {
        let number = lock(&self.state).next_number()?;
        let name = names::journal(number);
        let created = Journal::create(&*self.folder.files, number, OpenMode::Create);
        let journal = created.map_err(|error| self.folder.failure(&name, error))?;
        let synced = self.sync_names(&name);
        let begun = synced.and_then(|()| lock(&self.state).begin_checkpoint(journal));
        begun.inspect_err(|_| {
            // The number is used again.
            let _ = self.folder.files.unlink(&name);
        })
    }

    /// Makes the name of a file durable. If that fails, the catalog is read-only: a later sync of the
    /// directory would say nothing about the names that failed.
    fn sync_names(&self, name: &str) -> Result<(), CatalogError> {
        let synced = self.folder.files.sync_directory();
        synced.map_err(|error| lock(&self.state).fail("a sync", name, error))
    }

    fn write(
        &self,
        header: Header,
        live: impl FnOnce(&mut CheckpointWriter<'_>) -> Result<(), CatalogError>,
    ) -> Result<CheckpointReport, CatalogError> {
        let number = header.number;
        let name = names::unfinished(number);
        let failed = |error| self.folder.failure(&name, error);
        let file = self.folder.open(&name, OpenMode::CreateNew)?;
        let mut writer = CheckpointWriter {
            catalog: self,
            file,
            header,
            buffer: Vec::with_capacity(BUFFER + 2 * RECORD),
            written: to_u64(RECORD),
            blocks: 0,
        };
        live(&mut writer)?;
        writer.check_abandoned()?;
        writer.finish().map_err(failed)?;
        let report = CheckpointReport { number, blocks: writer.blocks, bytes: writer.written };
        let renamed = names::checkpoint(number);
        self.folder.files.rename(&name, &renamed).map_err(failed)?;
        self.sync_names(&renamed)?;
        let replaced = lock(&self.state).finish_checkpoint(number);
        // Without the lock: closing a removed file frees its disk blocks.
        drop(replaced);
        self.remove_older(number);
        Ok(report)
    }
}

/// A checkpoint that is being written.
#[derive(Debug)]
pub struct CheckpointWriter<'a> {
    catalog: &'a Catalog,
    file: Box<dyn OpenFile>,
    header: Header,
    buffer: Vec<u8>,
    /// The bytes that were written, the place of the header included.
    written: u64,
    blocks: u64,
}

impl CheckpointWriter<'_> {
    /// Adds a live block. Most calls only encode it; one in some thousands writes.
    ///
    /// # Errors
    ///
    /// Returns an error that names the limit if the record is not possible, the error of the system,
    /// or [`CatalogError::CheckpointAbandoned`] if the store is being cleared.
    pub fn add(&mut self, record: &PutRecord<'_>) -> Result<(), CatalogError> {
        self.catalog.check(record)?;
        let Header { number, epoch, first_sequence, .. } = self.header;
        // All records have one number, before those of the journal.
        let stamp = Stamp { sequence: first_sequence - 1, epoch };
        encode_put(record, stamp, 0, number, &mut self.buffer);
        self.header.records += 1 + to_u64(record.key_parts());
        self.blocks += 1;
        if self.buffer.len() < BUFFER {
            return Ok(());
        }
        self.check_abandoned()?;
        let flushed = self.flush();
        flushed.map_err(|error| self.catalog.folder.failure(&names::unfinished(number), error))
    }

    fn check_abandoned(&self) -> Result<(), CatalogError> {
        // Relaxed: see `Catalog::clear`.
        if self.catalog.is_abandoned.load(Ordering::Relaxed) {
            return Err(CatalogError::CheckpointAbandoned);
        }
        Ok(())
    }

    fn flush(&mut self) -> Result<(), OsError> {
        self.file.write_at(&self.buffer, self.written)?;
        self.written += to_u64(self.buffer.len());
        self.buffer.clear();
        Ok(())
    }

    /// Writes the rest, and the header now that the number of records is known.
    fn finish(&mut self) -> Result<(), OsError> {
        self.flush()?;
        self.file.write_at(&self.header.encode(), 0)?;
        self.file.sync_data()
    }
}
