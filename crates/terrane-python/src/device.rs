//! CUDA devices: their contexts, and the order of jobs after the work of other libraries.

use std::ffi::c_void;

use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use pyo3::types::PyDict;
use terrane_core::sync::lock;
use terrane_core::{ByteCount, DeviceId};
use terrane_cuda::{Context, CudaError, Event, Stream, Timing, WithDevices};
use terrane_interop::dlpack::ConsumerStream;
use terrane_transfer::{DeviceOrder, EventHandle, TransferManager};

use crate::errors::{ForkedError, StoreError, text};
use crate::process::PerProcess;
use crate::streams::StreamPool;
use crate::torch;

/// The contexts that were created. They are kept, because the driver frees a device's memory with its last context.
static CONTEXTS: PerProcess<Vec<Context>> = PerProcess::new();

/// `CU_STREAM_PER_THREAD`, the default stream of the calling thread.
const PER_THREAD: i64 = 2;

const OR_COMPLETED: &str = ", or -1 if the device has completed its work";

/// The context of a device. The first call loads the driver, which may take seconds with the list locked. So callers
/// must release the GIL.
pub(crate) fn context(device: DeviceId) -> PyResult<Context> {
    let mut known = lock(CONTEXTS.get());
    if let Some(context) = known.iter().find(|context| context.device().id == device) {
        return Ok(context.clone());
    }
    let context = Context::primary(device).map_err(refused)?;
    known.push(context.clone());
    Ok(context)
}

/// A transfer manager for these devices, the host and files.
pub(crate) fn manager(contexts: &[Context]) -> PyResult<TransferManager> {
    let failed = |error: terrane_transfer::TransferError| StoreError::new_err(text(&error));
    if contexts.is_empty() {
        return TransferManager::with_default_engines().map_err(failed);
    }
    Ok(TransferManager::builder().devices(contexts).map_err(failed)?.build())
}

/// The device of a cache, for the order of its jobs.
pub(crate) struct DeviceSide {
    /// Streams of this package, which wait for streams of the tensors' library.
    streams: StreamPool,
    /// A tensor of that library. `None` for a cache that was adopted by addresses.
    tensor: Option<Py<PyAny>>,
}

impl DeviceSide {
    pub(crate) fn new(context: &Context, tensor: Option<Py<PyAny>>) -> Self {
        Self { streams: StreamPool::new(context), tensor }
    }

    pub(crate) fn context(&self) -> &Context {
        self.streams.context()
    }

    /// The work after which a job runs.
    ///
    /// With `None`, this is the work on the library's current stream. PyTorch returns its current stream of the
    /// tensors' device. For other libraries, DLPack's `stream` argument makes a stream of this package wait for the
    /// library's stream. With a number, it is the work on that stream, or no work for −1. The stream must exist only
    /// during the call, because an event marks its work.
    pub(crate) fn order(&self, py: Python<'_>, stream: Option<i64>) -> PyResult<DeviceOrder> {
        if stream == Some(-1) {
            return Ok(DeviceOrder::AlreadySynchronised);
        }
        self.mark(py, stream)?.order().map_err(refused)
    }

    /// The work of the libraries of both caches, which may be on two devices.
    pub(crate) fn order_with(&self, py: Python<'_>, other: &Self) -> PyResult<DeviceOrder> {
        let marks = [self.mark(py, None)?, other.mark(py, None)?];
        let joined = self.on_own_stream(|stream| {
            marks.iter().try_for_each(|mark| stream.wait_for(mark)).map_err(refused)
        })?;
        joined.order().map_err(refused)
    }

    fn mark(&self, py: Python<'_>, stream: Option<i64>) -> PyResult<Event> {
        match stream {
            None => {
                let tensor = self.tensor()?.bind(py);
                match torch::current_stream(tensor)? {
                    Some(handle) => self.mark(py, Some(handle)),
                    None => self.on_own_stream(|stream| ask(tensor, stream)),
                }
            }
            Some(PER_THREAD) => {
                let event = Event::new(self.context(), Timing::Off).map_err(refused)?;
                event.record_on_thread_stream().map_err(refused)?;
                Ok(event)
            }
            Some(handle) => {
                // SAFETY: Python's caller passes a stream that exists during the call, and the value is dropped
                // before the call ends.
                marked(&unsafe { borrowed(self.context(), handle, OR_COMPLETED) }?)
            }
        }
    }

    fn tensor(&self) -> PyResult<&Py<PyAny>> {
        self.tensor.as_ref().ok_or_else(|| {
            PyValueError::new_err(
                "the cache was adopted by its addresses, so its library's stream is unknown; pass stream=",
            )
        })
    }

    /// An event after the work that `submit` submits to a stream of this package.
    fn on_own_stream(&self, submit: impl FnOnce(&Stream) -> PyResult<()>) -> PyResult<Event> {
        let stream = self.streams.take().map_err(refused)?;
        submit(&stream)?;
        let event = marked(&stream)?;
        self.streams.put_back(stream, &event);
        Ok(event)
    }
}

/// The stream of another library with this handle. `other` is what a caller may pass instead.
///
/// # Safety
///
/// The stream exists as long as the value.
unsafe fn borrowed(context: &Context, handle: i64, other: &str) -> PyResult<Stream> {
    let number = u64::try_from(handle).map_err(|_| {
        PyValueError::new_err(format!(
            "stream {handle} does not exist; pass a stream's handle{other}"
        ))
    })?;
    let pointer: *mut c_void =
        std::ptr::with_exposed_provenance_mut(ByteCount::new(number).to_usize());
    // SAFETY: the caller's promise.
    unsafe { Stream::borrow(context, pointer, ()) }.map_err(refused)
}

/// Makes later work of a stream of another library, which exists during the call, run after these events.
pub(crate) fn make_wait(context: &Context, handle: i64, events: &[EventHandle]) -> PyResult<()> {
    // SAFETY: Python's caller passes a stream that exists during the call, in which the value is dropped.
    let stream = unsafe { borrowed(context, handle, "") }?;
    stream.wait_for_events(events).map_err(refused)
}

/// Makes a stream of this package wait for the current stream of the tensor's library.
fn ask(tensor: &Bound<'_, PyAny>, stream: &Stream) -> PyResult<()> {
    let options = PyDict::new(tensor.py());
    options.set_item("stream", ConsumerStream::of(stream).to_python())?;
    // The capsule is not used. Its drop returns the tensor.
    tensor.call_method("__dlpack__", (), Some(&options)).map(drop)
}

fn marked(stream: &Stream) -> PyResult<Event> {
    let event = Event::new(stream.context(), Timing::Off).map_err(refused)?;
    event.record(stream).map_err(refused)?;
    Ok(event)
}

pub(crate) fn refused(error: CudaError) -> PyErr {
    match error {
        CudaError::Forked => ForkedError::new_err(text(&error)),
        _ => StoreError::new_err(text(&error)),
    }
}
