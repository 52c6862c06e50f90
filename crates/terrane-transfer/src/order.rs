//! What a transfer runs after, on the device's side.

use std::any::Any;
use std::fmt;
use std::sync::Arc;

use terrane_core::DeviceId;

/// When the bytes of a device are ready to be copied.
///
/// Copying before the compute that writes the source has finished is silent corruption, so a
/// transfer with a device on either side has to say one of these. For CUDA, `terrane-cuda` makes them
/// of its streams and events (`Stream::order`, `Event::order`).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum DeviceOrder {
    /// Everything that touches the blocks has finished, and the host knows it.
    AlreadySynchronised,
    /// After everything submitted to this stream by the time at which the transfer is submitted.
    AfterStream(StreamHandle),
    /// After what this event marks by then. It may be recorded again afterwards.
    AfterEvent(EventHandle),
}

/// An order as of a certain time, and what keeps its handle live; from
/// [`CopyEngine::pin`](crate::CopyEngine::pin).
#[derive(Clone)]
pub struct PinnedOrder {
    order: DeviceOrder,
    _owner: Arc<dyn Any + Send + Sync>,
}

impl PinnedOrder {
    /// An order whose handle is live, and marks the same, for as long as `owner` is.
    #[must_use]
    pub fn new(order: DeviceOrder, owner: impl Any + Send + Sync) -> Self {
        Self { order, _owner: Arc::new(owner) }
    }

    /// The order.
    #[must_use]
    pub fn order(&self) -> DeviceOrder {
        self.order
    }
}

impl fmt::Debug for PinnedOrder {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("PinnedOrder").field(&self.order).finish()
    }
}

macro_rules! handle_type {
    ($(#[$documentation:meta])* $name:ident, $what:literal) => {
        $(#[$documentation])*
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
        pub struct $name {
            device: DeviceId,
            raw: u64,
        }

        impl $name {
            #[doc = concat!("The driver's handle of ", $what, ".")]
            ///
            /// # Safety
            ///
            /// The handle is a live one of that device's driver, and stays live until every
            /// transfer that was given it has ended.
            #[must_use]
            pub const unsafe fn from_raw(device: DeviceId, raw: u64) -> Self {
                Self { device, raw }
            }

            /// The device that it belongs to.
            #[must_use]
            pub const fn device(self) -> DeviceId {
                self.device
            }

            /// The driver's handle.
            #[must_use]
            pub const fn raw(self) -> u64 {
                self.raw
            }
        }
    };
}

handle_type! {
    /// A stream of a device, borrowed from whoever made it.
    StreamHandle, "a stream"
}
handle_type! {
    /// A recorded event of a device, borrowed from whoever made it.
    EventHandle, "an event"
}
