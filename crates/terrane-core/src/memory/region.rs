//! Type-erased memory and bounds-checked views of it.

use std::any::Any;
use std::sync::Arc;

use crate::bytes::byte_count::ByteCount;
use crate::location::Location;
use crate::location::storage_kind::StorageKind;
use crate::memory::Memory;
use crate::memory::span::Span;

/// A span of memory of any kind. It keeps the memory alive.
///
/// Cloning or viewing a region costs a reference count. The memory drops with its last region.
#[derive(Clone)]
pub struct Region {
    memory: Arc<dyn Memory>,
    /// Where this region begins. It is cached to avoid a call to the memory.
    location: Location,
    length: ByteCount,
    offset: ByteCount,
}

impl Region {
    /// A region of the whole `memory`.
    #[must_use]
    pub fn new(memory: impl Memory) -> Self {
        Self::from_arc(Arc::new(memory))
    }

    /// A region of the whole `memory`, which may have other owners as well.
    #[must_use]
    pub fn from_arc(memory: Arc<dyn Memory>) -> Self {
        let (location, length) = (memory.location(), memory.length());
        Self { memory, location, length, offset: ByteCount::ZERO }
    }

    /// A view of `length` bytes from `offset` on. The offset of a nested view counts from the
    /// beginning of this view.
    ///
    /// # Errors
    ///
    /// [`ViewOutOfBounds`] if the range ends past the end of the region.
    pub fn view(&self, offset: ByteCount, length: ByteCount) -> Result<Self, ViewOutOfBounds> {
        let error = ViewOutOfBounds { offset, length, region: self.length };
        let end = offset.checked_add(length).map_err(|_| error)?;
        if end > self.length {
            return Err(error);
        }
        Ok(Self {
            memory: Arc::clone(&self.memory),
            location: self.location.checked_add(offset).ok_or(error)?,
            length,
            offset: self.offset.checked_add(offset).map_err(|_| error)?,
        })
    }

    /// The offset of the region within its memory.
    #[must_use]
    pub fn offset(&self) -> ByteCount {
        self.offset
    }

    /// The memory that contains this region.
    #[must_use]
    pub fn memory(&self) -> &Arc<dyn Memory> {
        &self.memory
    }

    /// Kind, location and length as plain data.
    #[must_use]
    pub fn span(&self) -> Span {
        Span::of(self)
    }

    /// Whether both are parts of the same memory.
    #[must_use]
    pub fn same_memory(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.memory, &other.memory)
    }
}

// SAFETY: a region keeps its memory alive, `view` proved that the part lies within it, and the
// memory always returns the same values.
unsafe impl Memory for Region {
    fn kind(&self) -> StorageKind {
        self.memory.kind()
    }

    fn location(&self) -> Location {
        self.location
    }

    fn length(&self) -> ByteCount {
        self.length
    }

    crate::delegate_part!(self, *self.memory, self.offset);

    fn managed_block(&self) -> Option<&(dyn Any + Send + Sync)> {
        self.memory.managed_block()
    }
}

crate::debug_fields!(Region, |it| { kind: it.kind(), location: it.location, length: it.length });

/// A view that ends past the end of its region.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "a view of {} bytes at offset {} ends past the end of its region of {} bytes; state a view \
     within the region",
    .length.get(), .offset.get(), .region.get()
)]
pub struct ViewOutOfBounds {
    /// The offset of the requested view.
    pub offset: ByteCount,
    /// The length of the requested view.
    pub length: ByteCount,
    /// The length of the region.
    pub region: ByteCount,
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::location::HostAddress;
    use crate::memory::foreign::ForeignMemory;
    use std::ptr::NonNull;

    fn region() -> (Region, u64) {
        let mut bytes = vec![0_u8; 64].into_boxed_slice();
        let address = HostAddress::new(NonNull::from(&mut bytes[0]));
        let span = Span {
            kind: StorageKind::System,
            location: Location::Host(address),
            length: ByteCount::new(64),
        };
        // SAFETY: the box owns the bytes and does not move them.
        let memory = unsafe { ForeignMemory::new(span, bytes) };
        (Region::new(memory), address.get())
    }

    #[test]
    fn views_of_views_add_up() {
        let (region, base) = region();
        let view = region.view(ByteCount::new(16), ByteCount::new(32)).unwrap();
        let inner = view.view(ByteCount::new(8), ByteCount::new(24)).unwrap();
        assert_eq!(inner.offset(), ByteCount::new(24));
        assert_eq!(inner.location().as_host().unwrap().get(), base + 24);
        assert!(inner.same_memory(&region));
        assert!(inner.span().overlaps(&region.span()));
    }

    #[test]
    fn views_end_with_their_region_not_with_its_memory() {
        let (region, _) = region();
        let view = region.view(ByteCount::new(16), ByteCount::new(32)).unwrap();
        let error = view.view(ByteCount::new(1), ByteCount::new(32)).unwrap_err();
        assert_eq!(error.region, ByteCount::new(32));
        assert!(view.view(ByteCount::new(32), ByteCount::ZERO).is_ok());
        assert!(view.view(ByteCount::new(u64::MAX), ByteCount::new(2)).is_err());
    }
}
