//! Limits that a test sets in a process of its own.

use std::ffi::CString;
use std::io;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;

/// Limits the size of the files that this process writes, and ignores the signal of that limit.
pub fn limit_file_size(bytes: u64) {
    // SAFETY: ignoring a signal touches no memory.
    unsafe { libc::signal(libc::SIGXFSZ, libc::SIG_IGN) };
    let limit = libc::rlimit { rlim_cur: bytes, rlim_max: libc::RLIM_INFINITY };
    // SAFETY: the structure outlives the call.
    assert_eq!(unsafe { libc::setrlimit(libc::RLIMIT_FSIZE, &raw const limit) }, 0);
}

/// Mounts a tmpfs of `bytes` bytes on `directory`, seen by this thread, and those that it starts,
/// alone; or says why not.
pub fn mount_tiny(directory: &Path, bytes: u64) -> Result<(), io::Error> {
    let path = CString::new(directory.as_os_str().as_bytes()).unwrap();
    let options = CString::new(format!("size={bytes}")).unwrap();
    let check = |result| if result == 0 { Ok(()) } else { Err(io::Error::last_os_error()) };
    // SAFETY: the call takes a plain number.
    check(unsafe { libc::unshare(libc::CLONE_NEWNS) })?;
    let private = libc::MS_REC | libc::MS_PRIVATE;
    let null = std::ptr::null();
    // SAFETY: the strings are NUL-terminated and outlive the call.
    check(unsafe { libc::mount(null, c"/".as_ptr(), null, private, null.cast()) })?;
    let tmpfs = c"tmpfs".as_ptr();
    // SAFETY: as above.
    check(unsafe { libc::mount(tmpfs, path.as_ptr(), tmpfs, 0, options.as_ptr().cast()) })
}
