//! The order of reads and writes of columns: the thread's own, or a stream's.

use std::mem::ManuallyDrop;
use std::ptr::{self, NonNull};

use terrane_core::{ByteCount, HostAddress, Location};
use terrane_cuda::Stream;

use super::ColumnError;

/// An order of memory accesses. Each access runs after the earlier work in the same order, and has
/// completed when the call returns. [`ColumnError::EndUnknown`] is the exception.
///
/// [`HostOrder`] is the calling thread's order, for host memory. A [`Stream`] is the order of its
/// work, for memory that its device can access.
///
/// # Safety
///
/// When [`copy`](Self::copy) returns `Ok`, it has copied all bytes. After it has returned, with or
/// without an error, it uses neither location, unless the error is [`ColumnError::EndUnknown`].
/// [`read`](Self::read) and [`write`](Self::write) use the slice only until they return, whatever
/// the error. An order that returns `EndUnknown` implements them accordingly. Callers treat the
/// destination of a successful copy as initialised.
pub unsafe trait AccessOrder {
    /// Copies `length` bytes.
    ///
    /// # Errors
    ///
    /// [`ColumnError::Unreachable`] for locations that this order cannot access,
    /// [`ColumnError::Cuda`], and [`ColumnError::EndUnknown`].
    ///
    /// # Safety
    ///
    /// Both spans are valid and do not overlap. Until the call returns, no code writes the source
    /// and no code uses the destination, except for earlier work in this order. After
    /// [`ColumnError::EndUnknown`], this applies until the process ends.
    unsafe fn copy(
        &self,
        from: Location,
        to: Location,
        length: ByteCount,
    ) -> Result<(), ColumnError>;

    /// Copies bytes to a slice.
    ///
    /// # Errors
    ///
    /// As for [`copy`](Self::copy).
    ///
    /// # Safety
    ///
    /// As for [`copy`](Self::copy), for the source.
    unsafe fn read(&self, from: Location, into: &mut [u8]) -> Result<(), ColumnError> {
        let length = ByteCount::from_usize(into.len());
        let to = HostAddress::new(NonNull::from(into).cast::<u8>());
        // SAFETY: the caller's promise for the source; the destination is borrowed until the copy
        // has completed.
        unsafe { self.copy(from, Location::Host(to), length) }
    }

    /// Copies bytes from a slice.
    ///
    /// # Errors
    ///
    /// As for [`copy`](Self::copy).
    ///
    /// # Safety
    ///
    /// As for [`copy`](Self::copy), for the destination.
    unsafe fn write(&self, bytes: &[u8], to: Location) -> Result<(), ColumnError> {
        let length = ByteCount::from_usize(bytes.len());
        let from = HostAddress::new(NonNull::from(bytes).cast::<u8>());
        // SAFETY: the caller's promise for the destination; the source is borrowed until the copy
        // has completed.
        unsafe { self.copy(Location::Host(from), to, length) }
    }
}

/// The calling thread's order, for host memory.
#[derive(Clone, Copy, Debug, Default)]
pub struct HostOrder;

// SAFETY: the processor has copied the bytes when the call returns, and accesses nothing after an
// error.
unsafe impl AccessOrder for HostOrder {
    unsafe fn copy(
        &self,
        from: Location,
        to: Location,
        length: ByteCount,
    ) -> Result<(), ColumnError> {
        let host =
            |location: Location| location.as_host().ok_or(ColumnError::Unreachable { location });
        let (from, to) = (host(from)?.as_ptr(), host(to)?.as_ptr());
        // SAFETY: the caller's promise for both.
        unsafe { ptr::copy_nonoverlapping(from.cast_const(), to, length.to_usize()) };
        Ok(())
    }
}

// SAFETY: the copy has completed after the synchronisation of the stream. If the driver refuses the
// synchronisation, the error is `EndUnknown`, unless the context is lost: then it runs nothing. The
// slices are copied from and to own memory, which is leaked after that error.
unsafe impl AccessOrder for Stream {
    unsafe fn copy(
        &self,
        from: Location,
        to: Location,
        length: ByteCount,
    ) -> Result<(), ColumnError> {
        let own = self.context().device().id;
        for location in [from, to] {
            if let Location::Device { device, .. } = location
                && device != own
            {
                return Err(ColumnError::WrongDevice { columns: device, stream: own });
            }
        }
        // A stream that is being captured would run the copy later. This call fails for such a
        // stream.
        self.is_idle()?;
        // SAFETY: the caller's promise for both, until the wait below returns.
        unsafe { Self::copy(self, from, to, length) }?;
        self.synchronize().map_err(|error| {
            if error.is_context_lost() {
                return error.into();
            }
            // The caller, or the methods below, keep the memory.
            self.context().leak((), &error);
            ColumnError::EndUnknown(error)
        })
    }

    unsafe fn read(&self, from: Location, into: &mut [u8]) -> Result<(), ColumnError> {
        let mut own: Box<[u8]> = vec![0; into.len()].into();
        let to = HostAddress::new(NonNull::from(&mut *own).cast::<u8>());
        let length = ByteCount::from_usize(into.len());
        // SAFETY: the caller's promise for the source. The destination is new, and lives until the
        // copy has completed.
        let copied = unsafe { AccessOrder::copy(self, from, Location::Host(to), length) };
        if copied.is_ok() {
            into.copy_from_slice(&own);
        }
        keep_if_in_use(copied, own)
    }

    unsafe fn write(&self, bytes: &[u8], to: Location) -> Result<(), ColumnError> {
        let own: Box<[u8]> = bytes.into();
        let from = HostAddress::new(NonNull::from(&*own).cast::<u8>());
        let length = ByteCount::from_usize(bytes.len());
        // SAFETY: the caller's promise for the destination. The source lives until the copy has
        // completed.
        let copied = unsafe { AccessOrder::copy(self, Location::Host(from), to, length) };
        keep_if_in_use(copied, own)
    }
}

/// Keeps a value until the process ends, if an access of its memory may still run.
pub(super) fn keep_if_in_use<T>(
    accessed: Result<(), ColumnError>,
    value: T,
) -> Result<(), ColumnError> {
    if matches!(accessed, Err(ColumnError::EndUnknown(_))) {
        let _kept = ManuallyDrop::new(value);
    }
    accessed
}
