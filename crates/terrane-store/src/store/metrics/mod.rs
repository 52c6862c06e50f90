//! Numbers about a store, and their formats.

pub(crate) mod counters;
#[cfg(feature = "metrics")]
mod facade;
pub(crate) mod openmetrics;
pub(crate) mod snapshot;
