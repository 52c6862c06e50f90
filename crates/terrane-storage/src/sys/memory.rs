//! System calls for memory and for CPU affinity.

use std::ffi::c_ulong;
use std::ptr::NonNull;

use terrane_core::{Alignment, OsError};

use super::check;

/// The size of a page.
pub(crate) fn page_size() -> Alignment {
    // SAFETY: the call takes a plain number.
    let bytes = unsafe { libc::sysconf(libc::_SC_PAGESIZE) };
    // Every system has a page size, and it is a power of two.
    u64::try_from(bytes).ok().and_then(|b| Alignment::new(b).ok()).unwrap_or(Alignment::PAGE)
}

/// Maps `length` bytes of private, zeroed memory. With `huge_log2`, the mapping uses explicit huge
/// pages of 2^`huge_log2` bytes.
pub(crate) fn map(length: usize, huge_log2: Option<u32>) -> Result<NonNull<u8>, OsError> {
    let mut flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS;
    if let Some(exponent) = huge_log2 {
        let size = exponent << libc::MAP_HUGE_SHIFT;
        // An exponent has at most six bits, so the shifted value stays positive.
        flags |= libc::MAP_HUGETLB | i32::try_from(size).unwrap_or(0);
    }
    let protection = libc::PROT_READ | libc::PROT_WRITE;
    // SAFETY: without an address or a file, the kernel chooses a range where nothing is mapped.
    let address = unsafe { libc::mmap(std::ptr::null_mut(), length, protection, flags, -1, 0) };
    match NonNull::new(address.cast::<u8>()) {
        Some(mapped) if address != libc::MAP_FAILED => Ok(mapped),
        _ => Err(OsError::last("mmap")),
    }
}

/// Unmaps memory.
///
/// # Safety
///
/// The range was mapped by [`map`] and begins and ends at multiples of its page size. No code uses
/// it any more.
pub(crate) unsafe fn unmap(address: NonNull<u8>, length: usize) -> Result<(), OsError> {
    // SAFETY: the caller guarantees the requirements on the range.
    check("munmap", unsafe { libc::munmap(address.as_ptr().cast(), length) }).map(|_| ())
}

/// Frees the pages of a range and keeps it mapped. The range reads as zeros afterwards.
///
/// # Safety
///
/// The range is mapped, anonymous and private. It begins and ends at multiples of its page size. No
/// code uses its bytes any more.
pub(crate) unsafe fn discard(address: NonNull<u8>, length: usize) -> Result<(), OsError> {
    // SAFETY: the caller guarantees the requirements on the range.
    match unsafe { advise(address, length, libc::MADV_DONTNEED) } {
        // The range is locked (`mlockall`). Linux 5.18 has a separate advice for that.
        // SAFETY: as above.
        Err(OsError { code: libc::EINVAL, .. }) => unsafe {
            advise(address, length, MADV_DONTNEED_LOCKED)
        },
        result => result,
    }
}

/// # Safety
///
/// The range is mapped. No code uses bytes that the advice changes.
unsafe fn advise(address: NonNull<u8>, length: usize, advice: libc::c_int) -> Result<(), OsError> {
    // SAFETY: the caller guarantees the requirements on the range.
    check("madvise", unsafe { libc::madvise(address.as_ptr().cast(), length, advice) }).map(|_| ())
}

/// `MADV_DONTNEED_LOCKED` of the kernel's `mman-common.h`.
const MADV_DONTNEED_LOCKED: libc::c_int = 24;

/// Requests transparent huge pages, or disables them.
///
/// # Safety
///
/// The range is mapped.
pub(crate) unsafe fn advise_huge(
    address: NonNull<u8>,
    length: usize,
    wanted: bool,
) -> Result<(), OsError> {
    let advice = if wanted { libc::MADV_HUGEPAGE } else { libc::MADV_NOHUGEPAGE };
    // SAFETY: this advice changes no bytes, and the caller guarantees that the range is mapped.
    unsafe { advise(address, length, advice) }
}

/// Whether the kernel supports `MADV_POPULATE_WRITE` (Linux 5.14).
pub(crate) fn can_populate() -> bool {
    // SAFETY: the range is empty, so the call changes no memory. It only tests whether the kernel
    // knows the advice.
    let result = unsafe { libc::madvise(std::ptr::null_mut(), 0, libc::MADV_POPULATE_WRITE) };
    result == 0
}

/// Populates every page of a range for writing, without changing its bytes.
///
/// # Safety
///
/// The range is mapped.
pub(crate) unsafe fn populate(address: NonNull<u8>, length: usize) -> Result<(), OsError> {
    loop {
        // SAFETY: this advice changes no bytes, and the caller guarantees that the range is mapped.
        match unsafe { advise(address, length, libc::MADV_POPULATE_WRITE) } {
            Err(error) if error.code == libc::EINTR => {}
            other => return other,
        }
    }
}

/// The placement of pages on NUMA nodes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Placement {
    Bind,
    Interleave,
}

/// Sets the NUMA nodes for the pages of a range.
///
/// # Safety
///
/// The range is mapped.
pub(crate) unsafe fn bind(
    address: NonNull<u8>,
    length: usize,
    placement: Placement,
    nodes: &[u32],
) -> Result<(), OsError> {
    let mask = bit_mask(nodes)?;
    let mode = match placement {
        Placement::Bind => libc::MPOL_BIND,
        Placement::Interleave => libc::MPOL_INTERLEAVE,
    };
    // The kernel reads one bit less than the given number.
    let bits = mask.len() * WORD_BITS + 1;
    // SAFETY: the mask has that many bits, and the caller guarantees that the range is mapped.
    let result = unsafe {
        libc::syscall(libc::SYS_mbind, address.as_ptr(), length, mode, mask.as_ptr(), bits, 0)
    };
    check("mbind", result).map(|_| ())
}

/// Restricts the calling thread to these CPUs.
pub(crate) fn run_on(cpus: &[u32]) -> Result<(), OsError> {
    let mask = bit_mask(cpus)?;
    let bytes = size_of_val(mask.as_slice());
    // SAFETY: the mask has that many bytes, and 0 refers to the calling thread.
    let result = unsafe { libc::sched_setaffinity(0, bytes, mask.as_ptr().cast()) };
    check("sched_setaffinity", result).map(|_| ())
}

/// The bits of a `c_ulong` on a 64-bit system.
const WORD_BITS: usize = 64;

/// The maximum number of bits in a mask. It is far above the kernel's limits for nodes (1,024) and
/// CPUs (8,192). It bounds the allocation for a number from a damaged sysfs.
const MAX_BITS: u32 = 1 << 16;

fn bit_mask(members: &[u32]) -> Result<Vec<c_ulong>, OsError> {
    let mut mask: Vec<c_ulong> = Vec::new();
    for &member in members {
        if member >= MAX_BITS {
            return Err(OsError::new("mbind", libc::EINVAL));
        }
        let member = usize::try_from(member).map_err(|_| OsError::new("mbind", libc::EINVAL))?;
        let word = member / WORD_BITS;
        if mask.len() <= word {
            mask.resize(word + 1, 0);
        }
        if let Some(word) = mask.get_mut(word) {
            *word |= 1 << (member % WORD_BITS);
        }
    }
    Ok(mask)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn masks_have_a_bit_for_each_member() {
        assert_eq!(bit_mask(&[0, 3]).unwrap(), [0b1001]);
        assert_eq!(bit_mask(&[65]).unwrap(), [0, 2]);
        assert!(bit_mask(&[u32::MAX]).is_err());
    }
}
