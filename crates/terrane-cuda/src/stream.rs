//! Streams: queues of a device's work, owned or borrowed.

use std::any::Any;
use std::ffi::c_void;
use std::fmt;
use std::ptr;

use cudarc::driver::sys::{CUdeviceptr, CUstream};
use terrane_core::{ByteCount, Location};

use crate::context::Context;
use crate::driver::DriverCode;
use crate::error::{CudaError, check, check_ready};
use crate::event::Event;

/// `CU_STREAM_PER_THREAD`: the handle of the per-thread default stream, another stream on each thread.
const PER_THREAD: usize = 2;

/// `CU_STREAM_NON_BLOCKING`: the legacy default stream does not wait for it, nor it for that.
const NON_BLOCKING: u32 = 1;

/// How a stream's work ranks against that of other streams, where there is not enough device for
/// all of it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum StreamPriority {
    /// Below everything else, the default included where the device can.
    Lowest,
    /// As streams are by default.
    #[default]
    Default,
    /// Above everything else.
    Highest,
}

/// A queue of a device's work, which runs in the order of its submission.
///
/// It is the same queue on every thread. The per-thread default stream is not, so it cannot be
/// borrowed; [`Event::record_on_thread_stream`] and [`Event::delay_thread_stream`] order it against
/// other streams.
///
/// An owned stream is destroyed when it drops; what was submitted still runs.
pub struct Stream {
    raw: CUstream,
    context: Context,
    /// Keeps a borrowed stream alive; `None` for an owned one.
    owner: Option<Box<dyn Any + Send + Sync>>,
}

// SAFETY: the driver takes a stream's handle on any thread, and synchronises.
unsafe impl Send for Stream {}
// SAFETY: as for `Send`.
unsafe impl Sync for Stream {}

impl Stream {
    /// A stream of its own, which does not wait for the legacy default stream.
    ///
    /// # Errors
    ///
    /// [`CudaError::Driver`], [`CudaError::DeviceLost`].
    pub fn new(context: &Context) -> Result<Self, CudaError> {
        Self::with_priority(context, StreamPriority::Default)
    }

    /// A stream of its own with a priority.
    ///
    /// # Errors
    ///
    /// As for [`new`](Self::new).
    pub fn with_priority(context: &Context, priority: StreamPriority) -> Result<Self, CudaError> {
        let mut raw = ptr::null_mut();
        context.bound(|functions| {
            let (mut lowest, mut highest) = (0, 0);
            // SAFETY: the function writes two numbers.
            let code = unsafe {
                (functions.cuCtxGetStreamPriorityRange)(&raw mut lowest, &raw mut highest)
            };
            check("cuCtxGetStreamPriorityRange", code)?;
            let priority = match priority {
                StreamPriority::Lowest => lowest,
                StreamPriority::Default => 0,
                StreamPriority::Highest => highest,
            };
            // SAFETY: the function writes one handle.
            let code = unsafe {
                (functions.cuStreamCreateWithPriority)(&raw mut raw, NON_BLOCKING, priority)
            };
            check("cuStreamCreateWithPriority", code)
        })?;
        context.counters().streams.add(ByteCount::ZERO);
        Ok(Self { raw, context: context.clone(), owner: None })
    }

