//! Dispatch sets: the allocations and the parameter buffer of one dispatch.

use std::fmt;
use std::time::Duration;

use terrane_core::{Allocate, ByteCount, Location, RegionRequest};

use super::area::StagingArea;
use super::error::{NotFinished, StagingError};
use super::lease::{Lease, try_reserve};
use crate::streams::fence::StreamId;

/// The allocations of a dispatch in preparation.
pub struct DispatchSet<A: Allocate> {
    lease: Lease<A>,
    /// The buffer of each allocation; `None` for an allocation of zero bytes.
    allocations: Vec<Option<usize>>,
    /// The parameter buffer; `Some(None)` for one of zero bytes.
    parameters: Option<Option<usize>>,
}

/// The index of an allocation in a set.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct AllocationId(usize);

impl<A: Allocate> StagingArea<A> {
    /// Creates an empty dispatch set.
    #[must_use]
    pub fn dispatch_set(&self) -> DispatchSet<A> {
        let lease = Lease::new(self.clone());
        DispatchSet { lease, allocations: Vec::new(), parameters: None }
    }
}

impl<A: Allocate> DispatchSet<A> {
    /// Reserves space for `additional` allocations and the parameter buffer.
    ///
    /// # Errors
    ///
    /// [`StagingError::Reserve`].
    pub fn try_reserve(&mut self, additional: usize) -> Result<(), StagingError> {
        let buffers = additional.checked_add(1).unwrap_or(additional);
        self.lease.try_reserve(buffers)?;
        try_reserve(&mut self.allocations, additional)
    }

    /// Adds an allocation. Zero bytes allocate nothing.
    ///
    /// # Errors
    ///
    /// [`StagingError::Allocate`] or [`StagingError::Reserve`]. The set is unchanged.
    pub fn allocate(&mut self, request: &RegionRequest) -> Result<AllocationId, StagingError> {
        try_reserve(&mut self.allocations, 1)?;
        let buffer = self.lease.allocate_buffer(request)?;
        self.allocations.push(buffer);
        Ok(AllocationId(self.allocations.len() - 1))
    }

    /// Allocates the parameter buffer.
    ///
    /// # Errors
    ///
    /// [`StagingError::ParametersTaken`] if the set has one; otherwise as for
    /// [`allocate`](Self::allocate).
    pub fn parameters(&mut self, bytes: ByteCount) -> Result<(), StagingError> {
        if self.parameters.is_some() {
            return Err(StagingError::ParametersTaken);
        }
        let request = RegionRequest::new(bytes).labelled("dispatch parameters");
        self.parameters = Some(self.lease.allocate_buffer(&request)?);
        Ok(())
    }

    /// Returns the number of allocations, without the parameter buffer.
    #[must_use]
    pub fn len(&self) -> usize {
        self.allocations.len()
    }

    /// Returns whether there is no allocation.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.allocations.is_empty()
    }

    /// Gives access to the locations of the allocations, for work that is submitted only to
    /// `streams`.
    ///
    /// # Errors
    ///
    /// [`StagingError::NoFences`], with the unchanged set, if there are streams and the area has no
    /// fences.
    #[expect(clippy::result_large_err, reason = "the error contains the set")]
    pub fn begin(
        mut self,
        streams: &[StreamId],
    ) -> Result<LaunchedDispatch<A>, (Self, StagingError)> {
        match self.lease.begin(streams) {
            Ok(()) => Ok(LaunchedDispatch { set: self }),
            Err(error) => Err((self, error)),
        }
    }
}

/// A dispatch whose work is being submitted.
#[derive(Debug)]
pub struct LaunchedDispatch<A: Allocate> {
    set: DispatchSet<A>,
}

impl<A: Allocate> LaunchedDispatch<A> {
    /// Returns the location of an allocation; `None` for an allocation of zero bytes.
    ///
    /// # Errors
    ///
    /// [`StagingError::NoSuchAllocation`] if the set has no allocation with this index. An
    /// allocation of another set is not detected if this set has one with its index.
    pub fn location(&self, allocation: AllocationId) -> Result<Option<Location>, StagingError> {
        let allocations = &self.set.allocations;
        let buffer = allocations.get(allocation.0).ok_or(StagingError::NoSuchAllocation {
            index: allocation.0,
            allocations: allocations.len(),
        })?;
        Ok(buffer.and_then(|index| self.set.lease.location(index)))
    }

    /// Iterates over the locations of all allocations, in the order of allocation.
    pub fn locations(&self) -> impl Iterator<Item = Option<Location>> {
        let location = |buffer: &Option<usize>| self.set.lease.location((*buffer)?);
        self.set.allocations.iter().map(location)
    }

    /// Returns the location of the parameter buffer, if there is one that is not empty.
    #[must_use]
    pub fn parameters(&self) -> Option<Location> {
        self.set.lease.location(self.set.parameters??)
    }

    /// Declares that all the work has been submitted. Dropping a launched set does the same.
    #[must_use]
    pub fn submitted(mut self) -> PendingDispatch<A> {
        self.set.lease.submitted();
        PendingDispatch { lease: self.set.lease }
    }
}

/// A dispatch whose work has been submitted. Dropping it moves the allocations to the area, which
/// frees them when the streams are done.
#[derive(Debug)]
pub struct PendingDispatch<A: Allocate> {
    lease: Lease<A>,
}

impl<A: Allocate> PendingDispatch<A> {
    /// Returns whether the streams are done with it. Never blocks.
    ///
    /// # Errors
    ///
    /// [`StagingError::Fence`] if a fence fails.
    pub fn is_complete(&mut self) -> Result<bool, StagingError> {
        self.lease.is_complete()
    }

    /// Waits until the streams are done with it, and frees the allocations.
    ///
    /// # Errors
    ///
    /// [`NotFinished`], with the dispatch, after `timeout` or if a fence fails.
    #[expect(clippy::result_large_err, reason = "the error contains the dispatch")]
    pub fn wait(mut self, timeout: Duration) -> Result<(), NotFinished<Self>> {
        self.lease.wait(timeout).map_err(|cause| NotFinished { pending: self, cause })
    }
}

impl<A: Allocate> fmt::Debug for DispatchSet<A> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("DispatchSet")
            .field("allocations", &self.allocations.len())
            .field("parameters", &self.parameters)
            .field("lease", &self.lease)
            .finish()
    }
}
