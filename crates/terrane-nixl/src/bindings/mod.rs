//! Rules for every call to NIXL's bindings: which process may call, under which locks, and how types
//! and statuses convert.

pub(crate) mod memory_type;
pub(crate) mod process;
pub(crate) mod status;
pub(crate) mod without_tracing;
