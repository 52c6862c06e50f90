//! The entries of a ring's submission queue for requests.

use io_uring::{opcode, squeue, types};

use super::request::IoOperation;
use super::transfer::{IoStep, MAX_STEP, Transfer};

/// The entry for the next step of `transfer`.
pub(super) fn entry_of(transfer: &Transfer) -> squeue::Entry {
    let file = types::Fd(transfer.file.descriptor);
    let is_read = transfer.operation == IoOperation::Read;
    // The entry of one code, or of another one with the registered buffer.
    macro_rules! entry {
        ($code:ident, $fixed:ident, $offset:ident, $($argument:expr),+) => {
            match transfer.registered {
                None => opcode::$code::new(file, $($argument),+).offset($offset).build(),
                Some(buffer) => {
                    opcode::$fixed::new(file, $($argument),+, buffer).offset($offset).build()
                }
            }
        };
    }
    match transfer.step(MAX_STEP) {
        IoStep::Single(vector, offset) => {
            let address = vector.iov_base.cast::<u8>();
            // At most `MAX_STEP`, so it fits.
            let length = u32::try_from(vector.iov_len).unwrap_or(u32::MAX);
            match is_read {
                true => entry!(Read, ReadFixed, offset, address, length),
                false => entry!(Write, WriteFixed, offset, address, length),
            }
        }
        IoStep::Vectored(vectors, offset) => {
            // At most `MAX_VECTORS`, so it fits.
            let count = u32::try_from(vectors.len()).unwrap_or(0);
            match is_read {
                true => entry!(Readv, ReadvFixed, offset, vectors.as_ptr(), count),
                false => entry!(Writev, WritevFixed, offset, vectors.as_ptr(), count),
            }
        }
        IoStep::Sync => {
            let flags = match transfer.operation {
                IoOperation::SyncData => types::FsyncFlags::DATASYNC,
                _ => types::FsyncFlags::empty(),
            };
            opcode::Fsync::new(file).flags(flags).build()
        }
    }
}
