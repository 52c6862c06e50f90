//! Files as sources of memory: one scratch file for each region, or one named file.

use std::path::{Path, PathBuf};

use terrane_core::{
    Alignment, Allocate, AllocateError, ByteCount, CapabilityReport, Limits, Memory, RegionRequest,
    Requirement, StorageKind,
};

use super::{DiskFile, DiskOptions, open};
use crate::error::StorageError;

/// Allocates disk memory. Each region is a separate scratch file in one directory.
///
/// ```
/// use terrane_core::{Allocate, ByteCount, Memory, RegionRequest};
/// use terrane_storage::{DiskAllocator, DiskOptions};
///
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let directory = tempfile::tempdir()?;
/// let allocator = DiskAllocator::new(directory.path(), DiskOptions::default())?;
/// let region = allocator.allocate(&RegionRequest::new(ByteCount::mib(1)).labelled("blocks"))?;
/// assert_eq!(region.length(), ByteCount::mib(1));
/// # Ok(())
/// # }
/// ```
#[derive(Clone, Debug)]
pub struct DiskAllocator {
    directory: PathBuf,
    options: DiskOptions,
    granule: Alignment,
    report: CapabilityReport,
}

impl DiskAllocator {
    /// Creates an allocator of scratch files in `directory`. It creates a small file to detect the
    /// capabilities of the file system.
    ///
    /// # Errors
    ///
    /// As for [`DiskFile::scratch`].
    pub fn new(directory: &Path, options: DiskOptions) -> Result<Self, StorageError> {
        let probe = DiskFile::scratch(directory, ByteCount::new(1), &options)?;
        let offset = probe.handle().direct.map(|direct| direct.offset_alignment);
        Ok(Self {
            directory: directory.to_owned(),
            options,
            granule: offset.unwrap_or_default().max(Alignment::PAGE),
            report: probe.capabilities(),
        })
    }

    /// The directory.
    #[must_use]
    pub fn directory(&self) -> &Path {
        &self.directory
    }

    /// The capabilities that the file system granted to the test file.
    #[must_use]
    pub const fn capabilities(&self) -> &CapabilityReport {
        &self.report
    }
}

// SAFETY: each region is a separate file, without a name by which another process could open it.
unsafe impl Allocate for DiskAllocator {
    type Memory = DiskFile;

    fn kind(&self) -> StorageKind {
        StorageKind::Disk
    }

    /// Pages of 4 KiB, or the alignment of offsets for direct I/O if that is larger.
    fn limits(&self) -> Limits {
        Limits { alignment: self.granule, granule: self.granule, largest_region: None }
    }

    /// A region begins at offset 0 of its file, which satisfies every alignment.
    fn allocate(&self, request: &RegionRequest) -> Result<DiskFile, AllocateError> {
        DiskFile::scratch(&self.directory, request.bytes, &self.options).map_err(|error| {
            error.into_allocate_error(StorageKind::Disk, request.bytes, request.label.clone())
        })
    }
}

/// Allocates one region, as a new file with a name. The request sets the file's length, so a
/// layout's plan determines it.
///
/// The file stays when the memory drops. It also stays if a layout fails to build after the file
/// was created. While the file exists, further requests fail with [`StorageError::AlreadyExists`].
/// A later process can open it with [`DiskFile::open_existing`] and adopt it.
///
/// ```
/// use terrane_core::{Allocate, ByteCount, Memory, RegionRequest};
/// use terrane_storage::{DiskOptions, NamedFileAllocator};
///
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let directory = tempfile::tempdir()?;
/// let path = directory.path().join("blocks");
/// let allocator = NamedFileAllocator::new(&path, DiskOptions::default())?;
/// let region = allocator.allocate(&RegionRequest::new(ByteCount::mib(1)).labelled("blocks"))?;
/// assert_eq!(region.length(), ByteCount::mib(1));
/// assert!(path.exists());
/// # Ok(())
/// # }
/// ```
#[derive(Clone, Debug)]
pub struct NamedFileAllocator {
    path: PathBuf,
    options: DiskOptions,
    /// An allocator in the same directory. It has the limits, and serves requests of zero bytes.
    scratch: DiskAllocator,
}

impl NamedFileAllocator {
    /// Creates an allocator of a file at `path`. The first request creates the file. This call
    /// creates a small scratch file in the directory to detect the capabilities of the file system.
    ///
    /// # Errors
    ///
    /// As for [`DiskFile::scratch`], for the path's directory. [`DiskOptions::unnamed`] has no
    /// effect here.
    pub fn new(path: &Path, options: DiskOptions) -> Result<Self, StorageError> {
        let unnamed = DiskOptions { unnamed: Requirement::Preferred, ..options };
        let scratch = DiskAllocator::new(open::directory_of(path), unnamed)?;
        Ok(Self { path: path.to_owned(), options, scratch })
    }

    /// The path.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The capabilities that the file system granted to the test file.
    #[must_use]
    pub const fn capabilities(&self) -> &CapabilityReport {
        self.scratch.capabilities()
    }
}

// SAFETY: a region is a file that did not exist before. The owner of its name prevents other
// access.
unsafe impl Allocate for NamedFileAllocator {
    type Memory = DiskFile;

    fn kind(&self) -> StorageKind {
        StorageKind::Disk
    }

    /// The limits of a [`DiskAllocator`] in the same directory.
    fn limits(&self) -> Limits {
        self.scratch.limits()
    }

    /// A region begins at offset 0 of the file. A request of zero bytes creates no named file.
    fn allocate(&self, request: &RegionRequest) -> Result<DiskFile, AllocateError> {
        if request.bytes.is_zero() {
            return self.scratch.allocate(request);
        }
        DiskFile::create_new(&self.path, request.bytes, &self.options).map_err(|error| {
            error.into_allocate_error(StorageKind::Disk, request.bytes, request.label.clone())
        })
    }
}
