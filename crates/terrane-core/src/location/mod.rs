//! Locations of bytes: host addresses, device addresses, file positions and addresses of peers.
//! These are four types without conversions between them.

pub(crate) mod durability;
pub(crate) mod position;
pub(crate) mod remote;
pub(crate) mod storage_kind;

use std::fmt;
use std::os::fd::RawFd;
use std::ptr::NonNull;

use crate::bytes::alignment::Alignment;
use crate::bytes::byte_count::ByteCount;
use crate::convert;
use crate::location::durability::Durability;
use crate::location::remote::RemoteAddress;
use crate::location::storage_kind::DeviceId;

/// Where a span of bytes begins.
///
/// A location gives no right to access the bytes. It is valid while the [`Memory`](crate::Memory)
/// that returned it lives.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Location {
    /// An address of the host.
    Host(HostAddress),
    /// An address of one device.
    Device {
        /// The device that owns the memory.
        device: DeviceId,
        /// The address in that device's address space.
        address: DeviceAddress,
    },
    /// A position in a file.
    File(FilePosition),
    /// An address of another agent, usually in another process.
    Remote(RemoteAddress),
}

impl Location {
    /// The location that is `offset` bytes higher, or `None` on overflow.
    #[must_use]
    pub fn checked_add(self, offset: ByteCount) -> Option<Self> {
        Some(match self {
            Self::Host(address) => Self::Host(address.checked_add(offset)?),
            Self::Device { device, address } => {
                Self::Device { device, address: address.checked_add(offset)? }
            }
            Self::File(position) => Self::File(position.checked_add(offset)?),
            Self::Remote(address) => Self::Remote(address.checked_add(offset)?),
        })
    }

    /// The largest power of two that divides the location.
    #[must_use]
    pub fn alignment(self) -> Alignment {
        Alignment::of(self.position().start)
    }

    /// The host address, if the location has one.
    #[must_use]
    pub const fn as_host(self) -> Option<HostAddress> {
        match self {
            Self::Host(address) => Some(address),
            _ => None,
        }
    }

    /// The file position, if the location has one.
    #[must_use]
    pub const fn as_file(self) -> Option<FilePosition> {
        match self {
            Self::File(position) => Some(position),
            _ => None,
        }
    }

    /// The peer's address, if the location has one.
    #[must_use]
    pub const fn as_remote(self) -> Option<RemoteAddress> {
        match self {
            Self::Remote(address) => Some(address),
            _ => None,
        }
    }
}

impl fmt::Display for Location {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Host(address) => write!(f, "host {:#x}", address.get()),
            Self::Device { device, address } => write!(f, "device {device} {:#x}", address.get()),
            Self::File(at) => {
                write!(f, "file descriptor {} @ {}", at.file.descriptor, at.offset.get())
            }
            Self::Remote(address) => fmt::Display::fmt(address, f),
        }
    }
}

/// An address in the host's address space. It keeps the pointer's provenance.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct HostAddress(NonNull<u8>);

// SAFETY: an address is only a number to safe code. Unsafe code that dereferences it must
// synchronise.
unsafe impl Send for HostAddress {}
// SAFETY: as for `Send`.
unsafe impl Sync for HostAddress {}

impl HostAddress {
    /// The address of a pointer.
    #[must_use]
    pub const fn new<T>(pointer: NonNull<T>) -> Self {
        Self(pointer.cast())
    }

    /// The address as a pointer. The code that dereferences it must prove that this is sound.
    #[must_use]
    pub const fn as_ptr(self) -> *mut u8 {
        self.0.as_ptr()
    }

    /// The address as a number.
    #[must_use]
    pub fn get(self) -> u64 {
        convert::to_u64(self.0.addr().get())
    }

    /// The address that is `offset` bytes higher, or `None` on overflow.
    #[must_use]
    pub fn checked_add(self, offset: ByteCount) -> Option<Self> {
        self.0.addr().get().checked_add(offset.to_usize())?;
        NonNull::new(self.0.as_ptr().wrapping_add(offset.to_usize())).map(Self)
    }
}

impl fmt::Debug for HostAddress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "HostAddress({:#x})", self.get())
    }
}

/// An address in a device's address space. It may differ from the host address of the same bytes,
/// so the two types cannot be converted into each other.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct DeviceAddress(u64);

impl DeviceAddress {
    /// Creates an address from a number.
    #[must_use]
    pub const fn new(address: u64) -> Self {
        Self(address)
    }

    /// The address as a number.
    #[must_use]
    pub const fn get(self) -> u64 {
        self.0
    }

    /// The address that is `offset` bytes higher, or `None` on overflow.
    #[must_use]
    pub fn checked_add(self, offset: ByteCount) -> Option<Self> {
        self.0.checked_add(offset.get()).map(Self)
    }
}

impl fmt::Debug for DeviceAddress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "DeviceAddress({:#x})", self.0)
    }
}

/// A position in an open file.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct FilePosition {
    /// The file.
    pub file: FileHandle,
    /// Bytes from the beginning of the file.
    pub offset: ByteCount,
}

impl FilePosition {
    /// The position that is `offset` bytes higher, or `None` past the largest file offset of the
    /// operating system (2^63 − 1).
    #[must_use]
    pub fn checked_add(self, offset: ByteCount) -> Option<Self> {
        let offset = self.offset.checked_add(offset).ok()?;
        i64::try_from(offset.get()).is_ok().then_some(Self { offset, ..self })
    }
}

/// An open file: its descriptors and its identity.
///
/// The descriptors stay open while the [`Memory`](crate::Memory) that returned this lives.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct FileHandle {
    /// A descriptor that uses the page cache.
    pub descriptor: RawFd,
    /// The descriptor that bypasses the page cache, if the file system supports it.
    pub direct: Option<DirectFile>,
    /// The identity of the file. It is the same each time the file is opened.
    pub identity: FileIdentity,
    /// The durability that every write must reach before it counts as complete.
    pub durability: Durability,
}

/// A descriptor opened for direct I/O, with its alignment requirements.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct DirectFile {
    /// The descriptor, opened with `O_DIRECT`.
    pub descriptor: RawFd,
    /// The required alignment of the address of every buffer.
    pub memory_alignment: Alignment,
    /// The required alignment of every file offset and length.
    pub offset_alignment: Alignment,
}

/// The identity of a file on this machine: its file system and its inode number.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct FileIdentity {
    /// `st_dev`: the file system.
    pub file_system: u64,
    /// `st_ino`: the file within it.
    pub inode: u64,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn host_addresses_do_not_wrap() {
        let address = HostAddress::new(NonNull::<u64>::dangling());
        assert_eq!(address.checked_add(ByteCount::new(u64::MAX)), None);
        assert_eq!(address.checked_add(ByteCount::new(8)).map(HostAddress::get), Some(16));
    }

    #[test]
    fn file_offsets_stay_within_what_the_system_takes() {
        let file = FileHandle {
            descriptor: 3,
            direct: None,
            identity: FileIdentity { file_system: 1, inode: 2 },
            durability: Durability::None,
        };
        let start = FilePosition { file, offset: ByteCount::new(1 << 62) };
        assert!(start.checked_add(ByteCount::new(1 << 61)).is_some());
        assert_eq!(start.checked_add(ByteCount::new(1 << 62)), None);
    }
}
