//! The catalog: which block is in which slot, on disk.

pub(crate) mod snapshot;
pub(crate) mod state;
pub(crate) mod superblocks;
pub(crate) mod write_checkpoint;

use std::num::NonZeroUsize;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, OnceLock};
use std::thread;
use std::time::Instant;

use terrane_core::OwnerProcess;
use terrane_core::convert::to_u64;
use terrane_core::sync::lock;

use crate::disk::catalog::snapshot::CatalogSnapshot;
use crate::disk::catalog::state::State;
use crate::disk::error::{CatalogError, ReadOnlyReason};
use crate::disk::files::directory::Directory;
use crate::disk::files::folder::{Folder, failure};
use crate::disk::files::owner;
use crate::disk::files::{DirectoryLock, Files};
use crate::disk::format::names;
use crate::disk::format::namespace::{GroupSlots, Namespace};
use crate::disk::format::record::{PutRecord, Stamp, encode_put, encode_remove};
use crate::disk::format::superblock::{Secret, Superblock};
use crate::disk::live::{LiveRecords, Recovered};
use crate::disk::recovery::{self, Reading};
use crate::disk::stripes::Stripes;
use crate::key::KeyHash;

/// The most threads of a recovery, unless the caller names a number. Memory bandwidth limits more.
const MOST_THREADS: usize = 8;

/// How a catalog is opened.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct CatalogOptions {
    /// Whether the keys of the blocks are read, too. Without it blocks are known by their hashes.
    pub keep_keys: bool,
    /// The threads of the recovery. `None` uses the machine's, up to eight.
    pub recovery_threads: Option<NonZeroUsize>,
}

/// The crash-safe metadata of a disk tier, in the folder of a namespace.
///
/// It records which block is in which slot, with the checksum of the payload. The payload's files are
/// the caller's. Any number of threads may use it.
///
/// # Rules for the caller
///
/// - Change the index first, then append: a checkpoint reads the index and replaces the records.
/// - Let no other thread change the same key between the change of the index and the append. With two
///   threads on one key, the order of the records must be the order of the index.
/// - Let no put run across a [`clear`](Self::clear): a record that is appended after it belongs to the
///   empty store, though its block may have left the index.
/// - Sync the payload's files before [`sync`](Self::sync): a block is durable when both are.
/// - Verify the checksum at each read: a record may be older than the bytes in its slot.
#[derive(Debug)]
pub struct Catalog {
    pub(in crate::disk) folder: Folder,
    pub(in crate::disk) groups: Vec<GroupSlots>,
    pub(in crate::disk) process: OwnerProcess,
    /// Not in the state: no lock is needed to read it.
    secret: Secret,
    pub(in crate::disk) state: Mutex<State>,
    /// Why the state is read-only, to read without its lock.
    read_only: Arc<OnceLock<Arc<ReadOnlyReason>>>,
    /// Held by the thread that syncs. Others wait for it and find their records durable.
    pub(in crate::disk) syncing: Mutex<()>,
    /// Held by a checkpoint or a clear.
    pub(in crate::disk) maintenance: Mutex<()>,
    /// Set by a clear, so that a running checkpoint ends early.
    pub(in crate::disk) is_abandoned: AtomicBool,
    _lock: Box<dyn DirectoryLock>,
}

impl Catalog {
    /// Opens or creates the catalog in the folder of `namespace` in `directory`, which exists.
    ///
    /// # Errors
    ///
    /// Returns [`CatalogError::Owned`] if the folder has an owner, and
    /// [`CatalogError::NamespaceDiffers`] if the store is another one. If its superblocks are not
    /// usable, the error names the file. Errors of the system are returned too. A full disk is no
    /// error: the catalog is then read-only.
    pub fn open(
        directory: &Path,
        namespace: &Namespace,
        groups: &[GroupSlots],
        options: CatalogOptions,
    ) -> Result<(Self, Recovered), CatalogError> {
        let folder = Directory::open(directory, namespace.name())?;
        let path = folder.path().to_owned();
        Self::open_in(Arc::new(folder), &path, namespace, groups, options)
    }

    /// Opens or creates the catalog in `files`. `directory` is its path, for messages.
    ///
    /// # Errors
    ///
    /// As [`open`](Self::open).
    pub fn open_in(
        files: Arc<dyn Files>,
        directory: &Path,
        namespace: &Namespace,
        groups: &[GroupSlots],
        options: CatalogOptions,
    ) -> Result<(Self, Recovered), CatalogError> {
        Self::open_with(files, directory, (namespace, groups), options, None)
    }

    /// Opens or creates the catalog of a tier with these directories, whose first is `files`. A new store
    /// records their number, their order and the alignment of its slots.
    ///
    /// # Errors
    ///
    /// As [`open`](Self::open), and [`CatalogError::DirectoryCount`], [`CatalogError::StripeDiffers`] or
    /// [`CatalogError::SlotAlignmentDiffers`] if the store records others. No file of the store's data
    /// was changed then.
    pub fn open_striped(
        files: Arc<dyn Files>,
        directory: &Path,
        namespace: &Namespace,
        groups: &[GroupSlots],
        options: CatalogOptions,
        stripes: &Stripes,
    ) -> Result<(Self, Recovered), CatalogError> {
        Self::open_with(files, directory, (namespace, groups), options, Some(stripes))
    }

