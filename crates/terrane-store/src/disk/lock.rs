//! One owner of a directory in one process.
//!
//! The kernel's record locks exclude other processes only. This list excludes other catalogs of this
//! process, and it is consulted before the lock file is opened: closing a second descriptor of that
//! file would release the first owner's lock.

use std::os::fd::OwnedFd;
use std::sync::{Mutex, TryLockError};
use std::thread;
use std::time::Duration;

use rustix::fs::{FlockOperation, fcntl_lock};
use rustix::io::Errno;
use terrane_core::{OsError, OwnerProcess};

use super::files::DirectoryLock;

/// A directory: its file system and its inode.
pub(super) type DirectoryIdentity = (u64, u64);

static OWNED: Mutex<Vec<(DirectoryIdentity, OwnerProcess)>> = Mutex::new(Vec::new());

/// How often a thread tries to get the list, a millisecond apart. Others hold it for a few
/// instructions; only in a process that was forked during them is it never released.
const ATTEMPTS: u32 = 2000;

/// A lock of this process on a directory.
#[derive(Debug)]
pub(super) struct ProcessLock {
    /// Closing it releases the lock. It is closed before the directory leaves the list.
    descriptor: Option<OwnedFd>,
    directory: DirectoryIdentity,
    owner: OwnerProcess,
}

impl DirectoryLock for ProcessLock {}

impl ProcessLock {
    /// Locks `directory` by the file that `open` opens. `None` if another owner has it.
    pub(super) fn acquire(
        directory: DirectoryIdentity,
        open: impl FnOnce() -> Result<OwnedFd, OsError>,
    ) -> Result<Option<Self>, OsError> {
        let owner = OwnerProcess::current();
        let is_free = with_list(|list| {
            // Entries of the process that this one was forked from are not this process's.
            list.retain(|(_, process)| process.is_current());
            let is_free = list.iter().all(|(owned, _)| *owned != directory);
            if is_free {
                list.push((directory, owner));
            }
            is_free
        })?;
        if !is_free {
            return Ok(None);
        }
        let mut lock = Self { descriptor: None, directory, owner };
        let descriptor = lock.descriptor.insert(open()?);
        match fcntl_lock(descriptor, FlockOperation::NonBlockingLockExclusive) {
            Ok(()) => Ok(Some(lock)),
            Err(Errno::ACCESS | Errno::AGAIN) => Ok(None),
            Err(error) => Err(OsError::new("fcntl", error.raw_os_error())),
        }
    }
}

impl Drop for ProcessLock {
    fn drop(&mut self) {
        self.descriptor = None;
        if self.owner.is_current() {
            // A list that cannot be had keeps the entry: the directory then stays owned.
            let _ = with_list(|list| list.retain(|(owned, _)| *owned != self.directory));
        }
    }
}

fn with_list<T>(
    body: impl FnOnce(&mut Vec<(DirectoryIdentity, OwnerProcess)>) -> T,
) -> Result<T, OsError> {
    for _ in 0..ATTEMPTS {
        match OWNED.try_lock() {
            Ok(mut list) => return Ok(body(&mut list)),
            Err(TryLockError::Poisoned(poisoned)) => {
                return Ok(body(&mut poisoned.into_inner()));
            }
            Err(TryLockError::WouldBlock) => thread::sleep(Duration::from_millis(1)),
        }
    }
    Err(OsError::new("pthread_mutex_lock", Errno::DEADLK.raw_os_error()))
}
