//! Streams: queues of a device's work, owned or borrowed.

use std::any::Any;
use std::ffi::c_void;
use std::sync::Arc;
use std::{fmt, ptr};

use cudarc::driver::sys::{CUdeviceptr, CUstream};
use terrane_core::convert::to_u64;
use terrane_core::{ByteCount, Location};

use crate::driver::code::DriverCode;
use crate::error::{CudaError, check, check_ready};
use crate::runtime::context::Context;
use crate::runtime::event::Event;

/// `CU_STREAM_PER_THREAD`: the handle of the per-thread default stream, a different stream on each
/// thread.
const PER_THREAD: usize = 2;

/// `CU_STREAM_NON_BLOCKING`: the stream and the legacy default stream do not wait for each other.
const NON_BLOCKING: u32 = 1;

/// The priority of a stream's work against that of other streams, when the device is fully used.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum StreamPriority {
    /// The device's lowest priority. On many devices, it equals the default.
    Lowest,
    /// The default priority of streams.
    #[default]
    Default,
    /// The device's highest priority.
    Highest,
}

/// A queue of a device's work, which runs in the order of its submission.
///
/// The queue is the same on every thread. The per-thread default stream is not, so it cannot be
/// borrowed. [`Event::record_on_thread_stream`] and [`Event::delay_thread_stream`] order it against
/// other streams.
///
/// A clone is another handle to the same stream. An owned stream is destroyed when the last clone
/// and the last transfer with its [order](Self::order) have dropped it. Submitted work still runs.
#[derive(Clone)]
pub struct Stream(Arc<RawStream>);

/// The stream that clones and orders share.
pub(crate) struct RawStream {
    raw: CUstream,
    context: Context,
    /// Keeps a borrowed stream alive; `None` for an owned one.
    owner: Option<Box<dyn Any + Send + Sync>>,
}

// SAFETY: the driver accepts a stream's handle on any thread, and synchronises its calls.
unsafe impl Send for RawStream {}
// SAFETY: as for `Send`.
unsafe impl Sync for RawStream {}

impl Stream {
    /// Creates a stream that does not synchronise with the legacy default stream.
    ///
    /// # Errors
    ///
    /// [`CudaError::Driver`], [`CudaError::ContextLost`].
    pub fn new(context: &Context) -> Result<Self, CudaError> {
        Self::with_priority(context, StreamPriority::Default)
    }

    /// Creates a stream with a priority.
    ///
    /// # Errors
    ///
    /// As for [`new`](Self::new).
    pub fn with_priority(context: &Context, priority: StreamPriority) -> Result<Self, CudaError> {
        let mut raw = ptr::null_mut();
        context.bound(|functions| {
            let (mut lowest, mut highest) = (0, 0);
            // SAFETY: the function writes two numbers.
            unsafe { functions.cuCtxGetStreamPriorityRange(&raw mut lowest, &raw mut highest) }?;
            let priority = match priority {
                StreamPriority::Lowest => lowest,
                StreamPriority::Default => 0,
                StreamPriority::Highest => highest,
            };
            // SAFETY: the function writes one handle.
            unsafe { functions.cuStreamCreateWithPriority(&raw mut raw, NON_BLOCKING, priority) }
        })?;
        context.counters().streams.add(ByteCount::ZERO);
        Ok(Self(Arc::new(RawStream { raw, context: context.clone(), owner: None })))
    }

    /// Borrows a stream of another library by its handle (a `CUstream` or `cudaStream_t`; null is
    /// the legacy default stream). `owner` lives as long as a clone of the value, or a transfer
    /// with its [order](Self::order).
    ///
    /// # Errors
    ///
    /// [`CudaError::WrongContext`] if the stream belongs to another context,
    /// [`CudaError::PerThreadStream`] for the per-thread default stream, [`CudaError::Driver`],
    /// [`CudaError::ContextLost`]. `owner` drops on error.
    ///
    /// # Safety
    ///
    /// The handle is a live stream for as long as `owner` lives.
    pub unsafe fn borrow(
        context: &Context,
        handle: *mut c_void,
        owner: impl Any + Send + Sync,
    ) -> Result<Self, CudaError> {
        if handle.addr() == PER_THREAD {
            return Err(CudaError::PerThreadStream);
        }
        let raw: CUstream = handle.cast();
        let mut its_context = ptr::null_mut();
        context.bound(|functions| {
            // SAFETY: the caller guarantees a live stream; one handle is written.
            unsafe { functions.cuStreamGetCtx(raw, &raw mut its_context) }
        })?;
        if !context.is(its_context) {
            let device = context.device().id;
            return Err(CudaError::WrongContext { what: "stream", device });
        }
        let owner: Option<Box<dyn Any + Send + Sync>> = Some(Box::new(owner));
        Ok(Self(Arc::new(RawStream { raw, context: context.clone(), owner })))
    }

    /// The driver's handle, a `CUstream`, for other libraries. It is valid for as long as this
    /// value lives. Other libraries must not destroy it.
    #[must_use]
    pub fn handle(&self) -> *mut c_void {
        self.0.raw.cast()
    }

    /// The context of the stream.
    #[must_use]
    pub fn context(&self) -> &Context {
        &self.0.context
    }

    /// Whether the stream is borrowed.
    #[must_use]
    pub fn is_borrowed(&self) -> bool {
        self.0.owner.is_some()
    }

    /// Whether all submitted work has run. Never blocks.
    ///
    /// # Errors
    ///
    /// [`CudaError::ContextLost`] or [`CudaError::Driver`], also for errors of earlier work.
    pub fn is_idle(&self) -> Result<bool, CudaError> {
        self.context().bound(|functions| {
            // SAFETY: the stream is alive.
            check_ready("cuStreamQuery", unsafe { (functions.cuStreamQuery)(self.raw()) })
        })
    }

