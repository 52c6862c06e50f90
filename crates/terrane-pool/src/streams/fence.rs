//! The interface to streams: the fences that a pool needs of a device's queues of work.
//!
//! A *stream* is a queue whose work runs in order. A *fence* is a mark in a stream that reports
//! whether all work before it has run. CUDA's streams and events are the model.

use std::fmt;
use std::sync::Arc;
use std::time::{Duration, Instant};

use terrane_core::BoxedCause;

/// The identity of a stream: a number that the [`FenceSource`] defines (a driver's handle, an
/// index).
///
/// A pool treats equal numbers as one stream. It immediately reuses blocks that were freed on the
/// stream, and may record a fence in it long after a block was freed. So a stream must live as long
/// as the pools that know it, or until they have been trimmed and no block is pending. Another
/// stream may get the same number, as drivers do with handles, only when all work of the first has
/// run.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct StreamId(u64);

impl StreamId {
    /// Creates the identity from its number.
    #[must_use]
    pub const fn new(id: u64) -> Self {
        Self(id)
    }

    /// Returns the number.
    #[must_use]
    pub const fn get(self) -> u64 {
        self.0
    }
}

impl fmt::Display for StreamId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "stream {:#x}", self.0)
    }
}

/// How a stream uses a block. A write is stronger than a read.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Access {
    /// The work reads the block.
    Read,
    /// The work writes the block, and may also read it.
    Write,
}

/// A source of fences: the queues of one device, or a simulation of them.
///
/// A pool calls a source and its fences without a lock, so they may use the pool.
#[diagnostic::on_unimplemented(
    message = "`{Self}` does not make fences",
    label = "it does not implement `FenceSource`",
    note = "`CudaStreams` of `terrane-cuda` makes the fences of a device; a pool over memory that no stream uses needs none"
)]
pub trait FenceSource: Send + Sync + fmt::Debug {
    /// Creates a fence. It is complete until it is recorded.
    ///
    /// A pool keeps its fences and records them repeatedly.
    ///
    /// # Errors
    ///
    /// [`FenceError`], if the driver cannot create a fence.
    fn create(&self) -> Result<Arc<dyn Fence>, FenceError>;
}

/// A mark in a stream.
pub trait Fence: Send + Sync + fmt::Debug {
    /// Moves the mark after all work that has been submitted to `stream` so far.
    ///
    /// # Errors
    ///
    /// [`FenceError`]. The fence then proves nothing until it is recorded again.
    fn record(&self, stream: StreamId) -> Result<(), FenceError>;

    /// Returns whether all work before the mark has run. Never blocks.
    ///
    /// # Errors
    ///
    /// [`FenceError`], if the driver cannot determine it. The caller must assume that the work is
    /// running.
    fn is_complete(&self) -> Result<bool, FenceError>;

    /// Blocks until all work before the mark has run, or `timeout` has passed. Returns whether the
    /// work has run.
    ///
    /// # Errors
    ///
    /// [`FenceError`], as for [`is_complete`](Self::is_complete).
    fn wait(&self, timeout: Duration) -> Result<bool, FenceError>;

    /// Orders later work of `stream` after the mark, without blocking the caller. Returns `false`
    /// if the source cannot order one stream after another.
    ///
    /// # Errors
    ///
    /// [`FenceError`]. In that case, nothing has been ordered.
    fn delay(&self, stream: StreamId) -> Result<bool, FenceError> {
        let _ = stream;
        Ok(false)
    }
}

/// Returns the instant when a wait of `wait` ends. If no clock can represent it, returns an instant
/// in a hundred years.
pub(crate) fn deadline_after(wait: Duration) -> Instant {
    const CENTURY: Duration = Duration::from_secs(100 * 365 * 24 * 60 * 60);
    let now = Instant::now();
    now.checked_add(wait.min(CENTURY)).unwrap_or(now)
}

/// The error of an operation on a fence.
#[derive(Debug, thiserror::Error)]
#[error("{operation} failed; the work before the fence may still be running")]
pub struct FenceError {
    /// The operation, by the driver's name.
    pub operation: &'static str,
    /// The driver's error.
    #[source]
    pub source: BoxedCause,
}

/// The time between two attempts with fences that fail.
pub(crate) const RETRY: Duration = Duration::from_millis(1);

/// The time of the first of several failures of fences in a row. A source that always fails must
/// not use up a wait that has no end.
#[derive(Debug, Default)]
pub(crate) struct FailingSince(Option<Instant>);

impl FailingSince {
    /// Records another failure. Returns whether the first one was too long ago.
    pub(crate) fn lasts_too_long(&mut self) -> bool {
        const LONGEST: Duration = Duration::from_secs(1);
        self.0.get_or_insert_with(Instant::now).elapsed() > LONGEST
    }
}
