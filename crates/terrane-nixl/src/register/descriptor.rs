//! NIXL descriptors of spans, derived from their locations.

use std::fmt;

use terrane_core::{ByteCount, Location, Span};

use super::refusal::Refusal;
use crate::agent::config::FileAccess;
use crate::bindings::memory_type::MemoryType;

/// A span in NIXL's terms: type of memory, address, length and device.
///
/// It derives only from the span's location, so the two always agree.
///
/// ```
/// use terrane_core::{ByteCount, DeviceAddress, DeviceId, Location, Span, StorageKind};
/// use terrane_nixl::{Descriptor, FileAccess, MemoryType};
///
/// let device = DeviceId::new(2);
/// let location = Location::Device { device, address: DeviceAddress::new(0x7000) };
/// let span = Span { kind: StorageKind::Device(device), location, length: ByteCount::kib(4) };
/// let descriptor = Descriptor::of(&span, FileAccess::Buffered)?;
/// assert_eq!(descriptor.memory_type(), MemoryType::Device);
/// assert_eq!((descriptor.address(), descriptor.device()), (0x7000, 2));
/// # Ok::<(), terrane_nixl::Refusal>(())
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Descriptor {
    pub(crate) memory: MemoryType,
    /// An address, or a position in a file.
    pub(crate) address: usize,
    pub(crate) length: usize,
    /// The ordinal of a device, the descriptor of a file, 0 for host memory.
    pub(crate) device: u64,
}

impl Descriptor {
    /// The memory type of a span.
    pub(crate) fn memory_of(span: &Span) -> Result<MemoryType, Refusal> {
        match span.location {
            Location::Host(_) => Ok(MemoryType::Host),
            Location::Device { .. } => Ok(MemoryType::Device),
            Location::File(_) => Ok(MemoryType::File),
            _ => Err(Refusal::Kind { kind: span.kind }),
        }
    }

    /// Creates the descriptor of a span for a backend with this access to files.
    ///
    /// # Errors
    ///
    /// [`Refusal`] if NIXL cannot describe the span: it is empty, is a file without the requested
    /// descriptor, or is a peer's memory.
    pub fn of(span: &Span, access: FileAccess) -> Result<Self, Refusal> {
        let memory = Self::memory_of(span)?;
        if span.length.is_zero() {
            return Err(Refusal::Empty);
        }
        let (address, device) = match span.location {
            Location::Host(address) => (address.get(), 0),
            Location::Device { device, address } => (address.get(), u64::from(device.get())),
            Location::File(position) => {
                let descriptor = match access {
                    FileAccess::Buffered => position.file.descriptor,
                    FileAccess::Direct => {
                        position.file.direct.ok_or(Refusal::NoDirectDescriptor)?.descriptor
                    }
                };
                let device = u64::try_from(descriptor);
                (position.offset.get(), device.map_err(|_| Refusal::Descriptor(descriptor))?)
            }
            _ => return Err(Refusal::Kind { kind: span.kind }),
        };
        let address = ByteCount::new(address).to_usize();
        Ok(Self { memory, address, length: span.length.to_usize(), device })
    }

    /// The type of memory.
    #[must_use]
    pub const fn memory_type(&self) -> MemoryType {
        self.memory
    }

    /// An address of the host or of the device, or a position in the file.
    #[must_use]
    pub const fn address(&self) -> usize {
        self.address
    }

    /// The length in bytes.
    #[must_use]
    pub const fn length(&self) -> usize {
        self.length
    }

    /// The ordinal of the device, the descriptor of the file, 0 for memory of the host.
    #[must_use]
    pub const fn device(&self) -> u64 {
        self.device
    }

    /// Whether this descriptor has any byte of `other`.
    pub(crate) fn overlaps(&self, other: &Self) -> bool {
        self.shared_with(other).is_some()
    }

