//! Whether a file takes direct I/O, found out on the file itself.

use std::fs::{File, OpenOptions};
use std::os::fd::{AsFd, AsRawFd};
use std::os::unix::fs::OpenOptionsExt;

use terrane_core::{Alignment, ByteCount, OsError, Reason};

use super::open::{Opened, identity};
use crate::sys;
use crate::system::Mapping;

/// The alignments that direct I/O on a file demands.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct DirectAlignments {
    pub(super) memory: Alignment,
    pub(super) offset: Alignment,
}

/// What the file system says, or a page where it does not say: that suits every disk with blocks
/// of up to 4 KiB, and the probe finds out about the others.
pub(super) fn alignments(file: &File) -> Result<DirectAlignments, Reason> {
    let by = "the file system";
    if sys::file::is_in_memory(file.as_fd()).map_err(Reason::Os)? {
        // It lets files be opened for direct I/O, but there is no cache to go around.
        return Err(Reason::Unsupported { by: "a file system in memory" });
    }
    match sys::file::direct_alignment(file.as_fd()).map_err(Reason::Os)? {
        None => Ok(DirectAlignments { memory: Alignment::PAGE, offset: Alignment::PAGE }),
        Some(said) => {
            let alignment = |bytes| Alignment::new(bytes).map_err(|_| Reason::Unsupported { by });
            Ok(DirectAlignments {
                memory: alignment(said.memory)?,
                offset: alignment(said.offset)?,
            })
        }
    }
}

/// A second descriptor of the file, opened for direct I/O, by which a read has succeeded.
pub(super) fn open(opened: &Opened, alignments: DirectAlignments) -> Result<File, Reason> {
    let mut options = OpenOptions::new();
    options.read(true).write(true).custom_flags(libc::O_DIRECT);
    // This reaches files that have no name; where /proc is not mounted, the name has to do.
    let by_descriptor = format!("/proc/self/fd/{}", opened.file.as_raw_fd());
    let file = options
        .open(by_descriptor)
        .or_else(|error| options.open(&opened.path).map_err(|_| error))
        .map_err(|error| match error.raw_os_error() {
            Some(libc::EINVAL) => Reason::Unsupported { by: "the file system" },
            _ => Reason::Os(OsError::from_io("open", &error)),
        })?;
    let metadata = file.metadata().map_err(|e| Reason::Os(OsError::from_io("fstat", &e)))?;
    if identity(&metadata) != opened.identity() {
        return Err(Reason::Needs("/proc, as the file has no name that still leads to it"));
    }
    probe(&file, alignments).map_err(Reason::Os)?;
    Ok(file)
}

/// Reads one block, which is refused if the alignments are not enough.
fn probe(file: &File, alignments: DirectAlignments) -> Result<(), OsError> {
    let length = ByteCount::new(alignments.offset.get());
    let buffer = Mapping::new(length, alignments.memory, None)?;
    let vector =
        libc::iovec { iov_base: buffer.address().as_ptr().cast(), iov_len: length.to_usize() };
    // SAFETY: the buffer is this function's own, at least that long, and outlives the call, as
    // does the file.
    unsafe { sys::file::read_vectored(file.as_raw_fd(), &[vector], 0) }.map(|_| ())
}
