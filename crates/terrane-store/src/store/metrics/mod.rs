//! Numbers about a store: the counters, their snapshot, and its formats OpenMetrics and `metrics`.

pub(crate) mod counters;
#[cfg(feature = "metrics")]
mod facade;
pub(crate) mod openmetrics;
pub(crate) mod snapshot;
