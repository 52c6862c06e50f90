//! What can go wrong with staging.

use std::collections::TryReserveError;
use std::fmt;
use std::time::Duration;

use terrane_core::{AllocateError, ByteCount, StorageKind};

use crate::FenceError;

/// Why something could not be staged or read back. Tables and outputs are as they were.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum StagingError {
    /// No buffer could be had.
    #[error(transparent)]
    Allocate(#[from] AllocateError),
    /// A table or an output vector could not grow.
    #[error("a table of {entries} more entries, or an output of as many bytes, cannot be had")]
    Reserve {
        /// How many entries, or bytes, there were to be.
        entries: usize,
        /// What the global allocator said.
        #[source]
        source: TryReserveError,
    },
    /// The upstream's memory is not the host's.
    #[error("{kind} memory cannot be filled from here; a transfer table needs a host upstream")]
    NotHost {
        /// The kind.
        kind: StorageKind,
    },
    /// The upstream gave less than was asked for.
    #[error("the upstream gave {granted} for {asked}; it breaks its contract")]
    Short {
        /// What was asked for.
        asked: ByteCount,
        /// What it gave.
        granted: ByteCount,
    },
    /// Padding that cuts off the data.
    #[error("{length} do not fit in a padded length of {padded}; pad to no less than the data")]
    PaddingTooShort {
        /// The length of the data.
        length: ByteCount,
        /// The length to pad it to.
        padded: ByteCount,
    },
    /// A stream where nobody can wait for one.
    #[error("the staging area knows no streams; make it with a fence source to use one")]
    NoFences,
    /// A dispatch set that has a parameter buffer already.
    #[error("the dispatch set has a parameter buffer already; it takes one")]
    ParametersTaken,
    /// An entry of another table, or one of the other direction.
    #[error("entry {index} is no output of this table, which has {entries} entries")]
    NoSuchOutput {
        /// The entry.
        index: usize,
        /// How many entries the table has.
        entries: usize,
    },
    /// An allocation of another dispatch set.
    #[error("allocation {index} is none of this dispatch set, which has {allocations}")]
    NoSuchAllocation {
        /// The allocation.
        index: usize,
        /// How many the set has.
        allocations: usize,
    },
    /// A range that leaves its output.
    #[error(
        "{} bytes at offset {} leave output {index}, which has {}",
        .length.get(), .offset.get(), .output.get()
    )]
    OutOfBounds {
        /// The entry.
        index: usize,
        /// Where the range begins.
        offset: ByteCount,
        /// How long it is.
        length: ByteCount,
        /// How long the output is.
        output: ByteCount,
    },
    /// Another number of slices than of outputs.
    #[error("{given} slices were given for {outputs} outputs")]
    WrongCount {
        /// How many outputs there are.
        outputs: usize,
        /// How many slices there were for them.
        given: usize,
    },
    /// A slice of another length than its output.
    #[error("slice {position} has {} bytes, and its output {}", .given.get(), .output.get())]
    WrongLength {
        /// Which slice, from 0.
        position: usize,
        /// How long the output is.
        output: ByteCount,
        /// How long the slice is.
        given: ByteCount,
    },
    /// The streams did not come past in time.
    #[error("the streams were not done after {waited:?}; wait again, or look at what they do")]
    TimedOut {
        /// How long they were waited for.
        waited: Duration,
    },
    /// A fence failed, so that nobody can say whether the streams are done.
    #[error("whether the streams are done cannot be told")]
    Fence(#[from] FenceError),
}

/// A wait that failed: what was waited for, as it was, and the cause.
#[derive(Debug)]
pub struct NotFinished<P> {
    /// What is not finished. Dropped, it returns its buffers when it is.
    pub pending: P,
    /// Why it is not known to be.
    pub cause: StagingError,
}

impl<P> fmt::Display for NotFinished<P> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(&self.cause, f)
    }
}

impl<P: fmt::Debug> std::error::Error for NotFinished<P> {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        self.cause.source()
    }
}
