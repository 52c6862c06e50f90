//! Requests to the queue, and their completions.

use std::fmt;
use std::os::fd::RawFd;
use std::path::PathBuf;
use std::time::Instant;

use terrane_core::{ByteCount, FileHandle, FileIdentity, HostAddress, OsError};

use super::registered::IoMemory;

/// One contiguous range of host memory to read into or write from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct IoBuffer {
    /// The address of its first byte.
    pub address: HostAddress,
    /// Its length in bytes. Zero is legal.
    pub length: ByteCount,
}

/// An open file for the queue: one descriptor, and the identity for errors.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct IoFile {
    /// The descriptor for the requests.
    pub descriptor: RawFd,
    /// The identity of the file.
    pub identity: FileIdentity,
}

impl IoFile {
    /// The file through the descriptor that uses the page cache.
    #[must_use]
    pub const fn buffered(handle: &FileHandle) -> Self {
        Self { descriptor: handle.descriptor, identity: handle.identity }
    }

    /// The file through its direct-I/O descriptor, if it has one. Offsets, lengths and buffer
    /// addresses must then be multiples of the alignments in
    /// [`DirectFile`](terrane_core::DirectFile).
    #[must_use]
    pub fn direct(handle: &FileHandle) -> Option<Self> {
        handle
            .direct
            .map(|direct| Self { descriptor: direct.descriptor, identity: handle.identity })
    }
}

/// The operation of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum IoOperation {
    /// Fills the buffers from the file.
    Read,
    /// Writes the buffers to the file.
    Write,
    /// `fdatasync`: syncs the data, and the metadata needed to find it, to the device.
    SyncData,
    /// `fsync`: syncs the data and all metadata to the device.
    SyncAll,
}

impl IoOperation {
    /// The name of the system call, for errors.
    pub(crate) const fn call(self) -> &'static str {
        match self {
            Self::Read => "preadv",
            Self::Write => "pwritev",
            Self::SyncData => "fdatasync",
            Self::SyncAll => "fsync",
        }
    }
}

impl fmt::Display for IoOperation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Self::Read => "reading",
            Self::Write => "writing",
            Self::SyncData | Self::SyncAll => "syncing",
        })
    }
}

/// One request to [`IoQueue::submit`](crate::IoQueue::submit).
///
/// The list of buffers is copied. The bytes are not.
#[derive(Clone, Copy, Debug)]
pub struct IoRequest<'a> {
    /// A value that the completion returns. The queue does not interpret it.
    pub token: u64,
    /// The file.
    pub file: IoFile,
    /// The operation.
    pub operation: IoOperation,
    /// The file offset of the first byte. Ignored by a sync.
    pub offset: ByteCount,
    /// The buffers, filled or written in order. Their number and sizes are not limited. Ignored by
    /// a sync.
    pub buffers: &'a [IoBuffer],
    /// The time at which the request is cancelled. `None` for no deadline.
    pub deadline: Option<Instant>,
    /// The memory of all `buffers`, which the queue may register; `None` if it is not known. Requests
    /// through the page cache do not become cheaper.
    pub memory: Option<&'a IoMemory>,
}

impl<'a> IoRequest<'a> {
    /// A request to fill `buffers` with the bytes from `offset` on.
    #[must_use]
    pub const fn read(
        token: u64,
        file: IoFile,
        offset: ByteCount,
        buffers: &'a [IoBuffer],
    ) -> Self {
        Self {
            token,
            file,
            operation: IoOperation::Read,
            offset,
            buffers,
            deadline: None,
            memory: None,
        }
    }

    /// A request to write `buffers` from `offset` on.
    #[must_use]
    pub const fn write(
        token: u64,
        file: IoFile,
        offset: ByteCount,
        buffers: &'a [IoBuffer],
    ) -> Self {
        Self { operation: IoOperation::Write, ..Self::read(token, file, offset, buffers) }
    }

    /// A request to sync the file's data to the device (`fdatasync`). It covers the writes whose
    /// completions were returned before it was submitted.
    #[must_use]
    pub const fn sync_data(token: u64, file: IoFile) -> Self {
        let operation = IoOperation::SyncData;
        Self { operation, ..Self::read(token, file, ByteCount::ZERO, &[]) }
    }

    /// A request to sync the file's data and metadata to the device (`fsync`), with the same
    /// coverage as [`sync_data`](Self::sync_data).
    #[must_use]
    pub const fn sync_all(token: u64, file: IoFile) -> Self {
        Self { operation: IoOperation::SyncAll, ..Self::sync_data(token, file) }
    }

