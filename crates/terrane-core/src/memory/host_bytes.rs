//! Bytes of the Rust heap as memory.

use std::mem::ManuallyDrop;
use std::ptr::NonNull;

use crate::bytes::byte_count::ByteCount;
use crate::location::storage_kind::StorageKind;
use crate::location::{HostAddress, Location};
use crate::memory::Memory;

/// A vector or a boxed slice of bytes as [`Memory`], without `unsafe` for the caller.
///
/// It owns the bytes, so that only users of its location access them.
/// [`into_bytes`](Self::into_bytes) returns the bytes. They have the alignment of the vector, which
/// may be one byte. Direct I/O and devices need a larger alignment, which allocators such as
/// `SystemAllocator` of `terrane-storage` provide.
///
/// ```
/// use terrane_core::{ByteCount, HostBytes, Memory};
///
/// let memory = HostBytes::from(vec![7_u8; 100]);
/// assert_eq!(memory.length(), ByteCount::new(100));
/// assert_eq!(memory.into_bytes(), [7; 100]);
/// ```
pub struct HostBytes {
    /// A pointer from `Box::into_raw`. The field is not a box, because a box would claim exclusive
    /// access to the bytes.
    bytes: NonNull<[u8]>,
}

impl HostBytes {
    /// Returns the bytes, with the contents that transfers have written.
    #[must_use]
    pub fn into_bytes(self) -> Vec<u8> {
        // The returned vector frees the bytes.
        let bytes = ManuallyDrop::new(self).bytes;
        // SAFETY: the pointer is from `Box::into_raw`, and `self` is never dropped.
        unsafe { Box::from_raw(bytes.as_ptr()) }.into_vec()
    }
}

impl From<Box<[u8]>> for HostBytes {
    fn from(bytes: Box<[u8]>) -> Self {
        // SAFETY: a box is never null.
        Self { bytes: unsafe { NonNull::new_unchecked(Box::into_raw(bytes)) } }
    }
}

impl From<Vec<u8>> for HostBytes {
    /// Frees the spare capacity of the vector.
    fn from(bytes: Vec<u8>) -> Self {
        bytes.into_boxed_slice().into()
    }
}

impl Drop for HostBytes {
    fn drop(&mut self) {
        // SAFETY: the pointer is from `Box::into_raw`, and is freed here only.
        drop(unsafe { Box::from_raw(self.bytes.as_ptr()) });
    }
}

// SAFETY: the value owns plain bytes, like the box from which it was created.
unsafe impl Send for HostBytes {}
// SAFETY: a shared reference returns only the address and the length.
unsafe impl Sync for HostBytes {}

// SAFETY: the bytes come from a box, so they are initialised, readable and writable. They do not
// move until the value drops, and are accessible by its location only.
unsafe impl Memory for HostBytes {
    fn kind(&self) -> StorageKind {
        StorageKind::System
    }

    fn location(&self) -> Location {
        Location::Host(HostAddress::new(self.bytes.cast::<u8>()))
    }

    fn length(&self) -> ByteCount {
        ByteCount::from_usize(self.bytes.len())
    }
}

crate::debug_fields!(HostBytes, |it| { length: it.length() });

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn written_bytes_are_returned_unchanged() {
        let mut vector = Vec::with_capacity(1000);
        vector.extend([1_u8, 2, 3]);
        let memory = HostBytes::from(vector);
        let address = memory.location().as_host().unwrap();
        let second = address.as_ptr().wrapping_add(1);
        // SAFETY: the memory has three bytes, which nothing else uses.
        unsafe { second.write(9) };
        let moved = Box::new(memory);
        assert_eq!(moved.location().as_host(), Some(address));
        assert_eq!(moved.into_bytes(), [1, 9, 3]);
    }

    #[test]
    fn no_bytes_are_memory_of_length_zero() {
        let memory = HostBytes::from(Vec::new());
        assert_eq!(memory.length(), ByteCount::ZERO);
        assert_eq!(memory.into_bytes(), []);
    }
}
