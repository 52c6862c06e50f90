//! The state that appends, syncs, checkpoints and clears share, under one short lock.

use std::sync::{Arc, OnceLock};

use terrane_core::OsError;
use terrane_core::convert::to_u64;

use crate::disk::catalog::snapshot::CatalogSnapshot;
use crate::disk::catalog::superblocks;
use crate::disk::error::{CatalogError, ReadOnlyReason};
use crate::disk::files::folder::Folder;
use crate::disk::files::{OpenFile, OpenMode};
use crate::disk::format::checkpoint::Header;
use crate::disk::format::journal::Journal;
use crate::disk::format::names::{self, SUPERBLOCKS};
use crate::disk::format::record::{Mark, RECORD, SEQUENCES, Stamp, encode_mark};
use crate::disk::format::superblock::Superblock;
use crate::disk::recovery;

/// The last sequence numbers, which only marks may use. Few marks follow an append.
const MARGIN: u64 = 1 << 32;

/// The state of an open catalog.
#[derive(Debug)]
pub(crate) struct State {
    folder: Folder,
    superblock: Superblock,
    /// `None` if it could not be created; the catalog is then read-only.
    journal: Option<Journal>,
    /// Earlier journals of this session, with records that may not be durable: their numbers and files.
    unsynced: Vec<(u64, Arc<dyn OpenFile>)>,
    next_sequence: u64,
    /// The last record that is not a mark.
    last_change: u64,
    durable: u64,
    tombstones: u64,
    /// The tombstones up to `durable`.
    durable_tombstones: u64,
    checkpoint: Option<u64>,
    /// The number of the journal that is not needed while its first mark is its only record.
    spare: Option<u64>,
    /// Set once. The catalog has it, too, and reads it without the lock.
    read_only: Arc<OnceLock<Arc<ReadOnlyReason>>>,
    /// Kept between appends.
    buffer: Vec<u8>,
}

/// The files of a sync, and what is durable when they are.
#[derive(Debug)]
pub(crate) struct Pending {
    older: Vec<(u64, Arc<dyn OpenFile>)>,
    /// Records may be appended to it during the sync, and a checkpoint may end it.
    current: Option<(u64, Arc<dyn OpenFile>)>,
    durable: u64,
    tombstones: u64,
}

impl Pending {
    /// The journals to sync: their numbers and files.
    pub(crate) fn journals(&self) -> impl Iterator<Item = &(u64, Arc<dyn OpenFile>)> {
        self.older.iter().chain(&self.current)
    }
}

impl State {
    pub(crate) fn new(
        folder: Folder,
        superblock: Superblock,
        found: &recovery::FoundState,
    ) -> Self {
        let durable = found.next_sequence - 1;
        Self {
            folder,
            superblock,
            journal: None,
            unsynced: Vec::new(),
            next_sequence: found.next_sequence,
            last_change: durable,
            durable,
            tombstones: found.tombstones,
            durable_tombstones: found.tombstones,
            checkpoint: found.checkpoint,
            spare: None,
            read_only: Arc::default(),
            buffer: Vec::new(),
        }
    }

    /// Begins the first journal of this session. If that fails, the catalog is read-only.
    ///
    /// # Errors
    ///
    /// Returns [`CatalogError::NumbersExhausted`].
    pub(crate) fn start_session(&mut self, last_number: u64) -> Result<(), CatalogError> {
        let number = number_after(last_number)?;
        // A journal that was not listed has records of an earlier session: it is not overwritten.
        if let Err(error) = self.begin_journal(number, OpenMode::CreateNew) {
            self.fail("an append", &names::journal(number), error);
        }
        self.spare = Some(number);
        Ok(())
    }

    fn begin_journal(&mut self, number: u64, mode: OpenMode) -> Result<(), OsError> {
        let journal = Journal::create(&*self.folder.files, number, mode)?;
        self.folder.files.sync_directory()?;
        self.switch(journal, true)
    }

