//! Positions in address spaces, as numbers that can be compared.

use crate::location::remote::{PeerId, RemoteSpace};
use crate::location::storage_kind::DeviceId;
use crate::location::{FileIdentity, Location};

/// An address space. Only positions in the same address space can be compared.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[non_exhaustive]
pub enum AddressSpace {
    /// A region of a plan, counted from 0. It has no address yet.
    Region(u32),
    /// The host's address space.
    Host,
    /// A device's address space.
    Device(DeviceId),
    /// A file. It is the same each time the file is opened.
    File(FileIdentity),
    /// An address space of a peer.
    Remote(PeerId, RemoteSpace),
}

/// An offset in bytes from the beginning of an address space.
///
/// A [`Location`] gives access to the bytes. A position is only for order and comparison.
///
/// ```
/// use terrane_core::{AddressSpace, DeviceAddress, DeviceId, Location, Position};
///
/// let device = DeviceId::new(1);
/// let location = Location::Device { device, address: DeviceAddress::new(0x1000) };
/// let position = Position { space: AddressSpace::Device(device), start: 0x1000 };
/// assert_eq!(location.position(), position);
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Position {
    /// The address space.
    pub space: AddressSpace,
    /// The offset in it, in bytes.
    pub start: u64,
}

impl Location {
    /// The position of this location, for comparison with other positions in its address space.
    #[must_use]
    pub fn position(self) -> Position {
        let (space, start) = match self {
            Self::Host(address) => (AddressSpace::Host, address.get()),
            Self::Device { device, address } => (AddressSpace::Device(device), address.get()),
            Self::File(at) => (AddressSpace::File(at.file.identity), at.offset.get()),
            Self::Remote(at) => (AddressSpace::Remote(at.peer, at.space), at.address),
        };
        Position { space, start }
    }
}
