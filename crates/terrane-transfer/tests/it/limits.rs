//! Limits that a test sets in a process of its own, and what it worked.

use std::ffi::CString;
use std::io;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;
use std::time::Duration;

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
pub fn mount_tiny(directory: &Path, bytes: u64) -> Result<Mounted, io::Error> {
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
    check(unsafe { libc::mount(tmpfs, path.as_ptr(), tmpfs, 0, options.as_ptr().cast()) })?;
    Ok(Mounted(path))
}

/// A mounted file system, which goes when this drops, so that its folder can go, too.
pub struct Mounted(CString);

impl Drop for Mounted {
    fn drop(&mut self) {
        // SAFETY: the string is NUL-terminated and outlives the call.
        unsafe { libc::umount2(self.0.as_ptr(), libc::MNT_DETACH) };
    }
}

/// How long this thread has worked so far; what others do meanwhile does not count.
pub fn thread_time() -> Duration {
    processor_time(libc::CLOCK_THREAD_CPUTIME_ID)
}

/// How long all threads of this process have worked so far.
pub fn process_time() -> Duration {
    processor_time(libc::CLOCK_PROCESS_CPUTIME_ID)
}

fn processor_time(clock: libc::clockid_t) -> Duration {
    let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: the structure outlives the call, which writes it.
    assert_eq!(unsafe { libc::clock_gettime(clock, &raw mut time) }, 0);
    Duration::new(time.tv_sec.try_into().unwrap(), time.tv_nsec.try_into().unwrap())
}
