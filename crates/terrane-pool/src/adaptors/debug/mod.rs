//! Adaptors that find wrong uses of memory.

pub(crate) mod guard;
pub(crate) mod options;
pub(crate) mod poison;
