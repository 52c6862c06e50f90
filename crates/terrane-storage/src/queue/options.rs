//! The options of a queue.

use terrane_core::{ByteCount, Requirement};

use crate::error::StorageError;

/// Which backend to use.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum IoBackend {
    /// io_uring if the kernel allows it, otherwise threads.
    #[default]
    Auto,
    /// io_uring, or an error.
    IoUring,
    /// Threads.
    Threads,
}

impl IoBackend {
    /// How strongly io_uring is requested.
    #[must_use]
    pub const fn requirement(self) -> Requirement {
        match self {
            Self::Auto => Requirement::Preferred,
            Self::IoUring => Requirement::Required,
            Self::Threads => Requirement::Off,
        }
    }
}

/// The options of an [`IoQueue`](crate::IoQueue).
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct IoQueueOptions {
    /// The maximum number of requests in flight: 1 to [`MAX_DEPTH`](Self::MAX_DEPTH).
    pub depth: u32,
    /// Which backend to use.
    pub backend: IoBackend,
    /// The number of threads for the thread backend. At most `depth` threads start.
    pub threads: usize,
    /// The maximum number of bytes of [`IoMemory`](crate::IoMemory) that the queue registers with
    /// io_uring. Registered memory is pinned: it counts against `RLIMIT_MEMLOCK`, unless the process
    /// has `CAP_IPC_LOCK`, and a `fork` copies it if it is private. Its untouched pages become
    /// resident. Zero registers none.
    pub registered: ByteCount,
}

impl IoQueueOptions {
    /// The maximum depth. Even with a cancellation for each request, this is far below the kernel's
    /// limit of 32,768 entries.
    pub const MAX_DEPTH: u32 = 4096;

    /// The depth as a `usize`, if it is supported.
    pub(super) fn checked_depth(&self) -> Result<usize, StorageError> {
        match usize::try_from(self.depth) {
            Ok(depth) if (1..=Self::MAX_DEPTH).contains(&self.depth) => Ok(depth),
            _ => Err(StorageError::QueueDepth { depth: self.depth, largest: Self::MAX_DEPTH }),
        }
    }
}

impl Default for IoQueueOptions {
    /// Depth 32, io_uring if allowed, otherwise eight threads. At most 4 GiB are registered.
    fn default() -> Self {
        Self { depth: 32, backend: IoBackend::Auto, threads: 8, registered: ByteCount::gib(4) }
    }
}
