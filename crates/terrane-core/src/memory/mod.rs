//! The contract of memory: a location and a length that stay valid.

pub(crate) mod foreign;
pub(crate) mod host_bytes;
pub(crate) mod region;
pub(crate) mod span;

use std::any::Any;
use std::fmt;
use std::sync::Arc;

use crate::bytes::byte_count::ByteCount;
use crate::capability::CapabilityReport;
use crate::location::storage_kind::StorageKind;
use crate::location::{DeviceAddress, Location};
use crate::register::registration::RegistrationRecord;

#[diagnostic::on_unimplemented(
    message = "`{Self}` is not memory that Terrane can use",
    label = "it does not implement `Memory`",
    note = "allocate memory with an allocator of `terrane-storage`, `terrane-cuda` or `terrane-pool`; for bytes that another library owns, use `ForeignMemory`; for host bytes, `HostBytes`"
)]
/// A span of bytes that is valid and does not move until the value drops.
///
/// A `Memory` returns the location of its bytes, never the bytes. Copy engines read and write the
/// bytes by unsafe code, and track the transfers in flight. Typed views prove that their accesses
/// are sound. No other code touches the bytes.
///
/// # Safety
///
/// The implementation must guarantee the following from the first call until the value drops:
///
/// 1. [`kind`](Self::kind), [`location`](Self::location) and [`length`](Self::length) always return
///    the same values.
/// 2. The span of `length` bytes from `location` is valid for reads and writes. Host addresses are
///    mapped readable and writable. Device addresses belong to a live allocation. File descriptors
///    are open for reading, and for writing unless a write may fail with a typed error. The file
///    is at least that long at that offset. If other code truncates the file, readers get a typed
///    error. For a peer's memory, the peer's statement of its registrations is enough. If the peer
///    no longer has the memory, a copy ends with a typed error.
/// 3. Moving the value does not move the bytes.
/// 4. Host bytes are initialised. Bytes that the kernel zeroed are initialised.
/// 5. Only users of this value's location, synchronised among themselves, access the bytes. A
///    peer's memory is exempt: the peer may access it at any time.
/// 6. Host addresses keep their pages. No other memory is mapped there, pages are not discarded
///    (`MADV_DONTNEED`, `MADV_REMOVE`), and no hole is punched in a file that is mapped there.
///    Engines register memory with the kernel or a device, which then use the registered pages.
///    The kernel itself may move pages that are not registered.
///
/// A span of length zero is legal. Its location is then only a well-aligned number.
pub unsafe trait Memory: Send + Sync + fmt::Debug + 'static {
    /// The kind of storage.
    fn kind(&self) -> StorageKind;

    /// The location of the first byte.
    fn location(&self) -> Location;

    /// The length of the span in bytes: at least the requested length, all of it usable.
    fn length(&self) -> ByteCount;

    /// The address with which a device accesses host memory that is mapped into its address space.
    ///
    /// It may differ from the host address even under unified addressing, so it cannot be derived.
    /// `None` without such a mapping.
    fn device_alias(&self) -> Option<DeviceAddress> {
        None
    }

    /// The number of bytes from `offset` on that a device may copy in one request.
    ///
    /// If the memory was registered with the device's driver in several parts, no request may span
    /// two parts. Then the number ends at the end of a part. It is zero at a part that is not
    /// registered yet. `None` if the memory does not know; the caller then asks the device's
    /// driver. For memory that is not registered with a device, the value has no meaning.
    fn copyable_from(&self, offset: ByteCount) -> Option<ByteCount> {
        let _ = offset;
        None
    }

    /// The capabilities that were requested for this memory, with their results.
    fn capabilities(&self) -> CapabilityReport {
        CapabilityReport::default()
    }

    /// Calls `visit` with every registration of this memory, the latest first.
    fn visit_registrations(&self, visit: &mut dyn FnMut(&RegistrationRecord)) {
        let _ = visit;
    }

    /// The block of a memory manager that contains these bytes, for code that knows the manager's
    /// type (`terrane_pool::managed::ManagedBlock`). `None` for memory without a manager, and for
    /// parts of a block with other owners, such as a pool's parts.
    fn managed_block(&self) -> Option<&(dyn Any + Send + Sync)> {
        None
    }
}

/// Implements all methods of [`Memory`] for a wrapper by delegation to its inner memory. A wrapper
/// also delegates default methods that are added later.
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

/// Implements the optional methods of [`Memory`] for the part of a memory that begins at an offset,
/// except [`managed_block`](Memory::managed_block). Its length is that of the implementing type.
#[macro_export]
macro_rules! delegate_part {
    ($self:ident, $memory:expr, $offset:expr) => {
        fn device_alias(&$self) -> ::core::option::Option<$crate::DeviceAddress> {
            $crate::Memory::device_alias(&$memory)?.checked_add($offset)
        }

        fn copyable_from(
            &$self,
            offset: $crate::ByteCount,
        ) -> ::core::option::Option<$crate::ByteCount> {
            let length = $crate::Memory::length($self);
            let remaining = length.checked_sub(offset).unwrap_or($crate::ByteCount::ZERO);
            let within = $offset.checked_add(offset).ok()?;
            ::core::option::Option::Some(
                $crate::Memory::copyable_from(&$memory, within)?.min(remaining),
            )
        }

        fn capabilities(&$self) -> $crate::CapabilityReport {
            $crate::Memory::capabilities(&$memory)
        }

        fn visit_registrations(&$self, visit: &mut dyn FnMut(&$crate::RegistrationRecord)) {
            $crate::Memory::visit_registrations(&$memory, visit);
        }
    };
}

// SAFETY: every method returns the pointee's value. The pointee lives as long as its last pointer
// and does not move when a pointer moves.
unsafe impl<M: Memory + ?Sized> Memory for Arc<M> {
    delegate_memory!(self, **self);
}

// SAFETY: as for `Arc`.
unsafe impl<M: Memory + ?Sized> Memory for Box<M> {
    delegate_memory!(self, **self);
}
