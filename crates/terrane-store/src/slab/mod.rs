//! Reads and writes blocks in slab files.
//!
//! A slab file is a row of slots of one size, without headers. A group has one in each directory, and
//! its slots alternate between them. One thread, named `terrane-store-io`, keeps requests in flight,
//! computes the checksums of the blocks that it writes and verifies those that it reads.

mod files;
mod options;
mod request;

use std::ops::Range;
use std::path::PathBuf;
use std::time::Instant;

use terrane_core::CapabilityReport;

use crate::disk::GroupSlots;
use crate::error::StoreError;
pub(crate) use options::SlabOptions;
pub use request::{JobId, Priority};
pub(crate) use request::{
    SlabBuffers, SlabDirection, SlabDone, SlabFailure, SlabHealth, SlabRequest, SlabSink,
};

/// The slab files of a store, and the thread that reads and writes them. Clones share them.
///
/// Dropping the last clone closes it, as [`close`](Self::close) does with a deadline that has passed.
#[derive(Clone, Debug)]
pub(crate) struct Slabs {}

impl Slabs {
    /// Opens `slab.GROUP.NNN` in each of `folders`, which exist, and starts the thread. `NNN` is the
    /// folder's index. Files that do not exist are created and reserve their disk blocks where the
    /// file system can; files that are too short are extended.
    ///
    /// # Errors
    ///
    /// [`StoreError::NoDirectory`], [`StoreError::SlotsTooLarge`], [`StoreError::SlabFile`], and
    /// [`StoreError::Storage`]: with `NoSpace` if the disk cannot hold the files.
    pub(crate) fn open(
        _folders: &[PathBuf],
        _groups: &[GroupSlots],
        _options: &SlabOptions,
    ) -> Result<Self, StoreError> {
        Err(StoreError::NoDirectory)
    }

    /// The bytes between two slots of a group: its slot size, rounded up for direct I/O. 0 for a group
    /// that does not exist.
    pub(crate) fn slot_bytes(&self, _group: u16) -> u64 {
        0
    }

    /// The bytes that all slab files take on disk.
    pub(crate) fn file_bytes(&self) -> u64 {
        0
    }

    /// Queues requests. It never blocks on I/O.
    ///
    /// Each request ends by one call of its sink, on the I/O thread and without a lock. After a
    /// [`close`](Self::close) and in a forked process, the calls come on this thread, before the
    /// return.
    ///
    /// # Safety
    ///
    /// Until the sink is called for a request, its buffers are valid for their lengths: for writes if
    /// it reads the file, for reads if it writes. No other code writes them meanwhile, or reads what a
    /// read fills.
    #[expect(unsafe_code, reason = "the caller keeps the buffers valid")]
    pub(crate) unsafe fn submit(&self, _requests: Vec<SlabRequest>) {}

    /// Ends the requests of a job as [`SlabFailure::Cancelled`]. Those that the device works on end when
    /// it has finished with them, with their normal result.
    pub(crate) fn cancel(&self, _job: JobId) {}

    /// Raises the priority of the requests of a job that were not started. It is never lowered.
    pub(crate) fn raise(&self, _job: JobId, _priority: Priority) {}

    /// Makes everything durable whose end was reported before. It blocks.
    ///
    /// # Errors
    ///
    /// [`StoreError::SyncFailed`] if a file could not be synced, now or ever before.
    pub(crate) fn sync(&self) -> Result<(), StoreError> {
        Ok(())
    }

    /// Frees the disk blocks of these slots. They read as zeros until they are written.
    ///
    /// # Errors
    ///
    /// [`StoreError::SlabFile`] if the file system refuses, for example because it cannot.
    pub(crate) fn punch(&self, _group: u16, _slots: Range<u32>) -> Result<(), StoreError> {
        Ok(())
    }

    /// Whether blocks can be read and written.
    pub(crate) fn health(&self) -> SlabHealth {
        SlabHealth::Good
    }

    /// What the file systems and the kernel granted: direct I/O, preallocation, io_uring.
    pub(crate) fn capabilities(&self) -> CapabilityReport {
        CapabilityReport::default()
    }

    /// Refuses further requests, ends those that were not started as [`SlabFailure::Closed`], waits for
    /// those in flight and joins the thread. At the deadline it cancels the requests in flight.
    pub(crate) fn close(&self, _deadline: Instant) {}
}
