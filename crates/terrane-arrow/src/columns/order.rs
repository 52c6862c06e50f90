//! In which order bytes of columns are read and written: the thread's own, or a stream's.

use std::ptr::{self, NonNull};

use terrane_core::{ByteCount, HostAddress, Location};
use terrane_cuda::Stream;

use super::ColumnError;

/// An order of accesses to memory: each runs after what came before it in the same order, and has
/// run when the call returns.
///
/// [`HostOrder`] is the calling thread's, for host memory; a [`Stream`] is the order of its work,
/// for memory that its device reaches.
///
/// # Safety
///
/// The implementer ensures that [`copy`](Self::copy), when it returns `Ok`, has copied all of the bytes, and when it returns at all, uses neither place any more: its callers borrow the bytes at
/// one end only until then, and take what stands there for the bytes at the other.
pub unsafe trait AccessOrder {
    /// Copies `length` bytes from one place to another.
    ///
    /// # Errors
    ///
    /// [`ColumnError::Unreachable`] for places that are out of reach, [`ColumnError::Cuda`].
    ///
    /// # Safety
    ///
    /// Both spans are valid and do not overlap. But for what came before in this order, no code
    /// writes the source, and no code uses the destination, until the call returns.
    unsafe fn copy(
        &self,
        from: Location,
        to: Location,
        length: ByteCount,
    ) -> Result<(), ColumnError>;

    /// Copies bytes here.
    ///
    /// # Errors
    ///
    /// As for [`copy`](Self::copy).
    ///
    /// # Safety
    ///
    /// As for [`copy`](Self::copy), of the source.
    unsafe fn read(&self, from: Location, into: &mut [u8]) -> Result<(), ColumnError> {
        let length = ByteCount::from_usize(into.len());
        let to = HostAddress::new(NonNull::from(into).cast::<u8>());
        // SAFETY: the caller's promise of the source; the destination is borrowed until the copy
        // has run.
        unsafe { self.copy(from, Location::Host(to), length) }
    }

    /// Copies bytes there.
    ///
    /// # Errors
    ///
    /// As for [`copy`](Self::copy).
    ///
    /// # Safety
    ///
    /// As for [`copy`](Self::copy), of the destination.
    unsafe fn write(&self, bytes: &[u8], to: Location) -> Result<(), ColumnError> {
        let length = ByteCount::from_usize(bytes.len());
        let from = HostAddress::new(NonNull::from(bytes).cast::<u8>());
        // SAFETY: the caller's promise of the destination; the source is borrowed until the copy
        // has run.
        unsafe { self.copy(Location::Host(from), to, length) }
    }
}

/// The calling thread's order, in host memory.
#[derive(Clone, Copy, Debug, Default)]
pub struct HostOrder;

// SAFETY: the processor has copied the bytes when the call returns, and nothing after an error.
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
        // SAFETY: the caller's promise of both.
        unsafe { ptr::copy_nonoverlapping(from.cast_const(), to, length.to_usize()) };
        Ok(())
    }
}

// SAFETY: the stream has run when it has been waited for; one that cannot be is given nothing, unless
// it is lost, and runs nothing any more.
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
        // A stream that is being captured would run the copy at some other time: it refuses this.
        self.is_idle()?;
        // SAFETY: the caller's promise of both, until the wait below is over.
        unsafe { Self::copy(self, from, to, length) }?;
        Ok(self.synchronize()?)
    }
}
