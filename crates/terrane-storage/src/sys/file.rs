//! System calls on files.

use std::mem::MaybeUninit;
use std::os::fd::{AsRawFd, BorrowedFd, RawFd};
use std::path::PathBuf;

use terrane_core::OsError;

use super::check;

/// Fills `vectors` from `offset` on, or writes them there. Returns the number of bytes.
///
/// # Safety
///
/// Each vector is valid for writes, or for reads if they are written. During the call no other code
/// writes it, or reads one that is filled. The descriptor is open and is not closed during the call.
pub(crate) unsafe fn transfer(
    descriptor: RawFd,
    vectors: &[libc::iovec],
    offset: u64,
    is_read: bool,
) -> Result<usize, OsError> {
    let invalid = OsError::new("preadv", libc::EINVAL);
    let count = libc::c_int::try_from(vectors.len()).map_err(|_| invalid)?;
    let offset = i64::try_from(offset).map_err(|_| invalid)?;
    let (name, call): (_, unsafe extern "C" fn(_, _, _, _) -> _) =
        if is_read { ("preadv", libc::preadv) } else { ("pwritev", libc::pwritev) };
    // SAFETY: the caller guarantees the vectors and the descriptor. The list of vectors is a slice
    // of that length.
    check(name, unsafe { call(descriptor, vectors.as_ptr(), count, offset) })
}

/// Syncs the file's data to the device, and all its metadata unless `data_only` is set.
///
/// # Safety
///
/// The descriptor is open and is not closed during the call.
pub(crate) unsafe fn sync(descriptor: RawFd, data_only: bool) -> Result<(), OsError> {
    if data_only {
        // SAFETY: the call takes a plain number.
        check("fdatasync", unsafe { libc::fdatasync(descriptor) })?;
    } else {
        // SAFETY: the call takes a plain number.
        check("fsync", unsafe { libc::fsync(descriptor) })?;
    }
    Ok(())
}

/// The length of the file behind a descriptor.
pub(crate) fn length(descriptor: RawFd) -> Result<u64, OsError> {
    let mut status = MaybeUninit::<libc::stat>::uninit();
    // SAFETY: the kernel writes a `stat` to memory of that size, or fails.
    check("fstat", unsafe { libc::fstat(descriptor, status.as_mut_ptr()) })?;
    // SAFETY: the call succeeded, so the kernel has written the value.
    let status = unsafe { status.assume_init() };
    u64::try_from(status.st_size).map_err(|_| OsError::new("fstat", libc::EOVERFLOW))
}

/// The kernel's path of the file behind a descriptor. `None` if `/proc` is not mounted.
pub(crate) fn path(descriptor: RawFd) -> Option<PathBuf> {
    std::fs::read_link(format!("/proc/self/fd/{descriptor}")).ok()
}

/// The maximum file length for this process (`RLIMIT_FSIZE`).
pub(crate) fn largest() -> u64 {
    let mut limit = libc::rlimit { rlim_cur: libc::RLIM_INFINITY, rlim_max: libc::RLIM_INFINITY };
    // It does not fail for an existing limit. If it did, the kernel would still enforce the limit.
    // SAFETY: the kernel writes an `rlimit` to a valid one, or fails.
    let _ = unsafe { libc::getrlimit(libc::RLIMIT_FSIZE, &raw mut limit) };
    limit.rlim_cur
}

/// Reserves blocks for the first `length` bytes, and extends the file to that length.
pub(crate) fn reserve(file: BorrowedFd<'_>, length: u64) -> Result<(), OsError> {
    let length = i64::try_from(length).map_err(|_| OsError::new("fallocate", libc::EFBIG))?;
    loop {
        // SAFETY: the call takes plain numbers.
        let result = unsafe { libc::fallocate(file.as_raw_fd(), 0, 0, length) };
        match check("fallocate", result) {
            Err(error) if error.code == libc::EINTR => {}
            other => return other.map(|_| ()),
        }
    }
}

/// The alignments of memory and of offsets for direct I/O, by `statx` with `STATX_DIOALIGN` (Linux
/// 6.1). `None` if the kernel or the file system does not report them. Zeros if the file does not
/// support direct I/O.
pub(crate) fn direct_alignment(file: BorrowedFd<'_>) -> Result<Option<[u64; 2]>, OsError> {
    let mut status = MaybeUninit::<libc::statx>::zeroed();
    // SAFETY: the path is a NUL-terminated literal. The kernel writes a `statx` to memory of that
    // size, or fails.
    let result = unsafe {
        libc::statx(
            file.as_raw_fd(),
            c"".as_ptr(),
            libc::AT_EMPTY_PATH,
            libc::STATX_DIOALIGN,
            status.as_mut_ptr(),
        )
    };
    check("statx", result)?;
    // SAFETY: all zeros is a valid `statx`, and the kernel has written over it.
    let status = unsafe { status.assume_init() };
    let alignments = [status.stx_dio_mem_align, status.stx_dio_offset_align].map(u64::from);
    Ok((status.stx_mask & libc::STATX_DIOALIGN != 0).then_some(alignments))
}

/// Whether the file is on a file system without a device (tmpfs, ramfs, hugetlbfs).
pub(crate) fn is_in_memory(file: BorrowedFd<'_>) -> Result<bool, OsError> {
    /// `RAMFS_MAGIC` of the kernel's `linux/magic.h`.
    const RAMFS_MAGIC: libc::__fsword_t = 0x8584_58f6;
    let mut status = MaybeUninit::<libc::statfs>::uninit();
    // SAFETY: the kernel writes a `statfs` to memory of that size, or fails.
    check("fstatfs", unsafe { libc::fstatfs(file.as_raw_fd(), status.as_mut_ptr()) })?;
    // SAFETY: the call succeeded, so the kernel has written the value.
    let status = unsafe { status.assume_init() };
    Ok(matches!(status.f_type, libc::TMPFS_MAGIC | libc::HUGETLBFS_MAGIC | RAMFS_MAGIC))
}
