//! The order of streams: fences, the streams that use a block, and frees that wait for them.
//!
//! [`pending`] stores the freed blocks of a pool by class and stream, so that a stream finds its
//! own blocks at once. [`deferred`] stores other items until their streams have finished.

pub(crate) mod deferred;
pub(crate) mod fence;
pub(crate) mod pending;
pub(crate) mod stream_pool;
pub(crate) mod uses;

#[cfg(test)]
#[cfg(not(loom))]
pub(crate) mod simulated;
