//! File systems that a test mounts and fills.

use std::ffi::CString;
use std::io;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;

/// A mounted file system. It is unmounted on drop, so that its folder can be removed.
#[derive(Debug)]
pub struct Mounted(CString);

/// Mounts a tmpfs of `bytes` bytes on `directory`, visible only to this thread and those that it
/// starts. It needs its own process: [`in_child`](crate::process::in_child).
///
/// # Errors
///
/// The system's error: most users may not mount.
pub fn tmpfs(directory: &Path, bytes: u64) -> Result<Mounted, io::Error> {
    let path = CString::new(directory.as_os_str().as_bytes())?;
    let options = CString::new(format!("size={bytes}"))?;
    let check = |result| if result == 0 { Ok(()) } else { Err(io::Error::last_os_error()) };
    // SAFETY: the call takes a plain number.
    check(unsafe { libc::unshare(libc::CLONE_NEWNS) })?;
    let private = libc::MS_REC | libc::MS_PRIVATE;
    let null = std::ptr::null();
    // SAFETY: the strings are NUL-terminated and outlive the call.
    check(unsafe { libc::mount(null, c"/".as_ptr(), null, private, null.cast()) })?;
    let tmpfs = c"tmpfs".as_ptr();
    // SAFETY: as above.
    check(unsafe { libc::mount(tmpfs, path.as_ptr(), tmpfs, 0, options.as_ptr().cast()) })?;
    Ok(Mounted(path))
}

impl Drop for Mounted {
    fn drop(&mut self) {
        // SAFETY: the string is NUL-terminated and outlives the call.
        unsafe { libc::umount2(self.0.as_ptr(), libc::MNT_DETACH) };
    }
}
