//! Memory of another agent: the peer, its address space and the address.

use std::fmt;
use std::sync::atomic::{AtomicU64, Ordering};

use crate::bytes::byte_count::ByteCount;
use crate::location::storage_kind::DeviceId;

/// A peer: an agent, usually of another process, by its number in this process.
///
/// The number is valid in this process only and is never reused. If a peer is forgotten and added
/// again, it gets a new number. Requests for the old number therefore cannot reach the new peer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct PeerId(u64);

impl PeerId {
    /// A new number, which no other peer of this process has or had.
    #[must_use]
    pub fn next() -> Self {
        static NEXT: AtomicU64 = AtomicU64::new(0);
        // Relaxed: only uniqueness is required.
        Self(NEXT.fetch_add(1, Ordering::Relaxed))
    }

    /// The number.
    #[must_use]
    pub const fn get(self) -> u64 {
        self.0
    }
}

impl fmt::Display for PeerId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(&self.0, f)
    }
}

/// An address space of a peer. Addresses can be compared only within one address space.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[non_exhaustive]
pub enum RemoteSpace {
    /// The host memory of the peer's process.
    Host,
    /// The memory of one of the peer's devices, by the ordinal of its driver.
    Device(DeviceId),
    /// A file of the peer, by the number with which the peer registered it.
    File(u64),
}

impl fmt::Display for RemoteSpace {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Host => f.pad("host"),
            Self::Device(device) => write!(f, "device {device}"),
            Self::File(number) => write!(f, "file {number}"),
        }
    }
}

/// An address of a peer. This process cannot dereference it. The engine that communicates with the
/// peer uses it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct RemoteAddress {
    /// The peer that owns the memory.
    pub peer: PeerId,
    /// The address space of the peer.
    pub space: RemoteSpace,
    /// The address in that address space. In a file, the offset in bytes.
    pub address: u64,
}

impl RemoteAddress {
    /// The address that is `offset` bytes higher, or `None` on overflow. The limit for a file is
    /// the largest file offset of operating systems (2^63 − 1).
    #[must_use]
    pub fn checked_add(self, offset: ByteCount) -> Option<Self> {
        let address = self.address.checked_add(offset.get())?;
        let exists = !matches!(self.space, RemoteSpace::File(_)) || i64::try_from(address).is_ok();
        exists.then_some(Self { address, ..self })
    }
}

impl fmt::Display for RemoteAddress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.space {
            RemoteSpace::File(_) => {
                write!(f, "peer {} {} @ {}", self.peer, self.space, self.address)
            }
            _ => write!(f, "peer {} {} {:#x}", self.peer, self.space, self.address),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::bytes::alignment::Alignment;
    use crate::location::Location;
    use crate::location::storage_kind::StorageKind;
    use crate::memory::span::Span;

    fn span(peer: PeerId, space: RemoteSpace, address: u64, length: u64) -> Span {
        Span {
            kind: StorageKind::Remote(peer),
            location: Location::Remote(RemoteAddress { peer, space, address }),
            length: ByteCount::new(length),
        }
    }

    #[test]
    fn peers_are_never_the_same() {
        assert_ne!(PeerId::next(), PeerId::next());
    }

    #[test]
    fn addresses_are_compared_within_one_space_of_one_peer() {
        let (peer, other) = (PeerId::next(), PeerId::next());
        let device = |id| RemoteSpace::Device(DeviceId::new(id));
        let spaces = [
            (peer, RemoteSpace::Host),
            (other, RemoteSpace::Host),
            (peer, device(0)),
            (peer, device(1)),
            (peer, RemoteSpace::File(0)),
            (peer, RemoteSpace::File(1)),
        ];
        for (n, &(peer, space)) in spaces.iter().enumerate() {
            for (m, &(other, elsewhere)) in spaces.iter().enumerate() {
                let (a, b) = (span(peer, space, 4096, 64), span(other, elsewhere, 4100, 8));
                assert_eq!(a.overlaps(&b), n == m, "{} {}", a.location, b.location);
                assert_eq!(a.covers(&b), n == m, "{} {}", a.location, b.location);
            }
        }
    }

    #[test]
    fn addresses_do_not_wrap_and_files_end() {
        let at = |space, address| RemoteAddress { peer: PeerId::next(), space, address };
        let host = at(RemoteSpace::Host, u64::MAX - 1);
        assert!(host.checked_add(ByteCount::new(1)).is_some());
        assert_eq!(host.checked_add(ByteCount::new(2)), None);
        let file = at(RemoteSpace::File(3), 1 << 62);
        assert!(file.checked_add(ByteCount::new(1 << 61)).is_some());
        assert_eq!(file.checked_add(ByteCount::new(1 << 62)), None);
    }

    #[test]
    fn a_remote_location_names_its_peer() {
        let peer = PeerId::next();
        let at = Location::Remote(RemoteAddress { peer, space: RemoteSpace::Host, address: 0x600 });
        assert_eq!(at.to_string(), format!("peer {peer} host 0x600"));
        assert_eq!(StorageKind::Remote(peer).to_string(), format!("peer {peer}"));
        assert_eq!(at.alignment(), Alignment::SECTOR);
        assert_eq!((at.as_host(), at.as_file()), (None, None));
        assert!(!StorageKind::Remote(peer).is_host() && !StorageKind::Remote(peer).is_device());
    }
}
