//! What a job that waits for other transfers runs after on the device, taken down as it is submitted.

use terrane_transfer::{DeviceOrder, PinnedOrder};

use super::Shared;
use super::order::Pending;
use crate::driver::BesideCaptures;
use crate::error::CudaError;

/// The order as an event that nobody records again.
///
/// # Errors
///
/// [`CudaError::Captured`] if it is a part of a graph, [`CudaError::WrongContext`] if the stream is
/// not one of the primary context of its device, those of the driver and of making a stream.
pub(super) fn pin(order: DeviceOrder, shared: &Shared) -> Result<PinnedOrder, CudaError> {
    shared.context.driver().check_process()?;
    // The thread is the caller's, of whom another may be capturing.
    let _beside = BesideCaptures::new(shared.context.driver());
    let Some(pending) = Pending::of(Some(order), &shared.context, &shared.peers)? else {
        return Ok(PinnedOrder::new(DeviceOrder::AlreadySynchronised, ()));
    };
    let gate = pending.into_gate(&shared.context, &shared.gate_streams)?;
    // SAFETY: the event has been recorded, and lives with the order's owner, which is the transfer's.
    let order = unsafe { gate.order() };
    Ok(PinnedOrder::new(order, gate))
}