    /// Whether the stream is being captured into a graph, so that submitted work does not run.
    /// Never blocks, and does not invalidate the capture. A driver without this query has no
    /// captures.
    ///
    /// # Errors
    ///
    /// [`CudaError::Driver`], [`CudaError::ContextLost`].
    pub(crate) fn is_captured(&self) -> Result<bool, CudaError> {
        self.context().bound(|functions| {
            let Some(ask) = functions.cuStreamIsCapturing else { return Ok(false) };
            let mut status = 0;
            // SAFETY: the stream is alive; one number is written.
            let code = unsafe { ask(self.raw(), &raw mut status) };
            // The legacy default stream is unusable while a stream that synchronises with it is
            // being captured.
            if DriverCode::new(code).is_of_capture() {
                return Ok(true);
            }
            check("cuStreamIsCapturing", code).map(|()| status != 0)
        })
    }

    /// Blocks until all submitted work has run.
    ///
    /// # Errors
    ///
    /// As for [`is_idle`](Self::is_idle).
    pub fn synchronize(&self) -> Result<(), CudaError> {
        // SAFETY: the stream is alive.
        self.context().bound(|functions| unsafe { functions.cuStreamSynchronize(self.raw()) })
    }

    /// Makes later work of this stream run after the work that `event` marks, without blocking the
    /// caller. The event may belong to another device. An event that was never recorded delays
    /// nothing.
    ///
    /// # Errors
    ///
    /// [`CudaError::NotRecorded`] if the event's last record failed, [`CudaError::Driver`],
    /// [`CudaError::ContextLost`].
    pub fn wait_for(&self, event: &Event) -> Result<(), CudaError> {
        if !event.is_recorded()? {
            return Ok(());
        }
        // SAFETY: the event is alive. It may be reused at once: the driver has noted its mark when
        // the call returns.
        unsafe { self.wait_for_handle(event.handle()) }
    }

    /// Like [`wait_for`](Self::wait_for), for an event of another library by its handle (a
    /// `CUevent` or `cudaEvent_t`), for example the event of a transfer's layer.
    ///
    /// # Errors
    ///
    /// [`CudaError::Driver`], [`CudaError::ContextLost`].
    ///
    /// # Safety
    ///
    /// The handle is a live event. It may be destroyed after the call has returned.
    pub unsafe fn wait_for_handle(&self, event: *mut c_void) -> Result<(), CudaError> {
        self.context().bound(|functions| {
            // SAFETY: the stream is alive, and the caller guarantees a live event.
            unsafe { functions.cuStreamWaitEvent(self.raw(), event.cast(), 0) }
        })
    }

    /// Submits a copy of `length` bytes from one contiguous span to another. Each span is in host
    /// memory or in a device's memory. With pageable host memory the call may block until the copy
    /// has run.
    ///
    /// # Errors
    ///
    /// [`CudaError::Unreachable`] for a position in a file, [`CudaError::Driver`],
    /// [`CudaError::ContextLost`].
    ///
    /// # Safety
    ///
    /// Until the copy has completed, both spans are valid, nothing writes the source, and
    /// nothing else reads or writes the destination. The spans do not overlap.
    pub unsafe fn copy(
        &self,
        source: Location,
        destination: Location,
        length: ByteCount,
    ) -> Result<(), CudaError> {
        let (from, to) = (number(source)?, number(destination)?);
        if length.is_zero() {
            return Ok(());
        }
        self.context().bound(|functions| {
            // SAFETY: the caller guarantees it for both spans.
            unsafe { functions.cuMemcpyAsync(to, from, length.to_usize(), self.raw()) }
        })
    }

    /// Submits a fill of `length` bytes with `value`, in device memory or in host memory that the
    /// device accesses at the host's own address.
    ///
    /// # Errors
    ///
    /// As for [`copy`](Self::copy).
    ///
    /// # Safety
    ///
    /// Until the fill has completed, the span is valid and nothing else uses it.
    pub unsafe fn fill(
        &self,
        destination: Location,
        value: u8,
        length: ByteCount,
    ) -> Result<(), CudaError> {
        let to = number(destination)?;
        if length.is_zero() {
            return Ok(());
        }
        self.context().bound(|functions| {
            // SAFETY: the caller guarantees it for the span.
            unsafe { functions.cuMemsetD8Async(to, value, length.to_usize(), self.raw()) }
        })
    }

    pub(crate) fn raw(&self) -> CUstream {
        self.0.raw
    }

    pub(crate) fn shared(&self) -> &Arc<RawStream> {
        &self.0
    }
}

/// The driver's handle for the calling thread's default stream in the current context.
pub(crate) const fn of_this_thread() -> CUstream {
    ptr::without_provenance_mut(PER_THREAD)
}

/// A location in the driver's unified address space of host and devices.
fn number(location: Location) -> Result<CUdeviceptr, CudaError> {
    match location {
        Location::Host(address) => {
            // The driver converts the number back to a pointer.
            Ok(to_u64(address.as_ptr().expose_provenance()))
        }
        Location::Device { address, .. } => Ok(address.get()),
        _ => Err(CudaError::Unreachable { location }),
    }
}

impl Drop for RawStream {
    fn drop(&mut self) {
        if self.owner.is_some() {
            return;
        }
        self.context.counters().streams.subtract(ByteCount::ZERO);
        // SAFETY: the stream was created here, and nothing uses it any more.
        self.context.bound_in_drop(|functions| unsafe { functions.cuStreamDestroy_v2(self.raw) });
    }
}

impl fmt::Debug for Stream {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Stream")
            .field("handle", &self.raw())
            .field("device", &self.context().device().id)
            .field("is_borrowed", &self.is_borrowed())
            .finish()
    }
}
