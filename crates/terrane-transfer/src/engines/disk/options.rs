//! The options of the disk engine.

use terrane_core::ByteCount;
use terrane_storage::IoQueueOptions;

/// The options of a [`DiskEngine`](super::DiskEngine).
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DiskEngineOptions {
    /// The queue: its depth, and whether it uses io_uring.
    pub queue: IoQueueOptions,
    /// The maximum number of bytes of one request, rounded up to a multiple of 4 KiB.
    pub request: ByteCount,
    /// The number of such requests that have bounce buffers, for copies that cannot be direct. A
    /// buffer has at most 1 MiB, so a longer request uses several. There is at least one buffer,
    /// and at most two more than the queue's depth. The first such copy allocates them.
    pub bounce_buffers: usize,
}

impl Default for DiskEngineOptions {
    /// A queue of 32, requests of up to 4 MiB, buffers for 16 of them: 34 of 1 MiB.
    ///
    /// 4 MiB holds a block of nearly every model, so a block is one request. A deeper queue gained
    /// nothing on the disks that were measured.
    fn default() -> Self {
        Self { queue: IoQueueOptions::default(), request: ByteCount::mib(4), bounce_buffers: 16 }
    }
}
