//! Handles that distinguish each block from every other, including earlier blocks at its address.

use std::fmt;

use terrane_core::{ByteCount, DeviceId, Label, Location, StorageKind};

use crate::streams::fence::StreamId;

/// A block as a number, for an FFI boundary, a message or a log.
///
/// It consists of an index into the manager's table and the generation of that entry. So a handle
/// to a freed block differs from the handle to the next block with the same entry. It owns nothing.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct BlockHandle(u64);

impl BlockHandle {
    pub(super) fn new(slot: u32, generation: u32) -> Self {
        Self(u64::from(generation) << 32 | u64::from(slot))
    }

    /// Creates a handle from the number that [`to_raw`](Self::to_raw) returned. Any number is
    /// accepted here; the manager detects invalid numbers. Zero is never a block.
    #[must_use]
    pub const fn from_raw(raw: u64) -> Self {
        Self(raw)
    }

    /// Returns the handle as a number.
    #[must_use]
    pub const fn to_raw(self) -> u64 {
        self.0
    }

    /// Returns the generation, from 1.
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

/// A manager's record of a block.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BlockIdentity {
    /// The handle, with the generation.
    pub handle: BlockHandle,
    /// The kind of memory.
    pub kind: StorageKind,
    /// The location, also of a freed block.
    pub location: Location,
    /// The length in bytes.
    pub length: ByteCount,
    /// The bytes requested.
    pub requested: ByteCount,
    /// The stream in whose order the block is allocated and freed.
    pub stream: Option<StreamId>,
    /// The label of the request.
    pub tag: Label,
    /// The state of the block.
    pub state: Lifecycle,
}

impl BlockIdentity {
    /// Returns the device, if the block is device memory.
    #[must_use]
    pub fn device(&self) -> Option<DeviceId> {
        match self.kind {
            StorageKind::Device(device) => Some(device),
            _ => None,
        }
    }
}

/// The state of a block.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Lifecycle {
    /// The block has an owner.
    Live,
    /// The owner has dropped it, but some stream may still use it.
    PendingFree,
    /// It was freed to the upstream, which may reuse its bytes.
    Freed,
}

terrane_core::display_names!(Lifecycle {
    Self::Live => "live",
    Self::PendingFree => "pending free",
    Self::Freed => "freed",
});
