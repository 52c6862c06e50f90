//! Detects whether a file supports direct I/O, by a test read of the file.

use std::fs::File;
use std::os::fd::{AsFd, AsRawFd};
use std::os::unix::fs::OpenOptionsExt;

use terrane_core::{Alignment, ByteCount, OsError, Reason};

use super::open::{OpenedFile, identity};
use crate::sys;
use crate::system::Mapping;

/// The alignments that direct I/O on a file requires.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct DirectAlignments {
    pub(super) memory: Alignment,
    pub(super) offset: Alignment,
}

/// The alignments that the file system reports, or a page if it reports none. A page suits every
/// disk with blocks of up to 4 KiB. The probe detects larger blocks.
pub(super) fn alignments(file: &File) -> Result<DirectAlignments, Reason> {
    let by = "the file system";
    if sys::file::is_in_memory(file.as_fd()).map_err(Reason::Os)? {
        // It accepts `O_DIRECT`, but there is no page cache to bypass.
        return Err(Reason::Unsupported { by: "a file system in memory" });
    }
    match sys::file::direct_alignment(file.as_fd()).map_err(Reason::Os)? {
        None => Ok(DirectAlignments { memory: Alignment::PAGE, offset: Alignment::PAGE }),
        Some([memory, offset]) => {
            let alignment = |bytes| Alignment::new(bytes).map_err(|_| Reason::Unsupported { by });
            Ok(DirectAlignments { memory: alignment(memory)?, offset: alignment(offset)? })
        }
    }
}

/// A second descriptor of the file, opened for direct I/O. A test read with it has succeeded.
pub(super) fn open(opened: &OpenedFile, alignments: DirectAlignments) -> Result<File, Reason> {
    let mut options = opened.access.options();
    options.custom_flags(libc::O_DIRECT);
    // This path works for files without a name. If /proc is not mounted, the name is used.
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
        return Err(Reason::Needs("/proc, because no name leads to the file"));
    }
    probe(&file, alignments).map_err(Reason::Os)?;
    Ok(file)
}

/// Reads one block. The read fails if the alignments are too small.
fn probe(file: &File, alignments: DirectAlignments) -> Result<(), OsError> {
    let length = ByteCount::new(alignments.offset.get());
    let buffer = Mapping::new(length, alignments.memory, None)?;
    let vector =
        libc::iovec { iov_base: buffer.address().as_ptr().cast(), iov_len: length.to_usize() };
    // SAFETY: the buffer belongs to this function, has at least that length and outlives the call.
    // The file outlives the call as well.
    unsafe { sys::file::transfer(file.as_raw_fd(), &[vector], 0, true) }.map(|_| ())
}
