//! The files of one directory, as the catalog uses them.
//!
//! Production uses [`Directory`](super::Directory). Tests record the calls and make every state that
//! a crash can leave.

pub(crate) mod directory;
pub(crate) mod folder;
pub(crate) mod lock;
pub(crate) mod owner;

use std::fmt;

use terrane_core::OsError;

/// How a file is opened.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum OpenMode {
    /// The file exists.
    Existing,
    /// The file exists or is created empty.
    Create,
    /// The file does not exist and is created empty.
    CreateNew,
}

/// The files of one directory. Names have no separators.
///
/// A change of names (create, rename, unlink) is durable after [`sync_directory`](Self::sync_directory).
/// Until then a crash may undo any of them, in any order.
pub trait Files: fmt::Debug + Send + Sync {
    /// Opens a regular file for reading and writing.
    ///
    /// # Errors
    ///
    /// Returns the error of the system: `ENOENT`, `EEXIST`, `EACCES`, `ENOSPC`, `EINVAL` if the name
    /// is not that of a regular file, and others.
    fn open(&self, name: &str, mode: OpenMode) -> Result<Box<dyn OpenFile>, OsError>;

    /// Renames a file. A file that has the new name is replaced in one step.
    ///
    /// # Errors
    ///
    /// Returns the error of the system.
    fn rename(&self, from: &str, to: &str) -> Result<(), OsError>;

    /// Removes the name of a file.
    ///
    /// # Errors
    ///
    /// Returns the error of the system.
    fn unlink(&self, name: &str) -> Result<(), OsError>;

    /// Makes all changes of names durable.
    ///
    /// # Errors
    ///
    /// Returns the error of the system.
    fn sync_directory(&self) -> Result<(), OsError>;

    /// The names in the directory, in any order. Names that are not UTF-8 are left out.
    ///
    /// # Errors
    ///
    /// Returns the error of the system.
    fn list(&self) -> Result<Vec<String>, OsError>;

    /// Locks the directory by the file `name`, which is created if it does not exist. The lock ends
    /// when the value drops and when the process ends. A forked process does not have it.
    ///
    /// `None` means that another owner has the lock.
    ///
    /// # Errors
    ///
    /// Returns the error of the system.
    fn try_lock(&self, name: &str) -> Result<Option<Box<dyn DirectoryLock>>, OsError>;
}

/// A lock of a directory. It ends on drop.
pub trait DirectoryLock: fmt::Debug + Send + Sync {}

/// An open file. All calls name their offset, so that threads can share the file.
pub trait OpenFile: fmt::Debug + Send + Sync {
    /// The length in bytes.
    ///
    /// # Errors
    ///
    /// Returns the error of the system.
    fn length(&self) -> Result<u64, OsError>;

    /// Reads from `offset` until `bytes` is full or the file ends. Returns the number of bytes read.
    ///
    /// # Errors
    ///
    /// Returns the error of the system.
    fn read_at(&self, bytes: &mut [u8], offset: u64) -> Result<usize, OsError>;

    /// Writes all of `bytes` at `offset`.
    ///
    /// # Errors
    ///
    /// Returns the error of the system. Any part of the bytes may have been written.
    fn write_at(&self, bytes: &[u8], offset: u64) -> Result<(), OsError>;

    /// Cuts or extends the file.
    ///
    /// # Errors
    ///
    /// Returns the error of the system.
    fn set_length(&self, length: u64) -> Result<(), OsError>;

    /// Makes the data and the length durable (`fdatasync`).
    ///
    /// # Errors
    ///
    /// Returns the error of the system. After an error the file must not be synced again: a later
    /// success would say nothing about the data that failed.
    fn sync_data(&self) -> Result<(), OsError>;
}
