//! A queue that receives the outcomes of several jobs.

use std::os::fd::{AsFd, AsRawFd};

use pyo3::prelude::*;
use terrane_core::OwnerProcess;
use terrane_store::{CompletionQueue as NativeQueue, JobOutcome};

use crate::errors::{self, ForkedError};
use crate::memory::release_ended;
use crate::numbers::deadline;
use crate::outcome::Outcome;

/// A queue of outcomes, with a descriptor for event loops: `loop.add_reader(queue.fileno(), …)`.
///
/// `capacity` is the maximum number of jobs in flight plus outcomes that were not drained. Submitting more raises
/// `QueueFullError`.
#[pyclass(frozen, module = "terrane_kv")]
pub(crate) struct CompletionQueue {
    queue: NativeQueue<JobOutcome>,
    owner: OwnerProcess,
}

impl CompletionQueue {
    pub(crate) fn native(&self) -> PyResult<&NativeQueue<JobOutcome>> {
        if self.owner.is_current() {
            return Ok(&self.queue);
        }
        Err(ForkedError::new_err("the queue belongs to the parent of this process"))
    }
}

#[pymethods]
impl CompletionQueue {
    #[new]
    fn new(capacity: usize) -> PyResult<Self> {
        let queue = NativeQueue::new(capacity).map_err(|error| errors::queue(&error))?;
        Ok(Self { queue, owner: OwnerProcess::current() })
    }

    /// A descriptor that is readable while there are outcomes. Do not read from it; `drain` clears it.
    fn fileno(&self) -> PyResult<i32> {
        Ok(self.native()?.as_fd().as_raw_fd())
    }

    /// Returns all outcomes, the oldest first, without waiting.
    fn drain(&self, py: Python<'_>) -> PyResult<Vec<Outcome>> {
        let mut taken = Vec::new();
        self.native()?.take_all(&mut taken);
        release_ended(py);
        Ok(taken.into_iter().map(Outcome::new).collect())
    }

    /// Waits for the next outcome. Returns None after `timeout` seconds, and at once if no job is in flight.
    #[pyo3(signature = (timeout = None))]
    fn wait(&self, py: Python<'_>, timeout: Option<f64>) -> PyResult<Option<Outcome>> {
        let (queue, deadline) = (self.native()?, deadline(timeout)?);
        let outcome = py.detach(|| queue.wait(deadline));
        release_ended(py);
        Ok(outcome.map(Outcome::new))
    }

    /// The maximum number of jobs and outcomes.
    #[getter]
    fn capacity(&self) -> usize {
        self.queue.capacity()
    }

    /// The number of outcomes that were not drained.
    fn __len__(&self) -> usize {
        self.queue.len()
    }
}
