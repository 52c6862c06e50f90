//! Events that one thread signals and another thread waits for (`eventfd`).

use std::fs::File;
use std::io::{Read, Write};
use std::os::fd::FromRawFd;

use terrane_core::OsError;

/// Creates an event that is not signalled.
pub(crate) fn new() -> Result<File, OsError> {
    // SAFETY: the call takes plain numbers.
    let descriptor = unsafe { libc::eventfd(0, libc::EFD_CLOEXEC | libc::EFD_NONBLOCK) };
    if descriptor < 0 {
        return Err(OsError::last("eventfd"));
    }
    // SAFETY: the kernel has just created this descriptor, and no other code owns it.
    Ok(unsafe { File::from_raw_fd(descriptor) })
}

/// Signals the event. Several signals before the next drain count as one.
pub(crate) fn signal(mut event: &File) {
    // It fails only if the counter is at its limit. The event is then signalled already.
    let _ = event.write(&1_u64.to_ne_bytes());
}

/// Clears the signal. Returns whether the event was signalled.
pub(crate) fn drain(mut event: &File) -> bool {
    event.read(&mut [0_u8; 8]).is_ok()
}