    /// Adds `count` records, of which `tombstones` are tombstones.
    pub(crate) fn append(
        &mut self,
        count: u64,
        tombstones: u64,
        encode: impl FnOnce(Stamp, &mut Vec<u8>),
    ) -> Result<(), CatalogError> {
        self.check_writable()?;
        if count >= SEQUENCES.saturating_sub(self.next_sequence).saturating_sub(MARGIN) {
            return Err(CatalogError::SequencesExhausted);
        }
        let mut bytes = std::mem::take(&mut self.buffer);
        bytes.clear();
        encode(self.stamp(), &mut bytes);
        let written = self.write(&bytes);
        self.buffer = bytes;
        written?;
        self.next_sequence += count;
        self.last_change = self.next_sequence - 1;
        self.tombstones += tombstones;
        Ok(())
    }

    fn write(&mut self, bytes: &[u8]) -> Result<(), CatalogError> {
        let Some(journal) = &mut self.journal else { return Ok(()) };
        let Err(error) = journal.append(bytes) else { return Ok(()) };
        let name = names::journal(journal.number);
        Err(self.fail("an append", &name, error))
    }

    /// The last record that is not a mark.
    pub(crate) const fn last_change(&self) -> u64 {
        self.last_change
    }

    pub(crate) const fn is_durable(&self, sequence: u64) -> bool {
        sequence <= self.durable
    }

    /// The files to sync so that all records are durable.
    pub(crate) fn pending(&self) -> Result<Pending, CatalogError> {
        self.check_writable()?;
        let older = self.unsynced.clone();
        let journal = self.journal.as_ref();
        let current = journal.map(|journal| (journal.number, Arc::clone(&journal.file)));
        let (durable, tombstones) = (self.next_sequence - 1, self.tombstones);
        Ok(Pending { older, current, durable, tombstones })
    }

    /// Notes that a sync has succeeded, and adds the mark.
    pub(crate) fn finish_sync(&mut self, pending: &Pending) {
        self.durable = pending.durable;
        self.durable_tombstones = pending.tombstones;
        // The current journal is not among them: it may have grown since the sync began.
        let is_synced = |file: &Arc<dyn OpenFile>| {
            pending.older.iter().any(|(_, synced)| Arc::ptr_eq(synced, file))
        };
        self.unsynced.retain(|(_, file)| !is_synced(file));
        if self.read_only.get().is_some() {
            return;
        }
        let mut bytes = Vec::new();
        encode_mark(self.mark(false), self.stamp(), &mut bytes);
        // The records are durable without the mark. The next append reports the failure.
        if self.write(&bytes).is_ok() {
            self.next_sequence += 1;
        }
    }

    /// Lets appends go to `journal`, which is empty and has a durable name, for a checkpoint.
    pub(crate) fn begin_checkpoint(&mut self, journal: Journal) -> Result<Header, CatalogError> {
        self.check_writable()?;
        let (number, first_sequence) = (journal.number, self.next_sequence);
        let begun = self.switch(journal, false);
        begun.map_err(|error| self.folder.failure(&names::journal(number), error))?;
        // Its checkpoint may have got its name, unless it is abandoned.
        self.spare = None;
        let (epoch, tombstones) = (self.superblock.epoch, self.tombstones);
        Ok(Header { number, epoch, first_sequence, tombstones, records: 0 })
    }

    /// The number of the next journal.
    pub(crate) fn next_number(&self) -> Result<u64, CatalogError> {
        self.check_writable()?;
        number_after(self.journal.as_ref().map_or(0, |journal| journal.number))
    }

    /// Notes that checkpoint `number` is durable. Returns the journals that it replaces. They need no
    /// sync any more, and their disk space is freed when the caller closes them.
    pub(crate) fn finish_checkpoint(&mut self, number: u64) -> Vec<(u64, Arc<dyn OpenFile>)> {
        self.checkpoint = Some(number);
        self.unsynced.extract_if(.., |(journal, _)| *journal < number).collect()
    }

    /// Notes that checkpoint `number` was given up before it got its name.
    pub(crate) const fn abandon_checkpoint(&mut self, number: u64) {
        self.spare = Some(number);
    }

