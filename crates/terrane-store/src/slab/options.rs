//! Options of the slab files and of their I/O.

use terrane_core::{ByteCount, Durability, Requirement};
use terrane_storage::{DiskOptions, IoBackend, IoQueueOptions};

/// Options of [`Slabs`](super::Slabs).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct SlabOptions {
    /// The maximum number of requests in flight.
    pub(crate) depth: u32,
    /// The maximum number of bytes of one request. Larger blocks are split.
    pub(crate) request: ByteCount,
    /// The maximum number of requests to write in flight while reads wait.
    pub(crate) max_writes_while_reads_wait: usize,
    /// The call of [`Slabs::sync`](super::Slabs::sync): none, `fdatasync` or `fsync`.
    pub(crate) durability: Durability,
    /// io_uring or threads.
    pub(crate) backend: IoBackend,
    /// The maximum number of bytes that are registered with io_uring.
    pub(crate) registered: ByteCount,
    /// Reads and writes that bypass the page cache.
    pub(crate) direct: Requirement,
    /// Disk blocks that are reserved when a file is opened.
    pub(crate) preallocate: Requirement,
    /// Files are neither created nor written.
    pub(crate) read_only: bool,
}

impl SlabOptions {
    /// The options of each slab file.
    pub(super) const fn disk(&self) -> DiskOptions {
        DiskOptions {
            direct: self.direct,
            preallocate: self.preallocate,
            durability: self.durability,
            unnamed: Requirement::Preferred,
        }
    }
}

impl Default for SlabOptions {
    fn default() -> Self {
        Self {
            depth: 32,
            request: ByteCount::mib(4),
            max_writes_while_reads_wait: 2,
            durability: Durability::Data,
            backend: IoBackend::Auto,
            registered: IoQueueOptions::default().registered,
            direct: Requirement::Preferred,
            preallocate: Requirement::Preferred,
            read_only: false,
        }
    }
}
