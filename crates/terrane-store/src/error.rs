//! Refusals of keys and of completion queues.

use crate::MAX_KEY_BYTES;

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
