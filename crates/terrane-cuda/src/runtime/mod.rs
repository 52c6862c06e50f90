//! The driver's objects: devices, contexts, streams and events.

mod binding;
pub(crate) mod context;
pub(crate) mod device;
pub(crate) mod event;
pub(crate) mod stream;
pub(crate) mod usage;
