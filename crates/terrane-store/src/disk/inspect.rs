//! Reads the metadata of a store without owning it.
//!
//! A live store appends to its journal and replaces its checkpoint meanwhile. So its files are read
//! until two readings in a row find the same ones; the second one is used.
//!
//! It creates, locks and changes no file. So it works on a file system that is mounted read-only, and
//! never keeps a store from being opened.

use std::num::NonZeroUsize;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::thread;

use crate::disk::catalog::superblocks;
use crate::disk::error::{CatalogError, FoundStripe};
use crate::disk::files::directory::Directory;
use crate::disk::files::folder::Folder;
use crate::disk::files::owner::{self, StoreOwner};
use crate::disk::format::names;
use crate::disk::format::namespace::{GroupSlots, Namespace};
use crate::disk::format::superblock::{Secret, Superblock};
use crate::disk::live::LiveRecords;
use crate::disk::recovery::{self, Reading};
use crate::disk::stripes::{Placement, Stripes};

/// The most readings of the files. The last one is used even if it differs from the one before.
const MOST_READINGS: u32 = 8;

/// The metadata of a store.
#[derive(Debug)]
pub(crate) struct Inspected {
    pub(crate) namespace: Namespace,
    pub(crate) groups: Vec<GroupSlots>,
    pub(crate) secret: Secret,
    pub(crate) placement: Placement,
    pub(crate) epoch: u64,
    /// The number of the last record that was read.
    pub(crate) as_of: u64,
    pub(crate) live: LiveRecords,
    pub(crate) torn: u64,
    pub(crate) damaged: u64,
    pub(crate) dropped: u64,
    /// The bytes of the journals and the checkpoint.
    pub(crate) bytes: u64,
    /// Whether a process has the store open, and which, if it left its name.
    pub(crate) is_live: bool,
    pub(crate) owner: Option<StoreOwner>,
}

/// Reads the metadata of the store `name` in `directory`.
pub(crate) fn inspect(directory: &Path, name: &str) -> Result<Inspected, CatalogError> {
    let path = directory.join(name);
    if !path.is_dir() {
        return Err(CatalogError::NotFound { path });
    }
    let directory = Arc::new(Directory::open_read_only(directory, name)?);
    let folder = Folder { files: Arc::clone(&directory) as _, path };
    let is_locked = || {
        let is_locked = directory.is_locked(names::LOCK);
        is_locked.map_err(|error| folder.failure(names::LOCK, error))
    };
    let version = |(superblock, state): &(Superblock, recovery::FoundState)| {
        (superblock.generation, state.checkpoint, state.last_number)
    };
    let ((superblock, state), is_live) = settled(|| read(&folder), version, is_locked)?;
    let Superblock { namespace, groups, secret, placement, epoch, .. } = superblock;
    Ok(Inspected {
        namespace,
        groups,
        secret,
        placement,
        epoch,
        as_of: state.next_sequence.saturating_sub(1),
        live: LiveRecords::new(state.merged.parts),
        torn: state.torn,
        damaged: state.damaged,
        dropped: state.merged.dropped,
        bytes: state.bytes,
        is_live,
        owner: if is_live { owner::read(&*folder.files) } else { None },
    })
}

impl Inspected {
    /// Checks that the store has these directories, in this order.
    pub(crate) fn check_directories(&self, directories: &[PathBuf]) -> Result<(), CatalogError> {
        let recorded = (self.placement, &self.secret);
        check_directories(directories, self.namespace.name(), recorded)
    }
}

/// Checks that the store `name` has these directories, in this order. It changes nothing.
fn check_directories(
    directories: &[PathBuf],
    name: &str,
    (placement, secret): (Placement, &Secret),
) -> Result<(), CatalogError> {
    let folders: Vec<PathBuf> = directories.iter().map(|it| it.join(name)).collect();
    // The number first: a directory that is not of the store may not exist.
    placement.check_count(&folders)?;
    let (Some((first, _)), [_, others @ ..]) = (folders.split_first(), directories) else {
        return Ok(());
    };
    let mut stripes = Stripes::recorded(placement);
    for (index, directory) in (1..).zip(others) {
        let folder = match Directory::open_read_only(directory, name) {
            // The caller must not create it: its slots are elsewhere.
            Err(CatalogError::NotFound { path }) => {
                let is_there = directory.is_dir();
                let found = if is_there { FoundStripe::Nothing } else { FoundStripe::Missing };
                let first = first.to_owned();
                return Err(CatalogError::StripeDiffers { first, directory: path, index, found });
            }
            opened => opened?,
        };
        let path = folder.path().to_owned();
        stripes = stripes.also_in(Arc::new(folder), &path);
    }
    stripes.check(first, (placement, secret))
}

/// The placement that the store `name` in the first of these directories records, if there is a store. It is
/// an error if the store records other directories. An opening checks both again under its lock.
pub(crate) fn placement(
    directories: &[PathBuf],
    name: &str,
) -> Result<Option<Placement>, CatalogError> {
    let first = directories.first().and_then(|it| Directory::open_read_only(it, name).ok());
    let Some(files) = first.map(Arc::new) else { return Ok(None) };
    let folder = Folder { path: files.path().to_owned(), files };
    let Some((placement, secret)) = superblocks::placement(&folder) else { return Ok(None) };
    // A store that records no directories may be opened in new ones.
    if placement.directories != 0 {
        check_directories(directories, name, (placement, &secret))?;
    }
    Ok(Some(placement))
}

/// Reads until two readings agree, if the store is live, and returns whether it is. It may be
/// opened meanwhile, so the lock is checked after each reading, too.
fn settled<T, V: PartialEq>(
    read: impl Fn() -> Result<T, CatalogError>,
    version: impl Fn(&T) -> V,
    is_locked: impl Fn() -> Result<bool, CatalogError>,
) -> Result<(T, bool), CatalogError> {
    let mut is_live = is_locked()?;
    let (mut before, mut readings) = (None, 0);
    loop {
        let found = read();
        readings += 1;
        is_live = is_live || is_locked()?;
        let is_last = !is_live || readings >= MOST_READINGS;
        match found {
            // A file of a live store went between the listing and its opening.
            Err(_) if !is_last => {}
            Err(error) => return Err(error),
            Ok(found) => {
                let now = Some(version(&found));
                if is_last || before == now {
                    return Ok((found, is_live));
                }
                before = now;
            }
        }
        thread::yield_now();
    }
}

fn read(folder: &Folder) -> Result<(Superblock, recovery::FoundState), CatalogError> {
    let superblock = superblocks::newest(folder)?;
    let reading = Reading { threads: NonZeroUsize::MIN, keep_keys: true, syncs: false };
    let state = recovery::read(folder, superblock.epoch, &superblock.groups, reading)?;
    Ok((superblock, state))
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;

    use super::*;

    #[test]
    fn a_reading_beside_the_opening_of_a_store_is_repeated() {
        let not_found = || CatalogError::NotFound { path: "journal.1".into() };
        for opened_after in 0..3 {
            let (readings, asked) = (Cell::new(0), Cell::new(0));
            let next = |count: &Cell<u32>| count.replace(count.get() + 1);
            // The owner removes a file of the first listing.
            let read = || if next(&readings) == 0 { Err(not_found()) } else { Ok(7) };
            let is_locked = || Ok(next(&asked) >= opened_after);
            let settled = settled(read, |found| *found, is_locked);
            let expected = if opened_after < 2 { Ok((7, true)) } else { Err(not_found()) };
            assert_eq!(settled, expected, "{opened_after}");
        }
    }
}
