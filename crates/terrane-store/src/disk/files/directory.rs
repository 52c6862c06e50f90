//! A directory of the file system, as the catalog uses its files.

use std::fs::File;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use rustix::fs::{
    self, AtFlags, Dir, FileType, Mode, OFlags, fchmod, fstat, fsync, mkdirat, open, openat,
    renameat, unlinkat,
};
use rustix::io::Errno;
use rustix::process::geteuid;
use terrane_core::OsError;
use terrane_core::convert::to_u64;

use crate::disk::error::CatalogError;
use crate::disk::files::folder::failure;
use crate::disk::files::lock::{DirectoryIdentity, ProcessLock};
use crate::disk::files::{DirectoryLock, Files, OpenFile, OpenMode};
use crate::disk::format::names;

/// Only the owner may read what was cached.
const DIRECTORY_MODE: u32 = 0o700;
const FILE_MODE: u32 = 0o600;

/// How often a file is created to see its owner, while other processes do the same.
const ATTEMPTS: u32 = 100;

/// A directory of the file system, by its descriptor: it may be renamed while it is open.
#[derive(Debug)]
pub struct Directory {
    descriptor: OwnedFd,
    path: PathBuf,
    /// The access that its files are opened for.
    access: OFlags,
}

impl Directory {
    /// Opens the folder `name` of `parent`, and creates it with mode 0700 if it does not exist.
    ///
    /// # Errors
    ///
    /// Returns [`CatalogError::NotFound`] if `parent` does not exist,
    /// [`CatalogError::NotADirectory`], [`CatalogError::OtherUser`], [`CatalogError::NotPrivate`] or
    /// [`CatalogError::NotPermitted`] if the folder is not usable, and the errors of the system.
    pub fn open(parent: &Path, name: &str) -> Result<Self, CatalogError> {
        let path = parent.join(name);
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let parent_descriptor =
            open(parent, flags, Mode::empty()).map_err(|error| at(parent, "open", error))?;
        match mkdirat(&parent_descriptor, name, Mode::from_raw_mode(DIRECTORY_MODE)) {
            Ok(()) | Err(Errno::EXIST) => {}
            Err(error) => return Err(at(&path, "mkdirat", error)),
        }
        // A process that was killed may have created the folder without this sync.
        fsync(&parent_descriptor).map_err(|error| at(parent, "fsync", error))?;
        let flags = flags | OFlags::NOFOLLOW;
        let descriptor = openat(&parent_descriptor, name, flags, Mode::empty())
            .map_err(|error| at(&path, "openat", error))?;
        make_private(&descriptor, &path)?;
        Ok(Self { descriptor, path, access: OFlags::RDWR })
    }

    /// Opens the folder `name` of `parent` to read its files. It changes nothing, so it needs no
    /// permission to write, and works on a file system that is mounted read-only.
    pub(crate) fn open_read_only(parent: &Path, name: &str) -> Result<Self, CatalogError> {
        let path = parent.join(name);
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC | OFlags::NOFOLLOW;
        let opened = open(&path, flags, Mode::empty());
        let descriptor = opened.map_err(|error| at(&path, "open", error))?;
        Ok(Self { descriptor, path, access: OFlags::RDONLY })
    }

    /// Whether this process or another one has the lock `name`. It takes no lock.
    pub(crate) fn is_locked(&self, name: &str) -> Result<bool, OsError> {
        let missing = Errno::NOENT.raw_os_error();
        ProcessLock::is_held(self.identity()?, || match self.open_file(name, OFlags::empty()) {
            Err(error) if error.code == missing => Ok(None),
            opened => opened.map(Some),
        })
    }

    /// Its file system and its inode.
    pub(crate) fn identity(&self) -> Result<DirectoryIdentity, OsError> {
        let found = fstat(self.descriptor.as_fd()).map_err(|error| os("fstat", error))?;
        Ok((found.st_dev, found.st_ino))
    }

    /// The path under which the directory was opened.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.path
    }

    fn open_file(&self, name: &str, create: OFlags) -> Result<OwnedFd, OsError> {
        let flags = self.access | OFlags::CLOEXEC | OFlags::NOFOLLOW | OFlags::NONBLOCK | create;
        let mode = Mode::from_raw_mode(FILE_MODE);
        let descriptor =
            openat(&self.descriptor, name, flags, mode).map_err(|error| os("openat", error))?;
        let found = fstat(&descriptor).map_err(|error| os("fstat", error))?;
        if FileType::from_raw_mode(found.st_mode) != FileType::RegularFile {
            return Err(os("openat", Errno::INVAL));
        }
        Ok(descriptor)
    }
}

/// Removes the permissions of other users from a folder that existed. Its owner must be the user of
/// this process, also for root: an owner can read and replace its files.
fn make_private(descriptor: &OwnedFd, path: &Path) -> Result<(), CatalogError> {
    let found = fstat(descriptor).map_err(|error| at(path, "fstat", error))?;
    let (owner, user) = (found.st_uid, geteuid().as_raw());
    // A file system may give files another owner than the user of the process: NFS with `root_squash`, CIFS.
    if owner != user && owner_of_new_files(descriptor, path)? != Some(owner) {
        return Err(CatalogError::OtherUser { path: path.to_owned(), owner, user });
    }
    let mode = || -> Result<u32, CatalogError> {
        let found = fstat(descriptor).map_err(|error| at(path, "fstat", error))?;
        Ok(Mode::from_raw_mode(found.st_mode).bits() & 0o777)
    };
    if mode()? & !DIRECTORY_MODE == 0 {
        return Ok(());
    }
    // Some file systems have no modes, and report success.
    let _ = fchmod(descriptor, Mode::from_raw_mode(DIRECTORY_MODE));
    match mode()? {
        mode if mode & !DIRECTORY_MODE == 0 => Ok(()),
        mode => Err(CatalogError::NotPrivate { path: path.to_owned(), mode }),
    }
}

