//! Files as memory: scratch files and named files, with direct I/O where the file system supports
//! it.

mod allocators;
mod direct;
mod open;
mod options;

use std::fs::File;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd};
use std::path::{Path, PathBuf};

use terrane_core::{
    Alignment, ByteCount, Capability, CapabilityReport, CapabilityStatus, DirectFile, Durability,
    FileHandle, FilePosition, Location, Memory, OsError, Reason, Requirement, StorageKind,
};

pub use allocators::{DiskAllocator, NamedFileAllocator};
pub use options::DiskOptions;

use crate::error::StorageError;
use crate::sys;
use direct::DirectAlignments;
use open::{AccessMode, OpenedFile, failure};

/// A file as a [`Memory`] of all its bytes, from offset 0 on.
///
/// If the file system supports direct I/O, the file is open twice ([`FileHandle`]): one descriptor
/// for buffered I/O, the other for direct I/O. Both descriptors close on `exec` and when this value
/// drops. A scratch file disappears then; a named file stays. Local file systems keep the two paths
/// coherent: they write back and drop the cached pages. This has a cost, so use one path at a time.
///
/// A new file has a length of whole [granules](terrane_core::Allocate::limits), so that direct I/O
/// reaches every part of it. A length above `RLIMIT_FSIZE` fails with [`StorageError::NoSpace`]
/// before the file is created.
///
/// ```
/// use terrane_core::{ByteCount, Memory};
/// use terrane_storage::{DiskFile, DiskOptions};
///
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let directory = tempfile::tempdir()?;
/// let path = directory.path().join("blocks");
/// let file = DiskFile::create_new(&path, ByteCount::mib(1), &DiskOptions::default())?;
/// assert_eq!(file.length(), ByteCount::mib(1));
/// drop(file);
/// let again = DiskFile::open_existing(&path, ByteCount::mib(1), &DiskOptions::default())?;
/// println!("{}", again.capabilities());
/// # Ok(())
/// # }
/// ```
#[derive(Debug)]
pub struct DiskFile {
    handle: FileHandle,
    length: ByteCount,
    path: PathBuf,
    is_scratch: bool,
    report: CapabilityReport,
    buffered: File,
    /// Keeps the descriptor in the handle open.
    _direct: Option<File>,
}

impl DiskFile {
    /// Creates a file in `directory` without a name. It disappears when it is closed, even if the
    /// process is killed. For zero bytes the file is empty and uses no disk block.
    ///
    /// If the file system lacks `O_TMPFILE`, the file is created as `.terrane-scratch-N` and
    /// unlinked at once. A process that is killed between the two leaves an empty file behind. The
    /// next scratch file in the directory removes it.
    ///
    /// # Errors
    ///
    /// [`StorageError::PathContainsNul`], [`StorageError::NotFound`], [`StorageError::NotWritable`]
    /// or [`StorageError::File`] if the directory cannot be used. [`StorageError::NoSpace`] if the
    /// disk has too few blocks left. [`StorageError::Capability`] if a required capability was not
    /// granted. A failed call leaves nothing behind.
    pub fn scratch(
        directory: &Path,
        bytes: ByteCount,
        options: &DiskOptions,
    ) -> Result<Self, StorageError> {
        check_limit(directory, bytes)?;
        let mut report = CapabilityReport::default();
        let opened = open::scratch(directory, options.unnamed, &mut report)?;
        Self::make(opened, bytes, options, report, true)
    }

    /// Creates a file at `path`, readable by its owner only. It stays when this value drops.
    ///
    /// # Errors
    ///
    /// [`StorageError::AlreadyExists`] if the path exists; the call does not change it. Otherwise
    /// as for [`scratch`](Self::scratch). A failed call removes the file that it created.
    pub fn create_new(
        path: &Path,
        bytes: ByteCount,
        options: &DiskOptions,
    ) -> Result<Self, StorageError> {
        check_limit(path, bytes)?;
        let opened = open::create_new(path)?;
        Self::make(opened, bytes, options, CapabilityReport::default(), false)
    }

    /// Opens the file at `path`, which must have at least `bytes` bytes. The file is never
    /// truncated, lengthened or deleted. The memory is the whole file. If its length is no multiple
    /// of the alignment for direct I/O, only buffered I/O reaches its end.
    ///
    /// # Errors
    ///
    /// [`StorageError::NotFound`], [`StorageError::NotWritable`], [`StorageError::NotAFile`],
    /// [`StorageError::FileTooShort`], [`StorageError::PathContainsNul`] or [`StorageError::File`].
    /// [`StorageError::Capability`] if direct I/O is required and not granted.
    pub fn open_existing(
        path: &Path,
        bytes: ByteCount,
        options: &DiskOptions,
    ) -> Result<Self, StorageError> {
        Self::open(path, bytes, options, AccessMode::ReadAndWrite)
    }