    /// The same request with this deadline.
    #[must_use]
    pub const fn by(self, deadline: Instant) -> Self {
        Self { deadline: Some(deadline), ..self }
    }

    /// The same request, with its buffers in this memory.
    #[must_use]
    pub const fn within(self, memory: Option<&'a IoMemory>) -> Self {
        Self { memory, ..self }
    }
}

/// The completion of one request.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct IoCompletion {
    /// The token of the request.
    pub token: u64,
    /// `Ok` if every byte was transferred. In both cases neither the queue nor the kernel accesses
    /// the buffers any more.
    pub outcome: Result<(), IoFailure>,
}

/// A request that did not transfer all its bytes, with the offset where it stopped.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "{operation} {} stopped at offset {} with {} of {} bytes done: {reason}",
    self.file_name(), .offset.get(), .transferred.get(), .length.get()
)]
pub struct IoFailure {
    /// The file.
    pub file: FileIdentity,
    /// The file's path from `/proc/self/fd` when the request failed. For a file without a name, it
    /// is the directory with the note `(deleted)`. `None` if `/proc` is not mounted.
    pub path: Option<PathBuf>,
    /// The operation.
    pub operation: IoOperation,
    /// The offset in the file of the first byte that was not transferred.
    pub offset: ByteCount,
    /// The length of the request.
    pub length: ByteCount,
    /// The bytes transferred before it stopped. These bytes are valid.
    pub transferred: ByteCount,
    /// The reason why it stopped.
    #[source]
    pub reason: IoFailureReason,
}

impl IoFailure {
    fn file_name(&self) -> String {
        let FileIdentity { file_system, inode } = self.file;
        match &self.path {
            Some(path) => format!("{path:?}"),
            None => format!("inode {inode} of file system {file_system:#x}"),
        }
    }

    /// The bytes that were not transferred.
    #[must_use]
    pub fn missing(&self) -> ByteCount {
        self.length.checked_sub(self.transferred).unwrap_or(ByteCount::ZERO)
    }

    /// Whether the disk, a quota or a limit on file sizes is exhausted.
    #[must_use]
    pub fn is_exhaustion(&self) -> bool {
        matches!(self.reason, IoFailureReason::Os(error)
            if matches!(error.code, libc::ENOSPC | libc::EDQUOT | libc::EFBIG))
    }
}

/// The reason why a request stopped.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum IoFailureReason {
    /// The kernel refused the call or the device failed.
    #[error("{error}{advice}", error = .0, advice = advice(.0.code))]
    Os(OsError),
    /// The file ends there.
    #[error("the file ends there; it was truncated, or never written that far")]
    EndOfFile,
    /// The kernel took no byte and gave no reason.
    #[error("the kernel accepted no byte and gave no reason; check the device and its quota")]
    NoProgress,
    /// The request's deadline passed.
    #[error("its deadline passed; allow more time, or look for what keeps the device busy")]
    DeadlineExceeded,
    /// The caller cancelled it, or the queue was dropped.
    #[error("it was cancelled; submit a request for the missing bytes")]
    Cancelled,
}

/// Advice for error codes with a common cause.
const fn advice(code: i32) -> &'static str {
    match code {
        libc::ENOSPC => "; free space on the file system or choose another directory",
        libc::EDQUOT => "; raise the quota or choose another directory",
        libc::EFBIG => "; raise RLIMIT_FSIZE or use smaller files",
        libc::EINVAL => {
            "; under direct I/O, offset, lengths and buffer addresses must be multiples of the \
             file's direct alignments"
        }
        libc::EBADF => "; keep the file open, readable and writable, until its requests completed",
        libc::EFAULT => "; keep the buffers mapped until their requests completed",
        libc::EIO => "; the device failed: see the kernel log",
        _ => "",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_failure_says_where_it_stopped_and_what_to_do() {
        let failure = IoFailure {
            file: FileIdentity { file_system: 0xfe00, inode: 17 },
            path: Some("/cache/blocks".into()),
            operation: IoOperation::Write,
            offset: ByteCount::new(5000),
            length: ByteCount::new(4000),
            transferred: ByteCount::new(1000),
            reason: IoFailureReason::Os(OsError::new("pwritev", libc::ENOSPC)),
        };
        let text = failure.to_string();
        for part in ["writing", "\"/cache/blocks\"", "offset 5000", "1000 of 4000", "free space"] {
            assert!(text.contains(part), "{text}");
        }
        assert_eq!(failure.missing(), ByteCount::new(3000));
        assert!(failure.is_exhaustion());
        let text = IoFailure { path: None, ..failure }.to_string();
        assert!(text.contains("inode 17 of file system 0xfe00"), "{text}");
    }
}
