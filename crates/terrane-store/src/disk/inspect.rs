//! Reads the metadata of a store without owning it.
//!
//! A live store appends to its journal and replaces its checkpoint meanwhile. So its files are read
//! until two readings in a row find the same ones; the second one is used.
//!
//! It creates, locks and changes no file. So it works on a file system that is mounted read-only, and
//! never keeps a store from being opened.

use std::path::Path;
use std::thread;

use super::error::CatalogError;
use super::failure::failure;
use super::files::Files;
use super::live::LiveRecords;
use super::names;
use super::namespace::{GroupSlots, Namespace};
use super::owner::{self, StoreOwner};
use super::real::Directory;
use super::recovery;
use super::superblock::{Secret, Superblock};
use super::superblocks;

/// How often the files are read before the last reading is used as it is.
const MOST_READINGS: u32 = 8;

/// The metadata of a store.
#[derive(Debug)]
pub(crate) struct Inspected {
    pub(crate) namespace: Namespace,
    pub(crate) groups: Vec<GroupSlots>,
    pub(crate) secret: Secret,
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
    let files = Directory::open_read_only(directory, name)?;
    let is_live = files.is_locked(names::LOCK);
    let is_live = is_live.map_err(|error| failure(&path.join(names::LOCK), error))?;
    let owner = if is_live { owner::read(&files) } else { None };
    let mut before = None;
    for reading in 1.. {
        let read = read(&files, &path);
        let (superblock, state) = match read {
            // A file of a live store went between the listing and its opening.
            Err(_) if is_live && reading < MOST_READINGS => continue,
            read => read?,
        };
        let now = (superblock.generation, state.checkpoint, state.last_number);
        if !is_live || before == Some(now) || reading >= MOST_READINGS {
            let Superblock { namespace, groups, secret, epoch, .. } = superblock;
            return Ok(Inspected {
                namespace,
                groups,
                secret,
                epoch,
                as_of: state.next_sequence.saturating_sub(1),
                live: LiveRecords::new(state.merged.parts),
                torn: state.torn,
                damaged: state.damaged,
                dropped: state.merged.dropped,
                bytes: state.bytes,
                is_live,
                owner,
            });
        }
        before = Some(now);
        thread::yield_now();
    }
    Err(CatalogError::NotFound { path })
}

fn read(files: &dyn Files, path: &Path) -> Result<(Superblock, recovery::State), CatalogError> {
    let superblock = superblocks::newest(files, path)?;
    let settings = (std::num::NonZeroUsize::MIN, true);
    let state = recovery::read(files, path, superblock.epoch, &superblock.groups, settings)?;
    Ok((superblock, state))
}
