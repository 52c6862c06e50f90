//! The resources of jobs on the device: streams, buffers, lists, and access to both ends.

pub(crate) mod base_tables;
pub(crate) mod block_lists;
pub(crate) mod device_mapping;
pub(crate) mod job_streams;
pub(crate) mod peer_contexts;
pub(crate) mod scratch;