    /// The bytes that both descriptors have; `None` if there are none.
    pub(crate) fn shared_with(&self, other: &Self) -> Option<Self> {
        if (self.memory, self.device) != (other.memory, other.device) {
            return None;
        }
        let address = self.address.max(other.address);
        let length = self.end().min(other.end()).checked_sub(address)?;
        (length > 0).then_some(Self { address, length, ..*self })
    }

    /// Whether NIXL would look here for bytes of `span`, which `registered` covers, and would not
    /// find all of them. NIXL looks at the last descriptor that begins at or before the bytes.
    pub(crate) fn hides_bytes_of(&self, span: &Self, registered: &Self) -> bool {
        (self.memory, self.device) == (span.memory, span.device)
            && registered.address < self.address
            && self.address < span.end()
            && self.end() < span.end()
    }

    /// The address after the last byte. No memory ends beyond the address space.
    fn end(&self) -> usize {
        self.address.saturating_add(self.length)
    }

    /// Whether this descriptor has all bytes of `other`.
    pub(crate) fn covers(&self, other: &Self) -> bool {
        let skipped = other.address.checked_sub(self.address);
        let left = skipped.and_then(|skipped| self.length.checked_sub(skipped));
        (self.memory, self.device) == (other.memory, other.device)
            && left.is_some_and(|left| other.length <= left)
    }
}

impl fmt::Display for Descriptor {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { memory, address, device, .. } = self;
        write!(f, "{address:#x} to {:#x} of {memory} memory", self.end())?;
        if *memory == MemoryType::Host { Ok(()) } else { write!(f, " {device}") }
    }
}

impl nixl_sys::MemoryRegion for Descriptor {
    unsafe fn as_ptr(&self) -> *const u8 {
        // The bindings convert it back to a number; no code dereferences it.
        std::ptr::without_provenance(self.address)
    }

    fn size(&self) -> usize {
        self.length
    }
}

impl nixl_sys::NixlDescriptor for Descriptor {
    fn mem_type(&self) -> nixl_sys::MemType {
        self.memory.into_raw()
    }

