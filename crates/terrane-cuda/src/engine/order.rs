//! What a job runs after: asked whether it has happened, and waited for only where it has not.

use std::ffi::c_void;
use std::sync::{Arc, PoisonError, RwLock};

use rustc_hash::FxHashMap;
use terrane_core::{ByteCount, DeviceId};
use terrane_transfer::{DeviceOrder, StreamHandle};

use super::streams::{StreamLease, StreamPool};
use crate::context::Context;
use crate::driver::DriverCode;
use crate::error::{CudaError, check_ready};
use crate::event::{Event, Timing};
use crate::stream::Stream;

/// What has not happened yet.
#[derive(Debug)]
pub(super) enum Pending {
    /// An event of the engine's, behind what somebody's stream had been given.
    Stream(Event),
    /// Somebody's event, by its handle.
    Event(*mut c_void),
}

impl Pending {
    /// What of an order is still to happen; `None` if nothing is.
    ///
    /// # Errors
    ///
    /// [`CudaError::Captured`] if it is a part of a graph, [`CudaError::WrongContext`] if the stream
    /// is not one of the primary context of its device, those of the driver.
    pub(super) fn of(
        order: Option<DeviceOrder>,
        context: &Context,
        peers: &Peers,
    ) -> Result<Option<Self>, CudaError> {
        match order {
            Some(DeviceOrder::AfterStream(handle)) if handle.device() == context.device().id => {
                Self::of_stream(handle, context)
            }
            Some(DeviceOrder::AfterStream(handle)) => {
                Self::of_stream(handle, &peers.get(handle.device())?)
            }
            Some(DeviceOrder::AfterEvent(handle)) => {
                let event = pointer(handle.raw());
                // SAFETY: whoever made the handle promised that it is live until the transfer has
                // ended, which it has not.
                let has_happened = unsafe { has_happened(event, context) }?;
                Ok((!has_happened).then_some(Self::Event(event)))
            }
            // Everything else is ready as it is: the host knows that it has finished.
            _ => Ok(None),
        }
    }

    fn of_stream(handle: StreamHandle, context: &Context) -> Result<Option<Self>, CudaError> {
        // SAFETY: whoever made the handle promised that it is live until the transfer has ended, and
        // the borrowed stream goes before this function returns.
        let stream = unsafe { Stream::borrow(context, pointer(handle.raw()), ()) }?;
        // To ask a captured stream, or to record an event there, would end the capture or drag the
        // engine's streams into it.
        if stream.is_captured()? {
            return Err(CudaError::Captured { what: "stream" });
        }
        if stream.is_idle()? {
            return Ok(None);
        }
        let event = Event::new(context, Timing::Off)?;
        event.record(&stream)?;
        Ok(Some(Self::Stream(event)))
    }

    /// Makes what is submitted to a stream from now on run after it, without waiting for it.
    ///
    /// # Errors
    ///
    /// Those of the driver.
    pub(super) fn delay(&self, stream: &Stream) -> Result<(), CudaError> {
        match self {
            Self::Stream(event) => stream.wait_for(event),
            // SAFETY: whoever made the handle promised that it is live until the transfer has ended.
            Self::Event(event) => unsafe { stream.wait_for_handle(*event) },
        }
    }

    /// The same as something that can be asked and waited for later.
    ///
    /// Somebody else's event may be recorded again meanwhile, and mark something else then. So what
    /// it marks now goes to one of `streams`, which nothing else is on, and is marked there.
    ///
    /// # Errors
    ///
    /// Those of the driver, and of making a stream.
    pub(super) fn into_gate(
        self,
        context: &Context,
        streams: &Arc<StreamPool>,
    ) -> Result<Gate, CudaError> {
        if let Self::Stream(event) = self {
            return Ok(Gate { event: Arc::new(event), stream: None });
        }
        let stream = streams.take()?;
        self.delay(&stream)?;
        let event = Arc::new(Event::new(context, Timing::Off)?);
        event.record(&stream)?;
        Ok(Gate { event, stream: Some(stream) })
    }
}

/// What a job that has not begun waits for. It holds none of the streams that others copy on.
#[derive(Debug)]
pub(super) struct Gate {
    event: Arc<Event>,
    /// The stream that the event is on, which is nobody else's until then.
    stream: Option<StreamLease>,
}

impl Gate {
    pub(super) fn is_open(&self) -> Result<bool, CudaError> {
        self.event.is_complete()
    }

    /// Blocks until it is open.
    pub(super) fn wait(&self) -> Result<(), CudaError> {
        self.event.wait()
    }

    /// As the order of another job.
    ///
    /// # Safety
    ///
    /// The gate lives until that job has ended.
    pub(super) unsafe fn order(&self) -> DeviceOrder {
        // SAFETY: the event lives with the gate.
        unsafe { self.event.order() }
    }

    pub(super) fn into_parts(self) -> (Arc<Event>, Option<StreamLease>) {
        (self.event, self.stream)
    }
}

/// Whether somebody else's event has happened.
///
/// # Errors
///
/// [`CudaError::Captured`] if it marks a place in a graph, those of the driver.
///
/// # Safety
///
/// The handle is a live event.
unsafe fn has_happened(event: *mut c_void, context: &Context) -> Result<bool, CudaError> {
    context.bound(|functions| {
        // SAFETY: the event is alive, as the caller promised.
        let code = unsafe { (functions.cuEventQuery)(event.cast()) };
        if DriverCode::new(code).is_of_capture() {
            return Err(CudaError::Captured { what: "event" });
        }
        check_ready("cuEventQuery", code)
    })
}

/// The driver's handle, as a pointer again.
fn pointer(raw: u64) -> *mut c_void {
    std::ptr::with_exposed_provenance_mut(ByteCount::new(raw).to_usize())
}

/// The primary contexts of other devices, retained once each.
#[derive(Debug, Default)]
pub(super) struct Peers(RwLock<FxHashMap<DeviceId, Context>>);

impl Peers {
    /// # Errors
    ///
    /// Those of [`Context::primary`].
    pub(super) fn get(&self, device: DeviceId) -> Result<Context, CudaError> {
        {
            let known = self.0.read().unwrap_or_else(PoisonError::into_inner);
            // One that is lost may be another by now.
            if let Some(context) = known.get(&device).filter(|known| known.lost().is_none()) {
                return Ok(context.clone());
            }
        }
        let context = Context::primary(device)?;
        let mut known = self.0.write().unwrap_or_else(PoisonError::into_inner);
        let replaced = known.insert(device, context.clone());
        drop(known);
        drop(replaced);
        Ok(context)
    }
}
