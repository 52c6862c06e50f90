//! The results of jobs.

use std::os::fd::{AsFd, AsRawFd};
use std::sync::{Mutex, OnceLock};
use std::time::Instant;

use pyo3::exceptions::{PyTimeoutError, PyValueError};
use pyo3::prelude::*;
use terrane_core::OwnerProcess;
use terrane_core::sync::lock;
use terrane_cuda::Context;
use terrane_store::{
    BlockResult, CompletionQueue as NativeQueue, Job as NativeJob, JobLayerError, JobOutcome,
    Priority,
};

use crate::device;
use crate::errors::{self, ForkedError, StoreError};
use crate::memory::release_ended;
use crate::numbers::deadline;

/// The result of a job, with a result for each key in order.
#[pyclass(frozen, module = "terrane_kv")]
pub(crate) struct Outcome {
    outcome: JobOutcome,
}

impl Outcome {
    pub(crate) fn new(outcome: JobOutcome) -> Self {
        Self { outcome }
    }
}

/// The name of a result in Python.
fn name(result: &BlockResult) -> &'static str {
    match result {
        BlockResult::Done { .. } => "done",
        BlockResult::AlreadyStored => "already_stored",
        BlockResult::Absent => "absent",
        BlockResult::Corrupt => "corrupt",
        BlockResult::WrongLength { .. } => "wrong_length",
        BlockResult::TimedOut => "timed_out",
        BlockResult::Cancelled => "cancelled",
        BlockResult::NoRoom(_) => "no_room",
        _ => "failed",
    }
}

#[pymethods]
impl Outcome {
    /// The tag that was passed to the job; 0 by default.
    #[getter]
    fn tag(&self) -> u64 {
        self.outcome.tag
    }

    /// Whether the job succeeded for every block.
    #[getter]
    fn ok(&self) -> bool {
        self.outcome.is_ok()
    }

    /// For each key, whether the job succeeded for its block.
    #[getter]
    fn done(&self) -> Vec<bool> {
        self.outcome.results.iter().map(BlockResult::is_ok).collect()
    }

    /// For each key, one of "done", "already_stored", "absent", "corrupt", "wrong_length", "timed_out", "cancelled",
    /// "no_room", "failed".
    #[getter]
    fn results(&self) -> Vec<&'static str> {
        self.outcome.results.iter().map(name).collect()
    }

    /// The first failure as a sentence. None if each block is done, was already stored, or is absent.
    #[getter]
    fn error(&self) -> Option<String> {
        let failed =
            |result: &&BlockResult| !result.is_ok() && !matches!(result, BlockResult::Absent);
        let (index, result) =
            self.outcome.results.iter().enumerate().find(|(_, result)| failed(result))?;
        Some(match result {
            BlockResult::Failed(error) => format!("key {index}: {}", errors::text(error.as_ref())),
            other => format!("key {index}: {other}"),
        })
    }

    /// The bytes of all blocks that were moved.
    #[getter]
    fn bytes(&self) -> u64 {
        self.outcome.bytes.get()
    }

    /// The time from the submission to the end, in seconds.
    #[getter]
    fn seconds(&self) -> f64 {
        self.outcome.took.as_secs_f64()
    }

    fn __repr__(&self) -> String {
        let done = self.outcome.results.iter().filter(|result| result.is_ok()).count();
        format!("Outcome({done} of {} done, {} bytes)", self.outcome.results.len(), self.bytes())
    }
}

/// A job in flight. Wait for it, poll it, or `await` it. Dropping it does not cancel the job.
#[pyclass(frozen, module = "terrane_kv")]
pub(crate) struct Job {
    /// Without a lock of its own. In a forked child, another thread may have held the lock at the fork.
    job: NativeJob,
    /// The queue of this job alone. `None` if the caller passed a queue.
    queue: Option<NativeQueue<JobOutcome>>,
    /// The device with the job's blocks.
    context: Option<Context>,
    outcome: OnceLock<Py<Outcome>>,
    /// Functions to call when a thread has taken the outcome. The descriptor is then no longer readable, so an event
    /// loop would not wake up.
    callbacks: Mutex<Vec<Py<PyAny>>>,
    owner: OwnerProcess,
}

impl Job {
    pub(crate) fn new(job: NativeJob, queue: Option<NativeQueue<JobOutcome>>) -> Self {
        let owner = OwnerProcess::current();
        let (outcome, callbacks) = (OnceLock::new(), Mutex::new(Vec::new()));
        Self { job, queue, context: None, outcome, callbacks, owner }
    }

    /// The job, whose blocks are on this device.
    pub(crate) fn on_device(self, context: Option<&Context>) -> Self {
        Self { context: context.cloned(), ..self }
    }

    /// If the outcome was taken, calls the functions that wait for it.
    fn call_waiting(&self, py: Python<'_>) {
        if self.outcome.get().is_none() {
            return;
        }
        // No Python code runs under the lock.
        let callbacks = std::mem::take(&mut *lock(&self.callbacks));
        for function in callbacks {
            if let Err(error) = function.call0(py) {
                error.write_unraisable(py, Some(function.bind(py)));
            }
        }
    }

    fn check_owner(&self) -> PyResult<()> {
        if self.owner.is_current() {
            return Ok(());
        }
        Err(ForkedError::new_err("the job belongs to the parent of this process"))
    }

    fn own_queue(&self) -> PyResult<&NativeQueue<JobOutcome>> {
        self.check_owner()?;
        self.queue.as_ref().ok_or_else(|| {
            StoreError::new_err(
                "the job was submitted with a queue; drain the queue for its outcome",
            )
        })
    }
}

