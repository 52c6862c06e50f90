//! Opening files: scratch, new and existing ones.

use std::fs::{self, File, Metadata, OpenOptions};
use std::io;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{FileTypeExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use terrane_core::{
    ByteCount, Capability, CapabilityReport, CapabilityStatus, FileIdentity, OsError, Reason,
    Requirement,
};

use super::DiskOptions;
use crate::error::StorageError;

/// Only the owner may read the file: it may contain data of its prompts.
const MODE: u32 = 0o600;

/// The number of names to try for a scratch file. It suffices for many processes at once.
const ATTEMPTS: u32 = 1024;

/// The type of a file, for messages.
const LINK: &str = "a symbolic link";

/// An open file during construction. If it was created under a name, the drop unlinks it, unless
/// [`keep`](Self::keep) was called.
#[derive(Debug)]
pub(super) struct OpenedFile {
    pub(super) file: File,
    pub(super) path: PathBuf,
    pub(super) metadata: Metadata,
    pub(super) access: AccessMode,
    created: Option<CreatedName>,
}

/// The accesses that a file is opened for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum AccessMode {
    Read,
    ReadAndWrite,
}

impl AccessMode {
    pub(super) fn options(self) -> OpenOptions {
        let mut options = OpenOptions::new();
        options.read(true).write(self == Self::ReadAndWrite);
        options
    }
}

impl OpenedFile {
    fn new(file: File, path: &Path) -> Result<Self, StorageError> {
        let metadata = file
            .metadata()
            .map_err(|error| failure(path, ByteCount::ZERO, OsError::from_io("fstat", &error)))?;
        let access = AccessMode::ReadAndWrite;
        Ok(Self { file, path: path.to_owned(), metadata, access, created: None })
    }

    pub(super) fn identity(&self) -> FileIdentity {
        identity(&self.metadata)
    }

    /// The length of the file when it was opened.
    pub(super) fn length(&self) -> ByteCount {
        ByteCount::new(self.metadata.len())
    }

    /// The file and its path. The name stays.
    pub(super) fn keep(self) -> (File, PathBuf) {
        if let Some(mut created) = self.created {
            created.is_kept = true;
        }
        (self.file, self.path)
    }
}

/// A name that this process gave to a file. The drop unlinks it unless it is kept.
#[derive(Debug)]
struct CreatedName {
    path: PathBuf,
    file: FileIdentity,
    is_kept: bool,
}

impl Drop for CreatedName {
    fn drop(&mut self) {
        if self.is_kept {
            return;
        }
        // Another process may have created a different file with this name since.
        let is_ours = fs::symlink_metadata(&self.path).is_ok_and(|m| identity(&m) == self.file);
        if is_ours && let Err(error) = fs::remove_file(&self.path) {
            tracing::warn!(path = ?self.path, %error, "the file of a failed creation could not be removed");
        }
    }
}

/// Creates a file without a name in `directory`.
pub(super) fn scratch(
    directory: &Path,
    unnamed: Requirement,
    report: &mut CapabilityReport,
) -> Result<OpenedFile, StorageError> {
    check_path(directory)?;
    let attempt = match unnamed {
        Requirement::Off => None,
        _ => Some(nameless(directory)?),
    };
    report.record(Capability::UnnamedFile, unnamed, CapabilityStatus::of(attempt.as_ref()));
    report.check()?;
    match attempt {
        Some(Ok(file)) => OpenedFile::new(file, directory),
        _ => unlinked(directory),
    }
}

/// Creates a file that never had a name, if the file system can.
fn nameless(directory: &Path) -> Result<Result<File, Reason>, StorageError> {
    let opened = OpenOptions::new()
        .read(true)
        .write(true)
        .mode(MODE)
        // With `O_EXCL` the file can never get a name.
        .custom_flags(libc::O_TMPFILE | libc::O_EXCL)
        .open(directory);
    let error = match opened {
        Ok(file) => return Ok(Ok(file)),
        Err(error) => OsError::from_io("open", &error),
    };
    match error.code {
        libc::EOPNOTSUPP | libc::EISDIR | libc::EINVAL => {
            Ok(Err(Reason::Unsupported { by: "the file system" }))
        }
        _ => Err(creation_failure(directory, directory, error)),
    }
}

/// Creates a file under a name and unlinks it at once.
///
/// A process that is killed in between leaves an empty file under that name. Names are few and the
/// same for all processes, so the next process finds the file and removes it. Removing a file that
/// another process is about to unlink does no harm.
fn unlinked(directory: &Path) -> Result<OpenedFile, StorageError> {
    let mut number = 0;
    for _ in 0..ATTEMPTS {
        let path = directory.join(format!(".terrane-scratch-{number}"));
        let error = match create(&path) {
            Ok(file) => return remove_name(&path).and_then(|()| OpenedFile::new(file, directory)),
            Err(error) => OsError::from_io("open", &error),
        };
        if error.code != libc::EEXIST {
            return Err(creation_failure(directory, directory, error));
        }
        let is_left_behind = fs::symlink_metadata(&path).map(|m| m.is_file() && m.len() == 0);
        // Only a leftover is removed. A leftover of another user cannot be removed and stays.
        let is_removed = match is_left_behind {
            Ok(true) => remove_name(&path).is_ok(),
            Ok(false) => false,
            // It no longer exists.
            Err(_) => true,
        };
        number += u32::from(!is_removed);
    }
    Err(failure(directory, ByteCount::ZERO, OsError::new("open", libc::EEXIST)))
}