    /// Borrows somebody else's stream by its handle (a `CUstream` or `cudaStream_t`; null is the
    /// legacy default stream). `owner` is kept for as long as this value lives.
    ///
    /// # Errors
    ///
    /// [`CudaError::WrongContext`] if the stream is not of this context,
    /// [`CudaError::PerThreadStream`] for the per-thread default stream; the owner drops then.
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
            // SAFETY: the stream is alive, as the caller promised; one handle is written.
            let code = unsafe { (functions.cuStreamGetCtx)(raw, &raw mut its_context) };
            check("cuStreamGetCtx", code)
        })?;
        if !context.is(its_context) {
            let device = context.device().id;
            return Err(CudaError::WrongContext { what: "stream", device });
        }
        Ok(Self { raw, context: context.clone(), owner: Some(Box::new(owner)) })
    }

    /// The driver's handle, a `CUstream`, for other libraries. It is valid for as long as this
    /// value lives; destroying it is not theirs.
    #[must_use]
    pub const fn handle(&self) -> *mut c_void {
        self.raw.cast()
    }

    /// The context that it belongs to.
    #[must_use]
    pub const fn context(&self) -> &Context {
        &self.context
    }

    /// Whether it is somebody else's.
    #[must_use]
    pub const fn is_borrowed(&self) -> bool {
        self.owner.is_some()
    }

    /// Whether everything that was submitted has run. Never blocks.
    ///
    /// # Errors
    ///
    /// [`CudaError::DeviceLost`] or [`CudaError::Driver`], also for what earlier work met.
    pub fn is_idle(&self) -> Result<bool, CudaError> {
        self.context.bound(|functions| {
            // SAFETY: the stream is alive.
            check_ready("cuStreamQuery", unsafe { (functions.cuStreamQuery)(self.raw) })
        })
    }

    /// Whether what is submitted goes to a graph, so that nothing of it runs. Never blocks, and
    /// does the capture no harm. A driver that cannot say has no captures.
    ///
    /// # Errors
    ///
    /// [`CudaError::Driver`], [`CudaError::DeviceLost`].
    pub(crate) fn is_captured(&self) -> Result<bool, CudaError> {
        self.context.bound(|functions| {
            let Some(ask) = functions.cuStreamIsCapturing else { return Ok(false) };
            let mut status = 0;
            // SAFETY: the stream is alive; one number is written.
            let code = unsafe { ask(self.raw, &raw mut status) };
            // The legacy default stream cannot be used while any stream that waits for it is
            // captured.
            if DriverCode::new(code).is_of_capture() {
                return Ok(true);
            }
            check("cuStreamIsCapturing", code).map(|()| status != 0)
        })
    }

    /// Blocks until everything that was submitted has run.
    ///
    /// # Errors
    ///
    /// As for [`is_idle`](Self::is_idle).
    pub fn synchronize(&self) -> Result<(), CudaError> {
        self.context.bound(|functions| {
            // SAFETY: the stream is alive.
            check("cuStreamSynchronize", unsafe { (functions.cuStreamSynchronize)(self.raw) })
        })
    }

    /// Makes what is submitted from now on run after what `event` marks, without blocking the
    /// caller. The event may be of another device; one that was never recorded delays nothing.
    ///
    /// # Errors
    ///
    /// [`CudaError::NotRecorded`] if the event's last record failed, [`CudaError::Driver`],
    /// [`CudaError::DeviceLost`].
    pub fn wait_for(&self, event: &Event) -> Result<(), CudaError> {
        if !event.marks_something()? {
            return Ok(());
        }
        self.context.bound(|functions| {
            // SAFETY: stream and event are alive; the event may be used again at once, as the
            // driver has taken note of what it marks when the call returns.
            let code = unsafe { (functions.cuStreamWaitEvent)(self.raw, event.raw(), 0) };
            check("cuStreamWaitEvent", code)
        })
    }

    /// As [`wait_for`](Self::wait_for), for somebody else's event by its handle (a `CUevent` or
    /// `cudaEvent_t`): the event of a layer of a transfer, say.
    ///
    /// # Errors
    ///
    /// [`CudaError::Driver`], [`CudaError::DeviceLost`].
    ///
    /// # Safety
    ///
    /// The handle is a live event. It may go when the call has returned.
    pub unsafe fn wait_for_handle(&self, event: *mut c_void) -> Result<(), CudaError> {
        self.context.bound(|functions| {
            // SAFETY: the stream is alive, and the event is, as the caller promised.
            let code = unsafe { (functions.cuStreamWaitEvent)(self.raw, event.cast(), 0) };
            check("cuStreamWaitEvent", code)
        })
    }

    /// Submits the copy of `length` bytes from one contiguous span to another, each of them the
    /// host's or a device's. With pageable host memory the call may block until the copy has run.
    ///
    /// # Errors
    ///
    /// [`CudaError::Unreachable`] for a position in a file, [`CudaError::Driver`],
    /// [`CudaError::DeviceLost`].
    ///
    /// # Safety
    ///
    /// Until the stream has come past the copy, both spans are valid, nobody writes the source,
    /// and nobody else reads or writes the destination; they do not overlap.
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
        self.context.bound(|functions| {
            // SAFETY: the caller promised it of both spans.
            let code = unsafe { (functions.cuMemcpyAsync)(to, from, length.to_usize(), self.raw) };
            check("cuMemcpyAsync", code)
        })
    }

    /// Submits writing `value` to `length` bytes of device memory, or of host memory that the
    /// device reaches at its own address.
    ///
    /// # Errors
    ///
    /// As for [`copy`](Self::copy).
    ///
    /// # Safety
    ///
    /// Until the stream has come past it, the span is valid and nobody else uses it.
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
        self.context.bound(|functions| {
            // SAFETY: the caller promised it of the span.
            let code =
                unsafe { (functions.cuMemsetD8Async)(to, value, length.to_usize(), self.raw) };
            check("cuMemsetD8Async", code)
        })
    }

    pub(crate) const fn raw(&self) -> CUstream {
        self.raw
    }
}

/// What the driver takes for the default stream of the thread that calls it, in the current context.
pub(crate) const fn of_this_thread() -> CUstream {
    ptr::without_provenance_mut(PER_THREAD)
}

/// A location in the one address space that the driver has for host and devices.
fn number(location: Location) -> Result<CUdeviceptr, CudaError> {
    match location {
        Location::Host(address) => {
            // The driver makes a pointer of the number again.
            Ok(ByteCount::from_usize(address.as_ptr().expose_provenance()).get())
        }
        Location::Device { address, .. } => Ok(address.get()),
        _ => Err(CudaError::Unreachable { location }),
    }
}

impl Drop for Stream {
    fn drop(&mut self) {
        if self.owner.is_some() {
            return;
        }
        self.context.counters().streams.subtract(ByteCount::ZERO);
        self.context.bound_in_drop(|functions| {
            // SAFETY: the stream was made here, and nobody uses it any more.
            check("cuStreamDestroy_v2", unsafe { (functions.cuStreamDestroy_v2)(self.raw) })
        });
    }
}

impl fmt::Debug for Stream {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Stream")
            .field("handle", &self.raw)
            .field("device", &self.context.device().id)
            .field("is_borrowed", &self.is_borrowed())
            .finish()
    }
}