    /// The name of the journal if the store is the same without it. Its only record is then its opening
    /// mark.
    pub(crate) fn unused_journal(&self) -> Option<String> {
        let is_unused = |journal: &&Journal| {
            self.spare == Some(journal.number) && journal.length == to_u64(RECORD)
        };
        let journal = self.journal.as_ref().filter(|_| self.read_only.get().is_none());
        journal.filter(is_unused).map(|journal| names::journal(journal.number))
    }

    /// Begins a new epoch in a new journal, whose number is returned.
    pub(crate) fn clear(&mut self) -> Result<u64, CatalogError> {
        let number = self.next_number()?;
        let mut next = self.superblock.clone();
        next.epoch += 1;
        next.generation += 1;
        let replaced = superblocks::replace(&self.folder, &next, SUPERBLOCKS);
        replaced.map_err(|(name, error)| self.fail("a clear", name, error))?;
        self.superblock = next;
        self.unsynced.clear();
        (self.tombstones, self.durable_tombstones) = (0, 0);
        self.durable = self.next_sequence - 1;
        self.checkpoint = None;
        // Files of the older epoch may come back with a crash. The journal keeps its numbers above them.
        self.spare = None;
        let begun = self.begin_journal(number, OpenMode::Create);
        begun.map_err(|error| self.fail("a clear", &names::journal(number), error))?;
        // No record of an earlier epoch needs a sync.
        self.unsynced.clear();
        self.last_change = self.durable;
        Ok(number)
    }

    /// Writes the first record of `journal`, and lets appends go there.
    fn switch(&mut self, mut journal: Journal, starts_session: bool) -> Result<(), OsError> {
        let mut bytes = Vec::new();
        encode_mark(self.mark(starts_session), self.stamp(), &mut bytes);
        journal.append(&bytes)?;
        self.next_sequence += 1;
        if let Some(before) = self.journal.replace(journal) {
            self.unsynced.push((before.number, before.file));
        }
        Ok(())
    }

    /// Makes the catalog read-only, and returns the error of the file. The first reason stays. It writes
    /// no trace: locks are held.
    pub(crate) fn fail(
        &mut self,
        operation: &'static str,
        name: &str,
        source: OsError,
    ) -> CatalogError {
        if self.read_only.get().is_none() {
            let file = self.folder.path.join(name);
            let reason = Arc::new(ReadOnlyReason { operation, file, source });
            // The state's lock is held: no other thread sets it.
            let _ = self.read_only.set(reason);
        }
        self.folder.failure(name, source)
    }

    /// Why the catalog is read-only, once it is.
    pub(crate) fn read_only(&self) -> Arc<OnceLock<Arc<ReadOnlyReason>>> {
        Arc::clone(&self.read_only)
    }

    pub(crate) fn check_writable(&self) -> Result<(), CatalogError> {
        match self.read_only.get() {
            None => Ok(()),
            Some(reason) => Err(CatalogError::ReadOnly { reason: Arc::clone(reason) }),
        }
    }

    const fn mark(&self, starts_session: bool) -> Mark {
        Mark { durable: self.durable, tombstones: self.durable_tombstones, starts_session }
    }

    const fn stamp(&self) -> Stamp {
        Stamp { sequence: self.next_sequence, epoch: self.superblock.epoch }
    }

    pub(crate) fn snapshot(&self) -> CatalogSnapshot {
        CatalogSnapshot {
            epoch: self.superblock.epoch,
            next_sequence: self.next_sequence,
            durable: self.durable,
            tombstones: self.tombstones,
            journal: self.journal.as_ref().map(|journal| journal.number),
            journal_bytes: self.journal.as_ref().map_or(0, |journal| journal.length),
            checkpoint: self.checkpoint,
            read_only: self.read_only.get().cloned(),
        }
    }
}

/// The number of the file after the one with number `last`.
fn number_after(last: u64) -> Result<u64, CatalogError> {
    let limit = names::NUMBERS;
    let number = last + 1;
    if number < limit { Ok(number) } else { Err(CatalogError::NumbersExhausted { limit }) }
}