/// Unlinks a path that may no longer exist.
fn remove_name(path: &Path) -> Result<(), StorageError> {
    match fs::remove_file(path) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => {
            Err(failure(path, ByteCount::ZERO, OsError::from_io("unlink", &error)))
        }
        _ => Ok(()),
    }
}

/// Creates a file at `path`, which must not exist.
pub(super) fn create_new(path: &Path) -> Result<OpenedFile, StorageError> {
    check_path(path)?;
    let file = create(path).map_err(|error| {
        creation_failure(path, directory_of(path), OsError::from_io("open", &error))
    })?;
    let mut opened = OpenedFile::new(file, path)?;
    let (path, file) = (path.to_owned(), opened.identity());
    opened.created = Some(CreatedName { path, file, is_kept: false });
    Ok(opened)
}

fn create(path: &Path) -> io::Result<File> {
    OpenOptions::new().read(true).write(true).create_new(true).mode(MODE).open(path)
}

/// Opens the regular file at `path` without changing it.
pub(super) fn existing(
    path: &Path,
    access: AccessMode,
    options: &DiskOptions,
) -> Result<OpenedFile, StorageError> {
    check_path(path)?;
    let refuses_links = options.refuse_links;
    let call =
        |name, error: io::Error| failure(path, ByteCount::ZERO, OsError::from_io(name, &error));
    // Opening any other type of file could block or have side effects.
    let metadata = if refuses_links { fs::symlink_metadata(path) } else { fs::metadata(path) };
    check_type(path, &metadata.map_err(|error| call("stat", error))?)?;
    let mut options = access.options();
    options.custom_flags(if refuses_links { libc::O_NOFOLLOW } else { 0 });
    let opened = options.open(path).map_err(|error| match access {
        // Another process has replaced the file since.
        _ if refuses_links && error.raw_os_error() == Some(libc::ELOOP) => {
            StorageError::NotAFile { path: path.to_owned(), found: LINK }
        }
        AccessMode::ReadAndWrite => call("open", error),
        AccessMode::Read => {
            StorageError::File { path: path.to_owned(), source: OsError::from_io("open", &error) }
        }
    })?;
    let opened = OpenedFile { access, ..OpenedFile::new(opened, path)? };
    check_type(path, &opened.metadata)?;
    Ok(opened)
}

fn check_path(path: &Path) -> Result<(), StorageError> {
    if path.as_os_str().as_bytes().contains(&0) {
        return Err(StorageError::PathContainsNul { path: path.to_owned() });
    }
    Ok(())
}

fn check_type(path: &Path, metadata: &Metadata) -> Result<(), StorageError> {
    let kind = metadata.file_type();
    let found = match () {
        () if kind.is_file() => return Ok(()),
        () if kind.is_dir() => "a directory",
        () if kind.is_symlink() => LINK,
        () if kind.is_fifo() => "a FIFO",
        () if kind.is_socket() => "a socket",
        () if kind.is_block_device() || kind.is_char_device() => "a device",
        () => "of an unknown type",
    };
    Err(StorageError::NotAFile { path: path.to_owned(), found })
}

pub(super) fn identity(metadata: &Metadata) -> FileIdentity {
    FileIdentity { file_system: metadata.dev(), inode: metadata.ino() }
}

/// The directory of a file at `path`.
pub(super) fn directory_of(path: &Path) -> &Path {
    match path.parent() {
        Some(parent) if !parent.as_os_str().is_empty() => parent,
        _ => Path::new("."),
    }
}

/// The error if no file could be created in `directory`. Some file systems, such as `/proc`, return
/// `ENOENT` although the directory exists.
fn creation_failure(path: &Path, directory: &Path, source: OsError) -> StorageError {
    if source.code == libc::ENOENT && directory.is_dir() {
        return StorageError::NotWritable { path: path.to_owned(), source };
    }
    failure(path, ByteCount::ZERO, source)
}

/// The error for a failed call on `path` that concerned `requested` bytes.
pub(super) fn failure(path: &Path, requested: ByteCount, source: OsError) -> StorageError {
    let path = path.to_owned();
    match source.code {
        libc::EEXIST => StorageError::AlreadyExists { path },
        libc::ENOENT => StorageError::NotFound { path },
        libc::EACCES | libc::EPERM | libc::EROFS | libc::ETXTBSY => {
            StorageError::NotWritable { path, source }
        }
        libc::EISDIR => StorageError::NotAFile { path, found: "a directory" },
        libc::ENOSPC | libc::EDQUOT | libc::EFBIG => {
            StorageError::NoSpace { path, requested, source }
        }
        _ => StorageError::File { path, source },
    }
}
