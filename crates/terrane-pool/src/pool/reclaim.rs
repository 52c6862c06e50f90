//! The steps that a pool tries before it refuses.
//!
//! When the upstream is exhausted, a pool tries these steps, the cheapest first:
//!
//! 1. It waits for freed blocks that streams still use.
//! 2. It takes a cached block of its own class, or of a larger class within
//!    [`larger_class_waste`](crate::PoolOptions::larger_class_waste).
//! 3. It frees cached blocks to the upstream and repeats the request: first the bytes needed, then
//!    all.
//! 4. It makes the upstream free its own reserves.
//! 5. It calls the caller's callback, a bounded number of times.
//! 6. It takes a block of any larger class.
//!
//! Each step also finds blocks that another thread releases meanwhile. If the pool refuses, the
//! error contains the pool's state. A step with nothing to do costs nothing, because callers that
//! evict on a refusal reach this code often.

use std::sync::Arc;

use terrane_core::{Allocate, AllocateError, ByteCount, RegionRequest};

use super::Pool;
use super::record::Block;
use crate::error::Exhausted;
use crate::snapshot::ReclaimStage;
use crate::streams::fence::{StreamId, deadline_after};
use crate::tags::{LiveBytes, Tag};

/// An upstream with internal reserves that it can free, such as a driver's pool.
#[diagnostic::on_unimplemented(
    message = "`{Self}` cannot trim an upstream",
    label = "it does not implement `TrimUpstream`",
    note = "a closure `Fn(ByteCount) -> ByteCount` that is `Send` and `Sync` implements it: it gets the wanted bytes and returns the freed bytes"
)]
pub trait TrimUpstream: Send + Sync {
    /// Frees reserves, at least `wanted` bytes if there are that many, and returns the bytes freed.
    fn trim_upstream(&self, wanted: ByteCount) -> ByteCount;
}

impl<F: Fn(ByteCount) -> ByteCount + Send + Sync> TrimUpstream for F {
    fn trim_upstream(&self, wanted: ByteCount) -> ByteCount {
        self(wanted)
    }
}

/// The answer of a callback that may free memory for a refused request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Retry {
    /// Memory was freed: try again.
    Again,
    /// There is nothing more to free: refuse.
    GiveUp,
}

pub(crate) type Callback = Arc<dyn Fn(&Exhausted, ByteCount) -> Retry + Send + Sync>;

/// A request that the magazines did not serve.
#[derive(Clone, Copy)]
pub(crate) struct Wanted<'r> {
    pub(crate) request: &'r RegionRequest,
    pub(crate) tag: Tag,
    /// `None` if no pooled block serves the request.
    pub(crate) class: Option<usize>,
    pub(crate) stream: Option<StreamId>,
}

/// The block that a step found.
pub(super) type Found<A> = Result<Block<<A as Allocate>::Memory>, AllocateError>;

impl<A: Allocate> Pool<A> {
    /// Returns the result of `fetch`, counted as live. If the upstream is exhausted, returns the
    /// result of the reclaim instead.
    pub(crate) fn or_reclaim(&self, wanted: Wanted<'_>, fetch: impl Fn() -> Found<A>) -> Found<A> {
        let fetch = || {
            fetch().inspect(|record| self.cache.count(wanted.tag, record.granted, LiveBytes::Added))
        };
        match fetch() {
            Err(refusal) if refusal.is_exhaustion() => {
                tracing::debug!(%refusal, "the upstream is exhausted");
                self.source.reclaim_counts.count(ReclaimStage::Exhausted);
                self.reclaim(wanted, fetch, refusal)
            }
            result => result,
        }
    }

