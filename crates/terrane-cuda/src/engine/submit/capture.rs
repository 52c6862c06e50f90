//! The device order of a job that waits for other transfers, recorded at its submission.

use terrane_transfer::DeviceOrder;

use crate::driver::capture::RelaxedCaptureMode;
use crate::engine::shared::Shared;
use crate::engine::submit::order_event::PendingOrder;
use crate::error::CudaError;

/// Returns the order as an event that is never recorded again.
///
/// # Errors
///
/// [`CudaError::Captured`] if the order is part of a graph. [`CudaError::WrongContext`] if the
/// stream does not belong to the primary context of its device. The errors of the driver and of
/// creating a stream.
pub(crate) fn capture(order: &DeviceOrder, shared: &Shared) -> Result<DeviceOrder, CudaError> {
    shared.context.driver().check_process()?;
    // The mode is changed once, not at each call of the driver.
    let _relaxed = RelaxedCaptureMode::new(shared.context.driver());
    let Some(pending) = PendingOrder::of(Some(order), &shared.context, &shared.peers)? else {
        return Ok(DeviceOrder::AlreadySynchronised);
    };
    let order_event = pending.into_order_event(&shared.context, &shared.order_streams)?;
    Ok(order_event.into_order())
}
