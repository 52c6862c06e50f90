//! The contract of everything that holds bytes.

use std::any::Any;
use std::fmt;
use std::sync::Arc;

use crate::{
    ByteCount, CapabilityReport, DeviceAddress, Location, RegistrationRecord, StorageKind,
};

/// A span of bytes that is valid and stays where it is until the value drops.
///
/// A `Memory` hands out *where* its bytes are, never the bytes: reading or writing them is the
/// business of unsafe code that knows what else is in flight (the copy engines), or of typed
/// views that prove it.
///
/// # Safety
///
/// Whoever implements this promises that, from the first call until the value drops:
///
/// 1. [`kind`](Self::kind), [`location`](Self::location) and [`length`](Self::length) always
///    answer the same.
/// 2. The span of `length` bytes from `location` is valid for reads and writes: host addresses
///    are mapped readable and writable, device addresses belong to a live allocation, and file
///    descriptors are open for reading and writing, with a file at least that long at that
///    offset unless someone else truncates it (which readers meet as a typed error). Of a peer's
///    memory, the peer's word is all there is: it is what the peer says it has registered, and a
///    copy that finds it gone ends with a typed error.
/// 3. Moving the value does not move the bytes.
/// 4. Host bytes are initialised. What the kernel zeroes counts.
/// 5. Nothing but users of this value's location, synchronised among themselves, accesses the
///    bytes; but for a peer's memory, which the peer uses as it likes.
///
/// A span of length zero is legal; its location is then only a well-aligned number.
pub unsafe trait Memory: Send + Sync + fmt::Debug + 'static {
    /// The kind of storage.
    fn kind(&self) -> StorageKind;

    /// Where the first byte lies.
    fn location(&self) -> Location;

    /// The length of the span in bytes: what may be used, at least what was asked for.
    fn length(&self) -> ByteCount;

    /// The address by which a device reaches host memory that is mapped into its address space.
    ///
    /// It may differ from the host's address even under unified addressing, which is why it is
    /// asked for and never derived. `None` where there is no such mapping.
    fn device_alias(&self) -> Option<DeviceAddress> {
        None
    }

    /// How many bytes from `offset` on a device may copy in one request: fewer than are left where
    /// the memory was locked for the device in several parts, as no request may reach from one
    /// into the next; zero where it is not locked yet, in memory that is still coming up. `None`
    /// where the memory does not know, so that the device's driver has to be asked; of memory that
    /// is not locked for a device it means nothing.
    fn copyable_from(&self, offset: ByteCount) -> Option<ByteCount> {
        let _ = offset;
        None
    }

    /// What was wished for when the memory was made, and what was granted.
    fn capabilities(&self) -> CapabilityReport {
        CapabilityReport::default()
    }

    /// Shows `visit` every registration that this memory holds, the latest first.
    fn visit_registrations(&self, visit: &mut dyn FnMut(&RegistrationRecord)) {
        let _ = visit;
    }

    /// The block that these bytes lie in, as its manager keeps it, for code that knows the manager's
    /// type (`terrane_pool::managed::ManagedBlock`). `None` for memory that no manager keeps, and for
    /// parts of a block that go from hand to hand on their own, as a pool's do.
    fn managed_block(&self) -> Option<&(dyn Any + Send + Sync)> {
        None
    }
}

/// The methods of [`Memory`] for a wrapper that says of itself what its inner memory says, all of
/// them: one that is added later, with an answer by default, is handed on here and in no wrapper is
/// it forgotten.
///
/// ```
/// use terrane_core::{ByteCount, Memory, delegate_memory};
///
/// #[derive(Debug)]
/// struct Labelled<M> {
///     memory: M,
///     label: &'static str,
/// }
///
/// // SAFETY: every answer is that of the memory, which is neither moved nor dropped before `self`.
/// unsafe impl<M: Memory> Memory for Labelled<M> {
///     delegate_memory!(self, self.memory);
/// }
/// ```
#[macro_export]
macro_rules! delegate_memory {
    ($self:ident, $inner:expr) => {
        fn kind(&$self) -> $crate::StorageKind {
            $crate::Memory::kind(&$inner)
        }

        fn location(&$self) -> $crate::Location {
            $crate::Memory::location(&$inner)
        }

        fn length(&$self) -> $crate::ByteCount {
            $crate::Memory::length(&$inner)
        }

        fn device_alias(&$self) -> ::core::option::Option<$crate::DeviceAddress> {
            $crate::Memory::device_alias(&$inner)
        }

        fn copyable_from(
            &$self,
            offset: $crate::ByteCount,
        ) -> ::core::option::Option<$crate::ByteCount> {
            $crate::Memory::copyable_from(&$inner, offset)
        }

        fn capabilities(&$self) -> $crate::CapabilityReport {
            $crate::Memory::capabilities(&$inner)
        }

        fn visit_registrations(&$self, visit: &mut dyn FnMut(&$crate::RegistrationRecord)) {
            $crate::Memory::visit_registrations(&$inner, visit);
        }

        fn managed_block(
            &$self,
        ) -> ::core::option::Option<
            &(dyn ::core::any::Any + ::core::marker::Send + ::core::marker::Sync),
        > {
            $crate::Memory::managed_block(&$inner)
        }
    };
}

// SAFETY: every answer is that of the pointee, which lives as long as its last pointer and does not
// move when a pointer does.
unsafe impl<M: Memory + ?Sized> Memory for Arc<M> {
    delegate_memory!(self, **self);
}

// SAFETY: as for `Arc`.
unsafe impl<M: Memory + ?Sized> Memory for Box<M> {
    delegate_memory!(self, **self);
}