    fn device_id(&self) -> u64 {
        self.device
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::ptr::NonNull;
    use terrane_core::{
        Alignment, DeviceAddress, DeviceId, DirectFile, Durability, FileHandle, FileIdentity,
        FilePosition, HostAddress, PeerId, RemoteAddress, RemoteSpace, StorageKind,
    };

    fn span(kind: StorageKind, location: Location, length: u64) -> Span {
        Span { kind, location, length: ByteCount::new(length) }
    }

    fn file(direct: Option<i32>) -> Location {
        let direct = direct.map(|descriptor| DirectFile {
            descriptor,
            memory_alignment: Alignment::SECTOR,
            offset_alignment: Alignment::SECTOR,
        });
        let file = FileHandle {
            descriptor: 7,
            direct,
            identity: FileIdentity { file_system: 1, inode: 2 },
            durability: Durability::None,
        };
        Location::File(FilePosition { file, offset: ByteCount::new(4096) })
    }

    #[test]
    fn everything_derives_from_the_location() {
        let address = HostAddress::new(NonNull::<u64>::dangling());
        let host = Location::Host(address);
        for kind in [StorageKind::System, StorageKind::Pinned] {
            let descriptor = Descriptor::of(&span(kind, host, 64), FileAccess::Direct).unwrap();
            let expected =
                Descriptor { memory: MemoryType::Host, address: 8, length: 64, device: 0 };
            assert_eq!(descriptor, expected);
        }
        let id = DeviceId::new(3);
        let device = Location::Device { device: id, address: DeviceAddress::new(0x7000) };
        let device = span(StorageKind::Device(id), device, 1 << 40);
        let expected =
            Descriptor { memory: MemoryType::Device, address: 0x7000, length: 1 << 40, device: 3 };
        assert_eq!(Descriptor::of(&device, FileAccess::Buffered), Ok(expected));
    }

    #[test]
    fn a_file_is_its_descriptor_and_the_offset_in_it() {
        let both = span(StorageKind::Disk, file(Some(9)), 512);
        let of = |access| Descriptor::of(&both, access).map(|d| (d.device, d.address, d.length));
        assert_eq!(of(FileAccess::Buffered), Ok((7, 4096, 512)));
        assert_eq!(of(FileAccess::Direct), Ok((9, 4096, 512)));
        let buffered = span(StorageKind::Disk, file(None), 512);
        let refused = Descriptor::of(&buffered, FileAccess::Direct);
        assert_eq!(refused, Err(Refusal::NoDirectDescriptor));
        let closed = span(StorageKind::Disk, file(Some(-1)), 512);
        assert_eq!(Descriptor::of(&closed, FileAccess::Direct), Err(Refusal::Descriptor(-1)));
    }

    #[test]
    fn memory_of_a_peer_is_not_registered_here() {
        let address = RemoteAddress { peer: PeerId::next(), space: RemoteSpace::Host, address: 8 };
        let kind = StorageKind::Remote(address.peer);
        let remote = span(kind, Location::Remote(address), 64);
        assert_eq!(Descriptor::of(&remote, FileAccess::Buffered), Err(Refusal::Kind { kind }));
    }

    #[test]
    fn an_empty_span_of_a_file_is_not_all_of_the_file() {
        let empty = span(StorageKind::Disk, file(None), 0);
        assert_eq!(Descriptor::of(&empty, FileAccess::Buffered), Err(Refusal::Empty));
    }

    #[test]
    fn a_descriptor_within_a_longer_one_hides_the_bytes_behind_it() {
        let descriptor =
            |address, length| Descriptor { memory: MemoryType::Host, address, length, device: 0 };
        let whole = descriptor(100, 50);
        for (other, expected) in [
            (descriptor(110, 5), true),
            // The same start or the same end.
            (descriptor(100, 5), false),
            (descriptor(110, 40), false),
            // Partly outside, or wholly.
            (descriptor(90, 30), false),
            (descriptor(110, 60), false),
            (descriptor(150, 5), false),
            (descriptor(60, 5), false),
        ] {
            assert_eq!(other.hides_bytes_of(&whole, &whole), expected, "{other}");
        }
        // Before a span that the longer registration serves.
        assert!(descriptor(110, 5).hides_bytes_of(&descriptor(120, 5), &whole));
        assert!(!descriptor(130, 5).hides_bytes_of(&descriptor(120, 5), &whole));
        assert_eq!(whole.to_string(), "0x64 to 0x96 of host memory");
    }

    #[test]
    fn a_descriptor_covers_what_is_within_it_and_overlaps_more() {
        let descriptor = |device, address, length| Descriptor {
            memory: MemoryType::File,
            address,
            length,
            device,
        };
        for (other, expected) in [
            (descriptor(1, 99, 1), false),
            (descriptor(1, 99, 2), true),
            (descriptor(1, 120, 1), true),
            (descriptor(1, 0, usize::MAX), true),
            (descriptor(1, 149, 9), true),
            (descriptor(1, 150, 9), false),
            (descriptor(2, 120, 1), false),
        ] {
            let one = descriptor(1, 100, 50);
            assert_eq!([one.overlaps(&other), other.overlaps(&one)], [expected; 2], "{other:?}");
        }
        let shared = descriptor(1, 100, 50).shared_with(&descriptor(1, 140, 50));
        assert_eq!(shared, Some(descriptor(1, 140, 10)));
        let outer = descriptor(1, 100, 50);
        for (inner, expected) in [
            (outer, true),
            (descriptor(1, 149, 1), true),
            (descriptor(1, 149, 2), false),
            (descriptor(1, 99, 1), false),
            (descriptor(2, 120, 1), false),
            (descriptor(1, usize::MAX, 1), false),
        ] {
            assert_eq!(outer.covers(&inner), expected, "{inner:?}");
        }
    }
}