/// The owner that the file system gives to a file that this process creates in the folder. `None` if it may
/// create none.
fn owner_of_new_files(folder: &OwnedFd, path: &Path) -> Result<Option<u32>, CatalogError> {
    let flags = OFlags::WRONLY | OFlags::CLOEXEC | OFlags::CREATE | OFlags::EXCL;
    for _ in 0..ATTEMPTS {
        // A killed process may have left one. A process that reads the owner of its own has it open.
        let _ = unlinkat(folder, names::PROBE, AtFlags::empty());
        let created = match openat(folder, names::PROBE, flags, Mode::from_raw_mode(FILE_MODE)) {
            Err(Errno::EXIST) => continue,
            Err(Errno::ACCESS | Errno::PERM | Errno::ROFS) => return Ok(None),
            created => created.map_err(|error| at(path, "openat", error))?,
        };
        let found = fstat(&created).map_err(|error| at(path, "fstat", error));
        let _ = unlinkat(folder, names::PROBE, AtFlags::empty());
        return Ok(Some(found?.st_uid));
    }
    Err(at(path, "openat", Errno::EXIST))
}

fn os(operation: &'static str, error: Errno) -> OsError {
    OsError::new(operation, error.raw_os_error())
}

fn at(path: &Path, operation: &'static str, error: Errno) -> CatalogError {
    match error {
        Errno::NOENT => CatalogError::NotFound { path: path.to_owned() },
        Errno::NOTDIR | Errno::LOOP => CatalogError::NotADirectory { path: path.to_owned() },
        error => failure(path, os(operation, error)),
    }
}

impl Files for Directory {
    fn open(&self, name: &str, mode: OpenMode) -> Result<Box<dyn OpenFile>, OsError> {
        let create = match mode {
            OpenMode::Existing => OFlags::empty(),
            OpenMode::Create => OFlags::CREATE,
            OpenMode::CreateNew => OFlags::CREATE | OFlags::EXCL,
        };
        Ok(Box::new(DirectoryFile(File::from(self.open_file(name, create)?))))
    }

    fn rename(&self, from: &str, to: &str) -> Result<(), OsError> {
        renameat(&self.descriptor, from, &self.descriptor, to)
            .map_err(|error| os("renameat", error))
    }

    fn unlink(&self, name: &str) -> Result<(), OsError> {
        unlinkat(&self.descriptor, name, AtFlags::empty()).map_err(|error| os("unlinkat", error))
    }

    fn sync_directory(&self) -> Result<(), OsError> {
        fsync(&self.descriptor).map_err(|error| os("fsync", error))
    }

    fn list(&self) -> Result<Vec<String>, OsError> {
        let failed = |error| os("getdents", error);
        let directory = Dir::read_from(&self.descriptor).map_err(failed)?;
        let mut names = Vec::new();
        for entry in directory {
            let entry = entry.map_err(failed)?;
            match entry.file_name().to_str() {
                Ok("." | "..") | Err(_) => {}
                Ok(name) => names.push(name.to_owned()),
            }
        }
        Ok(names)
    }

    fn try_lock(&self, name: &str) -> Result<Option<Box<dyn DirectoryLock>>, OsError> {
        let open = || self.open_file(name, OFlags::CREATE);
        let lock = ProcessLock::acquire(self.identity()?, open)?;
        Ok(lock.map(|lock| -> Box<dyn DirectoryLock> { Box::new(lock) }))
    }
}

#[derive(Debug)]
struct DirectoryFile(File);

impl OpenFile for DirectoryFile {
    fn length(&self) -> Result<u64, OsError> {
        let metadata = self.0.metadata().map_err(|error| OsError::from_io("fstat", &error))?;
        Ok(metadata.len())
    }

    fn read_at(&self, bytes: &mut [u8], offset: u64) -> Result<usize, OsError> {
        let mut filled = 0;
        while let Some(rest) = bytes.get_mut(filled..).filter(|rest| !rest.is_empty()) {
            match self.0.read_at(rest, offset.saturating_add(to_u64(filled))) {
                Ok(0) => break,
                Ok(count) => filled += count,
                Err(error) if error.kind() == std::io::ErrorKind::Interrupted => {}
                Err(error) => return Err(OsError::from_io("pread", &error)),
            }
        }
        Ok(filled)
    }

    fn write_at(&self, bytes: &[u8], offset: u64) -> Result<(), OsError> {
        self.0.write_all_at(bytes, offset).map_err(|error| OsError::from_io("pwrite", &error))
    }

    fn set_length(&self, length: u64) -> Result<(), OsError> {
        self.0.set_len(length).map_err(|error| OsError::from_io("ftruncate", &error))
    }

    fn sync_data(&self) -> Result<(), OsError> {
        fs::fdatasync(&self.0).map_err(|error| os("fdatasync", error))
    }
}