    fn open_with(
        files: Arc<dyn Files>,
        directory: &Path,
        (namespace, groups): (&Namespace, &[GroupSlots]),
        options: CatalogOptions,
        stripes: Option<&Stripes>,
    ) -> Result<(Self, Recovered), CatalogError> {
        let start = Instant::now();
        let empty = |(_, group): &(usize, &GroupSlots)| group.slots == 0 || group.slot_bytes == 0;
        if let Some((group, &GroupSlots { slot_bytes, slots, .. })) =
            groups.iter().enumerate().find(empty)
        {
            return Err(CatalogError::EmptyGroup { group, slots, slot_bytes });
        }
        Superblock::check(namespace, groups)?;
        let lock = owner::acquire(files.as_ref(), directory)?;
        let folder = Folder { files, path: directory.to_owned() };
        let loaded = superblocks::load(&folder, namespace, groups, stripes)?;
        let epoch = loaded.superblock.epoch;
        let threads = options.recovery_threads.unwrap_or_else(default_threads);
        let reading = Reading { threads, keep_keys: options.keep_keys, syncs: true };
        let found = recovery::read(&folder, epoch, groups, reading)?;
        // All found records are durable before new ones follow them, and before leftovers are
        // removed.
        folder.files.sync_directory().map_err(|error| failure(directory, error))?;
        for name in &found.leftovers {
            remove(&*folder.files, name);
        }
        let secret = loaded.superblock.secret;
        let mut state = State::new(folder.clone(), loaded.superblock, &found);
        state.start_session(found.last_number)?;

        let live = LiveRecords::new(found.merged.parts);
        let recovered = Recovered {
            found: to_u64(live.len()),
            live,
            torn: found.torn,
            damaged: found.damaged,
            dropped: found.merged.dropped,
            superblock_repaired: loaded.repaired,
            bytes: found.bytes,
            journals: found.journals,
            took: start.elapsed(),
        };
        let catalog = Self {
            folder,
            groups: groups.to_vec(),
            process: OwnerProcess::current(),
            secret,
            read_only: state.read_only(),
            state: Mutex::new(state),
            syncing: Mutex::new(()),
            maintenance: Mutex::new(()),
            is_abandoned: AtomicBool::new(false),
            _lock: lock,
        };
        Ok((catalog, recovered))
    }

