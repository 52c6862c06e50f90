//! The device order of a job. It is queried first, and waited for only if it is not yet satisfied.

use std::ffi::c_void;
use std::sync::Arc;

use terrane_core::ByteCount;
use terrane_transfer::{DeviceOrder, EventHandle, StreamHandle};

use crate::driver::code::DriverCode;
use crate::engine::resources::job_streams::{StreamLease, StreamPool};
use crate::engine::resources::peer_contexts::Peers;
use crate::error::{CudaError, check_ready};
use crate::runtime::context::Context;
use crate::runtime::event::{Event, Timing};
use crate::runtime::stream::Stream;

/// An order that is not yet satisfied.
#[derive(Debug)]
pub(crate) enum PendingOrder {
    /// An event of the engine, after all earlier work of the caller's stream.
    Stream(Event),
    /// An event of another library.
    Event(EventHandle),
}

impl PendingOrder {
    /// The unsatisfied part of an order; `None` if it is satisfied.
    ///
    /// # Errors
    ///
    /// [`CudaError::Captured`] if it is part of a graph, [`CudaError::WrongContext`] if the stream
    /// does not belong to the primary context of its device, the errors of the driver.
    pub(crate) fn of(
        order: Option<&DeviceOrder>,
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
                Ok((!is_complete(handle, context)?).then(|| Self::Event(handle.clone())))
            }
            // All other orders are satisfied: the host knows that their work has completed.
            _ => Ok(None),
        }
    }

    fn of_stream(handle: &StreamHandle, context: &Context) -> Result<Option<Self>, CudaError> {
        // SAFETY: the handle keeps the stream alive, and the borrowed stream drops before this
        // function returns.
        let stream = unsafe { Stream::borrow(context, pointer(handle.raw()), ()) }?;
        // A query of a captured stream, or a record on it, would end the capture or pull the
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

    /// Makes later work of a stream run after the order, without waiting on the host.
    ///
    /// # Errors
    ///
    /// The errors of the driver.
    pub(crate) fn delay(&self, stream: &Stream) -> Result<(), CudaError> {
        match self {
            Self::Stream(event) => stream.wait_for(event),
            // SAFETY: the handle keeps the event alive.
            Self::Event(event) => unsafe { stream.wait_for_handle(pointer(event.raw())) },
        }
    }

    /// Converts the order to an event that can be queried and waited for later.
    ///
    /// Another library may record its event again meanwhile, which changes its meaning. So one of
    /// `streams`, which is otherwise empty, waits for the event now, and an event of the engine is
    /// recorded behind that.
    ///
    /// # Errors
    ///
    /// The errors of the driver, and of creating a stream.
    pub(crate) fn into_order_event(
        self,
        context: &Context,
        streams: &Arc<StreamPool>,
    ) -> Result<OrderEvent, CudaError> {
        if let Self::Stream(event) = self {
            return Ok(OrderEvent { event, stream: None });
        }
        let mut stream = streams.take()?;
        stream.hold();
        self.delay(&stream)?;
        let event = Event::new(context, Timing::Off)?;
        event.record(&stream)?;
        Ok(OrderEvent { event, stream: Some(stream) })
    }
}

/// The order of a job that has not begun. It uses none of the streams that other jobs copy on.
#[derive(Debug)]
pub(crate) struct OrderEvent {
    event: Event,
    /// The stream of the event. No other job uses the stream until the event completes.
    stream: Option<StreamLease>,
}

impl OrderEvent {
    pub(crate) fn is_satisfied(&self) -> Result<bool, CudaError> {
        self.event.is_complete()
    }

    /// Blocks until the order is satisfied.
    pub(crate) fn wait(&self) -> Result<(), CudaError> {
        self.event.wait()
    }

    /// Returns the stream of a satisfied order.
    pub(crate) fn release(self) {
        if let Some(mut stream) = self.stream {
            stream.release();
        }
    }

    /// Converts this value to a device order, which owns it.
    pub(crate) fn into_order(self) -> DeviceOrder {
        let handle = self.event.transfer_handle();
        if self.stream.is_none() {
            return DeviceOrder::AfterEvent(handle);
        }
        let (device, raw) = (handle.device(), handle.raw());
        // SAFETY: the event lives with this value.
        DeviceOrder::AfterEvent(unsafe { EventHandle::from_raw(device, raw, Arc::new(self)) })
    }

    pub(crate) fn into_parts(self) -> (Event, Option<StreamLease>) {
        (self.event, self.stream)
    }
}

/// Whether another library's event has completed.
///
/// # Errors
///
/// [`CudaError::Captured`] if the event is part of a graph, the errors of the driver.
fn is_complete(event: &EventHandle, context: &Context) -> Result<bool, CudaError> {
    context.bound(|functions| {
        // SAFETY: the handle keeps the event alive.
        let code = unsafe { (functions.cuEventQuery)(pointer(event.raw()).cast()) };
        if DriverCode::new(code).is_of_capture() {
            return Err(CudaError::Captured { what: "event" });
        }
        check_ready("cuEventQuery", code)
    })
}

/// The driver's handle, converted back to a pointer.
fn pointer(raw: u64) -> *mut c_void {
    std::ptr::with_exposed_provenance_mut(ByteCount::new(raw).to_usize())
}
