//! The errors of staging.

use std::collections::TryReserveError;
use std::time::Duration;

use terrane_core::{AllocateError, ByteCount, StorageKind};

use crate::streams::fence::FenceError;

/// The error of staging or reading back. Tables and outputs are unchanged.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum StagingError {
    /// No buffer could be allocated.
    #[error(transparent)]
    Allocate(#[from] AllocateError),
    /// A table or an output vector could not grow.
    #[error("there is no memory for {entries} more entries or bytes; free some, or stage less")]
    Reserve {
        /// The number of entries, or bytes, requested.
        entries: usize,
        /// The global allocator's error.
        #[source]
        source: TryReserveError,
    },
    /// The upstream's memory is not host memory.
    #[error("the host cannot fill {kind} memory; a transfer table needs a host upstream")]
    NotHost {
        /// The kind.
        kind: StorageKind,
    },
    /// The upstream returned less than requested.
    #[error("the upstream returned {granted} for a request of {requested}; fix the upstream")]
    Short {
        /// The bytes requested.
        requested: ByteCount,
        /// The bytes returned.
        granted: ByteCount,
    },
    /// The padded length is shorter than the data.
    #[error("{length} of data exceed the padded length of {padded}; pad to at least the data")]
    PaddingTooShort {
        /// The length of the data.
        length: ByteCount,
        /// The padded length.
        padded: ByteCount,
    },
    /// A stream was named, but the area has no fences.
    #[error(
        "the staging area has no fence source; create it with `StagingArea::new` to use streams"
    )]
    NoFences,
    /// The dispatch set already has a parameter buffer.
    #[error(
        "the dispatch set already has a parameter buffer, and can have only one; create another \
         set"
    )]
    ParametersTaken,
    /// The table has no output with this index: the entry is an upload, or of another table.
    #[error(
        "entry {index} is not an output of this table, which has {entries} entries; pass an entry \
         that the table returned for an output"
    )]
    NoSuchOutput {
        /// The entry.
        index: usize,
        /// The number of entries in the table.
        entries: usize,
    },
    /// The dispatch set has no allocation with this index: it is of another set.
    #[error(
        "allocation {index} is not in this dispatch set, which has {allocations}; name one of its \
         own"
    )]
    NoSuchAllocation {
        /// The allocation.
        index: usize,
        /// The number of allocations in the set.
        allocations: usize,
    },
    /// The range extends beyond its output.
    #[error(
        "{} bytes at offset {} exceed output {index}, which has {} bytes; name a range within it",
        .length.get(), .offset.get(), .output.get()
    )]
    OutOfBounds {
        /// The entry.
        index: usize,
        /// The start of the range.
        offset: ByteCount,
        /// The length of the range.
        length: ByteCount,
        /// The length of the output.
        output: ByteCount,
    },
    /// The number of slices differs from the number of outputs.
    #[error("{given} slices were passed for {outputs} outputs; pass one for each")]
    WrongCount {
        /// The number of outputs.
        outputs: usize,
        /// The number of slices.
        given: usize,
    },
    /// The length of a slice differs from the length of its output.
    #[error(
        "slice {position} has {} bytes, and its output has {}; pass a slice of equal length",
        .given.get(), .output.get()
    )]
    WrongLength {
        /// The index of the slice, from 0.
        position: usize,
        /// The length of the output.
        output: ByteCount,
        /// The length of the slice.
        given: ByteCount,
    },
    /// The streams did not finish in time.
    #[error("the streams did not finish in {waited:?}; wait longer, or check their work")]
    TimedOut {
        /// The time waited.
        waited: Duration,
    },
    /// A fence failed, so it is unknown whether the streams are done.
    #[error("a fence failed, so it is unknown whether the streams have finished; see the cause")]
    Fence(#[from] FenceError),
}

/// The error of a wait: the unchanged dispatch or table, and the cause.
#[derive(Debug)]
pub struct NotFinished<P> {
    /// The unfinished object. When dropped, its buffers are freed once the streams are done.
    pub pending: P,
    /// The cause: a timeout, or the failure of a fence.
    pub cause: StagingError,
}

terrane_core::delegate_error!(NotFinished<P>);
