//! Options of the slab files and of their I/O.

use terrane_core::{Alignment, ByteCount, Durability};
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
    /// io_uring or threads.
    pub(crate) backend: IoBackend,
    /// The maximum number of bytes that are registered with io_uring.
    pub(crate) registered: ByteCount,
    /// The options of each slab file. Their durability is that of [`Slabs::sync`](super::Slabs::sync).
    pub(crate) disk: DiskOptions,
    /// The alignment of slots that the store records. `None` takes that of the file systems.
    pub(crate) slot_alignment: Option<Alignment>,
    /// Files are neither created nor written.
    pub(crate) read_only: bool,
}

impl Default for SlabOptions {
    fn default() -> Self {
        Self {
            depth: 32,
            request: ByteCount::mib(4),
            max_writes_while_reads_wait: 2,
            backend: IoBackend::Auto,
            registered: IoQueueOptions::default().registered,
            disk: DiskOptions {
                durability: Durability::Data,
                refuse_links: true,
                ..DiskOptions::default()
            },
            slot_alignment: None,
            read_only: false,
        }
    }
}
