//! The device order of transfers, and of work that runs after their layers.

use std::ffi::c_void;
use std::ptr;
use std::sync::Arc;

use terrane_core::convert::to_u64;
use terrane_transfer::{DeviceOrder, EventHandle, LayerRange, Layers, StreamHandle};

use crate::error::CudaError;
use crate::runtime::event::Event;
use crate::runtime::stream::Stream;

impl Stream {
    /// The device order "after all work submitted to this stream so far", for a
    /// [transfer](terrane_transfer::Transfer::device_order). Use the stream of the compute that
    /// writes a transfer's source, or reads its destination.
    ///
    /// The order keeps the stream alive.
    #[must_use]
    pub fn order(&self) -> DeviceOrder {
        let (device, raw) = (self.context().device().id, number(self.handle()));
        let owner = Arc::clone(self.shared());
        // SAFETY: the owner keeps the stream alive.
        DeviceOrder::AfterStream(unsafe { StreamHandle::from_raw(device, raw, owner) })
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
    /// it; [`CudaError::Driver`]; [`CudaError::ContextLost`].
    pub fn wait_for_layers(
        &self,
        layers: &Layers,
        which: impl LayerRange,
    ) -> Result<(), CudaError> {
        self.wait_for_events(&layers.events(which)?)
    }

    /// Makes later work of this stream run after these events of layers.
    ///
    /// # Errors
    ///
    /// [`CudaError::Driver`], [`CudaError::ContextLost`].
    pub fn wait_for_events(&self, events: &[EventHandle]) -> Result<(), CudaError> {
        for event in events {
            // SAFETY: the handle keeps the event alive.
            unsafe { self.wait_for_handle(pointer(event)) }?;
        }
        Ok(())
    }
}

impl Event {
    /// The device order "after the work that this event has recorded", for a
    /// [transfer](terrane_transfer::Transfer::device_order). The event's last record before the
    /// submission counts.
    ///
    /// The order keeps the event alive.
    ///
    /// # Errors
    ///
    /// [`CudaError::NotRecorded`] if the event was never recorded, or its last record failed.
    pub fn order(&self) -> Result<DeviceOrder, CudaError> {
        if !self.is_recorded()? {
            return Err(CudaError::NotRecorded);
        }
        Ok(DeviceOrder::AfterEvent(self.transfer_handle()))
    }

    /// The event as a handle of `terrane-transfer`.
    pub(crate) fn transfer_handle(&self) -> EventHandle {
        let (device, raw) = (self.device(), number(self.handle()));
        let owner = Arc::clone(self.shared());
        // SAFETY: the owner keeps the event alive.
        unsafe { EventHandle::from_raw(device, raw, owner) }
    }
}

/// Handles are passed to `terrane-transfer` as numbers.
fn number(handle: *mut c_void) -> u64 {
    to_u64(handle.expose_provenance())
}

fn pointer(event: &EventHandle) -> *mut c_void {
    ptr::with_exposed_provenance_mut(terrane_core::ByteCount::new(event.raw()).to_usize())
}
