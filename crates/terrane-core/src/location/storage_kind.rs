//! The kinds of storage that hold blocks.

use std::fmt;

use crate::location::remote::PeerId;

/// The kind of memory of a span. The span's [`Location`](crate::Location) has the address.
///
/// A kind does not identify a particular piece of memory. Regions in different files have the same
/// kind.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[non_exhaustive]
pub enum StorageKind {
    /// Pageable memory of the host.
    System,
    /// Host memory that is page-locked for direct access by a device.
    Pinned,
    /// Memory of one device.
    Device(DeviceId),
    /// A file on a block device or a file system.
    Disk,
    /// Memory of another agent, of any kind. This process has no address for it. Only the engine
    /// that communicates with that peer can copy it.
    Remote(PeerId),
}

impl StorageKind {
    /// Whether the processor can address the bytes ([`System`](Self::System) and
    /// [`Pinned`](Self::Pinned)).
    #[must_use]
    pub const fn is_host(self) -> bool {
        matches!(self, Self::System | Self::Pinned)
    }

    /// Whether this is memory of a device of this process.
    #[must_use]
    pub const fn is_device(self) -> bool {
        matches!(self, Self::Device(_))
    }

    /// Whether this is memory of a peer.
    #[must_use]
    pub const fn is_remote(self) -> bool {
        matches!(self, Self::Remote(_))
    }
}

impl fmt::Display for StorageKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::System => f.pad("system"),
            Self::Pinned => f.pad("pinned"),
            Self::Device(id) => f.pad(&format!("device {id}")),
            Self::Disk => f.pad("disk"),
            Self::Remote(peer) => f.pad(&format!("peer {peer}")),
        }
    }
}

/// The ordinal of a device, as its driver counts them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct DeviceId(u32);

impl DeviceId {
    /// The device with this ordinal. Only the driver knows whether it exists.
    #[must_use]
    pub const fn new(ordinal: u32) -> Self {
        Self(ordinal)
    }

    /// The ordinal.
    #[must_use]
    pub const fn get(self) -> u32 {
        self.0
    }
}

impl fmt::Display for DeviceId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(&self.0, f)
    }
}
