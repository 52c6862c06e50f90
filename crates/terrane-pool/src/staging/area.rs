//! The area that provides staging buffers, and keeps them until they can be freed.

use std::sync::Arc;
use std::time::Duration;

use terrane_core::{Allocate, AllocateError, RegionRequest};

use super::error::StagingError;
use crate::streams::deferred::DeferredFrees;
use crate::streams::fence::{Fence, FenceError, FenceSource};

/// A source of staging tables over an upstream. It keeps dropped buffers that streams still use.
///
/// Cloning returns another handle to the same area. When the last handle and the last table have
/// dropped, the area waits for the streams. Buffers that streams still use after the wait are
/// leaked.
pub struct StagingArea<A: Allocate>(Arc<Area<A>>);

struct Area<A: Allocate> {
    // Fields drop in this order: buffers are freed before their upstream drops.
    deferred: DeferredFrees<Vec<A::Memory>>,
    upstream: A,
    knows_streams: bool,
}

impl<A: Allocate> StagingArea<A> {
    /// Creates an area over `upstream`, whose buffers are used on the streams of `fences`. The area
    /// waits for the streams for at most `pending_wait`, when it is exhausted and when it drops.
    #[must_use]
    pub fn new(upstream: A, fences: Arc<dyn FenceSource>, pending_wait: Duration) -> Self {
        let deferred = DeferredFrees::new(fences, pending_wait);
        Self(Arc::new(Area { deferred, upstream, knows_streams: true }))
    }

    /// Creates an area whose buffers no stream uses: copies are complete when they are submitted.
    #[must_use]
    pub fn without_streams(upstream: A) -> Self {
        let deferred = DeferredFrees::new(Arc::new(NoStreams), Duration::ZERO);
        Self(Arc::new(Area { deferred, upstream, knows_streams: false }))
    }

    /// Frees the buffers that no stream uses any more, and returns the number of their tables.
    /// Never waits. An exhausted area calls this before it refuses a request.
    pub fn reap(&self) -> usize {
        self.0.deferred.reap(drop)
    }

    /// Returns the number of dropped tables whose buffers are still in use.
    #[must_use]
    pub fn pending(&self) -> usize {
        self.0.deferred.len()
    }

    /// Returns the upstream.
    #[must_use]
    pub fn upstream(&self) -> &A {
        &self.0.upstream
    }

    pub(super) fn deferred(&self) -> &DeferredFrees<Vec<A::Memory>> {
        &self.0.deferred
    }

    pub(super) fn knows_streams(&self) -> bool {
        self.0.knows_streams
    }

    pub(super) fn allocate_buffer(
        &self,
        request: &RegionRequest,
    ) -> Result<A::Memory, AllocateError> {
        self.deferred().allocate_or_reclaim(|| self.0.upstream.allocate(request), drop)
    }
}

impl<A: Allocate> Clone for StagingArea<A> {
    fn clone(&self) -> Self {
        Self(Arc::clone(&self.0))
    }
}

terrane_core::debug_fields!(StagingArea<A: Allocate>, |it| { kind: it.0.upstream.kind(),
    pending: it.pending() });

/// The fence source of an area without streams. The area never creates a fence with it.
#[derive(Debug)]
struct NoStreams;

impl FenceSource for NoStreams {
    fn create(&self) -> Result<Arc<dyn Fence>, FenceError> {
        Err(FenceError { operation: "create", source: Box::new(StagingError::NoFences) })
    }
}
