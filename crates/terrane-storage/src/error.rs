//! The error type of this crate.

use std::path::PathBuf;

use terrane_core::{
    AllocateError, ByteCount, CapabilityMissing, ForkedProcess, Label, OsError, SizeOverflow,
    StorageKind,
};

use crate::queue::IoFailure;

/// The reason why a storage operation failed.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum StorageError {
    /// A size or an offset left the range of 64 bits.
    #[error(transparent)]
    Overflow(#[from] SizeOverflow),
    /// A capability that a policy requires was not granted.
    #[error(transparent)]
    Capability(#[from] CapabilityMissing),
    /// A queue was used in a process that was forked from the queue's owner.
    #[error(
        "the I/O queue belongs to the process that this one was forked from; create one after the fork"
    )]
    Forked(#[from] ForkedProcess),
    /// A request of the I/O queue did not transfer all its bytes.
    #[error(transparent)]
    Io(#[from] IoFailure),
    /// The machine, or the control group, has too little memory left.
    #[error(
        "cannot allocate {requested} of memory{}; free some, request less, or raise the limit",
        .available.map(|bytes| format!(" ({bytes} available)")).unwrap_or_default()
    )]
    OutOfMemory {
        /// The requested bytes.
        requested: ByteCount,
        /// The available bytes, if the system reports them.
        available: Option<ByteCount>,
        /// The error of the kernel. `None` if the memory was too little to try.
        #[source]
        source: Option<OsError>,
    },
    /// The kernel refused to map or to prepare memory.
    #[error("the kernel refused to map or prepare {requested} of memory; see the cause")]
    Memory {
        /// The requested bytes.
        requested: ByteCount,
        /// The error of the kernel.
        #[source]
        source: OsError,
    },
    /// The alignment is not supported.
    #[error("an alignment of {requested} is not supported; request at most {largest}")]
    TooStrictlyAligned {
        /// The requested alignment.
        requested: terrane_core::Alignment,
        /// The maximum alignment.
        largest: terrane_core::Alignment,
    },
    /// The bring-up was cancelled through its progress. All memory was freed.
    #[error(
        "the preparation of {of} of memory was cancelled after {ready}; allocate the memory again \
         to use it"
    )]
    Cancelled {
        /// The bytes that were ready.
        ready: ByteCount,
        /// The requested bytes.
        of: ByteCount,
    },
    /// A thread could not be started.
    #[error("cannot start a thread; use fewer threads, or raise RLIMIT_NPROC")]
    Thread {
        /// The error of the system.
        #[source]
        source: OsError,
    },
    /// A path contains a NUL byte, which the system does not accept.
    #[error("the path {path:?} contains a NUL byte; choose another path")]
    PathContainsNul {
        /// The path.
        path: PathBuf,
    },
    /// A file to be created exists already.
    #[error("{path:?} exists; open it as an existing file, or choose another path")]
    AlreadyExists {
        /// The path.
        path: PathBuf,
    },
    /// A file to be opened, or its directory, does not exist.
    #[error("{path:?} does not exist; create it, or its directory, first")]
    NotFound {
        /// The path.
        path: PathBuf,
    },
    /// The process may not write a file or directory.
    #[error("no permission to write {path:?}; check its permissions and the mount")]
    NotWritable {
        /// The path.
        path: PathBuf,
        /// The error of the kernel.
        #[source]
        source: OsError,
    },
    /// A path that names something other than a regular file.
    #[error("{path:?} is {found}; blocks need a regular file, so choose another path")]
    NotAFile {
        /// The path.
        path: PathBuf,
        /// The type of the file.
        found: &'static str,
    },
    /// A file is shorter than required.
    #[error("{path:?} has {length} and needs {needed}; it is another file, or was truncated")]
    FileTooShort {
        /// The path.
        path: PathBuf,
        /// The file's length.
        length: ByteCount,
        /// The required length.
        needed: ByteCount,
    },
    /// The file system, a quota or a limit on file sizes is exhausted.
    #[error(
        "{requested} for {path:?} exceed the limit of the file system, a quota or RLIMIT_FSIZE; \
         free space or choose another directory"
    )]
    NoSpace {
        /// The file, or its directory.
        path: PathBuf,
        /// The requested bytes.
        requested: ByteCount,
        /// The error of the kernel.
        #[source]
        source: OsError,
    },
    /// Another call on a file failed.
    #[error("a call on the file {path:?} failed; see the cause, and check the mount")]
    File {
        /// The path.
        path: PathBuf,
        /// The error of the kernel.
        #[source]
        source: OsError,
    },
    /// The queue has as many requests as its depth allows.
    #[error("all {depth} slots of the I/O queue are in use; wait for a completion first")]
    QueueFull {
        /// The queue's depth.
        depth: usize,
    },
    /// The queue depth is not supported.
    #[error("an I/O queue of depth {depth} is not supported; choose 1 to {largest}")]
    QueueDepth {
        /// The requested depth.
        depth: u32,
        /// The maximum depth.
        largest: u32,
    },
    /// A request ends past the largest file offset.
    #[error(
        "{length} at offset {} end past the largest file offset, 2^63 − 1; use a lower offset",
        .offset.get()
    )]
    OffsetOutOfRange {
        /// The offset of the request.
        offset: ByteCount,
        /// The length of the request.
        length: ByteCount,
    },
    /// The kernel refused to serve the queue.
    #[error("io_uring failed; use the thread backend of the I/O queue")]
    Queue {
        /// The error of the kernel.
        #[source]
        source: OsError,
    },
}

impl StorageError {
    /// Whether the same call could succeed after memory or disk space is freed.
    #[must_use]
    pub const fn is_exhaustion(&self) -> bool {
        matches!(self, Self::OutOfMemory { .. } | Self::NoSpace { .. })
    }

    /// Converts to the error of every allocator: for `kind`, `requested` bytes and `label`.
    #[must_use]
    pub fn into_allocate_error(
        self,
        kind: StorageKind,
        requested: ByteCount,
        label: Label,
    ) -> AllocateError {
        match self {
            Self::Capability(source) => AllocateError::Capability { kind, label, source },
            Self::TooStrictlyAligned { requested, largest } => {
                AllocateError::TooStrictlyAligned { kind, requested, largest, label }
            }
            Self::OutOfMemory { .. } | Self::NoSpace { .. } => {
                let available = match &self {
                    Self::OutOfMemory { available, .. } => *available,
                    _ => None,
                };
                let source = Some(Box::new(self) as _);
                AllocateError::OutOfMemory { kind, requested, available, label, source }
            }
            other => AllocateError::Backend { kind, requested, label, source: Box::new(other) },
        }
    }
}
