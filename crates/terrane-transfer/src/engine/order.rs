//! The device work that a transfer runs after.

use std::any::Any;
use std::sync::Arc;

use terrane_core::DeviceId;

/// When the bytes of a device are ready to be copied.
///
/// A copy that starts before the compute has written the source silently corrupts data. So a
/// transfer with a device at either end must state an order. For CUDA, `terrane-cuda` creates them
/// from its streams and events (`Stream::order`, `Event::order`).
///
/// An order owns its stream or event. A transfer keeps its order until it has ended, so the caller
/// may drop the stream or event earlier. Two orders are equal if they contain the same handle.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum DeviceOrder {
    /// All device work on the blocks has finished, and the host has waited for it.
    AlreadySynchronised,
    /// After all work submitted to this stream before the transfer is submitted.
    AfterStream(StreamHandle),
    /// After the work that this event marks when the transfer is submitted. It may be recorded
    /// again afterwards.
    AfterEvent(EventHandle),
}

impl DeviceOrder {
    /// The device of the stream or event; `None` without one.
    #[must_use]
    pub const fn device(&self) -> Option<DeviceId> {
        match self {
            Self::AlreadySynchronised => None,
            Self::AfterStream(stream) => Some(stream.device()),
            Self::AfterEvent(event) => Some(event.device()),
        }
    }
}

macro_rules! handle_type {
    ($(#[$documentation:meta])* $name:ident, $what:literal) => {
        $(#[$documentation])*
        ///
        /// Cloning it costs a reference count. Two handles are equal if their device and number are
        /// equal.
        #[derive(Clone)]
        pub struct $name {
            device: DeviceId,
            raw: u64,
            _owner: Arc<dyn Any + Send + Sync>,
        }

        impl $name {
            #[doc = concat!("The driver's handle of ", $what, ", which `owner` keeps valid.")]
            ///
            /// The owner drops with the last clone, on any thread. A transfer drops its clone as it
            /// ends, so the drop [must not wait](crate::TransferManager::submit) for a transfer.
            ///
            /// # Safety
            ///
            /// The handle is valid for that device's driver, and stays valid while `owner` lives.
            #[must_use]
            pub unsafe fn from_raw(
                device: DeviceId,
                raw: u64,
                owner: Arc<dyn Any + Send + Sync>,
            ) -> Self {
                Self { device, raw, _owner: owner }
            }

            terrane_core::getters! {
                /// The device that it belongs to.
                device: DeviceId,
                /// The driver's handle. It is valid while this value or a clone of it lives.
                raw: u64,
            }
        }

        impl PartialEq for $name {
            fn eq(&self, other: &Self) -> bool {
                (self.device, self.raw) == (other.device, other.raw)
            }
        }

        impl Eq for $name {}

        terrane_core::debug_fields!($name { device, raw });
    };
}

handle_type! {
    /// A stream of a device, with its owner.
    StreamHandle, "a stream"
}
handle_type! {
    /// A recorded event of a device, with its owner.
    EventHandle, "an event"
}