    /// Records blocks, with one write. They are durable after the next [`sync`](Self::sync).
    ///
    /// # Errors
    ///
    /// Returns an error that names the limit if a record is not possible; then none is recorded.
    /// Returns [`CatalogError::NoSpace`] or [`CatalogError::Io`] if the write fails. From then on the
    /// catalog is read-only.
    pub fn append_puts(&self, records: &[PutRecord<'_>]) -> Result<(), CatalogError> {
        self.process.check()?;
        records.iter().try_for_each(|record| self.check(record))?;
        let count = records.iter().map(|record| 1 + to_u64(record.key_parts())).sum();
        self.append(count, 0, |mut stamp, bytes| {
            for record in records {
                encode_put(record, stamp, 1, 0, bytes);
                stamp.sequence += 1 + to_u64(record.key_parts());
            }
        })
    }

    /// Records that keys were removed, with one write. The removal is durable after the next
    /// [`sync`](Self::sync).
    ///
    /// # Errors
    ///
    /// As [`append_puts`](Self::append_puts).
    pub fn append_removes(&self, keys: &[KeyHash]) -> Result<(), CatalogError> {
        self.process.check()?;
        let count = to_u64(keys.len());
        self.append(count, count, |mut stamp, bytes| {
            for key_hash in keys {
                encode_remove(*key_hash, stamp, bytes);
                stamp.sequence += 1;
            }
        })
    }

    fn append(
        &self,
        count: u64,
        tombstones: u64,
        encode: impl FnOnce(Stamp, &mut Vec<u8>),
    ) -> Result<(), CatalogError> {
        if count == 0 {
            return Ok(());
        }
        lock(&self.state).append(count, tombstones, encode)
    }

    /// Makes all records durable that were appended before the call. Threads that call it at the same
    /// time share a sync.
    ///
    /// # Errors
    ///
    /// Returns the error of the sync. From then on the catalog is read-only, and the file is not
    /// synced again. Returns [`CatalogError::ReadOnly`] if it was read-only and has records that are
    /// not durable.
    pub fn sync(&self) -> Result<(), CatalogError> {
        self.process.check()?;
        let wanted = lock(&self.state).last_change();
        if lock(&self.state).is_durable(wanted) {
            return Ok(());
        }
        let _syncing = lock(&self.syncing);
        let pending = {
            let state = lock(&self.state);
            if state.is_durable(wanted) {
                return Ok(());
            }
            state.pending()?
        };
        for (number, file) in pending.journals() {
            if let Err(error) = file.sync_data() {
                let name = names::journal(*number);
                return Err(lock(&self.state).fail("a sync", &name, error));
            }
        }
        lock(&self.state).finish_sync(&pending);
        Ok(())
    }

    /// Removes all blocks. Records that are appended after it belong to the empty store; appends and
    /// syncs wait for it. A checkpoint that is being written ends with
    /// [`CatalogError::CheckpointAbandoned`].
    ///
    /// # Errors
    ///
    /// Returns the error of the system. The catalog is then read-only, and a later opening finds
    /// either all blocks or none.
    pub fn clear(&self) -> Result<(), CatalogError> {
        self.process.check()?;
        // Relaxed: a checkpoint that sees it late is replaced by the clear in any case.
        self.is_abandoned.store(true, Ordering::Relaxed);
        let maintenance = lock(&self.maintenance);
        self.is_abandoned.store(false, Ordering::Relaxed);
        let syncing = lock(&self.syncing);
        let number = lock(&self.state).clear()?;
        drop(syncing);
        self.remove_older(number);
        drop(maintenance);
        Ok(())
    }

    /// The store's secret, the key of its hash of keys. It must not leave the process.
    #[must_use]
    pub const fn secret(&self) -> [u8; 16] {
        self.secret.0
    }

    /// Numbers about the catalog.
    ///
    /// # Errors
    ///
    /// Returns [`CatalogError::Forked`] in a process that was forked from the owner.
    pub fn snapshot(&self) -> Result<CatalogSnapshot, CatalogError> {
        // Before the lock, which another thread may have held at the fork.
        self.process.check()?;
        Ok(lock(&self.state).snapshot())
    }

    /// Why the catalog writes no more, if it does not.
    pub(crate) fn read_only(&self) -> Option<CatalogError> {
        let reason = Arc::clone(self.read_only.get()?);
        Some(CatalogError::ReadOnly { reason })
    }

    /// Checks a record against the groups.
    pub(in crate::disk) fn check(&self, record: &PutRecord<'_>) -> Result<(), CatalogError> {
        let &PutRecord { group, slot, length, key, .. } = record;
        let Some(limits) = self.groups.get(usize::from(group)) else {
            return Err(CatalogError::NoSuchGroup { group, groups: self.groups.len() });
        };
        if slot >= limits.slots {
            return Err(CatalogError::NoSuchSlot { group, slot, slots: limits.slots });
        }
        if length > limits.slot_bytes {
            return Err(CatalogError::PayloadTooLong { group, length, limit: limits.slot_bytes });
        }
        let limit = usize::from(u16::MAX);
        if key.len() > limit {
            return Err(CatalogError::KeyTooLong { length: key.len(), limit });
        }
        Ok(())
    }

    /// Removes journals and checkpoints with lower numbers. Those that stay are removed when the
    /// store is opened.
    pub(in crate::disk) fn remove_older(&self, number: u64) {
        let names = self.folder.files.list().unwrap_or_default();
        for name in names {
            let is_older = match names::parse(&name) {
                Some(names::Name::Journal(other) | names::Name::Checkpoint(other)) => {
                    other < number
                }
                Some(names::Name::Unfinished(_)) | None => false,
            };
            if is_older {
                // Without a trace: a lock is held.
                let _ = self.folder.files.unlink(&name);
            }
        }
    }
}

/// A session without a record leaves no journal, so that such sessions do not make openings slow.
impl Drop for Catalog {
    fn drop(&mut self) {
        if !self.process.is_current() {
            return;
        }
        // The lock of the directory is a field, and released after this.
        if let Some(name) = lock(&self.state).unused_journal() {
            remove(&*self.folder.files, &name);
        }
    }
}

fn remove(files: &dyn Files, name: &str) {
    if let Err(error) = files.unlink(name) {
        tracing::warn!(%error, name, "a file that is not needed stays until the next opening");
    }
}

fn default_threads() -> NonZeroUsize {
    let threads = thread::available_parallelism().unwrap_or(NonZeroUsize::MIN);
    threads.min(NonZeroUsize::new(MOST_THREADS).unwrap_or(NonZeroUsize::MIN))
}

/// Locks the folders of a striped tier for this process, except the first one, which the catalog locks. A
/// folder that is listed twice is locked once.
pub(crate) fn acquire_striped(
    folders: &[Arc<Directory>],
) -> Result<Vec<Box<dyn DirectoryLock>>, CatalogError> {
    let (mut locked, mut locks) = (Vec::new(), Vec::new());
    for folder in folders {
        let identity = folder.identity().map_err(|error| failure(folder.path(), error))?;
        if locked.contains(&identity) {
            continue;
        }
        if !locked.is_empty() {
            locks.push(owner::acquire(&**folder, folder.path())?);
        }
        locked.push(identity);
    }
    Ok(locks)
}
