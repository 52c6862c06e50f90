//! Copies between caches.

use std::mem::ManuallyDrop;
use std::sync::{Arc, Mutex, OnceLock};
use std::time::Instant;

use pyo3::exceptions::PyTimeoutError;
use pyo3::prelude::*;
use terrane_core::sync::lock;
use terrane_core::{DeviceId, OwnerProcess};
use terrane_cuda::Context;
use terrane_transfer::{
    Completion, Outcome, Ticket, Transfer as NativeTransfer, TransferError, TransferManager,
};

use crate::cache::KvCache;
use crate::device;
use crate::errors::{ForkedError, StoreError, text};
use crate::memory::{Blocks, KeptObjects, drop_detached, release_ended};
use crate::numbers::deadline;
use crate::process::PerProcess;

/// The transfers that may be in flight.
static IN_FLIGHT: PerProcess<Vec<Ticket>> = PerProcess::new();

/// Waits until no transfer uses memory of Python. At the deadline, cancels the remaining transfers, and waits for
/// them until `limit`. Returns whether all have ended: a stream may never complete.
pub(crate) fn end_transfers(deadline: Instant, limit: Instant) -> bool {
    let tickets = std::mem::take(&mut *lock(IN_FLIGHT.get()));
    for ticket in &tickets {
        let _ = ticket.wait_until(deadline);
        ticket.cancel();
    }
    tickets.iter().all(|ticket| ticket.wait_until(limit).is_some())
}

/// The objects that keep both ends of a transfer alive.
type Guard = (Arc<KeptObjects>, Arc<KeptObjects>);

/// Copies blocks between caches: host memory, pinned memory and CUDA devices.
///
/// `devices` are the numbers of the CUDA devices that it copies to and from. By default, each store creates its own
/// manager. Pass `Store(…, manager=manager)` to share one.
///
/// When a manager is freed, it waits for its copies and releases the GIL meanwhile.
///
/// Raises `StoreError` if `devices` is not empty and there is no CUDA driver.
#[pyclass(frozen, module = "terrane_kv")]
pub(crate) struct Manager {
    manager: ManuallyDrop<TransferManager>,
    owner: OwnerProcess,
}

impl Manager {
    pub(crate) fn native(&self) -> PyResult<&TransferManager> {
        if self.owner.is_current() {
            return Ok(&self.manager);
        }
        Err(ForkedError::new_err("the manager belongs to the parent of this process"))
    }
}

impl Drop for Manager {
    fn drop(&mut self) {
        // SAFETY: the field is not used afterwards.
        let manager = unsafe { ManuallyDrop::take(&mut self.manager) };
        // The drop joins the threads of the engines, after they have completed their copies.
        drop_detached(manager);
    }
}

#[pymethods]
impl Manager {
    #[new]
    #[pyo3(signature = (devices = Vec::new()))]
    fn new(py: Python<'_>, devices: Vec<u32>) -> PyResult<Self> {
        py.detach(|| {
            let contexts = devices.into_iter().map(|number| device::context(DeviceId::new(number)));
            let contexts: Vec<Context> = contexts.collect::<PyResult<_>>()?;
            let manager = ManuallyDrop::new(device::manager(&contexts)?);
            Ok(Self { manager, owner: OwnerProcess::current() })
        })
    }

    /// Copies blocks of a cache to blocks of another cache with the same shape, in order. It does not wait for the
    /// copy. Both arguments are whole blocks (`cache.blocks(ids)`).
    ///
    /// On a device, the copy runs after the work that is already on the current streams of both libraries. With
    /// `stream` (a handle), it runs after the work on that stream instead; −1 means that the device has completed its
    /// work. With two devices, `stream` is a stream of the source's device.
    ///
    /// After `timeout` seconds the copy fails if it has not started, or else before its next chunk. It does not end
    /// while the device works on a chunk, or has not reached the end of the stream's work. `Transfer.wait(timeout)`
    /// returns in any case.
    ///
    /// The copy also runs after the copies `after` have ended, whether they succeeded or failed. Their blocks are then not
    /// in use.
    ///
    /// Raises `StoreError` if the shapes differ, or a block is in use.
    #[pyo3(signature = (source, destination, *, stream = None, timeout = None, after = Vec::new()))]
    fn copy(
        &self,
        py: Python<'_>,
        source: &Bound<'_, Blocks>,
        destination: &Bound<'_, Blocks>,
        stream: Option<i64>,
        timeout: Option<f64>,
        after: Vec<Bound<'_, Transfer>>,
    ) -> PyResult<Transfer> {
        let (source, destination) = (source.get(), destination.get());
        let ((from, from_blocks), (to, to_blocks)) =
            (source.whole_blocks()?, destination.whole_blocks()?);
        let (from, to) = (from.get(), to.get());
        let mut transfer =
            NativeTransfer::new(from.endpoint(), to.endpoint()).blocks(from_blocks, to_blocks);
        if let Some(order) = KvCache::order_of_both(py, from, to, stream)? {
            transfer = transfer.device_order(order);
        }
        if let Some(deadline) = deadline(timeout)? {
            transfer = transfer.deadline(deadline);
        }
        for earlier in &after {
            let earlier = earlier.get();
            earlier.check()?;
            transfer = transfer.after_end(&earlier.ticket);
        }
        let (manager, guard) = (self.native()?, (source.kept(), destination.kept()));
        let submitted = py.detach(|| manager.submit(transfer, guard));
        release_ended(py);
        let completion =
            submitted.map_err(|rejected| StoreError::new_err(text(&rejected.cause)))?;
        let mut in_flight = lock(IN_FLIGHT.get());
        in_flight.retain(|ticket| !ticket.has_ended());
        in_flight.push(completion.ticket());
        drop(in_flight);
        Ok(Transfer::new(completion))
    }
}

