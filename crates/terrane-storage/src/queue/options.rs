//! The options of a queue.

use terrane_core::Wish;

use crate::error::StorageError;

/// Which way requests are to go.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum IoBackend {
    /// io_uring if the kernel allows it, threads otherwise.
    #[default]
    Auto,
    /// io_uring or an error.
    IoUring,
    /// Threads.
    Threads,
}

impl IoBackend {
    /// How much io_uring is wished for.
    #[must_use]
    pub const fn wish(self) -> Wish {
        match self {
            Self::Auto => Wish::Preferred,
            Self::IoUring => Wish::Required,
            Self::Threads => Wish::Off,
        }
    }
}

/// Which way requests go.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum ActiveBackend {
    /// io_uring.
    IoUring,
    /// A pool of threads that make blocking calls.
    Threads,
}

/// The options of an [`IoQueue`](crate::IoQueue).
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct IoQueueOptions {
    /// How many requests can be in flight at once: 1 to [`MAX_DEPTH`](Self::MAX_DEPTH).
    pub depth: u32,
    /// Which way requests go.
    pub backend: IoBackend,
    /// How many threads serve the requests where io_uring does not; never more than the depth.
    pub threads: usize,
}

impl IoQueueOptions {
    /// The deepest queue: with a cancellation beside each request, the kernel's 32,768 entries
    /// of a ring are far away.
    pub const MAX_DEPTH: u32 = 4096;

    /// The depth as a length, if a queue can have it.
    pub(super) fn checked_depth(&self) -> Result<usize, StorageError> {
        match usize::try_from(self.depth) {
            Ok(depth) if (1..=Self::MAX_DEPTH).contains(&self.depth) => Ok(depth),
            _ => Err(StorageError::QueueDepth { depth: self.depth, largest: Self::MAX_DEPTH }),
        }
    }

    pub(super) fn thread_count(&self, depth: usize) -> usize {
        self.threads.clamp(1, depth)
    }
}

impl Default for IoQueueOptions {
    /// Depth 32, io_uring if allowed, otherwise eight threads.
    fn default() -> Self {
        Self { depth: 32, backend: IoBackend::Auto, threads: 8 }
    }
}
