//! Buffers that are freed together, when the streams that use them are done.

use std::mem::{self, ManuallyDrop};
use std::time::Duration;

use smallvec::SmallVec;
use terrane_core::{Allocate, ByteCount, Location, Memory, RegionRequest};

use super::area::StagingArea;
use super::error::StagingError;
use crate::streams::deferred::Marks;
use crate::streams::fence::{StreamId, deadline_after};

/// The buffers of one table.
pub(super) struct Lease<A: Allocate> {
    area: StagingArea<A>,
    buffers: Vec<A::Memory>,
    hold: Hold,
}

/// The work that must finish before buffers can be freed.
enum Hold {
    Nothing,
    /// Work may still be submitted to these streams.
    Streams(SmallVec<[StreamId; 2]>),
    /// All work has been submitted before these marks.
    Marks(Marks),
}

impl<A: Allocate> Lease<A> {
    pub(super) fn new(area: StagingArea<A>) -> Self {
        Self { area, buffers: Vec::new(), hold: Hold::Nothing }
    }

    pub(super) fn try_reserve(&mut self, additional: usize) -> Result<(), StagingError> {
        try_reserve(&mut self.buffers, additional)
    }

    /// Allocates a further buffer, and returns its index. Zero bytes allocate nothing.
    pub(super) fn allocate_buffer(
        &mut self,
        request: &RegionRequest,
    ) -> Result<Option<usize>, StagingError> {
        if request.bytes.is_zero() {
            return Ok(None);
        }
        self.try_reserve(1)?;
        let buffer = self.area.allocate_buffer(request)?;
        let (requested, granted) = (request.bytes, buffer.length());
        if granted < requested {
            return Err(StagingError::Short { requested, granted });
        }
        self.buffers.push(buffer);
        Ok(Some(self.buffers.len() - 1))
    }

    pub(super) fn buffer(&self, index: usize) -> Option<&A::Memory> {
        self.buffers.get(index)
    }

    pub(super) fn location(&self, index: usize) -> Option<Location> {
        self.buffer(index).map(Memory::location)
    }

    /// Allows work on `streams` to use the buffers from here on.
    pub(super) fn begin(&mut self, streams: &[StreamId]) -> Result<(), StagingError> {
        if !streams.is_empty() && !self.area.knows_streams() {
            return Err(StagingError::NoFences);
        }
        self.hold = Hold::Streams(streams.iter().copied().collect());
        Ok(())
    }

    /// Declares that all the work that uses the buffers has been submitted.
    pub(super) fn submitted(&mut self) {
        if let Hold::Streams(streams) = &self.hold {
            let marks = Marks::new(self.area.deferred().fences(), streams.iter().copied());
            self.hold = Hold::Marks(marks);
        }
    }

    /// Returns whether no stream uses the buffers any more.
    pub(super) fn is_complete(&mut self) -> Result<bool, StagingError> {
        match &mut self.hold {
            Hold::Nothing => Ok(true),
            Hold::Streams(streams) => Ok(streams.is_empty()),
            Hold::Marks(marks) => Ok(marks.are_passed(self.area.deferred().fences())?),
        }
    }

    /// Waits until no stream uses the buffers any more.
    pub(super) fn wait(&mut self, timeout: Duration) -> Result<(), StagingError> {
        let is_complete = match &mut self.hold {
            Hold::Nothing => true,
            Hold::Streams(streams) => streams.is_empty(),
            Hold::Marks(marks) => {
                marks.wait(self.area.deferred().fences(), deadline_after(timeout))?
            }
        };
        if is_complete { Ok(()) } else { Err(StagingError::TimedOut { waited: timeout }) }
    }
}

impl<A: Allocate> Drop for Lease<A> {
    fn drop(&mut self) {
        // If a fence panics, the buffers are leaked.
        let buffers = ManuallyDrop::new(mem::take(&mut self.buffers));
        self.submitted();
        let mut marks = match mem::replace(&mut self.hold, Hold::Nothing) {
            Hold::Marks(marks) => marks,
            Hold::Nothing | Hold::Streams(_) => Marks::default(),
        };
        let deferred = self.area.deferred();
        let is_passed = marks.are_passed(deferred.fences());
        let buffers = ManuallyDrop::into_inner(buffers);
        if !buffers.is_empty() && !matches!(is_passed, Ok(true)) {
            deferred.keep(marks, buffers);
        }
    }
}

terrane_core::debug_fields!(Lease<A: Allocate>, |it|
    buffers: it.buffers.len(),
    bytes: it.buffers.iter().map(Memory::length).collect::<Result<ByteCount, _>>());

pub(super) fn try_reserve<T>(entries: &mut Vec<T>, additional: usize) -> Result<(), StagingError> {
    entries
        .try_reserve(additional)
        .map_err(|source| StagingError::Reserve { entries: additional, source })
}