    /// Like [`open_existing`](Self::open_existing), for a file that may be too short. It is then
    /// lengthened to `bytes`. On request the blocks of the first `bytes` bytes are reserved, also
    /// those that were freed after the creation.
    ///
    /// # Errors
    ///
    /// As for [`open_existing`](Self::open_existing), without [`StorageError::FileTooShort`].
    /// [`StorageError::NoSpace`] if the file cannot be lengthened. A file that is long enough opens
    /// even if the disk has no space to reserve its blocks, unless the options require that.
    pub fn open_extended(
        path: &Path,
        bytes: ByteCount,
        options: &DiskOptions,
    ) -> Result<Self, StorageError> {
        let opened = open::existing(path, AccessMode::ReadAndWrite, options)?;
        if bytes > opened.length() {
            check_limit(path, bytes)?;
        }
        let mut report = CapabilityReport::default();
        lengthen(&opened, bytes, options.preallocate, &mut report)?;
        let length = bytes.max(opened.length());
        Self::finish(opened, length, options, report, false)
    }

    /// Like [`open_existing`](Self::open_existing), for reading only: a file without write
    /// permission, or on a file system that is mounted read-only. Copies to it fail.
    ///
    /// # Errors
    ///
    /// As for [`open_existing`](Self::open_existing), without [`StorageError::NotWritable`].
    pub fn open_read_only(
        path: &Path,
        bytes: ByteCount,
        options: &DiskOptions,
    ) -> Result<Self, StorageError> {
        Self::open(path, bytes, options, AccessMode::Read)
    }

    fn open(
        path: &Path,
        bytes: ByteCount,
        options: &DiskOptions,
        access: AccessMode,
    ) -> Result<Self, StorageError> {
        let opened = open::existing(path, access, options)?;
        let length = opened.length();
        if length < bytes {
            return Err(StorageError::FileTooShort {
                path: path.to_owned(),
                length,
                needed: bytes,
            });
        }
        Self::finish(opened, length, options, CapabilityReport::default(), false)
    }

    /// The path of the file. For a scratch file, the path of its directory.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Whether the file disappears when this value drops.
    #[must_use]
    pub const fn is_scratch(&self) -> bool {
        self.is_scratch
    }

    /// The descriptors and the identity.
    #[must_use]
    pub const fn handle(&self) -> FileHandle {
        self.handle
    }

    /// Syncs the completed writes to the device, as the file's [durability](FileHandle::durability)
    /// requires.
    ///
    /// This call blocks. A queue does the same with
    /// [`IoRequest::sync_data`](crate::IoRequest::sync_data). Transfers sync on their own.
    ///
    /// # Errors
    ///
    /// [`StorageError::NoSpace`] or [`StorageError::File`] if the device or file system failed.
    /// Writes since the last sync may then be lost, and another sync does not report the loss.
    pub fn sync(&self) -> Result<(), StorageError> {
        let (call, result) = match self.handle.durability {
            Durability::None => return Ok(()),
            Durability::Data => ("fdatasync", self.buffered.sync_data()),
            Durability::Full => ("fsync", self.buffered.sync_all()),
        };
        result.map_err(|error| failure(&self.path, self.length, OsError::from_io(call, &error)))
    }

    /// Sets the length of a new file and reserves its blocks.
    fn make(
        opened: OpenedFile,
        bytes: ByteCount,
        options: &DiskOptions,
        mut report: CapabilityReport,
        is_scratch: bool,
    ) -> Result<Self, StorageError> {
        let granule = match alignments(&opened, options) {
            Some(Ok(alignments)) => alignments.offset.max(Alignment::PAGE),
            _ => Alignment::PAGE,
        };
        let length = bytes.align_up(granule)?;
        // Checked again, because rounding up has increased the length.
        check_limit(&opened.path, length)?;
        lengthen(&opened, length, options.preallocate, &mut report)?;
        if options.durability == Durability::Full && !is_scratch {
            sync_creation(&opened).map_err(|error| failure(&opened.path, length, error))?;
        }
        Self::finish(opened, length, options, report, is_scratch)
    }

