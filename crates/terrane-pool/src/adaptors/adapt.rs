//! Stacks of adaptors, written from the upstream outwards.

use std::io::Write;
use std::num::NonZeroU32;

use terrane_core::Allocate;

use super::accounting::budget::Budget;
use super::accounting::limit::Limit;
use super::accounting::statistics::{Counters, Statistics};
use super::accounting::tags::{LiveBlocks, Tags};
use super::accounting::trace::{Trace, TraceSink};
use super::compose::either::MixedKinds;
use super::compose::erased::Erased;
use super::compose::fallback::Fallback;
use super::compose::on_failure::{OnFailure, RefusedRequest};
use super::compose::slabs::{SlabOptions, Slabs};
use super::debug::guard::Guard;
use super::debug::poison::{Fill, Poison, PoisonBytes};
use crate::pool::reclaim::Retry;
use crate::streams::fence::StreamId;

/// Wraps adaptors around any upstream. Each method wraps its receiver.
pub trait Adapt: Allocate + Sized {
    /// Limits allocations to `budget`.
    fn limited(self, budget: Budget) -> Limit<Self> {
        Limit::new(self, budget)
    }

    /// Counts allocations in `counters`.
    fn counted(self, counters: Counters) -> Statistics<Self> {
        Statistics::new(self, counters)
    }

    /// Logs allocations and frees to `sink`.
    fn traced<W: Write + Send + 'static>(self, sink: TraceSink<W>) -> Trace<Self, W> {
        Trace::new(self, sink)
    }

    /// Detects overlaps and writes out of bounds.
    fn guarded(self) -> Guard<Self> {
        Guard::new(self)
    }

    /// Like [`guarded`](Self::guarded), with canaries that `fill` writes and reads, in the order of
    /// `stream`.
    fn guarded_on(self, fill: impl Fill, stream: StreamId) -> Guard<Self> {
        Guard::ordered(self, fill, stream)
    }

    /// Fills memory with a pattern through `fill`, in the order of `stream`.
    fn poisoned(self, fill: impl Fill, bytes: PoisonBytes, stream: StreamId) -> Poison<Self> {
        Poison::new(self, fill, bytes, stream)
    }

    /// Records live blocks in `blocks`.
    fn tagged(self, blocks: LiveBlocks) -> Tags<Self> {
        Tags::new(self, blocks)
    }

    /// Calls `callback` on exhaustion, up to `retries` times a request.
    fn on_failure<F>(self, retries: NonZeroU32, callback: F) -> OnFailure<Self, F>
    where
        F: Fn(&RefusedRequest<'_>) -> Retry,
    {
        OnFailure::new(self, retries, callback)
    }

    /// Sends requests that this upstream cannot serve to `second`.
    ///
    /// # Errors
    ///
    /// [`MixedKinds`] if the two are not of one kind of memory.
    fn or_else<B: Allocate>(self, second: B) -> Result<Fallback<Self, B>, MixedKinds> {
        Fallback::new(self, second)
    }

    /// Cuts small blocks out of large regions.
    fn in_slabs(self, options: SlabOptions) -> Slabs<Self> {
        Slabs::new(self, options)
    }

    /// Hides the type of the memory.
    fn erased(self) -> Erased<Self> {
        Erased(self)
    }
}

impl<A: Allocate> Adapt for A {}
