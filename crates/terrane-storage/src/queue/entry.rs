//! The entries of a ring's submission queue for requests.

use io_uring::{opcode, squeue, types};

use super::request::IoOperation;
use super::transfer::{MAX_STEP, Step, Transfer};

/// The entry for the next step of `transfer`.
pub(super) fn entry_of(transfer: &Transfer) -> squeue::Entry {
    let file = types::Fd(transfer.file.descriptor);
    let is_read = transfer.operation == IoOperation::Read;
    match transfer.step(MAX_STEP) {
        Step::Single(vector, offset) => {
            let address = vector.iov_base.cast::<u8>();
            // At most `MAX_STEP`, so it fits.
            let length = u32::try_from(vector.iov_len).unwrap_or(u32::MAX);
            match (transfer.registered, is_read) {
                (None, true) => opcode::Read::new(file, address, length).offset(offset).build(),
                (None, false) => opcode::Write::new(file, address, length).offset(offset).build(),
                (Some(buffer), true) => {
                    opcode::ReadFixed::new(file, address, length, buffer).offset(offset).build()
                }
                (Some(buffer), false) => {
                    opcode::WriteFixed::new(file, address, length, buffer).offset(offset).build()
                }
            }
        }
        Step::Vectored(vectors, offset) => {
            // At most `MAX_VECTORS`, so it fits.
            let count = u32::try_from(vectors.len()).unwrap_or(0);
            let vectors = vectors.as_ptr();
            match (transfer.registered, is_read) {
                (None, true) => opcode::Readv::new(file, vectors, count).offset(offset).build(),
                (None, false) => opcode::Writev::new(file, vectors, count).offset(offset).build(),
                (Some(buffer), true) => {
                    opcode::ReadvFixed::new(file, vectors, count, buffer).offset(offset).build()
                }
                (Some(buffer), false) => {
                    opcode::WritevFixed::new(file, vectors, count, buffer).offset(offset).build()
                }
            }
        }
        Step::Sync => {
            let flags = match transfer.operation {
                IoOperation::SyncData => types::FsyncFlags::DATASYNC,
                _ => types::FsyncFlags::empty(),
            };
            opcode::Fsync::new(file).flags(flags).build()
        }
    }
}