#[pymethods]
impl Job {
    /// Waits for the end, and returns the `Outcome`. The GIL is released meanwhile.
    ///
    /// Raises `TimeoutError` after `timeout` seconds, and `StoreError` if the job has a queue.
    #[pyo3(signature = (timeout = None))]
    fn wait(&self, py: Python<'_>, timeout: Option<f64>) -> PyResult<Py<Outcome>> {
        let queue = self.own_queue()?;
        let deadline = deadline(timeout)?;
        loop {
            if let Some(outcome) = self.outcome.get() {
                release_ended(py);
                return Ok(outcome.clone_ref(py));
            }
            // `None` at the deadline, or because another thread has taken the outcome.
            match py.detach(|| queue.wait(deadline)) {
                Some(outcome) => {
                    let outcome = Py::new(py, Outcome::new(outcome))?;
                    // Only one thread gets the value, so it is set once.
                    let _ = self.outcome.set(outcome);
                    self.call_waiting(py);
                }
                None if deadline.is_some_and(|deadline| Instant::now() >= deadline) => {
                    if self.outcome.get().is_none() {
                        return Err(PyTimeoutError::new_err("the job has not ended"));
                    }
                }
                None => py.detach(std::thread::yield_now),
            }
        }
    }

    /// Whether the job has ended.
    fn has_ended(&self) -> PyResult<bool> {
        let queue = self.own_queue()?;
        Ok(self.outcome.get().is_some() || !queue.is_empty())
    }

    /// Waits until the layers from `first` to `layer` have arrived for all blocks. The GIL is released meanwhile.
    ///
    /// The job is a get with `layer_by_layer`. Blocks that come from disk hold all layers back. With `stream` (the
    /// handle of a CUDA stream), that stream waits instead of the thread: its later work runs after the arrival. The
    /// thread then waits for blocks that come from disk, and until the copies of the layers are submitted.
    ///
    /// Raises `TimeoutError` after `timeout` seconds, `StoreError` if the job fails before, and `ValueError` if there is
    /// no such layer.
    #[pyo3(signature = (layer, timeout = None, *, first = 0, stream = None))]
    fn wait_layer(
        &self,
        py: Python<'_>,
        layer: u32,
        timeout: Option<f64>,
        first: u32,
        stream: Option<i64>,
    ) -> PyResult<()> {
        self.check_owner()?;
        let layers = self.job.layers().ok_or_else(|| {
            PyValueError::new_err(
                "the job has no layers to wait for; submit a get with layer_by_layer=True",
            )
        })?;
        let (deadline, waited) = (deadline(timeout)?, first..=layer);
        let has_come = match stream {
            None => py.detach(|| match deadline {
                None => layers.wait(waited).map(|()| true),
                Some(deadline) => layers.wait_until(waited, deadline),
            }),
            Some(stream) => {
                let context = self.context.as_ref().ok_or_else(|| {
                    PyValueError::new_err(
                        "stream= was passed for blocks in host memory, which no stream orders; omit it",
                    )
                })?;
                let events = py.detach(|| match deadline {
                    None => layers.events(waited).map(Some),
                    Some(deadline) => layers.events_until(waited, deadline),
                });
                match events {
                    Ok(Some(events)) => {
                        device::make_wait(context, stream, &events)?;
                        Ok(true)
                    }
                    Ok(None) => Ok(false),
                    Err(error) => Err(error),
                }
            }
        };
        match has_come {
            Ok(true) => Ok(()),
            Ok(false) => Err(PyTimeoutError::new_err(format!("layer {layer} has not arrived"))),
            Err(error @ JobLayerError::NoSuchLayer { .. }) => {
                Err(PyValueError::new_err(errors::text(&error)))
            }
            Err(error) => Err(StoreError::new_err(errors::text(&error))),
        }
    }

    /// A descriptor that is readable from the end of the job until `wait` has returned.
    fn fileno(&self) -> PyResult<i32> {
        Ok(self.own_queue()?.as_fd().as_raw_fd())
    }

    /// Calls `function` when a thread has taken the outcome with `wait`, or at once if one has.
    fn _add_taken_callback(&self, py: Python<'_>, function: Py<PyAny>) {
        lock(&self.callbacks).push(function);
        self.call_waiting(py);
    }

    /// Removes a function that was added and was not called.
    fn _remove_taken_callback(&self, function: &Bound<'_, PyAny>) {
        let mut callbacks = lock(&self.callbacks);
        let at = callbacks.iter().position(|it| it.is(function));
        let removed = at.map(|at| callbacks.swap_remove(at));
        // No Python code runs under the lock.
        drop(callbacks);
        drop(removed);
    }

    /// Cancels the job. Blocks that are done stay done. In a forked child it does nothing.
    fn cancel(&self, py: Python<'_>) {
        py.detach(|| self.job.cancel());
    }

    /// Raises the priority to "low", "normal" or "high". It is never lowered. In a forked child it does nothing.
    fn raise_priority(&self, py: Python<'_>, level: &str) -> PyResult<()> {
        let priority = priority(level)?;
        py.detach(|| self.job.raise(priority));
        Ok(())
    }

    fn __await__<'py>(slf: &Bound<'py, Self>) -> PyResult<Bound<'py, PyAny>> {
        let module = slf.py().import("terrane_kv.aio")?;
        module.getattr("ended")?.call1((slf,))?.call_method0("__await__")
    }
}

/// A priority by its name.
pub(crate) fn priority(level: &str) -> PyResult<Priority> {
    match level {
        "low" => Ok(Priority::Low),
        "normal" => Ok(Priority::Normal),
        "high" => Ok(Priority::High),
        _ => Err(PyValueError::new_err(format!(
            "there is no priority {level:?}; pass \"low\", \"normal\" or \"high\""
        ))),
    }
}
