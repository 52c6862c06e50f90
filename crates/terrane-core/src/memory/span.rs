//! The description of a span of memory, as plain data.

use crate::bytes::byte_count::ByteCount;
use crate::location::Location;
use crate::location::storage_kind::StorageKind;
use crate::memory::Memory;

/// The description of a contiguous span: its kind, location and length.
///
/// It keeps nothing alive.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Span {
    /// The kind of storage.
    pub kind: StorageKind,
    /// The location of the first byte.
    pub location: Location,
    /// The length in bytes.
    pub length: ByteCount,
}

impl Span {
    /// The span of the whole `memory`.
    #[must_use]
    pub fn of(memory: &(impl Memory + ?Sized)) -> Self {
        Self { kind: memory.kind(), location: memory.location(), length: memory.length() }
    }

    /// Whether the two spans share a byte. Files are compared by identity, so two descriptors of
    /// one file are equal. An empty span overlaps nothing.
    #[must_use]
    pub fn overlaps(&self, other: &Self) -> bool {
        let (a, b) = (self.location.position(), other.location.position());
        // Compares distances, so that a span at the end of the address space needs no special case.
        let apart = if a.start <= b.start {
            b.start - a.start >= self.length.get()
        } else {
            a.start - b.start >= other.length.get()
        };
        !self.length.is_zero() && !other.length.is_zero() && a.space == b.space && !apart
    }

    /// Whether `inner` is entirely within this span.
    #[must_use]
    pub fn covers(&self, inner: &Self) -> bool {
        let (from, to) = (self.location.position(), inner.location.position());
        let skipped = to.start.checked_sub(from.start).map(ByteCount::new);
        let left = skipped.and_then(|skipped| self.length.checked_sub(skipped));
        from.space == to.space && left.is_some_and(|left| inner.length <= left)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::location::DeviceAddress;
    use crate::location::storage_kind::DeviceId;

    fn device(id: u32, address: u64, length: u64) -> Span {
        let id = DeviceId::new(id);
        Span {
            kind: StorageKind::Device(id),
            location: Location::Device { device: id, address: DeviceAddress::new(address) },
            length: ByteCount::new(length),
        }
    }

    #[test]
    fn overlap_is_symmetric_and_knows_its_space() {
        let a = device(0, 100, 50);
        for (other, expected) in [
            (device(0, 149, 1), true),
            (device(0, 150, 1), false),
            (device(0, 50, 50), false),
            (device(0, 50, 51), true),
            (device(1, 100, 50), false),
            (device(0, 120, 0), false),
            (device(0, u64::MAX, 1), false),
        ] {
            assert_eq!(a.overlaps(&other), expected, "{other:?}");
            assert_eq!(other.overlaps(&a), expected, "{other:?}");
        }
    }
}
