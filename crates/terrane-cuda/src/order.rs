//! The device order of transfers, and of work after their layers.

use std::ffi::c_void;
use std::ptr;

use terrane_transfer::{DeviceOrder, EventHandle, LayerRange, Layers, StreamHandle};

use crate::error::CudaError;
use crate::event::Event;
use crate::stream::Stream;

impl Stream {
    /// All work submitted to this stream so far, as the order of a
    /// [transfer](terrane_transfer::Transfer::device_order): the transfer runs after it. Use the
    /// stream of the compute that writes a transfer's source, or reads its destination.
    ///
    /// # Safety
    ///
    /// The stream lives until every transfer that was given the order has ended.
    #[must_use]
    pub unsafe fn order(&self) -> DeviceOrder {
        let device = self.context().device().id;
        // SAFETY: the stream is alive, and stays alive as the caller guarantees.
        DeviceOrder::AfterStream(unsafe { StreamHandle::from_raw(device, number(self.handle())) })
    }

    /// Makes later work of this stream run after the arrival of these layers of a transfer: `2`,
    /// `0..4` or `..`.
    ///
    /// Blocks the thread until the engine has put the layers on a stream. It does not wait for the
    /// layers' arrival, so compute on layer 0 is submitted while layer 1 travels. If the device
    /// fails meanwhile, only the outcome of the transfer reports it.
    ///
    /// # Errors
    ///
    /// [`CudaError::Layer`] if the transfer failed before a layer was submitted, or does not move
    /// it; [`CudaError::Driver`]; [`CudaError::DeviceLost`].
    pub fn wait_for_layers(
        &self,
        layers: &Layers,
        which: impl LayerRange,
    ) -> Result<(), CudaError> {
        for event in layers.events(which)? {
            // SAFETY: the layers keep the event alive.
            unsafe { self.wait_for_handle(pointer(event)) }?;
        }
        Ok(())
    }
}

impl Event {
    /// The work that this event marks, as the order of a
    /// [transfer](terrane_transfer::Transfer::device_order): the transfer runs after it.
    ///
    /// # Safety
    ///
    /// The event has been recorded, and lives until every transfer that was given the order has
    /// ended.
    #[must_use]
    pub unsafe fn order(&self) -> DeviceOrder {
        // SAFETY: the event is alive, and stays alive as the caller guarantees.
        let event = unsafe { EventHandle::from_raw(self.device(), number(self.handle())) };
        DeviceOrder::AfterEvent(event)
    }
}

/// Handles are passed to `terrane-transfer` as numbers.
fn number(handle: *mut c_void) -> u64 {
    terrane_core::ByteCount::from_usize(handle.expose_provenance()).get()
}

fn pointer(event: EventHandle) -> *mut c_void {
    ptr::with_exposed_provenance_mut(terrane_core::ByteCount::new(event.raw()).to_usize())
}
