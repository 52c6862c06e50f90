//! The result of a job for one block.

use std::fmt;
use std::sync::Arc;

use crate::error::StoreError;
use crate::slab::SlabFailure;

/// How a job ended for one of its keys.
///
/// A result other than [`Done`](Self::Done) concerns this key alone.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub enum BlockResult {
    /// The block was stored, read, moved or removed.
    Done {
        /// Its bytes.
        bytes: u32,
    },
    /// A put found the key in the store, so it copied nothing.
    AlreadyStored,
    /// No tier has the block.
    Absent,
    /// The bytes on disk differ from the checksum of the block. The block is absent from now on.
    Corrupt,
    /// The block has another length than the destination. Nothing was copied.
    WrongLength {
        /// The bytes of the block.
        stored: u32,
        /// The bytes of the destination.
        requested: u32,
    },
    /// The deadline passed. The destination may have been written in part.
    TimedOut,
    /// The job was cancelled. The destination may have been written in part.
    Cancelled,
    /// A tier has no room for the block.
    NoRoom(NoRoom),
    /// An error that is none of the above.
    Failed(Arc<StoreError>),
}

impl BlockResult {
    /// Whether the block is where the job was to bring it.
    #[must_use]
    pub const fn is_ok(&self) -> bool {
        matches!(self, Self::Done { .. } | Self::AlreadyStored)
    }

    pub(crate) fn failed(error: impl Into<StoreError>) -> Self {
        Self::Failed(Arc::new(error.into()))
    }
}

/// Sets the result of a block of a job.
pub(crate) fn set(results: &mut [BlockResult], index: usize, result: BlockResult) {
    if let Some(slot) = results.get_mut(index) {
        *slot = result;
    }
}

/// The result of a block that could not be written to disk.
pub(crate) fn not_written(failure: SlabFailure) -> BlockResult {
    match failure {
        SlabFailure::Io(failure) => BlockResult::failed(StoreError::WriteFailed(failure)),
        other => not_read(other),
    }
}

/// The result of a block that could not be read from disk.
pub(crate) fn not_read(failure: SlabFailure) -> BlockResult {
    match failure {
        SlabFailure::Corrupt { .. } => BlockResult::Corrupt,
        SlabFailure::TimedOut => BlockResult::TimedOut,
        SlabFailure::Cancelled => BlockResult::Cancelled,
        SlabFailure::Io(failure) => BlockResult::failed(StoreError::ReadFailed(failure)),
        SlabFailure::ReadOnly(error) | SlabFailure::Refused(error) => BlockResult::Failed(error),
        SlabFailure::Closed => BlockResult::failed(StoreError::Closed),
    }
}

impl fmt::Display for BlockResult {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Done { bytes } => write!(f, "done, {bytes} bytes"),
            Self::AlreadyStored => f.write_str("already stored"),
            Self::Absent => f.write_str("absent"),
            Self::Corrupt => f.write_str("damaged on disk; the block was dropped"),
            Self::WrongLength { stored, requested } => {
                write!(f, "the block has {stored} bytes and the destination {requested}")
            }
            Self::TimedOut => f.write_str("not done by the deadline"),
            Self::Cancelled => f.write_str("cancelled"),
            Self::NoRoom(reason) => fmt::Display::fmt(reason, f),
            Self::Failed(error) => fmt::Display::fmt(error, f),
        }
    }
}

/// Why a tier has no room. A job takes the slots of all its blocks in a tier at once, so it never
/// holds some of them while it waits for others.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum NoRoom {
    /// Leases pin so many blocks that the job does not fit beside them.
    Pinned {
        /// The slots that the job needs at once.
        requested: usize,
        /// The slots that the tier has for the group, without those that are quarantined or that an
        /// orphaned copy may still use.
        slots: usize,
        /// The slots that leases pin.
        pinned: usize,
    },
    /// The job needs more slots than the tier has for the group. Split it, or open the store with a
    /// larger tier.
    ///
    /// A job does not wait for orphaned copies alone, because they may never end. So it may also
    /// succeed later, when such a copy has ended.
    TierTooSmall {
        /// The slots that the job needs at once.
        requested: usize,
        /// The slots that the tier has for the group, as in [`Pinned`](Self::Pinned). It does not count
        /// those of dirty blocks, if orphaned copies claim all slots of the next slower tier.
        slots: usize,
    },
    /// Other jobs took the slot of the block in the host tier, before it was copied from there to the
    /// device. The block is still on disk.
    LeftHostTier {
        /// The slots that the host tier has for the group.
        slots: usize,
    },
}

impl fmt::Display for NoRoom {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Pinned { requested, slots, pinned } => write!(
                f,
                "slots requested at once: {requested}, slots of the tier: {slots}, of which leases pin \
                 {pinned}; release leases, or use smaller jobs"
            ),
            Self::TierTooSmall { requested, slots } => write!(
                f,
                "slots requested at once: {requested}, slots of the tier for the group: {slots}; use smaller \
                 jobs or a larger tier"
            ),
            Self::LeftHostTier { slots } => write!(
                f,
                "the block left the host tier on its way to the device, slots of the host tier for the \
                 group: {slots}; try again, or use smaller jobs or a larger host tier"
            ),
        }
    }
}
