//! The registered buffers of an io_uring ring, by its descriptor. Any thread may change them.

use std::os::fd::RawFd;

use terrane_core::OsError;

const REGISTER: &str = "io_uring_register";

/// `IORING_UNREGISTER_BUFFERS` of the kernel's `io_uring.h`.
const UNREGISTER_BUFFERS: libc::c_uint = 1;
/// `IORING_REGISTER_BUFFERS_UPDATE`.
const REGISTER_BUFFERS_UPDATE: libc::c_uint = 16;

/// `struct io_uring_rsrc_update2`.
#[repr(C)]
struct Update {
    offset: u32,
    reserved: u32,
    data: u64,
    tags: u64,
    count: u32,
    reserved2: u32,
}

/// Replaces an entry of the ring's table of registered buffers. An empty vector clears it.
///
/// The kernel pins the pages that are mapped at the vector, or fails. It accesses them only for
/// requests that name the entry.
pub(crate) fn update_buffer(
    ring: RawFd,
    index: u16,
    (address, length): (usize, usize),
) -> Result<(), OsError> {
    let vector =
        libc::iovec { iov_base: std::ptr::with_exposed_provenance_mut(address), iov_len: length };
    let update = Update {
        offset: u32::from(index),
        reserved: 0,
        data: terrane_core::convert::to_u64((&raw const vector).addr()),
        tags: 0,
        count: 1,
        reserved2: 0,
    };
    // SAFETY: the kernel reads `update` and `vector`, which outlive the call. It does not change
    // the memory at the vector.
    let result = unsafe {
        libc::syscall(
            libc::SYS_io_uring_register,
            ring,
            REGISTER_BUFFERS_UPDATE,
            &raw const update,
            size_of::<Update>(),
        )
    };
    if result < 0 { Err(OsError::last(REGISTER)) } else { Ok(()) }
}

/// Clears the ring's table of registered buffers, and removes it.
pub(crate) fn unregister_buffers(ring: RawFd) -> Result<(), OsError> {
    // SAFETY: the kernel accesses no memory for this call.
    let result = unsafe {
        libc::syscall(
            libc::SYS_io_uring_register,
            ring,
            UNREGISTER_BUFFERS,
            std::ptr::null::<u8>(),
            0_usize,
        )
    };
    if result < 0 { Err(OsError::last(REGISTER)) } else { Ok(()) }
}
