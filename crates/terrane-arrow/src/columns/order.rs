//! The order of reads and writes of columns: the thread's own, or a stream's.

use std::ptr::{self, NonNull};

use terrane_core::{ByteCount, HostAddress, Location};
use terrane_cuda::Stream;

use super::ColumnError;

/// An order of memory accesses. Each access runs after the earlier work in the same order, and has
/// completed when the call returns.
///
/// [`HostOrder`] is the calling thread's order, for host memory. A [`Stream`] is the order of its
/// work, for memory that its device can access.
///
/// # Safety
///
/// When [`copy`](Self::copy) returns `Ok`, it has copied all bytes. After it has returned, with or
/// without an error, it uses neither location. Its callers borrow the bytes at one end until then,
/// and treat the destination as initialised.
pub unsafe trait AccessOrder {
    /// Copies `length` bytes.
    ///
    /// # Errors
    ///
    /// [`ColumnError::Unreachable`] for locations that this order cannot access, and
    /// [`ColumnError::Cuda`].
    ///
    /// # Safety
    ///
    /// Both spans are valid and do not overlap. Until the call returns, no code writes the source
    /// and no code uses the destination, except for earlier work in this order.
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

// SAFETY: the copy has completed after the synchronisation of the stream. A stream that cannot be
// synchronised gets no copy, unless it is lost; then it runs nothing.
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
        Ok(self.synchronize()?)
    }
}
