//! Requests for blocks in slab files, and their results.

use std::sync::Arc;
use std::time::Instant;

use smallvec::SmallVec;
use terrane_storage::{IoBuffer, IoFailure, IoFailureReason, IoMemory};

use crate::error::StoreError;

/// The number of a job, unique in a store.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct JobId(u64);

impl JobId {
    /// The job with this number.
    pub(crate) const fn new(number: u64) -> Self {
        Self(number)
    }

    /// The number.
    #[must_use]
    pub const fn get(self) -> u64 {
        self.0
    }
}

/// How urgent a job is, among jobs of the same direction.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Priority {
    /// After the others: prefetches, write-back.
    Low,
    /// The default.
    #[default]
    Normal,
    /// Before the others: a request of a user waits for it.
    High,
}

/// The memory of a block, in canonical order.
pub(crate) type SlabBuffers = SmallVec<[IoBuffer; 2]>;

/// The direction of a block's transfer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum SlabDirection {
    /// The buffers are filled from the slot, and must have this checksum.
    Read {
        /// The CRC-64/NVME of the block.
        checksum: u64,
    },
    /// The buffers are written to the slot.
    Write,
}

/// A block to read or to write. Its length is the sum of its buffers' lengths: at least 1 byte, at most
/// a slot.
pub(crate) struct SlabRequest {
    pub(crate) job: JobId,
    /// The block's place in the job, for the sink.
    pub(crate) index: usize,
    pub(crate) group: u16,
    pub(crate) slot: u32,
    /// Any number of any length and alignment. None of them is accessed outside its length.
    pub(crate) buffers: SlabBuffers,
    /// The memory of the buffers, which the queue may register.
    pub(crate) memory: Option<IoMemory>,
    pub(crate) direction: SlabDirection,
    /// The time at which the request ends as [`SlabFailure::TimedOut`]. A request in the device ends
    /// when the device has finished with it.
    pub(crate) deadline: Option<Instant>,
    pub(crate) priority: Priority,
    pub(crate) sink: Arc<dyn SlabSink>,
}

/// Receives the results of requests.
pub(crate) trait SlabSink: Send + Sync {
    /// The request with this index has ended. Its buffers are no longer used.
    ///
    /// The I/O thread calls it without a lock. Other requests wait meanwhile.
    fn block_ended(&self, index: usize, result: Result<SlabDone, SlabFailure>);

    /// No further result follows at once. A sink that wakes a task wakes it here, once for several
    /// results.
    fn results_end(&self) {}
}

/// A block that was read or written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct SlabDone {
    pub(crate) bytes: u64,
    /// The CRC-64/NVME of the block.
    pub(crate) checksum: u64,
}

/// Why a block was not read or written.
#[derive(Clone, Debug)]
pub(crate) enum SlabFailure {
    /// The slot holds other bytes than those of the block. The buffers hold them.
    Corrupt { expected: u64, found: u64 },
    /// Its deadline passed. The slot or the buffers may hold a part of the block.
    TimedOut,
    /// Its job was cancelled. The slot or the buffers may hold a part of the block.
    Cancelled,
    /// The kernel or the device failed.
    Io(IoFailure),
    /// The files are read-only, for this reason.
    ReadOnly(Arc<StoreError>),
    /// No block can be read or written any more, for this reason; or the request was wrong
    /// ([`StoreError::OutsideSlabs`]), or was made in a forked process ([`StoreError::Forked`]).
    Refused(Arc<StoreError>),
    /// The slab files were closed first.
    Closed,
}

impl SlabFailure {
    /// Whether the file or its bytes failed: the job did not end early, and the store does not close.
    pub(crate) const fn is_of_device(&self) -> bool {
        matches!(self, Self::Corrupt { .. } | Self::Io(_) | Self::Refused(_))
    }

    /// Whether a read failed because of the place in the file: the device lost its bytes, or the file
    /// is too short. Other failures, such as of memory, say nothing about it.
    pub(crate) fn is_of_place(&self) -> bool {
        use rustix::io::Errno;
        let Self::Io(failure) = self else { return false };
        match failure.reason {
            IoFailureReason::EndOfFile => true,
            IoFailureReason::Os(error) => {
                let code = Errno::from_raw_os_error(error.code);
                matches!(code, Errno::IO | Errno::NODATA | Errno::REMOTEIO | Errno::BADMSG)
            }
            _ => false,
        }
    }
}
