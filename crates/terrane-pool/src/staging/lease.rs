//! Buffers that are freed together, when the streams that use them are done.

use std::mem::{self, ManuallyDrop};
use std::time::Duration;

use terrane_core::{Allocate, ByteCount, Location, Memory, RegionRequest};

use super::area::StagingArea;
use super::error::StagingError;
use crate::streams::deferred::Marks;
use crate::streams::fence::{StreamId, deadline_after};

/// The buffers of one table.
pub(super) struct Lease<A: Allocate> {
    area: StagingArea<A>,
    buffers: Vec<A::Memory>,
    /// The work that must finish before the buffers can be freed.
    marks: Marks,
}

impl<A: Allocate> Lease<A> {
    pub(super) fn new(area: StagingArea<A>) -> Self {
        Self { area, buffers: Vec::new(), marks: Marks::default() }
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
        self.marks = Marks::unmarked(streams.iter().copied());
        Ok(())
    }

    /// Declares that all the work that uses the buffers has been submitted.
    pub(super) fn submitted(&mut self) {
        self.marks.mark(self.area.deferred().fences());
    }

    /// Returns whether no stream uses the buffers any more, after [`submitted`](Self::submitted).
    pub(super) fn is_complete(&mut self) -> Result<bool, StagingError> {
        Ok(self.marks.are_passed(self.area.deferred().fences())?)
    }

    /// Waits until no stream uses the buffers any more, after [`submitted`](Self::submitted).
    pub(super) fn wait(&mut self, timeout: Duration) -> Result<(), StagingError> {
        let fences = self.area.deferred().fences();
        if self.marks.wait(fences, deadline_after(timeout))? {
            Ok(())
        } else {
            Err(StagingError::TimedOut { waited: timeout })
        }
    }
}

impl<A: Allocate> Drop for Lease<A> {
    fn drop(&mut self) {
        // If a fence panics, the buffers are leaked.
        let buffers = ManuallyDrop::new(mem::take(&mut self.buffers));
        self.submitted();
        let mut marks = mem::take(&mut self.marks);
        let deferred = self.area.deferred();
        let is_passed = marks.are_passed(deferred.fences());
        let buffers = ManuallyDrop::into_inner(buffers);
        if !buffers.is_empty() && !matches!(is_passed, Ok(true)) {
            deferred.keep(marks, buffers);
        }
    }
}

terrane_core::debug_fields!(Lease<A: Allocate>, |it| { buffers: it.buffers.len(),
    bytes: it.buffers.iter().map(Memory::length).collect::<Result<ByteCount, _>>() });

pub(super) fn try_reserve<T>(entries: &mut Vec<T>, additional: usize) -> Result<(), StagingError> {
    entries
        .try_reserve(additional)
        .map_err(|source| StagingError::Reserve { entries: additional, source })
}
