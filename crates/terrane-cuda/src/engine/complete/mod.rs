//! From the last submitted work of a job to its end.

pub(crate) mod completion_queue;
pub(crate) mod failed_job;
pub(crate) mod in_flight;
pub(crate) mod orphans;
pub(crate) mod progress;