/// A copy in flight. Wait for it, poll it, or `await` it. Dropping it does not cancel the copy.
#[pyclass(frozen, module = "terrane_kv")]
pub(crate) struct Transfer {
    completion: Mutex<Option<Completion<Guard>>>,
    ticket: Ticket,
    ended: OnceLock<Result<Copied, String>>,
    owner: OwnerProcess,
}

/// The result of a copy.
#[pyclass(frozen, get_all, module = "terrane_kv")]
#[derive(Clone)]
pub(crate) struct Copied {
    /// The bytes that were copied.
    bytes: u64,
    /// The time from the start of the copy to its end, in seconds.
    seconds: f64,
    /// The engine that copied, such as "host" or "cuda".
    engine: String,
    /// The engine's path, such as "staged" or "direct".
    path: String,
}

#[pymethods]
impl Copied {
    fn __repr__(&self) -> String {
        let Self { bytes, seconds, engine, path } = self;
        format!("Copied({bytes} bytes in {seconds:.6} s by {engine}, {path})")
    }
}

impl Transfer {
    fn new(completion: Completion<Guard>) -> Self {
        let (ticket, owner) = (completion.ticket(), OwnerProcess::current());
        Self { completion: Mutex::new(Some(completion)), ticket, ended: OnceLock::new(), owner }
    }

    fn check(&self) -> PyResult<()> {
        if self.owner.is_current() {
            return Ok(());
        }
        Err(ForkedError::new_err("the copy belongs to the parent of this process"))
    }

    /// The outcome. The first caller after the end takes it from the completion.
    fn end(&self) -> &Result<Copied, String> {
        let mut completion = lock(&self.completion);
        self.ended.get_or_init(|| match completion.take() {
            // The transfer has ended, so this returns at once.
            Some(completion) => report(completion.wait()),
            None => Err(String::from("another caller has taken the outcome")),
        })
    }
}

fn report(outcome: Outcome<Guard>) -> Result<Copied, String> {
    let report = outcome.result.map_err(|error: TransferError| text(&error))?;
    Ok(Copied {
        bytes: report.explanation.bytes.get(),
        seconds: report.copied.as_secs_f64(),
        engine: report.explanation.engine.to_string(),
        path: report.explanation.path().to_string(),
    })
}

#[pymethods]
impl Transfer {
    /// Waits for the end, and returns a `Copied`. The GIL is released meanwhile.
    ///
    /// Raises `StoreError` if the copy failed, and `TimeoutError` after `timeout` seconds.
    #[pyo3(signature = (timeout = None))]
    fn wait(&self, py: Python<'_>, timeout: Option<f64>) -> PyResult<Copied> {
        self.check()?;
        let deadline = deadline(timeout)?;
        let ended = py.detach(|| {
            match deadline {
                Some(deadline) => self.ticket.wait_until(deadline)?,
                None => self.ticket.wait(),
            };
            Some(self.end().clone())
        });
        release_ended(py);
        match ended {
            Some(ended) => ended.map_err(StoreError::new_err),
            None => Err(PyTimeoutError::new_err("the copy has not ended")),
        }
    }

    /// Whether the copy has ended.
    fn has_ended(&self, py: Python<'_>) -> PyResult<bool> {
        self.check()?;
        // A completion polls the engine, so the end is noticed at once. That may start other copies.
        Ok(py.detach(|| match lock(&self.completion).as_ref() {
            Some(completion) => completion.has_ended(),
            None => self.ticket.has_ended(),
        }))
    }

    /// Cancels the copy, if its engine can. `wait` then raises `StoreError`.
    fn cancel(&self, py: Python<'_>) {
        py.detach(|| self.ticket.cancel());
    }

    fn __await__<'py>(slf: &Bound<'py, Self>) -> PyResult<Bound<'py, PyAny>> {
        let module = slf.py().import("terrane_kv.aio")?;
        module.getattr("copied")?.call1((slf,))?.call_method0("__await__")
    }
}
