//! What a job that waits for other transfers runs after on the device, taken down as it is submitted.

use std::ffi::c_void;

use terrane_core::{ByteCount, DeviceId};
use terrane_transfer::{DeviceOrder, PinnedOrder};

use crate::context::Context;
use crate::error::CudaError;
use crate::event::{Event, Timing};
use crate::stream::Stream;

/// The order as an event that nobody records again.
///
/// # Errors
///
/// [`CudaError::WrongContext`] if the stream is not one of the primary context of its device, those of
/// the driver, and of making a stream.
pub(super) fn pin(order: DeviceOrder, context: &Context) -> Result<PinnedOrder, CudaError> {
    let (event, stream) = match order {
        DeviceOrder::AfterStream(handle) => {
            let context = primary(handle.device(), context)?;
            let event = Event::new(&context, Timing::Off)?;
            // SAFETY: whoever made the handle promised that it is live until the transfer has ended,
            // and the borrowed stream goes before this function returns.
            let stream = unsafe { Stream::borrow(&context, pointer(handle.raw()), ()) }?;
            event.record(&stream)?;
            (event, None)
        }
        DeviceOrder::AfterEvent(handle) => {
            let context = primary(handle.device(), context)?;
            let event = Event::new(&context, Timing::Off)?;
            // One that nothing else is on, as it may be a while.
            let stream = Stream::new(&context)?;
            // SAFETY: whoever made the handle promised that it is live until the transfer has ended.
            unsafe { stream.wait_for_handle(pointer(handle.raw())) }?;
            event.record(&stream)?;
            (event, Some(stream))
        }
        reached => return Ok(PinnedOrder::new(reached, ())),
    };
    // SAFETY: the event has been recorded, and lives with the order's owner, which is the transfer's.
    let order = unsafe { event.order() };
    Ok(PinnedOrder::new(order, (event, stream)))
}

fn primary(device: DeviceId, context: &Context) -> Result<Context, CudaError> {
    if device == context.device().id { Ok(context.clone()) } else { Context::primary(device) }
}

/// The driver's handle, as a pointer again.
fn pointer(raw: u64) -> *mut c_void {
    std::ptr::with_exposed_provenance_mut(ByteCount::new(raw).to_usize())
}
