//! Events that one thread signals and another waits for (`eventfd`).

use std::fs::File;
use std::io::{Read, Write};
use std::os::fd::{AsRawFd, FromRawFd, RawFd};

use terrane_core::OsError;

/// An event that is not signalled.
pub(crate) fn new() -> Result<File, OsError> {
    // SAFETY: the call takes plain numbers.
    let descriptor = unsafe { libc::eventfd(0, libc::EFD_CLOEXEC | libc::EFD_NONBLOCK) };
    if descriptor < 0 {
        return Err(OsError::last("eventfd"));
    }
    // SAFETY: the kernel has just made this descriptor, and nobody else has it.
    Ok(unsafe { File::from_raw_fd(descriptor) })
}

/// Signals the event. Signals that nobody has seen yet become one.
pub(crate) fn signal(mut event: &File) {
    // It fails only when the counter is at its limit, and then the event is signalled.
    let _ = event.write(&1_u64.to_ne_bytes());
}

/// Takes the signal back. Returns whether there was one.
pub(crate) fn drain(mut event: &File) -> bool {
    event.read(&mut [0_u8; 8]).is_ok()
}

pub(crate) fn descriptor(event: &File) -> RawFd {
    event.as_raw_fd()
}
