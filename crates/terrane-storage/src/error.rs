//! The one error type of this crate.

use std::path::PathBuf;

use terrane_core::{
    AllocateError, ByteCount, CapabilityMissing, ForkedProcess, Label, OsError, SizeOverflow,
    StorageKind,
};

use crate::queue::IoFailure;

/// Why storage could not be had or used.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum StorageError {
    /// A size or an offset left the range of 64 bits.
    #[error(transparent)]
    Overflow(#[from] SizeOverflow),
    /// Something that a policy requires was not granted.
    #[error(transparent)]
    Capability(#[from] CapabilityMissing),
    /// A queue was used in a process that was forked from the queue's.
    #[error("the I/O queue belongs to another process")]
    Forked(#[from] ForkedProcess),
    /// A request of the I/O queue did not transfer all its bytes.
    #[error(transparent)]
    Io(#[from] IoFailure),
    /// The machine, or the control group, has no such amount of memory left.
    #[error(
        "{requested} of memory could not be had{}; free some, ask for less, or raise the limit",
        .available.map(|bytes| format!(" ({bytes} available)")).unwrap_or_default()
    )]
    OutOfMemory {
        /// The bytes asked for.
        requested: ByteCount,
        /// The bytes available, where the system says.
        available: Option<ByteCount>,
        /// What the kernel said; `None` if it was not asked because too little is left.
        #[source]
        source: Option<OsError>,
    },
    /// The kernel refused to map or to prepare memory.
    #[error("{requested} of memory could not be prepared")]
    Memory {
        /// The bytes asked for.
        requested: ByteCount,
        /// What the kernel said.
        #[source]
        source: OsError,
    },
    /// No such alignment can be had.
    #[error("memory at multiples of {requested} cannot be had; {largest} is the strictest")]
    TooStrictlyAligned {
        /// The alignment asked for.
        requested: terrane_core::Alignment,
        /// The strictest.
        largest: terrane_core::Alignment,
    },
    /// Bringing memory up was cancelled through its progress; all of it was given back.
    #[error("bringing up {of} of memory was cancelled after {ready}")]
    Cancelled {
        /// The bytes that were ready.
        ready: ByteCount,
        /// The bytes asked for.
        of: ByteCount,
    },
    /// A thread could not be started.
    #[error("a thread could not be started; use fewer, or raise RLIMIT_NPROC")]
    Thread {
        /// What the system said.
        #[source]
        source: OsError,
    },
    /// A path holds a NUL byte, which the system cannot take.
    #[error("the path {path:?} holds a NUL byte; choose another")]
    PathContainsNul {
        /// The path.
        path: PathBuf,
    },
    /// A file that was to be created exists.
    #[error("{path:?} exists; open it as an existing file, or choose another path")]
    AlreadyExists {
        /// The path.
        path: PathBuf,
    },
    /// A file that was to be opened does not exist, or its directory does not.
    #[error("{path:?} does not exist; create it, or its directory, first")]
    NotFound {
        /// The path.
        path: PathBuf,
    },
    /// A file or directory must not be written.
    #[error("{path:?} must not be written; check its permissions and the mount")]
    NotWritable {
        /// The path.
        path: PathBuf,
        /// What the kernel said.
        #[source]
        source: OsError,
    },
    /// A path that names something other than a regular file.
    #[error("{path:?} is {found}; only regular files hold blocks")]
    NotAFile {
        /// The path.
        path: PathBuf,
        /// What it is.
        found: FileType,
    },
    /// A file is shorter than what it should hold.
    #[error("{path:?} has {length} and should have {needed}; it is another file, or was cut")]
    FileTooShort {
        /// The path.
        path: PathBuf,
        /// The file's length.
        length: ByteCount,
        /// The length that is needed.
        needed: ByteCount,
    },
    /// The file system, a quota or a limit on file sizes is exhausted.
    #[error(
        "{requested} for {path:?} exceed what the file system, a quota or RLIMIT_FSIZE allow; \
         free space or choose another directory"
    )]
    NoSpace {
        /// The file, or its directory.
        path: PathBuf,
        /// The bytes asked for.
        requested: ByteCount,
        /// What the kernel said.
        #[source]
        source: OsError,
    },
    /// Another call on a file failed.
    #[error("the file {path:?} could not be prepared")]
    File {
        /// The path.
        path: PathBuf,
        /// What the kernel said.
        #[source]
        source: OsError,
    },
    /// As many requests are in flight as the queue can hold.
    #[error("all {depth} places of the I/O queue are taken; wait for a completion first")]
    QueueFull {
        /// The queue's depth.
        depth: usize,
    },
    /// No queue can have this depth.
    #[error("an I/O queue of depth {depth} cannot be had; choose 1 to {largest}")]
    QueueDepth {
        /// The depth asked for.
        depth: u32,
        /// The largest.
        largest: u32,
    },
    /// A request reaches past the largest offset of a file.
    #[error("{length} at offset {} leave the range of file offsets, 2^63 − 1", .offset.get())]
    OffsetOutOfRange {
        /// Where the request begins.
        offset: ByteCount,
        /// How long it is.
        length: ByteCount,
    },
    /// The kernel refused to serve the queue.
    #[error("the kernel refused to serve the I/O queue; use its thread backend")]
    Queue {
        /// What the kernel said.
        #[source]
        source: OsError,
    },
}

impl StorageError {
    /// Whether freeing memory or space could make the same call succeed.
    #[must_use]
    pub const fn is_exhaustion(&self) -> bool {
        matches!(self, Self::OutOfMemory { .. } | Self::NoSpace { .. })
    }

    /// The error as every allocator reports it: of `kind`, for `requested` bytes for `label`.
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
            Self::OutOfMemory { available, .. } => AllocateError::OutOfMemory {
                kind,
                requested,
                available,
                label,
                source: Some(Box::new(self)),
            },
            Self::NoSpace { .. } => AllocateError::OutOfMemory {
                kind,
                requested,
                available: None,
                label,
                source: Some(Box::new(self)),
            },
            other => AllocateError::Backend { kind, requested, label, source: Box::new(other) },
        }
    }
}

/// What a path names.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum FileType {
    /// A directory.
    Directory,
    /// A FIFO.
    Fifo,
    /// A socket.
    Socket,
    /// A device.
    Device,
    /// Something else.
    Other,
}

impl std::fmt::Display for FileType {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.pad(match self {
            Self::Directory => "a directory",
            Self::Fifo => "a FIFO",
            Self::Socket => "a socket",
            Self::Device => "a device",
            Self::Other => "no regular file",
        })
    }
}
