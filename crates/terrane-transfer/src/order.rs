//! The device work that a transfer runs after.

use std::any::Any;
use std::fmt;
use std::sync::Arc;

use terrane_core::DeviceId;

/// When the bytes of a device are ready to be copied.
///
/// A copy that starts before the compute has written the source silently corrupts data. So a
/// transfer with a device on either side has to state one of these. For CUDA, `terrane-cuda`
/// creates them from its streams and events (`Stream::order`, `Event::order`).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum DeviceOrder {
    /// All device work on the blocks has finished, and the host knows it.
    AlreadySynchronised,
    /// After all work submitted to this stream before the transfer is submitted.
    AfterStream(StreamHandle),
    /// After the work that this event marks when the transfer is submitted. It may be recorded
    /// again afterwards.
    AfterEvent(EventHandle),
}

/// A captured order, and the owner that keeps its handle valid; from
/// [`CopyEngine::pin`](crate::CopyEngine::pin).
#[derive(Clone)]
pub struct PinnedOrder {
    order: DeviceOrder,
    _owner: Arc<dyn Any + Send + Sync>,
}

impl PinnedOrder {
    /// An order whose handle is valid, and marks the same work, as long as `owner` lives.
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
            /// The handle is a valid one of that device's driver, and stays valid until every
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
    /// A stream of a device, borrowed from its creator.
    StreamHandle, "a stream"
}
handle_type! {
    /// A recorded event of a device, borrowed from its creator.
    EventHandle, "an event"
}
