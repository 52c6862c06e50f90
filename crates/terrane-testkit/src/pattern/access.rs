//! Accesses the bytes of a piece.

use std::fs::File;
use std::io;
use std::os::fd::BorrowedFd;
use std::os::unix::fs::FileExt;

use terrane_core::{BoxedCause, ByteCount, FilePosition, Location};

use crate::device;

/// Reads and writes bytes by their location. [`InProcess`] supports the host, files and simulated
/// devices. A backend with other memory implements this trait.
pub trait PieceAccess: Sync {
    /// Reads the bytes from `at` on.
    ///
    /// # Safety
    ///
    /// They belong to live memory, and no code writes them during the call.
    ///
    /// # Errors
    ///
    /// The error of the backend, or [`Unreachable`].
    unsafe fn read(&self, at: Location, bytes: &mut [u8]) -> Result<(), BoxedCause>;

    /// Writes the bytes from `at` on.
    ///
    /// # Safety
    ///
    /// They belong to live memory, and no code reads or writes them during the call.
    ///
    /// # Errors
    ///
    /// The error of the backend, or [`Unreachable`].
    unsafe fn write(&self, at: Location, bytes: &[u8]) -> Result<(), BoxedCause>;
}

/// Accesses host memory by its address, files by their buffered descriptor, and simulated devices
/// through [`device`].
#[derive(Clone, Copy, Debug, Default)]
pub struct InProcess;

/// A location that an access does not support.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "{bytes} bytes at {at} cannot be accessed by this process; implement `PieceAccess` for them"
)]
pub struct Unreachable {
    /// The location.
    pub at: Location,
    /// The number of bytes.
    pub bytes: usize,
}

impl PieceAccess for InProcess {
    unsafe fn read(&self, at: Location, bytes: &mut [u8]) -> Result<(), BoxedCause> {
        if let Location::File(position) = at {
            // SAFETY: the memory is alive, so its descriptor is open.
            let file = unsafe { open(position) }?;
            return Ok(file.read_exact_at(bytes, position.offset.get())?);
        }
        let from = pointer(at, bytes.len())?;
        // SAFETY: the caller guarantees that the span is alive and that no code writes it. It
        // cannot overlap the caller's buffer.
        unsafe { from.copy_to_nonoverlapping(bytes.as_mut_ptr(), bytes.len()) };
        Ok(())
    }

    unsafe fn write(&self, at: Location, bytes: &[u8]) -> Result<(), BoxedCause> {
        if let Location::File(position) = at {
            // SAFETY: the memory is alive, so its descriptor is open.
            let file = unsafe { open(position) }?;
            return Ok(file.write_all_at(bytes, position.offset.get())?);
        }
        let to = pointer(at, bytes.len())?;
        // SAFETY: the caller guarantees that the span is alive and that no other code uses it. It
        // cannot overlap the caller's buffer.
        unsafe { to.copy_from_nonoverlapping(bytes.as_ptr(), bytes.len()) };
        Ok(())
    }
}

/// The bytes of a location that this process can address. The caller ensures that an access is
/// permitted.
pub(crate) fn pointer(at: Location, bytes: usize) -> Result<*mut u8, Unreachable> {
    match at {
        Location::Host(address) => Some(address.as_ptr()),
        Location::Device { device, address } => {
            device::resolve(device, address, ByteCount::from_usize(bytes))
        }
        _ => None,
    }
    .ok_or(Unreachable { at, bytes })
}

/// # Safety
///
/// The position's descriptor is open.
unsafe fn open(position: FilePosition) -> io::Result<File> {
    // SAFETY: the caller guarantees that it is open.
    let borrowed = unsafe { BorrowedFd::borrow_raw(position.file.descriptor) };
    Ok(File::from(borrowed.try_clone_to_owned()?))
}
