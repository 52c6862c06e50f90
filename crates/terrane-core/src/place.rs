//! Positions of memory, as numbers that can be compared.

use crate::{ByteCount, DeviceId, FileIdentity, Location, PeerId, RemoteSpace, Span};

/// An address space. Only places in the same address space can be compared.
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

/// A place: an offset in bytes from the beginning of an address space.
///
/// ```
/// use terrane_core::{DeviceAddress, DeviceId, Location, Position, AddressSpace};
///
/// let device = DeviceId::new(1);
/// let location = Location::Device { device, address: DeviceAddress::new(0x1000) };
/// assert_eq!(location.position(), Position { space: AddressSpace::Device(device), start: 0x1000 });
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Position {
    /// The address space.
    pub space: AddressSpace,
    /// The offset in it, in bytes.
    pub start: u64,
}

impl Location {
    /// The place of the location, as numbers that can be compared.
    #[must_use]
    pub fn place(self) -> Position {
        match self {
            Self::Host(address) => Position { space: AddressSpace::Host, start: address.get() },
            Self::Device { device, address } => {
                Position { space: AddressSpace::Device(device), start: address.get() }
            }
            Self::File(position) => Position {
                space: AddressSpace::File(position.file.identity),
                start: position.offset.get(),
            },
            Self::Remote(remote) => Position {
                space: AddressSpace::Remote(remote.peer, remote.space),
                start: remote.address,
            },
        }
    }
}

impl Span {
    /// Whether all of `inner` lies within this span.
    #[must_use]
    pub fn covers(&self, inner: &Self) -> bool {
        let (from, to) = (self.location.position(), inner.location.position());
        let skipped = to.start.checked_sub(from.start).map(ByteCount::new);
        let left = skipped.and_then(|skipped| self.length.checked_sub(skipped));
        from.space == to.space && left.is_some_and(|left| inner.length <= left)
    }
}