    fn reclaim(
        &self,
        wanted: Wanted<'_>,
        fetch: impl Fn() -> Found<A>,
        mut refusal: AllocateError,
    ) -> Found<A> {
        let Wanted { request, class, .. } = wanted;
        self.cache.note_exhaustion();
        let held = self.cache.account.held();
        if let Some(record) = self.wait_for_pending(wanted) {
            return self.count_served(ReclaimStage::Pending, record);
        }
        // Blocks that are not cached went back to the upstream.
        if self.cache.account.held() < held
            && let Some(record) = ask_again(&fetch, &mut refusal)?
        {
            return self.count_served(ReclaimStage::Pending, record);
        }
        if let Some(record) = self.take_cached(wanted) {
            return self.count_served(ReclaimStage::Larger, record);
        }
        let bytes = class.map_or(request.bytes.get(), |class| self.cache.table.size(class));
        // The upstream may lack fewer than these bytes, so any eviction justifies another request.
        if self.cache.evict(bytes) > 0
            && let Some(record) = ask_again(&fetch, &mut refusal)?
        {
            return self.count_served(ReclaimStage::Trimmed, record);
        }
        if self.cache.limit.reserved() > 0
            && !self.trim(ByteCount::ZERO).is_zero()
            && let Some(record) = ask_again(&fetch, &mut refusal)?
        {
            return self.count_served(ReclaimStage::Trimmed, record);
        }
        if let Some(upstream) = &self.trim_upstream {
            let freed = upstream.trim_upstream(request.bytes);
            tracing::debug!(%freed, wanted = %request.bytes, "the upstream trimmed itself");
            if let Some(record) = ask_again(&fetch, &mut refusal)? {
                return self.count_served(ReclaimStage::UpstreamTrimmed, record);
            }
        }
        let mut attempts = 0;
        while let Some(callback) = &self.callback
            && attempts < self.options.callback_attempts
        {
            attempts += 1;
            let answer = callback(&self.exhausted(attempts), request.bytes);
            if let Some(record) = self.take_released(wanted) {
                return self.count_served(ReclaimStage::Callback, record);
            }
            self.trim(ByteCount::ZERO);
            if let Some(record) = ask_again(&fetch, &mut refusal)? {
                return self.count_served(ReclaimStage::Callback, record);
            }
            if answer == Retry::GiveUp {
                break;
            }
        }
        if let Some(record) = self.take_any_larger(wanted) {
            return self.count_served(ReclaimStage::Larger, record);
        }
        self.source.reclaim_counts.count(ReclaimStage::Refused);
        let mut state = self.exhausted(attempts);
        state.refusal = Some(Arc::new(refusal));
        Err(AllocateError::OutOfMemory {
            kind: self.kind(),
            requested: request.bytes,
            available: state.largest_free,
            label: request.label.clone(),
            source: Some(Box::new(state)),
        })
    }

    #[expect(clippy::unnecessary_wraps, reason = "the callers return it")]
    fn count_served(&self, stage: ReclaimStage, record: Block<A::Memory>) -> Found<A> {
        self.source.reclaim_counts.count(stage);
        Ok(record)
    }

    /// Takes a block that streams have finished with, after a wait if necessary.
    ///
    /// Without a class, no pooled block serves the request, but freed blocks may make room for it.
    /// The pool then waits until nothing is pending.
    fn wait_for_pending(&self, wanted: Wanted<'_>) -> Option<Block<A::Memory>> {
        let pending = self.cache.pending.as_ref()?;
        self.cache.flush_stream_magazines();
        // Blocks that other threads kept for this stream need no wait.
        if let Some(record) = self.take_pending(wanted) {
            return Some(record);
        }
        let deadline = deadline_after(self.options.pending_wait);
        while pending.bytes() > 0 && pending.wait(deadline) {
            let found = self.take_pending(wanted);
            if found.is_some() {
                return found;
            }
        }
        self.reap();
        wanted.class.and_then(|class| self.cache.take_shared(class, wanted.tag))
    }

    /// Takes a cached block of the class, or of a larger class within the accepted waste.
    fn take_cached(&self, wanted: Wanted<'_>) -> Option<Block<A::Memory>> {
        let (class, waste) = (wanted.class?, self.options.larger_class_waste);
        let last = self.cache.table.last_within(class, wanted.request.bytes, waste);
        self.cache.take_anywhere(class..=last, wanted.tag)
    }

    /// Takes a block that the caller's callback has released.
    fn take_released(&self, wanted: Wanted<'_>) -> Option<Block<A::Memory>> {
        self.take_pending(wanted).or_else(|| self.take_cached(wanted))
    }

    /// Takes a freed block of any class that is large enough.
    fn take_any_larger(&self, wanted: Wanted<'_>) -> Option<Block<A::Memory>> {
        let class = wanted.class?;
        let last = self.cache.table.len().saturating_sub(1);
        let pending = self.take_pending(wanted);
        pending.or_else(|| self.cache.take_anywhere(class..=last, wanted.tag))
    }

    /// Returns the state of the pool for an error.
    fn exhausted(&self, callback_attempts: u32) -> Exhausted {
        let mut state = if self.cache.knows_streams() || self.cache.is_in_threads() {
            self.snapshot().exhausted()
        } else {
            self.cache.exhausted()
        };
        state.callback_attempts = callback_attempts;
        state
    }
}

/// Fetches again. Returns `None`, with the new `refusal`, if the upstream is still exhausted.
fn ask_again<R>(
    fetch: impl Fn() -> Result<R, AllocateError>,
    refusal: &mut AllocateError,
) -> Result<Option<R>, AllocateError> {
    match fetch() {
        Ok(record) => Ok(Some(record)),
        Err(again) if again.is_exhaustion() => {
            *refusal = again;
            Ok(None)
        }
        Err(other) => Err(other),
    }
}
