//! The result of a job for one block.

use std::fmt;
use std::sync::Arc;

use crate::error::StoreError;

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
        asked: u32,
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

impl fmt::Display for BlockResult {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Done { bytes } => write!(f, "done, {bytes} bytes"),
            Self::AlreadyStored => f.write_str("already stored"),
            Self::Absent => f.write_str("absent"),
            Self::Corrupt => f.write_str("damaged on disk; the block was dropped"),
            Self::WrongLength { stored, asked } => {
                write!(f, "the block has {stored} bytes and the destination {asked}")
            }
            Self::TimedOut => f.write_str("not done by the deadline"),
            Self::Cancelled => f.write_str("cancelled"),
            Self::NoRoom(reason) => fmt::Display::fmt(reason, f),
            Self::Failed(error) => fmt::Display::fmt(error, f),
        }
    }
}

/// Why a tier has no room.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum NoRoom {
    /// Leases pin so many blocks that the job does not fit beside them.
    Pinned,
    /// The job needs more blocks than the tier has for the group.
    TierTooSmall,
}

impl fmt::Display for NoRoom {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Self::Pinned => "leases pin too many blocks of the tier; release some",
            Self::TierTooSmall => "the job has more blocks than the tier; use smaller jobs",
        })
    }
}
