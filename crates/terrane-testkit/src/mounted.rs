//! File systems that a test mounts and fills.

use std::ffi::CString;
use std::io;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;

/// A mounted file system. It is unmounted on drop, so that its folder can be removed.
#[derive(Debug)]
pub struct Mounted(CString);

/// Mounts a tmpfs of `bytes` bytes on `directory`, visible only to this thread and the threads that
/// it starts. It needs a separate process: [`in_child`](crate::process::in_child).
///
/// # Errors
///
/// The system's error: most users may not mount.
pub fn tmpfs(directory: &Path, bytes: u64) -> Result<Mounted, io::Error> {
    let path = CString::new(directory.as_os_str().as_bytes())?;
    let options = CString::new(format!("size={bytes}"))?;
    own_mounts()?;
    let tmpfs = c"tmpfs".as_ptr();
    // SAFETY: the strings are NUL-terminated and outlive the call.
    check(unsafe { libc::mount(tmpfs, path.as_ptr(), tmpfs, 0, options.as_ptr().cast()) })?;
    Ok(Mounted(path))
}

/// Mounts `directory` read-only on itself, with the same visibility as [`tmpfs`].
///
/// # Errors
///
/// As for [`tmpfs`].
pub fn read_only(directory: &Path) -> Result<Mounted, io::Error> {
    let path = CString::new(directory.as_os_str().as_bytes())?;
    own_mounts()?;
    let (at, null) = (path.as_ptr(), std::ptr::null());
    // SAFETY: the strings are NUL-terminated and outlive the call.
    check(unsafe { libc::mount(at, at, null, libc::MS_BIND, null.cast()) })?;
    let mounted = Mounted(path);
    let flags = libc::MS_BIND | libc::MS_REMOUNT | libc::MS_RDONLY;
    // SAFETY: as above.
    check(unsafe { libc::mount(null, mounted.0.as_ptr(), null, flags, null.cast()) })?;
    Ok(mounted)
}

/// Creates a mount namespace for this thread. Users who may not do that get a user namespace too,
/// if the process has one thread.
fn own_mounts() -> Result<(), io::Error> {
    // SAFETY: the call takes a plain number.
    let namespace = |flags| check(unsafe { libc::unshare(flags) });
    let users = libc::CLONE_NEWUSER | libc::CLONE_NEWNS;
    namespace(libc::CLONE_NEWNS).or_else(|error| namespace(users).map_err(|_| error))?;
    let (private, null) = (libc::MS_REC | libc::MS_PRIVATE, std::ptr::null());
    // SAFETY: the string is NUL-terminated and outlives the call.
    check(unsafe { libc::mount(null, c"/".as_ptr(), null, private, null.cast()) })
}

fn check(result: libc::c_int) -> Result<(), io::Error> {
    if result == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

impl Drop for Mounted {
    fn drop(&mut self) {
        // SAFETY: the string is NUL-terminated and outlives the call.
        unsafe { libc::umount2(self.0.as_ptr(), libc::MNT_DETACH) };
    }
}
