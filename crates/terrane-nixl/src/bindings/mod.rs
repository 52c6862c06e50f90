//! Rules for every call to NIXL's bindings: the processes and locks in which calls are allowed, and
//! conversions of types and statuses.

pub(crate) mod memory_type;
pub(crate) mod process;
pub(crate) mod status;
pub(crate) mod without_tracing;
