//! The checksums of a job's blocks, computed by kernels in the device's memory.

pub(crate) mod factors;
pub(crate) mod job_sums;
pub(crate) mod limits;
pub(crate) mod shape;
pub(crate) mod tables;
