//! Copies of blocks between memory: `copies` on the thread of a task, `transfers` by copy engines,
//! and `moves`, which chooses between the two for a copy from tier to tier.

pub(crate) mod copies;
pub(crate) mod moves;
pub(crate) mod transfers;
