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
use rustix::process::{Flock, FlockType, fcntl_getlk};
use terrane_core::{OsError, OwnerProcess};

use crate::disk::files::DirectoryLock;

/// A directory: its file system and its inode.
pub(crate) type DirectoryIdentity = (u64, u64);

static OWNED: Mutex<Vec<(DirectoryIdentity, OwnerProcess)>> = Mutex::new(Vec::new());

/// How often a thread tries to get the list, a millisecond apart. Others hold it for a few
/// instructions or system calls; only in a process that was forked during them is it never released.
const ATTEMPTS: u32 = 2000;

/// A thread held the list as this process was forked.
pub(in crate::disk) const LOST: OsError =
    OsError::new("pthread_mutex_lock", Errno::DEADLK.raw_os_error());

/// A lock of this process on a directory.
#[derive(Debug)]
pub(in crate::disk) struct ProcessLock {
    /// Closing it releases the lock. It is closed before the directory leaves the list.
    descriptor: Option<OwnedFd>,
    directory: DirectoryIdentity,
    owner: OwnerProcess,
}

impl DirectoryLock for ProcessLock {}

impl ProcessLock {
    /// Locks `directory` by the file that `open` opens. `None` if another owner has it.
    pub(in crate::disk) fn acquire(
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

    /// Whether an owner has `directory`, by the file that `open` opens, if there is one.
    pub(in crate::disk) fn is_held(
        directory: DirectoryIdentity,
        open: impl FnOnce() -> Result<Option<OwnedFd>, OsError>,
    ) -> Result<bool, OsError> {
        with_list(|list| {
            if list.iter().any(|(owned, process)| *owned == directory && process.is_current()) {
                return Ok(true);
            }
            // Within the list's lock: if this process became the owner meanwhile, closing the descriptor
            // would release its lock.
            let Some(descriptor) = open()? else { return Ok(false) };
            match fcntl_getlk(&descriptor, &Flock::from(FlockType::WriteLock)) {
                Ok(holder) => Ok(holder.is_some()),
                Err(error) => Err(OsError::new("fcntl", error.raw_os_error())),
            }
        })?
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
    Err(LOST)
}

#[cfg(test)]
mod tests {
    use std::fs::File;
    use std::sync::mpsc;

    use terrane_testkit::process::{in_child, in_fork};

    use super::*;
    use crate::disk::CatalogError;
    use crate::disk::files::folder::failure;

    const DIRECTORY: DirectoryIdentity = (1, 2);

    #[test]
    fn a_child_that_is_forked_during_an_open_is_told_and_its_parent_goes_on() {
        const TEST: &str = "disk::files::lock::tests::a_child_that_is_forked_during_an_open_is_told_and_its_parent_goes_on";
        in_child(TEST, || {
            let file = tempfile::NamedTempFile::new().unwrap();
            let open = || Ok(File::options().write(true).open(file.path()).unwrap().into());
            let (entered, has_entered) = mpsc::channel();
            let (leave, may_leave) = mpsc::channel::<()>();
            thread::scope(|scope| {
                scope.spawn(move || {
                    with_list(|_| {
                        entered.send(()).unwrap();
                        may_leave.recv().unwrap();
                    })
                });
                has_entered.recv().unwrap();
                in_fork(|| {
                    let error = ProcessLock::acquire(DIRECTORY, open).unwrap_err();
                    let error = failure(file.path(), error);
                    assert_eq!(error, CatalogError::ForkedDuringOpen);
                    let error = ProcessLock::is_held(DIRECTORY, || Ok(None)).unwrap_err();
                    assert_eq!(error, LOST);
                });
                leave.send(()).unwrap();
            });
            let lock = ProcessLock::acquire(DIRECTORY, open).unwrap();
            assert!(lock.is_some() && ProcessLock::is_held(DIRECTORY, || Ok(None)).unwrap());
            in_fork(|| {
                let found = ProcessLock::acquire(DIRECTORY, open).unwrap();
                assert!(found.is_none(), "the parent has the lock");
            });
            drop(lock);
            assert!(ProcessLock::acquire(DIRECTORY, open).unwrap().is_some());
        });
    }
}
