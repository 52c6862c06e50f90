//! Copies of blocks: host memory on the thread of a job, and transfers between endpoints.

pub(crate) mod copies;
pub(crate) mod moves;
pub(crate) mod transfers;
