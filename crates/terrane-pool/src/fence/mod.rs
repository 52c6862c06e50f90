//! The seam to streams: what a pool has to know of a device's queues of work.
//!
//! A *stream* is a queue whose work runs in order; a *fence* is a mark in a stream that says
//! whether everything before it has run. CUDA's streams and events are the model;
//! [`SimulatedStreams`] has the same order without a device.

use std::fmt;
use std::sync::Arc;
use std::time::{Duration, Instant};

use terrane_core::BoxedCause;

mod simulated;

pub use simulated::SimulatedStreams;

/// Which stream: a number that the [`FenceSource`] gives a meaning to (a driver's handle, an
/// index).
///
/// To a pool a number is one stream for good: it reuses at once what was freed on it before, and
/// may record a fence in it long after a block was freed. So a stream lives for as long as pools
/// that know it, or until they have been trimmed and nothing is pending; and its number goes to
/// another stream, as drivers do with handles, only when all of its work has run.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct StreamId(u64);

impl StreamId {
    /// The stream of this number.
    #[must_use]
    pub const fn new(id: u64) -> Self {
        Self(id)
    }

    /// The number.
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

/// How a stream uses a block. A write counts for more than a read.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Access {
    /// The work reads the block.
    Read,
    /// The work writes the block, and may read it too.
    Write,
}

/// Where fences come from: the queues of one device, or a simulation of them.
///
/// A pool calls a source and its fences without a lock, so they may use the pool.
pub trait FenceSource: Send + Sync + fmt::Debug {
    /// Makes a fence. It counts as complete until it is recorded.
    ///
    /// A pool keeps its fences and records them over and over.
    ///
    /// # Errors
    ///
    /// [`FenceError`], if the driver has no fence to give.
    fn create(&self) -> Result<Arc<dyn Fence>, FenceError>;
}

/// A mark in a stream.
pub trait Fence: Send + Sync + fmt::Debug {
    /// Moves the mark behind everything that has been submitted to `stream` so far.
    ///
    /// # Errors
    ///
    /// [`FenceError`], after which the fence proves nothing until it is recorded again.
    fn record(&self, stream: StreamId) -> Result<(), FenceError>;

    /// Whether everything before the mark has run. Never blocks.
    ///
    /// # Errors
    ///
    /// [`FenceError`], if the driver cannot tell: the work must be taken to be running.
    fn is_complete(&self) -> Result<bool, FenceError>;

    /// Blocks until everything before the mark has run, or `timeout` has passed; answers whether
    /// it has run.
    ///
    /// # Errors
    ///
    /// [`FenceError`], as for [`is_complete`](Self::is_complete).
    fn wait(&self, timeout: Duration) -> Result<bool, FenceError>;

    /// Makes what is submitted to `stream` from now on run after the mark, without blocking the
    /// caller. Answers `false` where the source cannot order one stream after another.
    ///
    /// # Errors
    ///
    /// [`FenceError`], after which nothing has been ordered.
    fn delay(&self, stream: StreamId) -> Result<bool, FenceError> {
        let _ = stream;
        Ok(false)
    }
}

/// When `patience` runs out. What no clock can tell is as good as never: a century from now.
pub(crate) fn deadline_after(patience: Duration) -> Instant {
    const CENTURY: Duration = Duration::from_secs(100 * 365 * 24 * 60 * 60);
    let now = Instant::now();
    now.checked_add(patience.min(CENTURY)).unwrap_or(now)
}

/// An operation on a fence that failed.
#[derive(Debug, thiserror::Error)]
#[error("{operation} failed: the work before it has to be taken as still running")]
pub struct FenceError {
    /// The operation, as the driver calls it.
    pub operation: &'static str,
    /// What the driver said.
    #[source]
    pub source: BoxedCause,
}
