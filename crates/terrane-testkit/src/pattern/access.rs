//! How the bytes of a piece are reached.

use std::fs::File;
use std::io;
use std::os::fd::BorrowedFd;
use std::os::unix::fs::FileExt;

use terrane_core::{BoxedCause, ByteCount, FilePosition, Location};

use crate::device;

/// Reads and writes bytes by their location. [`InProcess`] knows the host, files and simulated
/// devices; a backend whose memory is elsewhere brings its own.
pub trait PieceAccess: Sync {
    /// Reads the bytes from `at` on.
    ///
    /// # Safety
    ///
    /// They belong to memory that is alive, and nobody writes them meanwhile.
    ///
    /// # Errors
    ///
    /// Whatever the backend says, or [`Unreachable`].
    unsafe fn read(&self, at: Location, bytes: &mut [u8]) -> Result<(), BoxedCause>;

    /// Writes the bytes from `at` on.
    ///
    /// # Safety
    ///
    /// They belong to memory that is alive, and nobody reads or writes them meanwhile.
    ///
    /// # Errors
    ///
    /// Whatever the backend says, or [`Unreachable`].
    unsafe fn write(&self, at: Location, bytes: &[u8]) -> Result<(), BoxedCause>;
}

/// Reaches host memory by its address, files by their page-cached descriptor, and simulated
/// devices by way of [`device`].
#[derive(Clone, Copy, Debug, Default)]
pub struct InProcess;

/// A location that an access does not know how to reach.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{bytes} bytes at {at} cannot be reached from here; bring a `PieceAccess` that does")]
pub struct Unreachable {
    /// Where it is.
    pub at: Location,
    /// How many bytes were wanted there.
    pub bytes: usize,
}

impl PieceAccess for InProcess {
    unsafe fn read(&self, at: Location, bytes: &mut [u8]) -> Result<(), BoxedCause> {
        if let Location::File(position) = at {
            // SAFETY: the memory is alive, and with it the descriptor.
            let file = unsafe { open(position) }?;
            return Ok(file.read_exact_at(bytes, position.offset.get())?);
        }
        let from = pointer(at, bytes.len())?;
        // SAFETY: the span is alive and nobody writes it, as the caller promised; it cannot
        // overlap a buffer of the caller's own.
        unsafe { from.copy_to_nonoverlapping(bytes.as_mut_ptr(), bytes.len()) };
        Ok(())
    }

    unsafe fn write(&self, at: Location, bytes: &[u8]) -> Result<(), BoxedCause> {
        if let Location::File(position) = at {
            // SAFETY: the memory is alive, and with it the descriptor.
            let file = unsafe { open(position) }?;
            return Ok(file.write_all_at(bytes, position.offset.get())?);
        }
        let to = pointer(at, bytes.len())?;
        // SAFETY: the span is alive and nobody else uses it, as the caller promised; it cannot
        // overlap a buffer of the caller's own.
        unsafe { to.copy_from_nonoverlapping(bytes.as_ptr(), bytes.len()) };
        Ok(())
    }
}

/// The bytes of a location that this process can address. Whether they may be touched is for the
/// caller to know.
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
    // SAFETY: the caller promised that it is open.
    let borrowed = unsafe { BorrowedFd::borrow_raw(position.file.descriptor) };
    Ok(File::from(borrowed.try_clone_to_owned()?))
}