    /// Opens the descriptor for direct I/O, and builds the memory.
    fn finish(
        opened: OpenedFile,
        length: ByteCount,
        options: &DiskOptions,
        mut report: CapabilityReport,
        is_scratch: bool,
    ) -> Result<Self, StorageError> {
        let open = |alignments| Ok((direct::open(&opened, alignments)?, alignments));
        let direct = alignments(&opened, options).map(|alignments| alignments.and_then(open));
        report.record(Capability::DirectIo, options.direct, CapabilityStatus::of(direct.as_ref()));
        report.check()?;
        let (direct, alignments) = direct.and_then(Result::ok).unzip();
        let identity = opened.identity();
        let (buffered, path) = opened.keep();
        let handle = FileHandle {
            descriptor: buffered.as_raw_fd(),
            direct: direct.as_ref().zip(alignments).map(|(file, alignments)| DirectFile {
                descriptor: file.as_raw_fd(),
                memory_alignment: alignments.memory,
                offset_alignment: alignments.offset,
            }),
            identity,
            durability: options.durability,
        };
        tracing::debug!(?path, %length, %report, "file is open");
        Ok(Self { handle, length, path, is_scratch, report, buffered, _direct: direct })
    }
}

impl AsFd for DiskFile {
    /// The descriptor that uses the page cache.
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.buffered.as_fd()
    }
}

// SAFETY: the descriptors are open until the value drops, for reading and, unless the caller opened
// the file read-only, for writing. The file had at least this length when it was opened. A scratch
// file has no name by which others could reach it. The owner of a named file prevents other access.
unsafe impl Memory for DiskFile {
    fn kind(&self) -> StorageKind {
        StorageKind::Disk
    }

    fn location(&self) -> Location {
        Location::File(FilePosition { file: self.handle, offset: ByteCount::ZERO })
    }

    fn length(&self) -> ByteCount {
        self.length
    }

    fn capabilities(&self) -> CapabilityReport {
        self.report.clone()
    }
}

/// The alignments of direct I/O, if it is wanted.
fn alignments(
    opened: &OpenedFile,
    options: &DiskOptions,
) -> Option<Result<DirectAlignments, Reason>> {
    (options.direct != Requirement::Off).then(|| direct::alignments(&opened.file))
}

/// Refuses a length above `RLIMIT_FSIZE`, because the kernel would send `SIGXFSZ`.
fn check_limit(path: &Path, length: ByteCount) -> Result<(), StorageError> {
    if length.get() > sys::file::largest() {
        return Err(failure(path, length, OsError::new("setrlimit", libc::EFBIG)));
    }
    Ok(())
}

/// Makes a file at least `length` bytes long, and reserves its blocks if the options request that.
fn lengthen(
    opened: &OpenedFile,
    length: ByteCount,
    preallocate: Requirement,
    report: &mut CapabilityReport,
) -> Result<(), StorageError> {
    let fail = |error| failure(&opened.path, length, error);
    let was_long_enough = opened.length() >= length;
    let mut status = CapabilityStatus::NotTried;
    if preallocate != Requirement::Off && !length.is_zero() {
        status = match sys::file::reserve(opened.file.as_fd(), length.get()) {
            Ok(()) => CapabilityStatus::Granted,
            Err(OsError { code: libc::EOPNOTSUPP | libc::ENOSYS, .. }) => {
                CapabilityStatus::Refused(Reason::Unsupported { by: "the file system" })
            }
            // The file stays as long as it was, and its blocks can be read.
            Err(error) if was_long_enough && matches!(error.code, libc::ENOSPC | libc::EDQUOT) => {
                CapabilityStatus::Refused(Reason::Os(error))
            }
            Err(error) => return Err(fail(error)),
        };
    }
    let is_long_enough = was_long_enough || status == CapabilityStatus::Granted;
    report.record(Capability::Preallocation, preallocate, status);
    report.check()?;
    if !is_long_enough {
        let result = opened.file.set_len(length.get());
        result.map_err(|error| match error.raw_os_error() {
            Some(_) => fail(OsError::from_io("ftruncate", &error)),
            // The standard library rejects lengths above the largest file offset.
            None => fail(OsError::new("ftruncate", libc::EFBIG)),
        })?;
    }
    Ok(())
}

/// Syncs a new file, and its name in the directory, to the device.
fn sync_creation(opened: &OpenedFile) -> Result<(), OsError> {
    opened.file.sync_all().map_err(|error| OsError::from_io("fsync", &error))?;
    let parent = open::directory_of(&opened.path);
    let directory = File::open(parent).map_err(|error| OsError::from_io("open", &error))?;
    directory.sync_all().map_err(|error| OsError::from_io("fsync", &error))
}
