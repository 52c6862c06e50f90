//! What a pool does before it refuses.
//!
//! When the upstream is exhausted, a pool climbs a ladder, from what costs least: freed blocks
//! that their streams have finished with (looked for before the upstream was asked at all);
//! freed blocks that have to be waited for; cached blocks of a larger class; giving its cached
//! blocks back and asking the upstream again; having the upstream give its own reserves back; and
//! the caller's callback, a bounded number of times. Each rung ends with another search, so a
//! block that another thread releases meanwhile is found. Only then it refuses, with what it knows
//! of itself in the error.

use terrane_core::{Allocate, AllocateError, ByteCount, RegionRequest};

use crate::fence::deadline_after;
use crate::record::Record;
use crate::snapshot::Rung;
use crate::tags::Tag;
use crate::{Exhausted, Pool, StreamId};

/// An upstream that keeps reserves of its own and can give them back: a driver's pool.
pub trait TrimUpstream: Send + Sync {
    /// Gives reserves back, `wanted` bytes at least if there are that many, and answers how many.
    fn trim_upstream(&self, wanted: ByteCount) -> ByteCount;
}

impl<F: Fn(ByteCount) -> ByteCount + Send + Sync> TrimUpstream for F {
    fn trim_upstream(&self, wanted: ByteCount) -> ByteCount {
        self(wanted)
    }
}

/// What the callback of an exhausted pool answers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Retry {
    /// Memory was freed: try again.
    Again,
    /// There is nothing more to free: refuse.
    GiveUp,
}

pub(crate) type Callback = Box<dyn Fn(&Exhausted, ByteCount) -> Retry + Send + Sync>;

/// A block, from one of the places on the ladder.
type Found<A> = Result<Box<Record<<A as Allocate>::Memory>>, AllocateError>;

impl<A: Allocate> Pool<A> {
    /// What `fetch` fetches, counted as live, or what the ladder leads to if it is exhausted.
    pub(crate) fn or_climb(
        &self,
        request: &RegionRequest,
        tag: Tag,
        class: Option<usize>,
        stream: Option<StreamId>,
        fetch: impl Fn() -> Found<A>,
    ) -> Found<A> {
        let fetch = || fetch().inspect(|record| self.stock.count(tag, record.granted, true));
        match fetch() {
            Err(refusal) if refusal.is_exhaustion() => {
                tracing::debug!(%refusal, "the upstream is exhausted");
                self.ladder.count(Rung::Exhausted);
                self.climb(request, tag, class, stream, fetch)
            }
            result => result,
        }
    }

    fn climb(
        &self,
        request: &RegionRequest,
        tag: Tag,
        class: Option<usize>,
        stream: Option<StreamId>,
        fetch: impl Fn() -> Found<A>,
    ) -> Found<A> {
        if let Some(record) = self.wait_for_pending(class, tag, stream) {
            return self.reached(Rung::Pending, record);
        }
        if let Some(record) = self.larger(class, tag) {
            return self.reached(Rung::Larger, record);
        }
        self.trim(ByteCount::ZERO);
        let mut refusal = match fetch() {
            Err(again) if again.is_exhaustion() => again,
            Err(other) => return Err(other),
            Ok(record) => return self.reached(Rung::Trimmed, record),
        };
        if let Some(upstream) = &self.trim_upstream {
            let freed = upstream.trim_upstream(request.bytes);
            tracing::debug!(%freed, wanted = %request.bytes, "had the upstream trim itself");
            match fetch() {
                Err(again) if again.is_exhaustion() => refusal = again,
                Err(other) => return Err(other),
                Ok(record) => return self.reached(Rung::UpstreamTrimmed, record),
            }
        }
        let mut attempts = 0;
        while let Some(callback) = &self.callback
            && attempts < self.options.callback_attempts
        {
            attempts += 1;
            let state = self.snapshot().exhausted(attempts);
            let answer = callback(&state, request.bytes);
            if let Some(record) = self.search(class, tag, stream) {
                return self.reached(Rung::Callback, record);
            }
            self.trim(ByteCount::ZERO);
            match fetch() {
                Err(again) if again.is_exhaustion() => refusal = again,
                Err(other) => return Err(other),
                Ok(record) => return self.reached(Rung::Callback, record),
            }
            if answer == Retry::GiveUp {
                break;
            }
        }
        if let Some(record) = self.search(class, tag, stream) {
            return self.reached(Rung::Larger, record);
        }
        self.ladder.count(Rung::Refused);
        let mut state = self.snapshot().exhausted(attempts);
        state.refusal = Some(std::sync::Arc::new(refusal));
        Err(AllocateError::OutOfMemory {
            kind: self.kind(),
            requested: request.bytes,
            available: state.largest_free,
            label: request.label.clone(),
            source: Some(Box::new(state)),
        })
    }

    #[expect(clippy::unnecessary_wraps, reason = "the callers return it")]
    fn reached(&self, rung: Rung, record: Box<Record<A::Memory>>) -> Found<A> {
        self.ladder.count(rung);
        Ok(record)
    }

    /// A block that streams have finished with, waiting for one if need be.
    ///
    /// With no class, nothing that is pooled serves the request, but what is freed may make room
    /// for it: the pool waits until nothing is pending.
    fn wait_for_pending(
        &self,
        class: Option<usize>,
        tag: Tag,
        stream: Option<StreamId>,
    ) -> Option<Box<Record<A::Memory>>> {
        let parking = self.stock.parking.as_ref()?;
        self.stock.park_lanes();
        let deadline = deadline_after(self.options.pending_wait);
        while parking.bytes() > 0 && parking.wait(deadline) {
            match class {
                Some(class) => {
                    let found = self.take_pending(class, tag, stream);
                    if found.is_some() {
                        return found;
                    }
                }
                None => self.reap(),
            }
        }
        self.reap();
        class.and_then(|class| self.stock.take_shared(class, tag))
    }

    /// A cached block of the class or a larger one.
    fn larger(&self, class: Option<usize>, tag: Tag) -> Option<Box<Record<A::Memory>>> {
        self.stock.take_anywhere(class?, tag)
    }

    /// Anything that serves the request just now.
    fn search(
        &self,
        class: Option<usize>,
        tag: Tag,
        stream: Option<StreamId>,
    ) -> Option<Box<Record<A::Memory>>> {
        self.take_pending(class?, tag, stream).or_else(|| self.larger(class, tag))
    }
}
