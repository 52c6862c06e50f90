//! What tells a block from every other, earlier ones at its address included.

use std::fmt;

use terrane_core::{ByteCount, DeviceId, Label, Location, StorageKind};

use crate::StreamId;

/// A block as a number, for where no owned value can go: an FFI boundary, a message, a log.
///
/// It holds a place in the manager's table and that place's generation, so that a handle to a
/// block that has gone is told from one to its successor. It owns nothing.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct BlockHandle(u64);

impl BlockHandle {
    pub(super) fn new(slot: u32, generation: u32) -> Self {
        Self(u64::from(generation) << 32 | u64::from(slot))
    }

    /// A handle that was turned into a number by [`to_raw`](Self::to_raw). Any number is legal
    /// here; the manager finds out the wrong ones. Zero is never a block.
    #[must_use]
    pub const fn from_raw(raw: u64) -> Self {
        Self(raw)
    }

    /// The handle as a number.
    #[must_use]
    pub const fn to_raw(self) -> u64 {
        self.0
    }

    /// The generation, from 1.
    #[must_use]
    pub fn generation(self) -> u32 {
        u32::try_from(self.0 >> 32).unwrap_or(0)
    }

    pub(super) fn slot(self) -> u32 {
        u32::try_from(self.0 & u64::from(u32::MAX)).unwrap_or(0)
    }
}

impl fmt::Display for BlockHandle {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}#{}", self.slot(), self.generation())
    }
}

impl fmt::Debug for BlockHandle {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "BlockHandle({self})")
    }
}

/// What a manager knows of a block.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BlockIdentity {
    /// Its handle, with the generation.
    pub handle: BlockHandle,
    /// The kind of memory.
    pub kind: StorageKind,
    /// Where it is, or was.
    pub location: Location,
    /// How long it is.
    pub length: ByteCount,
    /// How many bytes were asked for.
    pub asked: ByteCount,
    /// The stream in whose order it was allocated, and is freed.
    pub stream: Option<StreamId>,
    /// Whose it is.
    pub tag: Label,
    /// What has become of it.
    pub state: Lifecycle,
}

impl BlockIdentity {
    /// The device, if it is a device's memory.
    #[must_use]
    pub fn device(&self) -> Option<DeviceId> {
        match self.kind {
            StorageKind::Device(device) => Some(device),
            _ => None,
        }
    }
}

/// What has become of a block.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Lifecycle {
    /// Somebody owns it.
    Live,
    /// Its owner has dropped it, and some stream may still use it.
    PendingFree,
    /// It has gone back to the upstream, which may hand out its bytes again.
    Freed,
}

impl fmt::Display for Lifecycle {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Self::Live => "live",
            Self::PendingFree => "pending free",
            Self::Freed => "freed",
        })
    }
}
