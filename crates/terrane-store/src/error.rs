//! Errors of the store, of keys and of completion queues.

use std::path::PathBuf;

use terrane_core::{AllocateError, ForkedProcess, OsError};
use terrane_storage::StorageError;

use crate::MAX_KEY_BYTES;

/// Why the store refused a call, or stopped serving.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum StoreError {
    /// The store was used in a process that was forked from its own.
    #[error("the store belongs to another process")]
    Forked(#[from] ForkedProcess),
    /// The store is closed.
    #[error("the store is closed; open it again")]
    Closed,
    /// A slab file, the I/O queue or a thread was refused. [`StorageError::NoSpace`] states the
    /// bytes that a file needs.
    #[error(transparent)]
    Storage(#[from] StorageError),
    /// Memory was refused.
    #[error(transparent)]
    Memory(#[from] AllocateError),
    /// No directory was stated for the slab files.
    #[error("a disk tier needs a directory; state one or more")]
    NoDirectory,
    /// The slots of a group exceed the largest file.
    #[error(
        "group {group} has {slots} slots of {slot_bytes} bytes, more than the largest file offset, \
         2^63 - 1; state fewer slots"
    )]
    SlotsTooLarge {
        /// The group.
        group: usize,
        /// Its slots.
        slots: u32,
        /// The bytes of a slot.
        slot_bytes: u64,
    },
    /// A file could not be synced. What was written to it since the last sync may be lost. The file
    /// is not synced again, because a later success would say nothing about those bytes.
    #[error(
        "cannot sync {path:?}; what was written since the last sync may be lost; check the device, \
         then open the store again"
    )]
    SyncFailed {
        /// The file.
        path: PathBuf,
        /// The error of the kernel.
        #[source]
        source: OsError,
    },
    /// A call on a slab file failed.
    #[error("cannot prepare {path:?}")]
    SlabFile {
        /// The file, or its directory.
        path: PathBuf,
        /// The error of the kernel.
        #[source]
        source: OsError,
    },
    /// The tier was opened for reading only.
    #[error("the disk tier was opened read-only; open it for writing to put blocks")]
    ReadOnly,
    /// A write failed because of the device or its space.
    #[error(
        "a write failed, so the disk tier is read-only; free space or check the device, then open \
             the store again"
    )]
    WriteFailed(#[source] terrane_storage::IoFailure),
    /// A request names a group, a slot or a length that the slab files do not have.
    #[error(
        "{bytes} bytes for slot {slot} of group {group} exceed the slab files; state an existing group \
         and slot, and 1 byte to the slot's size"
    )]
    OutsideSlabs {
        /// The group.
        group: u16,
        /// The slot.
        slot: u32,
        /// The bytes of the block.
        bytes: u64,
    },
}

/// Why a key is refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum KeyError {
    /// The key has no bytes.
    #[error(
        "a key has no bytes; state 1 to {MAX_KEY_BYTES} bytes, such as a hash of the block's tokens"
    )]
    Empty,
    /// The key is longer than its length field can state.
    #[error("a key has {bytes} bytes; the maximum is {MAX_KEY_BYTES}: use a hash of it as the key")]
    TooLong {
        /// Its length in bytes.
        bytes: usize,
    },
}

/// Why a [`CompletionQueue`](crate::CompletionQueue) refuses.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum QueueError {
    /// A queue of capacity zero could take no job.
    #[error("a completion queue of capacity 0 was requested; state 1 or more")]
    NoCapacity,
    /// The operating system gave no event descriptor.
    #[error(
        "no event descriptor for a completion queue (error {errno}); raise the limit of open files, \
         or close some"
    )]
    NoDescriptor {
        /// The error number.
        errno: i32,
    },
    /// Jobs and values that were not taken fill the queue.
    #[error(
        "a completion queue of capacity {capacity} has {jobs} jobs and {values} values that were not \
         taken; take them, or make the queue larger"
    )]
    Full {
        /// The capacity.
        capacity: usize,
        /// The jobs that have not ended.
        jobs: usize,
        /// The values that wait to be taken.
        values: usize,
    },
}
